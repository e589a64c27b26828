"""Ranks get the environment, folder, paths and limits that the notebook has now, and torchrun's variables."""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import sys
import warnings
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import threadpoolctl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from nblaunch import notebook_launcher
from nblaunch.engines.fork_servers import Where, servers
from nblaunch.machine.limits import usable_cpus
from tests.conftest import conformance, eventually, marked_processes, present_server, settled_server
from tests.processes.conftest import Launcher
from tests.processes.test_named_resources import sum_of_block
from tests.processes.test_rank_shell import magics
from tests.processes.test_results import draw_some, draws, warn


# ------------------------------------------------------------------ what ranks run
def environment() -> dict[str, str]:
    return dict(os.environ)


def summed() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


class Unsolvable(Exception):  # noqa: N818  # a name of the user's
    rank: int  # which the notebook's side adds

    def __init__(self, text: str, steps: int) -> None:
        super().__init__(text, steps)
        self.steps = steps

    def __str__(self) -> str:
        return str(self.args[0])


@record
def recorded(rank: int) -> None:
    """Rank 1 fails under torch's own error handling, as scripts for torchrun have it."""
    if rank == 1:
        raise Unsolvable("rank 1 gave up", 7)


def process() -> dict[str, Any]:
    umask = os.umask(0)
    os.umask(umask)
    return {
        "cwd": os.getcwd(),
        "path": sys.path[:3],
        "argv": sys.argv,
        "umask": umask,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "cpus": os.sched_getaffinity(0),
    }


def threads() -> tuple[int, set[int], str | None]:
    """Of torch, of the BLAS libraries, and what the environment says."""
    blas = {int(library["num_threads"]) for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"}
    return torch.get_num_threads(), blas, os.environ.get("OMP_NUM_THREADS")


def version_of_local_module() -> str:
    import local_to_this_test  # type: ignore[import-not-found]  # written by the test

    return str(local_to_this_test.VERSION)


def train_on_many_threads() -> bool:
    """OpenMP, which hangs in a fork of a process that has used it."""
    torch.set_num_threads(2)
    a = torch.rand(200, 200, requires_grad=True)
    (a @ a).sum().backward()
    return a.grad is not None


def oom_score() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


def jit_is_on() -> bool:
    """What torch has read from PYTORCH_JIT when it was imported."""
    return bool(torch.jit._state._enabled.enabled)


def matplotlib_backend() -> str | None:
    return os.environ.get("MPLBACKEND")


def fail_at_first(folder: str, rank: int) -> tuple[str | None, str | None]:
    """Rank 1 fails the first two times, while rank 0 waits for it."""
    attempts = Path(folder) / "attempts"
    if rank == 1:
        with open(attempts, "a") as file:
            file.write("x")
        if len(attempts.read_text()) < 3:
            raise ConnectionResetError("not yet")
    summed()
    return os.environ.get("TORCHELASTIC_RESTART_COUNT"), os.environ.get("TORCHELASTIC_MAX_RESTARTS")


def server_pid() -> int:
    """The fork server's, once no other takes its place."""
    return settled_server().process.pid


# ------------------------------------------------------------------ torchrun's variables
@conformance("forkserver", "fork")
def test_ranks_have_the_variables_that_torchrun_sets(launch: Launcher) -> None:
    variables = list(launch(environment, num_processes=3))
    assert len({env["TORCHELASTIC_RUN_ID"] for env in variables}) == 1  # by it libraries know torchelastic
    for rank, env in enumerate(variables):
        expected = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank), "GROUP_RANK": "0",
            "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "ROLE_WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "ROLE_NAME": "default",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }  # fmt: skip
        assert {name: env.get(name) for name in expected} == expected
        assert 0 < int(env["MASTER_PORT"]) < 65536


def test_torchs_record_writes_its_file_and_the_error_is_raised(launch: Launcher, tmp_path: Path) -> None:
    with pytest.raises(Unsolvable, match=r"^rank 1 gave up$") as caught:
        launch(recorded)
    assert (caught.value.rank, caught.value.steps) == (1, 7)
    (file,) = tmp_path.glob("state/*/rank*.error.json")
    assert file.name == "rank1.error.json"
    assert json.loads(file.read_text())["message"]["message"] == "Unsolvable: rank 1 gave up"


