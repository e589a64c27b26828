"""Races, unresponsive processes, failing views and full disks."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch

from nblaunch import notebook_launcher
from nblaunch.engines import fork_servers
from nblaunch.errors import LaunchStoppedError, LaunchTimeoutError, RankDiedError, StartError
from nblaunch.launch import task
from nblaunch.machine import timeouts
from nblaunch.wire.channel import Channel, channel_pair
from tests.conftest import LONG, eventually, marked_processes, present_server, settled_server

quiet: Callable[..., Any] = functools.partial(notebook_launcher, num_processes=2, view="none")


def own_rank(rank: int) -> int:
    return rank


def wait_forever(folder: str, rank: int) -> None:
    Path(folder, f"running{rank}").write_text(str(os.getppid()))
    while True:
        time.sleep(0.01)


def begun(folder: Path, rank: int = 0) -> bool:
    """Return True once a rank of `wait_forever` has written its whole file."""
    file = folder / f"running{rank}"
    return file.exists() and file.read_text() != ""


def test_early_returns_do_not_break_ranks_that_still_connect() -> None:
    assert list(quiet(own_rank, num_processes=8)) == list(range(8))


def test_a_reaper_that_does_not_answer_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "GROUP_DEAF_TIMEOUT_S", 1.0)
    launch: Any = quiet(wait_forever, (str(tmp_path),), block=False)
    eventually(lambda: begun(tmp_path))
    reaper = int((tmp_path / "running0").read_text())
    ranks = marked_processes()
    os.kill(reaper, signal.SIGSTOP)
    launch.kill()
    assert launch.wait(LONG)
    eventually(lambda: reaper not in marked_processes())
    assert reaper in ranks


def test_a_fork_server_that_does_not_answer_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timeouts, "GROUP_BEGIN_TIMEOUT_S", 0.2)
    slow = settled_server()
    monkeypatch.setattr(slow, "wake", lambda: None)
    os.kill(slow.process.pid, signal.SIGSTOP)
    said: list[str] = []

    def is_said() -> bool:
        said.append(capsys.readouterr().out)
        return "waiting" in "".join(said)

    try:
        launch: Any = quiet(own_rank, start_method="forkserver", view="text", block=False)
        eventually(is_said)
        assert not launch.done
    finally:
        os.kill(slow.process.pid, signal.SIGCONT)
    assert list(launch.result()) == [0, 1]
    assert present_server() is slow
    assert f"no response from the fork server (pid {slow.process.pid}) for" in "".join(said)


def test_a_fork_server_that_something_has_stopped_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "GROUP_BEGIN_TIMEOUT_S", 0.2)
    stopped = settled_server()
    os.kill(stopped.process.pid, signal.SIGSTOP)
    assert list(quiet(own_rank, start_method="forkserver")) == [0, 1]
    assert present_server() is stopped


def leave_its_group(folder: str, rank: int) -> None:
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        time.sleep(600)
        os._exit(0)
    eventually(lambda: os.getpgid(child) == child)
    os.setpgid(0, child)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wait_forever(folder, rank)


def test_a_rank_that_moved_to_another_process_group_is_killed(tmp_path: Path) -> None:
    launch: Any = quiet(leave_its_group, (str(tmp_path),), block=False)
    eventually(lambda: begun(tmp_path, 0) and begun(tmp_path, 1))
    launch.kill()
    assert launch.wait(45)


def fail_to_save(folder: str, rank: int) -> None:
    try:
        wait_forever(folder, rank)
    finally:
        if rank == 1:
            raise OSError("disk full: checkpoint not written")


def test_failures_during_a_stop_are_reported(tmp_path: Path) -> None:
    launch: Any = quiet(fail_to_save, (str(tmp_path),), block=False)
    eventually(lambda: begun(tmp_path, 0) and begun(tmp_path, 1))
    launch.stop()
    with pytest.raises(LaunchStoppedError, match=r"rank 1 raised OSError: disk full: checkpoint not written"):
        launch.result()
    log = next((tmp_path / "state").glob("*/rank1.err")).read_text()
    assert "in fail_to_save" in log
    assert log.endswith("OSError: disk full: checkpoint not written\n")


def die_after_a_while() -> None:
    time.sleep(1.0)
    raise ValueError("again")


def test_the_timeout_holds_for_all_attempts_together() -> None:
    with pytest.raises(LaunchTimeoutError, match=r"timeout=2 s"):
        quiet(die_after_a_while, num_processes=1, timeout=2, max_restarts=9)


def test_a_rank_that_cannot_be_started_says_why() -> None:
    with pytest.raises(StartError, match=r"rank 0 could not be started: OSError: .*Argument list too long"):
        quiet(own_rank, start_method="spawn", env={"HUGE": "x" * 200_000})


def test_a_missing_temporary_folder_is_named_and_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(
        StartError,
        match=r"cannot create temporary files for the ranks: .*/gone/nbl-.*: free space there, or set TMPDIR",
    ):
        quiet(own_rank)


def return_much(rank: int) -> torch.Tensor:
    return torch.full((100_000,), float(rank))


def test_a_supervisor_that_fails_keeps_no_result_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "judge", lambda *ends: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quiet(return_much)  # the fixture of every test looks for descriptors that are left


@pytest.mark.usefixtures("_small_buffers")
def test_more_ranks_start_than_the_reapers_messages_hold() -> None:
    """With buffers of the usual size that takes some 300."""
    assert list(quiet(own_rank, num_processes=10)) == list(range(10))


@pytest.fixture
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the notebook and reapers: room for about five messages."""

    def small_pair() -> tuple[Channel, socket.socket]:
        here, there = channel_pair()
        for sock in (here.sock, there):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return here, there

    monkeypatch.setattr(fork_servers, "channel_pair", small_pair)


