"""Data in, results out: one writable copy for all ranks, and none for unchanged data."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nblaunch import Launch, LaunchResult, notebook_launcher
from nblaunch.errors import ArgumentError, LaunchStoppedError, PayloadError, RankLostError, ResultError
from nblaunch.machine import segments, timeouts
from nblaunch.transfer.parcel import sent_data_cache
from nblaunch.wire.channel import Channel
from tests.conftest import LONG, conformance, eventually
from tests.processes.conftest import Launcher

MB = 1 << 20


@pytest.fixture(autouse=True)
def _keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little memory is free."""
    monkeypatch.setenv("NBLAUNCH_KEEP_BYTES", str(1 << 30))


def settle() -> None:
    """Nothing is kept, and the last launch's supervisor has put its logs in order."""
    sent_data_cache.free()
    eventually(lambda: not any(thread.name.startswith("nblaunch-") for thread in threading.enumerate()))
    gc.collect()


# ------------------------------------------------------------------ what ranks run
def write_and_read(tensor: torch.Tensor, array: Any, rank: int) -> tuple[float, float]:
    tensor.fill_(rank + 1)
    array[:] = rank + 1
    dist.barrier()  # every rank has written by now
    return float(tensor.sum()), float(array.sum())


def sums(*tensors: torch.Tensor) -> list[float]:
    return [float(tensor.sum()) for tensor in tensors]


def mapped_share(tensor: torch.Tensor, folder: str, rank: int, world_size: int) -> float:
    """How much of what ranks map of their payload this one has to answer for, where each page counts once in all."""
    float(tensor.sum())  # every page has been read
    dist.barrier()
    share = sum(_proportional(block) for block in _mappings() if "memfd:nblaunch" in block[0])
    dist.barrier()
    return share