def test_a_hostile_inherited_environment_changes_nothing(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = {
        "RANK": "5", "LOCAL_RANK": "7", "WORLD_SIZE": "64", "GROUP_RANK": "3", "ROLE_RANK": "9",
        "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "another", "TORCHELASTIC_ERROR_FILE": "/nowhere/error.json",
        "GLOO_SOCKET_IFNAME": "eth99", "NCCL_SOCKET_IFNAME": "eth99",
    }  # fmt: skip
    for name, value in hostile.items():
        monkeypatch.setenv(name, value)
    assert list(launch(summed)) == [2.0, 2.0]
    for rank, env in enumerate(launch(environment)):
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["GLOO_SOCKET_IFNAME"] == "lo"
        assert env["TORCHELASTIC_ERROR_FILE"] != "/nowhere/error.json"
        assert env["TORCHELASTIC_RUN_ID"] != "another"
    assert os.environ["RANK"] == "5"


# ------------------------------------------------------------------ the notebook as it is now
def test_variables_are_the_notebooks_of_now_and_a_deleted_one_is_gone(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBTEST_A", "first")
    assert [env["NBTEST_A"] for env in launch(environment)] == ["first", "first"]
    monkeypatch.setenv("NBTEST_A", "second\nline = é")
    assert [env["NBTEST_A"] for env in launch(environment)] == ["second\nline = é"] * 2
    monkeypatch.delenv("NBTEST_A")
    assert all("NBTEST_A" not in env for env in launch(environment))


def test_the_next_launch_uses_variables_that_torch_reads_at_import(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(launch(jit_is_on)) == [True, True]
    before = server_pid()
    monkeypatch.setenv("PYTORCH_JIT", "0")
    assert list(launch(jit_is_on)) == [False, False]
    assert present_server().process.pid != before
    eventually(lambda: before not in marked_processes())


def debug_level() -> str:
    """What torch.distributed has read from TORCH_DISTRIBUTED_DEBUG when it was imported."""
    return dist.get_debug_level().name


def test_a_variable_of_the_call_that_torch_reads_at_import_has_one_of_two_servers_of_its_own() -> None:
    before = server_pid()
    for level in ("DETAIL", "INFO", "DETAIL", "OFF"):
        result: Any = notebook_launcher(
            debug_level, (), 1, view="none", start_method="forkserver", env={"TORCH_DISTRIBUTED_DEBUG": level}
        )
        assert list(result) == [level]
    assert server_pid() == before
    here = Where.here().read_at_import
    others = [server.where for server in servers._servers if server.where.read_at_import != here]
    assert [where.env["TORCH_DISTRIBUTED_DEBUG"] for where in others] == ["DETAIL", "OFF"]


def test_variables_of_libraries_and_other_launches_start_no_new_fork_server(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = server_pid()
    for name, value in {
        "KMP_DUPLICATE_LIB_OK": "True",
        "KMP_INIT_AT_FORK": "FALSE",
        "TORCHINDUCTOR_CACHE_DIR": "/nowhere",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TORCHELASTIC_RUN_ID": "another",
    }.items():
        monkeypatch.setenv(name, value)
    assert [env["KMP_DUPLICATE_LIB_OK"] for env in launch(environment)] == ["True"] * 2
    assert server_pid() == before


def test_variables_of_the_call_go_to_the_ranks_alone(launch: Launcher) -> None:
    assert [env["NBTEST_B"] for env in launch(environment, env={"NBTEST_B": "x=y"})] == ["x=y", "x=y"]
    assert "NBTEST_B" not in os.environ


@pytest.fixture
def _no_threads_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def _own_process_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder, a path, arguments, a umask, limits and CPUs that the fork server did not start with."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cpus)})
    umask = os.umask(0o027)
    core, files = resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    yield
    os.sched_setaffinity(0, cpus)
    os.umask(umask)
    resource.setrlimit(resource.RLIMIT_CORE, core)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)


@pytest.mark.usefixtures("_own_process_settings")
def test_ranks_have_the_notebooks_current_process_state(launch: Launcher) -> None:
    here = process()
    assert here["umask"] == 0o027
    assert len(here["cpus"]) == 1
    assert list(launch(process)) == [here, here]


def as_born(block: str, rank: int) -> dict[str, Any]:
    """All that the notebook's side decides of a rank before its function runs, and what works in it."""
    return {
        "random": draws(),
        "rank": rank,
        "sum": summed(),
        "block": sum_of_block(block),
        "warned": (warn(FutureWarning), warn(DeprecationWarning)),
        "process": process(),
        "variables": environment(),
        "jit": jit_is_on(),
        "oom": oom_score(),
        "threads": threads(),
        "shell": magics(rank),  # it leaves the folder
    }


@conformance("spawn")
@pytest.mark.usefixtures("_own_process_settings", "_no_threads_chosen")
def test_spawned_ranks_are_as_the_notebook_is_now(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch what the fork server's ranks are asked one by one: importing torch is most of a spawned rank."""
    before, here = server_pid(), process()
    monkeypatch.setenv("NBTEST_A", "first")
    monkeypatch.setenv("NBTEST_B", "second\nline = é")
    monkeypatch.delenv("NBTEST_A")
    monkeypatch.setenv("PYTORCH_JIT", "0")
    draw_some()
    block: Any = SharedMemory(create=True, size=100)
    block.buf[:3] = bytes([1, 2, 3])
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        ranks = list(launch(as_born, kwargs={"block": block.name}, threads_per_rank=3))
    assert sum_of_block(block.name) == 6  # the notebook's outlives the ranks
    block.close()
    block.unlink()
    drawn = draws()
    for rank, found in enumerate(ranks):
        variables = found.pop("variables")
        assert variables["NBTEST_B"] == "second\nline = é"
        assert (variables["RANK"], variables["WORLD_SIZE"], variables["MASTER_ADDR"]) == (str(rank), "2", "127.0.0.1")
        assert "NBTEST_A" not in variables
        assert found == {
            "random": drawn,
            "rank": rank,
            "sum": 2.0,
            "block": 6,
            "warned": ("raised FutureWarning", "went on"),
            "process": here,
            "jit": False,
            "oom": min(1000, oom_score() + 500),
            "threads": (3, {3}, "3"),
            "shell": ("RankShell", ["8", "two"], 3, "/"),
        }
    assert before in marked_processes()  # what is spawned reads PYTORCH_JIT itself


def test_a_folder_that_is_gone_stops_no_launch(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert list(launch(summed)) == [2.0, 2.0]


def test_a_module_stays_usable_after_the_directory_has_changed(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "left_settings.py").write_text("lr = 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in a notebook
    settings = importlib.import_module("left_settings")
    os.chdir("sub")
    try:
        assert list(launch(lambda: (settings.lr, os.getcwd()))) == [(0.5, str(tmp_path / "sub"))] * 2
    finally:
        del sys.modules["left_settings"]


def test_a_local_module_that_is_edited_between_launches_is_seen_fresh(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "local_to_this_test.py"
    for version in (
        "one",
        "another",
    ):  # of different lengths: Python compares a .pyc's source time, in seconds, and size
        module.write_text(f"VERSION = {version!r}\n")
        importlib.invalidate_caches()
        assert list(launch(version_of_local_module)) == [version, version]


def _openmp() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    a = torch.rand(300, 300)
    assert (a @ a).shape == (300, 300)
    torch.set_num_threads(before)


def test_earlier_activity_of_the_notebook_harms_no_rank(launch: Launcher) -> None:
    _openmp()
    nn.Linear(3, 1)(torch.ones(2, 3)).sum().backward()
    torch.cuda.is_available()
    assert list(launch(train_on_many_threads)) == [True, True]


@pytest.mark.parametrize(
    ("backend", "seen"),
    [
        ("inline", "module://nblaunch.ranks.matplotlib_backend"),
        ("svg", "svg"),
    ],
)
def test_a_matplotlib_backend_that_needs_a_notebook_is_replaced(
    backend: str, seen: str, launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", backend)
    assert list(launch(matplotlib_backend)) == [seen, seen]


# ------------------------------------------------------------------ threads
@pytest.mark.usefixtures("_no_threads_chosen")
def test_ranks_share_the_usable_cpus_as_threads(launch: Launcher) -> None:
    share = max(1, usable_cpus() // 2)
    assert list(launch(threads)) == [(share, {share}, str(share))] * 2


def test_omp_num_threads_counts_unless_the_call_overrides_it(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert list(launch(threads)) == [(3, {3}, "3")] * 2
    assert list(launch(threads, threads_per_rank=2)) == [(2, {2}, "2")] * 2


# ------------------------------------------------------------------ restarts
def test_a_failure_restarts_all_ranks_with_a_note(
    launch: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = launch(
        fail_at_first,
        (str(tmp_path),),
        max_restarts=3,
        view="text",
    )
    assert list(result) == [("2", "3")] * 2
    shown = capsys.readouterr().out
    for number in (1, 2):
        assert f"rank 1: ConnectionResetError: not yet: restarting all ranks ({number} of 3)" in shown
    assert "(3 of 3)" not in shown


def test_a_failure_comes_up_when_no_restart_is_left(launch: Launcher, tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError, match=r"^not yet$"):
        launch(fail_at_first, (str(tmp_path),), max_restarts=1)
    assert (tmp_path / "attempts").read_text() == "xx"


def _log() -> None:
    logging.getLogger("train").debug("hidden")
    logging.getLogger("train").info("shown")


def test_ranks_log_as_the_notebook_does(launch: Launcher) -> None:
    root, handler = logging.getLogger(), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("{levelname}|{message}", style="{"))
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        result = launch(_log)
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
    assert [logs.text() for logs in result.logs] == ["INFO|shown\n"] * 2
    assert [logs.text() for logs in launch(_log).logs] == [""] * 2
