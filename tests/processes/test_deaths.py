"""After SIGKILL of any process, its launch is gone soon, and the next launch works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nblaunch import Launch, LaunchResult, notebook_launcher
from nblaunch.engines.fork_servers import servers
from nblaunch.errors import RankDiedError, RankLostError
from tests.conftest import LONG, eventually, present_server, settled_server

KINDS = ("rank", "worker", "subprocess", "session", "daemon")
"""What `with_offspring` starts, besides its rank itself."""


# ------------------------------------------------------------------ what ranks run
def with_offspring(rank: int, folder: Path) -> None:
    """Start a descendant of every kind, write their pids, and block in a collective that never completes."""
    import torch.distributed as dist

    write_pid(folder, rank, "rank", os.getpid())
    write_pid(folder, rank, "reaper", os.getppid())
    workers = start_worker()
    write_pid(folder, rank, "worker", children(os.getpid())[0])
    plain = subprocess.Popen(["sleep", "600"])
    write_pid(folder, rank, "subprocess", plain.pid)
    alone = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    write_pid(folder, rank, "session", alone.pid)
    start_daemon(folder, rank)
    if rank == 0:
        dist.barrier()
    time.sleep(600)
    del workers, plain, alone


def start_worker() -> Any:
    """A loader with a live worker process, as the iterator that it lives with.

    It sends no tensors: their files in the temporary folder outlive a worker that is killed.
    """
    from torch.utils.data import DataLoader

    items: Any = range(10_000)
    workers = iter(DataLoader(items, sampler=items, num_workers=1, collate_fn=list))
    next(workers)
    return workers


def start_daemon(folder: Path, rank: int) -> None:
    """A process that no group, session, parent or environment ties to its rank."""
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            write_pid(folder, rank, "daemon", os.getpid())
            os.execve("/bin/sleep", ["sleep", "600"], {})
        os._exit(0)
    os.waitpid(middle, 0)


def write_pid(folder: Path, rank: int, kind: str, pid: int) -> None:
    (folder / f".{kind}{rank}").write_text(str(pid))
    (folder / f".{kind}{rank}").rename(folder / f"{kind}{rank}")


def hello(rank: int) -> str:
    return f"hello from {rank}"


# ------------------------------------------------------------------ processes
def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Family:
    """A launch of `with_offspring` over two ranks: where its pids are, and the pids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def complete(self) -> bool:
        return all((self.folder / f"{kind}{rank}").exists() for kind in KINDS for rank in range(2))

    def pid(self, kind: str, rank: int = 0) -> int:
        return int((self.folder / f"{kind}{rank}").read_text())

    def pids(self) -> dict[str, int]:
        return {f"{kind} of rank {rank}": self.pid(kind, rank) for kind in (*KINDS, "reaper") for rank in range(2)}

    def living(self) -> list[str]:
        return [name for name, pid in self.pids().items() if alive(pid)]


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    family = Family(tmp_path / "family")
    yield family
    end_all(family)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Family]:
    """A second launch at the same time."""
    family = Family(tmp_path / "other")
    yield family
    end_all(family)


def end_all(family: Family) -> None:
    """Kill the daemon if the test fails: it carries no mark, so no other clean-up finds it."""
    for file in family.folder.glob("[!.]*[01]"):
        pid = int(file.read_text())
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def begin(family: Family, start_method: str = "forkserver") -> Launch:
    settled_server()
    launch = notebook_launcher(
        with_offspring,
        kwargs={"folder": family.folder},
        num_processes=2,
        start_method=start_method,
        block=False,
        view="none",
    )
    assert isinstance(launch, Launch)
    eventually(lambda: family.complete() or launch.done)
    assert not launch.done, launch.result()
    assert len(family.living()) == len(family.pids())
    return launch


def assert_gone(family: Family) -> None:
    eventually(lambda: not family.living(), LONG, lambda: f"they survive: {family.living()}")


def assert_next_launch_works() -> None:
    result = notebook_launcher(hello, num_processes=2, view="none")
    assert isinstance(result, LaunchResult)
    assert list(result) == ["hello from 0", "hello from 1"]


@pytest.fixture
def _beside_a_worker() -> Iterator[None]:
    """A DataLoader worker of the notebook's own, alive, with copies of the notebook's descriptors."""
    servers.warm_up()  # the worker is to have a copy of its channel
    workers = start_worker()
    yield
    workers._shutdown_workers()


# ------------------------------------------------------------------ one victim each
@pytest.mark.usefixtures("_beside_a_worker")
def test_nothing_survives_the_fork_server(family: Family) -> None:
    launch = begin(family)

    os.kill(present_server().process.pid, signal.SIGKILL)

    assert_gone(family)
    with pytest.raises(
        RankLostError, match=r"parent process of the ranks of with_offspring was killed.*: launch again"
    ):
        launch.result()
    assert_next_launch_works()


@pytest.mark.usefixtures("_beside_a_worker")
def test_nothing_survives_a_reaper_but_the_other_launch(family: Family, other: Family) -> None:
    launch, other_launch = begin(family), begin(other, "spawn")

    os.kill(family.pid("reaper"), signal.SIGKILL)

    assert_gone(family)
    with pytest.raises(RankLostError, match="parent process of the ranks"):
        launch.result()
    assert len(other.living()) == len(other.pids())
    assert not other_launch.done
    assert_next_launch_works()

    os.kill(other.pid("reaper"), signal.SIGKILL)
    assert_gone(other)
    assert other_launch.wait(LONG)


def test_nothing_survives_a_rank_in_a_collective(family: Family) -> None:
    launch = begin(family)

    os.kill(family.pid("rank", 0), signal.SIGKILL)

    assert_gone(family)
    with pytest.raises(RankDiedError, match="rank 0 was killed by SIGKILL before with_offspring returned"):
        launch.result()
    assert_next_launch_works()


def test_nothing_survives_the_end_of_a_launch(family: Family) -> None:
    launch = begin(family)

    launch.kill()

    assert launch.wait(LONG)
    assert [name for name in family.living() if "reaper" not in name] == []  # it has said its last word, and leaves


# ------------------------------------------------------------------ the kernel itself
def be_a_kernel(folders: list[str]) -> None:
    """In a process of its own, with a DataLoader worker: launch by each start method, and wait to be killed."""
    servers.warm_up()
    workers = start_worker()
    for start_method, folder in zip(("forkserver", "spawn"), folders, strict=True):
        notebook_launcher(
            with_offspring,
            kwargs={"folder": Path(folder)},
            num_processes=2,
            start_method=start_method,
            block=False,
            view="none",
        )
    time.sleep(600)
    del workers


def test_nothing_survives_the_kernel(family: Family, other: Family) -> None:
    code = "import sys; from tests.processes.test_deaths import be_a_kernel; be_a_kernel(sys.argv[1:])"
    kernel = subprocess.Popen([sys.executable, "-c", code, str(family.folder), str(other.folder)])
    try:
        eventually(lambda: (family.complete() and other.complete()) or kernel.poll() is not None)
        os.kill(kernel.pid, signal.SIGKILL)
    finally:
        kernel.kill()
        kernel.wait()
    assert_gone(family)
    assert_gone(other)
