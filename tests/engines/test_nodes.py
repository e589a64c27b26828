"""Launches over two machines: the same as on one."""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import nblaunch
from nblaunch.engines import fork_servers
from nblaunch.engines.link import Peer, versions_here
from nblaunch.engines.node_engine import NodeEngine
from nblaunch.engines.nodes import Nodes
from nblaunch.errors import ArgumentError, LaunchStoppedError, RankDiedError, StartError
from nblaunch.launch.api import preload
from nblaunch.machine.inventory import Machine
from nblaunch.training import TrainConfig, Trainer
from nblaunch.training.collectives import exchange
from nblaunch.wire.link_messages import Joined
from nblaunch.wire.messages import Cell
from tests.conftest import eventually
from tests.engines.agents import have_begun
from tests.engines.machines import Cluster

Launcher = Callable[..., Any]


def placed() -> tuple[str, dict[str, str], list[float]]:
    total = torch.ones(2) * dist.get_rank()
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR")
    return socket.gethostname(), {name: os.environ[name] for name in names}, total.tolist()


def test_ranks_are_placed_node_by_node_with_torchruns_variables(launch: Launcher, cluster: Cluster) -> None:
    result = launch(placed, num_processes=2)
    assert [host for host, _, _ in result] == ["n1", "n1", "n2", "n2"]
    assert [env["LOCAL_RANK"] for _, env, _ in result] == ["0", "1", "0", "1"]
    assert [env["GROUP_RANK"] for _, env, _ in result] == ["0", "0", "1", "1"]
    assert (
        {env["LOCAL_WORLD_SIZE"] for _, env, _ in result} == {env["GROUP_WORLD_SIZE"] for _, env, _ in result} == {"2"}
    )
    assert {env["MASTER_ADDR"] for _, env, _ in result} == {cluster[0].address}
    assert [total for _, _, total in result] == [[6.0, 6.0]] * 4


def test_what_ranks_print_report_and_return_comes_back(launch: Launcher) -> None:
    def work(rank: int) -> torch.Tensor:
        for step in range(3):
            nblaunch.report(step=step, loss=rank + step / 10)
        for number in range(50_000):
            print(number, "of", rank)
        return torch.full((300_000,), float(rank))

    result = launch(work)
    for rank, log in enumerate(result.logs):
        assert log.text() == "".join(f"{number} of {rank}\n" for number in range(50_000))
    assert [float(value.sum()) for value in result] == [0.0, 300_000.0]
    assert len(result.metrics) == 6


def test_ranks_are_profiled_on_both_nodes(launch: Launcher) -> None:
    def work(rank: int) -> None:
        while True:
            time.sleep(0.1 * (1 + 2 * rank))
            dist.all_reduce(torch.zeros(1))

    running = launch(work, block=False)
    eventually(lambda: [rank for rank, text in running.stacks().items() if "in work" in text] == [0, 1])
    profile = running.profile(3.0)
    assert re.match(r"Rank 0 waits \d+% of the time for rank 1, whose code outside of torch takes", profile.sentence)
    assert profile.ranks[0].share("waiting") == pytest.approx(2 / 3, abs=0.1)
    assert profile.trace.stat().st_size > 1000
    running.stop()
    running.wait()


def test_a_stop_lets_ranks_finish_on_every_node(launch: Launcher) -> None:
    def work() -> None:
        try:
            print("begun", flush=True)
            time.sleep(600)
        finally:
            print("saved")

    running = launch(work, block=False)
    eventually(lambda: have_begun() or running.done)
    running.stop()
    with pytest.raises(LaunchStoppedError) as caught:
        running.result()
    files = caught.value._nblaunch_files  # type: ignore[attr-defined]
    assert [files.out(rank).read_text() for rank in (0, 1)] == ["begun\nsaved\n"] * 2


def test_a_rank_that_is_killed_is_named(launch: Launcher) -> None:
    def die(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankDiedError, match=r"^rank 1 on n2 was killed by SIGKILL before"):
        launch(die)


def test_the_first_failure_is_found_though_clocks_differ(launch: Launcher) -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise KeyError("first")
        try:
            time.sleep(600)
        finally:
            raise ValueError("in consequence")

    with pytest.raises(KeyError, match="first") as caught:
        launch(fail)
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    assert "in fail" in str(caught.value.__cause__)