def _mappings() -> list[list[str]]:
    blocks: list[list[str]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            blocks.append([])
        blocks[-1].append(line)
    return blocks


def _proportional(block: list[str]) -> int:
    return next(int(line.split()[1]) << 10 for line in block if line.startswith("Pss:"))


def fill_shared(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    tensor[rank] = rank + 1.0
    return tensor


def make(size: int, rank: int) -> dict[str, Any]:
    base = torch.arange(size) + rank
    return {"base": base, "view": base[10:20], "array": np.arange(size) * rank, "model": nn.Linear(300, 300)}


def fails_once(tensor: torch.Tensor, marks: Path, rank: int) -> float:
    tensor[0] += 1
    if rank == dist.get_world_size() - 1 and not (marks / "failed").exists():
        (marks / "failed").touch()
        raise ValueError("not this time")
    return float(tensor[0])


def waits(tensor: torch.Tensor, marks: Path, rank: int) -> float:
    (marks / f"began{rank}").write_text(str(os.getpid()))
    eventually(lambda: (marks / "go").exists())
    return float(tensor.sum())


def returns_shared(count: int, marks: Path, rank: int) -> list[torch.Tensor]:
    (marks / f"began{rank}").touch()
    eventually(lambda: (marks / "go").exists())
    return [torch.ones(3).share_memory_() for _ in range(rank * count)]


def unsendable(rank: int, folder: Path) -> Any:
    """The rank whose result can be sent returns it when the other has gone."""
    if rank == 1:
        (folder / "new").write_text(str(os.getpid()))
        (folder / "new").rename(folder / "pid")
        return {"fine": torch.ones(MB), "gate": threading.Lock()}
    eventually((folder / "pid").exists)
    eventually(lambda: not Path("/proc", (folder / "pid").read_text()).exists())
    return torch.full((MB,), 5.0)


# ------------------------------------------------------------------ in
@conformance("forkserver", "fork")
def test_each_rank_writes_to_a_copy_of_its_own(launch: Launcher) -> None:
    tensor, array = torch.zeros(MB), np.zeros(MB)
    for rank, found in enumerate(launch(write_and_read, (tensor, array))):
        assert found == ((rank + 1) * MB, (rank + 1) * MB)
    assert float(tensor.sum()) == float(array.sum()) == 0


def test_ranks_map_the_notebooks_file_and_write_as_it_may(launch: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "data"
    np.arange(4 * MB, dtype=np.int64).tofile(file)
    expected = np.fromfile(file, np.int64)
    array, readable = (np.memmap(file, np.int64, mode)[MB:] for mode in ("r+", "r"))
    result = launch(overwrite_own, (array, readable))
    assert result.payload.copied == 0
    assert list(result) == [True, True]
    expected[MB], expected[MB + 1] = 1, 2
    assert np.array_equal(np.fromfile(file, np.int64), expected)
    assert np.array_equal(array, expected[MB:])


def overwrite_own(array: Any, readable: Any, rank: int) -> bool:
    """Write to this rank's elements; return whether the map of mode r has the new value, and refuses another."""
    array[rank] = 1 + rank
    try:
        readable[rank] = 100
    except ValueError:
        return int(readable[rank]) == 1 + rank
    return False


class Tokens(Dataset[int]):
    """The usual dataset over a file."""

    def __init__(self, file: Path) -> None:
        self.data: Any = np.memmap(file, np.uint8, "r")

    def __len__(self) -> int:
        return len(self.data) // MB

    def __getitem__(self, index: int) -> int:
        return int(self.data[index * MB : (index + 1) * MB].sum())


def own_memory() -> int:
    """Bytes of this process's memory that no file holds, also those that it shares with its workers since the fork."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def read_all(tokens: Tokens) -> tuple[list[int], int, int]:
    """The sums that workers compute, the memory that a whole read takes here, and the sum of all."""
    sums = [int(each) for each in DataLoader(tokens, batch_size=None, num_workers=2)]
    before = own_memory()
    total = int(tokens.data.sum())
    return sums, own_memory() - before, total


def test_a_dataset_over_a_file_takes_no_memory_in_ranks(launch: Launcher, tmp_path: Path) -> None:
    np.ones(64 * MB, np.uint8).tofile(tmp_path / "tokens")
    result = launch(read_all, (Tokens(tmp_path / "tokens"),))
    assert result.payload.copied == 0
    for sums, more, total in result:
        assert sums == [MB] * 64
        assert total == 64 * MB
        assert more < 16 * MB


def test_all_ranks_map_one_copy(launch: Launcher, few: int, tmp_path: Path) -> None:
    tensor = torch.ones(32 * MB // 4)
    shares = launch(mapped_share, (tensor, str(tmp_path)), num_processes=2 * few)
    assert sum(shares) <= 1.15 * 32 * MB
    # The notebook keeps the segment mapped for the next launch's compare only: it has not been read here yet.
    assert sum(shares) >= 0.85 * 32 * MB


def test_shared_tensors_stay_shared_both_ways(launch: Launcher) -> None:
    tensor = torch.zeros(4).share_memory_()
    result = launch(fill_shared, (tensor,))
    assert tensor.tolist() == [1.0, 2.0, 0.0, 0.0]
    tensor[3] = 9.0
    assert all(back[3] == 9.0 for back in result)


def test_ranks_get_their_data_when_the_system_takes_its_descriptors(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for users who are not root, of many ranks with many segments."""
    send = Channel._send_with
    refused: list[int] = []

    def send_later(self: Channel, data: bytes, fds: Sequence[int]) -> int:
        if len(fds) > 1 and len(refused) < 5:
            refused.append(len(fds))
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        return send(self, data, fds)

    monkeypatch.setattr(Channel, "_send_with", send_later)
    assert list(launch(sums, (torch.ones(MB),))) == [[MB]] * 2
    assert len(refused) == 5


def test_changes_of_a_shared_module_are_the_notebooks(launch: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 3).share_memory()

    def fills(rank: int) -> None:
        with torch.no_grad():
            model.weight[rank].fill_(rank + 1.0)

    launch(fills, view="text")
    assert model.weight[:2].tolist() == [[1.0] * 3, [2.0] * 3]
    assert "ranks work on copies" not in capsys.readouterr().out


def test_a_result_with_too_many_descriptors_is_that_ranks_error(tmp_path: Path) -> None:
    launched = notebook_launcher(returns_shared, (300, tmp_path), 2, view="none", block=False)
    assert isinstance(launched, Launch)
    eventually(lambda: len(list(tmp_path.glob("began*"))) == 2)
    with may_open(200):
        (tmp_path / "go").touch()
        with pytest.raises(ResultError, match=r"too many open files \(ulimit -n\)") as caught:
            launched.result()
    assert caught.value.rank == 1


def test_a_launch_needs_no_more_descriptors_than_it_is_refused_for(launch: Launcher) -> None:
    """One less is refused before anything starts; torch's store would try to connect for minutes."""
    tensor, ranks = torch.ones(MB), 4
    launch(sums, (tensor,), num_processes=ranks)  # what stays open after a first launch is open
    needed = 4 * ranks + 30
    settle()
    with (
        may_open(needed - 1),
        pytest.raises(ArgumentError, match=rf"needs about {needed} file .* only {needed - 1} are free"),
    ):
        launch(sums, (tensor,), num_processes=ranks)
    settle()
    with may_open(needed):
        assert launch(sums, (tensor + 1,), num_processes=ranks)[ranks - 1] == [2.0 * MB]


@contextlib.contextmanager
def may_open(count: int) -> Iterator[None]:
    """Let this process open so many files and no more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) - 1  # the list's own is closed again
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_launch_again_copies_what_has_changed_and_nothing_else(launch: Launcher) -> None:
    one, other = torch.ones(20 * MB // 4), torch.ones(20 * MB // 4)
    first = launch(sums, (one, other))
    assert first.payload.copied == 40 * MB
    assert launch(sums, (one, other)).payload.copied == 0
    other[7] = 3.0
    third = launch(sums, (one, other))
    assert third.payload.copied == 20 * MB
    assert third[1] == [20 * MB / 4, 20 * MB / 4 + 2]
    assert [name for name, _ in third.payload.parts] == ["tensors"]


def test_ranks_receive_values_as_of_the_call(launch: Launcher, tmp_path: Path) -> None:
    tensor = torch.ones(MB)
    running = launch(waits, (tensor, tmp_path), block=False)
    assert isinstance(running, Launch)
    tensor.zero_()
    assert launch(sums, (tensor,))[0] == [0.0]
    (tmp_path / "go").touch()
    assert list(running.result()) == [MB, MB]


def test_a_restart_has_the_data_as_it_was(launch: Launcher, few: int, tmp_path: Path) -> None:
    tensor = torch.zeros(MB)
    assert list(launch(fails_once, (tensor, tmp_path), num_processes=few, max_restarts=1)) == [1.0] * few


def test_a_fork_of_the_notebook_sends_nothing() -> None:
    tensor = torch.ones(MB)
    with pytest.warns(UserWarning, match="start_method='fork' copies a multithreaded process"):
        result = notebook_launcher(sums, (tensor,), 2, start_method="fork", view="none")
    assert isinstance(result, LaunchResult)
    assert list(result) == [[MB], [MB]]
    assert result.payload.size == 0


def test_data_without_room_is_named_before_anything_starts(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MIN_CHECKED_BYTES", 0)
    monkeypatch.setattr(segments, "_RESERVE_BYTES", 1 << 60)
    with pytest.raises(PayloadError, match=r"^sums cannot be sent .* \(tensors 4 MB\): not enough memory for 4 MB"):
        launch(sums, (torch.ones(MB),))


# ------------------------------------------------------------------ out
def test_results_come_back_as_they_were_with_their_aliasing(launch: Launcher, few: int) -> None:
    for rank, back in enumerate(launch(make, (MB,), num_processes=few)):
        assert torch.equal(back["base"], torch.arange(MB) + rank)
        np.testing.assert_array_equal(back["array"], np.arange(MB) * rank)
        back["view"].zero_()
        assert back["base"][15] == 0
        assert isinstance(back["model"], nn.Linear)
        back["array"][3] = 7


def test_a_result_that_cannot_be_sent_is_named_and_the_others_survive(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "PEER_FAILURE_WAIT_S", 0.0)
    with pytest.raises(ResultError, match=r"result\['gate'\], a thread lock, which cannot be sent") as caught:
        launch(unsendable, kwargs={"folder": tmp_path})
    assert caught.value.rank == 1
    assert torch.equal(caught.value.results[0], torch.full((MB,), 5.0))  # type: ignore[arg-type]


# ------------------------------------------------------------------ nothing left (the fixture looks at descriptors too)
def stop(running: Launch, pids: list[int]) -> None:
    running.stop()


def kill_the_reaper(running: Launch, pids: list[int]) -> None:
    os.kill(int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)


@pytest.mark.parametrize(("end", "error"), [(stop, LaunchStoppedError), (kill_the_reaper, RankLostError)])
def test_however_a_launch_ends_its_memory_is_freed(
    end: Any, error: type[Exception], launch: Launcher, tmp_path: Path
) -> None:
    tensor = torch.ones(20 * MB // 4)
    running = launch(waits, (tensor, tmp_path), block=False)
    marks = [tmp_path / f"began{rank}" for rank in range(2)]
    eventually(lambda: all(mark.exists() and mark.read_text() for mark in marks))
    end(running, [int(mark.read_text()) for mark in marks])
    assert running.wait(LONG)
    with pytest.raises(error, match=r"was stopped|parent process of the ranks"):
        running.result()
    sent_data_cache.free()
    gc.collect()
    assert "memfd:nblaunch" not in Path("/proc/self/maps").read_text()