def load_and_be_killed(rank: int) -> None:
    import torch
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(torch.ones(10_000, 8))
    workers = iter(DataLoader(data, sampler=DistributedSampler(data), num_workers=1))
    next(workers)  # tensors travel by sockets in a temporary folder
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_killed_rank_leaves_no_temporary_folder_of_its_workers() -> None:
    with pytest.raises(RankDiedError, match="rank 0 was killed by SIGKILL"):
        quiet(load_and_be_killed)  # the fixture of every test looks for what is left


def load_in_spawned_workers(folder: str, rank: int) -> None:
    import torch
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(torch.ones(1000, 8))
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1, rank)
    workers = iter(DataLoader(data, sampler=sampler, num_workers=1, multiprocessing_context="spawn"))
    next(workers)  # their queues' semaphores have names in /dev/shm for as long as they live
    assert list(Path("/dev/shm").glob("sem.mp-*"))
    wait_forever(folder, rank)


def stop(launch: Any, reaper: int) -> None:
    launch.stop()


def kill_the_reaper(launch: Any, reaper: int) -> None:
    os.kill(reaper, signal.SIGKILL)


@pytest.mark.parametrize("end", [stop, kill_the_reaper])
def test_no_semaphore_of_spawned_workers_is_left(tmp_path: Path, end: Callable[[Any, int], None]) -> None:
    end_with_spawned_workers(tmp_path, "forkserver", end)  # the fixture of every test looks for what is left


def test_a_forked_rank_leaves_the_tracker_no_semaphores(tmp_path: Path) -> None:
    code = "import sys; from tests.processes.test_robustness import fork_beside_a_tracker as run; run(sys.argv[1])"
    fresh = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]  # a process without threads can be forked
    subprocess.run(fresh, check=True, timeout=LONG)


def fork_beside_a_tracker(folder: str) -> None:
    before = set(Path("/dev/shm").iterdir())
    tracker: Any = resource_tracker._resource_tracker
    tracker.ensure_running()  # as a notebook does with its first spawned worker or shared memory
    end_with_spawned_workers(Path(folder), "fork", lambda launch, reaper: launch.kill())
    eventually(lambda: set(Path("/dev/shm").iterdir()) <= before)  # before the notebook's tracker ends


def end_with_spawned_workers(folder: Path, start_method: str, end: Callable[[Any, int], None]) -> None:
    options: dict[str, Any] = {"num_processes": 1, "start_method": start_method, "block": False}
    launch: Any = quiet(load_in_spawned_workers, (str(folder),), **options)
    eventually(lambda: begun(folder))
    end(launch, int((folder / "running0").read_text()))
    assert launch.wait(LONG)


def save_in_a_thread(folder: str) -> str:
    def save() -> None:
        time.sleep(1.5)
        Path(folder, "saved").touch()

    threading.Thread(target=save).start()
    return "returned"


def test_a_thread_of_a_rank_that_has_returned_may_finish(tmp_path: Path) -> None:
    assert quiet(save_in_a_thread, (str(tmp_path),), num_processes=1)[0] == "returned"
    assert (tmp_path / "saved").exists()