def test_a_session_keeps_its_names_on_both_nodes(nodes: dict[str, Any]) -> None:
    with nblaunch.session(1, **nodes) as kept:
        kept.push(weights=torch.ones(3))
        kept.run_cell(
            Cell("import torch.distributed as dist\ndist.all_reduce(weights)", "<a cell>", "a cell"), [], view="none"
        )
        assert [value.tolist() for value in kept.pull("weights")] == [[2.0] * 3] * 2
        assert list(kept.pull("__import__('socket').gethostname()")) == ["n1", "n2"]
        assert re.search(r"rank 1: pid \d+ on n2, ", kept.status())


def files_of_agents(cluster: Cluster) -> set[str]:
    return set(cluster[0].run("find", "/tmp", "-xdev", "-path", "/tmp/nblaunch*", "-type", "f").split())


def test_own_modules_and_the_directory_need_no_shared_disk(
    launch: Launcher, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is below /tmp, which each machine has for itself."""
    package = tmp_path / "ownpackage"
    package.mkdir()
    (package / "__init__.py").write_text("from ownpackage.values import VALUE\n")
    (package / "values.py").write_text("VALUE = 1\n")
    (package / "later.py").write_text("LATER = 'imported in the rank alone'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def use() -> tuple[int, str, str]:
        later = importlib.import_module("ownpackage.later").LATER
        return importlib.import_module("ownpackage").VALUE, later, os.getcwd()

    before = files_of_agents(cluster)
    importlib.import_module("ownpackage")
    first = list(launch(use))
    assert [(value, later) for value, later, _ in first] == [(1, "imported in the rank alone")] * 2
    assert all(cwd.endswith("/cwd") for _, _, cwd in first)
    (package / "values.py").write_text("VALUE = 22\n")
    assert [value for value, _, _ in launch(use)] == [22, 22]
    monkeypatch.delitem(sys.modules, "ownpackage")
    eventually(lambda: files_of_agents(cluster) <= before)  # those of the launch before may have gone since


def test_data_goes_to_each_node_once_and_is_there_once(
    launch: Launcher, held: NodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch.arange(4 << 20, dtype=torch.float32)
    link: Any = held._nodes.link  # type: ignore[union-attr]
    send, sent = link._send, Counter[bytes]()

    def counting(peer: Peer, parts: Any) -> None:
        send(peer, parts)
        sent[peer.identity] += 1

    def use() -> float:
        return float(data[-1])

    monkeypatch.setattr(link, "_send", counting)
    assert list(launch(use, num_processes=4)) == [float((4 << 20) - 1)] * 8
    assert [64 <= count < 90 for count in sent.values()] == [True] * 2  # 64 parts, and what else a launch needs
    sent.clear()
    launch(use, num_processes=4)
    assert [count < 16 for count in sent.values()] == [True] * 2


def test_a_mapped_file_that_may_be_written_to_is_copied_to_nodes(launch: Launcher, tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "map", np.int64, "w+", shape=4 << 20)
    array[:] = 1

    def use(rank: int) -> tuple[int, Any]:
        before = int(array.sum())
        array[:] = rank + 5
        return before, array[:1000]

    for rank, (before, piece) in enumerate(launch(use)):
        assert before == 4 << 20
        assert int(piece.sum()) == 1000 * (rank + 5)
    array[0] = 2  # what a node has kept is of before
    assert [before for before, _ in launch(use)] == [(4 << 20) + 1] * 2
    assert int(np.fromfile(tmp_path / "map", np.int64).sum()) == (4 << 20) + 1


def test_nodes_without_numbers_are_in_the_order_of_their_names() -> None:
    nodes = Nodes("127.0.0.1", 3)
    try:
        for name in ("n2", "n10", "n1"):
            joined = Joined(Machine(0, 1, "linux", {}, name=name))
            nodes._join(Peer(name.encode()), versions_here(), partial(lambda given: given, joined))
        assert [(node.index, node.machine.name) for node in nodes.joined] == [(0, "n1"), (1, "n2"), (2, "n10")]
    finally:
        nodes.close()


def test_a_node_with_another_version_is_refused() -> None:
    nodes = Nodes("127.0.0.1", 1)
    try:
        nodes._join(Peer(b"n1"), replace(versions_here(), torch="1.0", host="n1"), pytest.fail)
        with pytest.raises(
            StartError, match=r"^n1 has torch 1\.0, but the notebook has \d.*: install the same version there"
        ):
            nodes.wait(0.0)
    finally:
        nodes.close()


def test_launches_that_send_the_same_data_at_once_both_get_it(launch: Launcher) -> None:
    data = torch.arange(8 << 20, dtype=torch.int32)

    def use() -> int:
        return int(data.sum())

    running = [launch(use, block=False) for _ in range(3)]
    assert [list(each.result()) for each in running] == [[int(data.sum())] * 2] * 3


def test_an_upload_that_was_stopped_begins_again(launch: Launcher) -> None:
    data = torch.arange(16 << 20, dtype=torch.int32)

    def use() -> int:
        return int(data.sum())

    stopped = launch(use, block=False)
    stopped.kill()
    with pytest.raises(LaunchStoppedError):
        stopped.result()
    assert list(launch(use)) == [int(data.sum())] * 2


def test_data_that_a_node_cannot_keep_is_an_error_and_sent_again(launch: Launcher, cluster: Cluster) -> None:
    data = torch.arange(1 << 20, dtype=torch.int32)

    def use() -> int:
        return int(data.sum())

    (agent,) = cluster[1].processes("nblaunch.engines.agent")
    cluster[1].run("prlimit", f"--pid={agent}", "--fsize=1000000:")  # as if its memory were full
    for _ in range(2):
        with pytest.raises(StartError, match=r"n2 cannot store the data: .*File too large"):
            launch(use)
    cluster[1].run("prlimit", f"--pid={agent}", "--fsize=unlimited")
    assert list(launch(use)) == [int(data.sum())] * 2


# ------------------------------------------------------------------ training
class CountNodes:
    def on_epoch_end(self, trainer: Trainer, results: dict[str, Any]) -> None:
        results["nodes"] = len(set(exchange(socket.gethostname())))


def trained(nprocs: int, folder: Path, *until: int, **launch: Any) -> Trainer:
    """Return the Trainer of a run that was resumed after each of these steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
    for steps in until:
        config = TrainConfig(
            nprocs, batch_size=4, compute_setup="cpu", max_steps=steps, checkpoint_dir=folder, launch=launch
        )
        trainer = Trainer(model, optimizer, config, callbacks=[CountNodes()])
        trainer.fit(data, data)
    return trainer


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every machine has."""
    with tempfile.TemporaryDirectory(prefix="nblaunch-nodes-", dir="/var/tmp") as folder:
        yield Path(folder)


def test_a_trainer_runs_and_resumes_on_both_nodes(
    nodes: dict[str, Any], cluster: Cluster, shared_folder: Path, tmp_path: Path
) -> None:
    there = trained(1, shared_folder, 4, 8, view="none", **nodes)
    here = trained(2, tmp_path / "here", 8, view="none")
    for name, value in there.model.state_dict().items():
        assert torch.equal(value, here.model.state_dict()[name])
    assert [row.pop("nodes") for row in there.history + here.history] == [2, 2, 1, 1]
    for row in there.history + here.history:
        row.pop("seconds")
    assert there.history == here.history
    cluster[0].run("mkdir", "-p", str(tmp_path))
    cluster[0].run("cp", "-r", str(shared_folder), str(tmp_path / "there"))  # n2 has no such folder
    with pytest.raises(ArgumentError, match=r"step-8.pt is not on n2: checkpoint_dir must be a folder"):
        trained(1, tmp_path / "there", 12, view="none", **nodes)
    cluster[0].run("rm", "-r", str(tmp_path))


# ------------------------------------------------------------------ last: later launches have fresh servers built
def test_modules_are_imported_ahead_on_every_node(launch: Launcher) -> None:
    def has_module() -> bool:
        return "tabnanny" in sys.modules

    def is_there() -> bool:
        time.sleep(2 * fork_servers.BUILD_QUIET_S)  # nothing is built while launches follow one another
        return list(launch(has_module)) == [True, True]

    assert list(launch(has_module)) == [False, False]
    preload(["tabnanny"])
    eventually(is_there)
