"""Stopped ranks get one KeyboardInterrupt and their grace period, and always end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from nblaunch import Launch, notebook_launcher
from nblaunch.errors import LaunchStoppedError, LaunchTimeoutError
from nblaunch.launch.handle import live_launches
from nblaunch.machine.processes import descendants
from tests.conftest import LONG, conformance, eventually, state_of

STOP_LIMIT = 45.0
"""Within so many seconds a rank that does not cooperate has ended: three times what it takes on a busy machine."""


# ------------------------------------------------------------------ what ranks run, and what they leave in files
def note(folder: Path, name: str, rank: int, text: object = "") -> None:
    """Write a file atomically: a reader never sees part of it."""
    scratch = folder / f".{name}{rank}"
    scratch.write_text(str(text))
    scratch.rename(folder / f"{name}{rank}")


def noted(folder: Path, name: str, ranks: int) -> bool:
    return all((folder / f"{name}{rank}").exists() for rank in range(ranks))


def read(folder: Path, name: str, rank: int) -> int:
    return int((folder / f"{name}{rank}").read_text())


def count_interrupts(rank: int, folder: Path) -> int:
    """Count KeyboardInterrupts until the file "leave" is there; "beat" holds the number of checks."""
    seen = beats = 0

    def beat() -> None:
        nonlocal beats
        while not (folder / "leave").exists():
            time.sleep(0.02)
            beats += 1
            note(folder, "beat", rank, beats)

    note(folder, "pid", rank, os.getpid())
    while not (folder / "leave").exists():
        try:
            beat()  # all of it, or an interrupt between two beats would end the rank
        except KeyboardInterrupt:
            seen += 1
            note(folder, "seen", rank, seen)
    return seen


def write_checkpoint(rank: int, folder: Path, seconds: float) -> None:
    """Wait to be interrupted, and write a checkpoint of ten parts in `finally`."""
    try:
        note(folder, "ready", rank)
        time.sleep(LONG)
    finally:
        for part in range(10):
            note(folder, "part", rank, part)
            time.sleep(seconds / 10)
        note(folder, "checkpoint", rank, "whole")


def be_obstinate(rank: int, folder: Path) -> None:
    """Ignore signals; be in C, with the GIL and without it; be under SIGSTOP; wait for other ranks: one rank each."""
    note(folder, "pid", rank, os.getpid())
    if rank == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(LONG)
    elif rank == 1:
        sum(range(10**13))
    elif rank == 2:
        lock_twice_in_c()
    elif rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        dist.barrier()


def lock_twice_in_c() -> None:
    """Block forever in C; unlike a sleep, no signal ends it."""
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def checkpoint_for_a_second(rank: int, folder: Path) -> None:
    write_checkpoint(rank, folder, 1.0)


def checkpoint_for_a_minute(rank: int, folder: Path) -> None:
    write_checkpoint(rank, folder, LONG)


def fail_while_the_other_finishes(rank: int, folder: Path) -> None:
    """Rank 1 saves in `finally`, and ends when it is allowed to."""
    if rank == 0:
        eventually(lambda: (folder / "ready1").exists())
        raise ValueError("rank 0 gives up")
    try:
        note(folder, "ready", rank)
        time.sleep(LONG)
    finally:
        eventually(lambda: (folder / "leave").exists())
        torch.save({"weights": torch.ones(1000)}, folder / "checkpoint.pt")


def load_in_workers(rank: int, folder: Path) -> None:
    """Be interrupted while worker processes load, then take a while to leave."""
    note(folder, "pid", rank, os.getpid())
    interrupts = 0
    try:
        for _ in DataLoader(Slow(), num_workers=1, timeout=0):  # type: ignore[arg-type]  # it has what a loader needs
            note(folder, "ready", rank)
    except KeyboardInterrupt:
        interrupts += 1
    finally:
        time.sleep(0.5)
        note(folder, "seen", rank, interrupts)


class Slow:
    """A dataset."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


def stick_beside_a_child(rank: int, folder: Path) -> None:
    """Be stuck in C, with a child that has this process's signal handlers and is not stuck."""
    note(folder, "pid", rank, os.getpid())
    child = os.fork()
    if child == 0:
        try:
            time.sleep(LONG)
        finally:
            os._exit(0)
    note(folder, "child", rank, child)
    lock_twice_in_c()


def state_if_any(pid: int) -> str:
    """Return the state letter of a process; empty if there is none."""
    try:
        return state_of(pid)
    except OSError:
        return ""


def begin(function: Callable[..., Any], folder: Path, start_method: str, ranks: int = 2, **options: Any) -> Launch:
    """Launch a function of `folder` in the background."""
    launch = notebook_launcher(
        function, kwargs={"folder": folder}, num_processes=ranks, start_method=start_method, block=False, **options
    )
    assert isinstance(launch, Launch)
    return launch


def send_often(signum: int, pids: list[int]) -> None:
    for _ in range(10):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a worker that the first has ended
                os.kill(pid, signum)


def seconds_to_end(launch: Launch, begun: float) -> float:
    assert launch.wait(LONG)
    return time.monotonic() - begun


# ------------------------------------------------------------------ exactly once
@conformance("forkserver", "fork")
def test_each_rank_sees_one_keyboard_interrupt_for_many_sigints(start_method: str, tmp_path: Path) -> None:
    launch = begin(count_interrupts, tmp_path, start_method)
    eventually(lambda: noted(tmp_path, "beat", 2))
    pids = [read(tmp_path, "pid", rank) for rank in range(2)]

    send_often(signal.SIGINT, pids)  # as editors do, to every descendant of the kernel
    launch.stop()
    eventually(lambda: noted(tmp_path, "seen", 2))
    send_often(signal.SIGINT, pids)
    beats = [read(tmp_path, "beat", rank) for rank in range(2)]
    eventually(lambda: all(read(tmp_path, "beat", rank) > beats[rank] + 2 for rank in range(2)))
    (tmp_path / "leave").touch()

    assert list(launch.result()) == [1, 1]


def test_sigints_to_loader_workers_too_give_the_rank_one_interrupt(start_method: str, tmp_path: Path) -> None:
    launch = begin(load_in_workers, tmp_path, start_method, ranks=1)
    eventually(lambda: noted(tmp_path, "ready", 1))
    pid = read(tmp_path, "pid", 0)

    send_often(signal.SIGINT, [pid, *descendants(pid)])
    launch.stop()

    assert launch.wait(LONG)
    assert read(tmp_path, "seen", 0) == 1


# ------------------------------------------------------------------ time to finish
def test_a_rank_that_overruns_stop_grace_is_killed(start_method: str, tmp_path: Path) -> None:
    launch = begin(checkpoint_for_a_minute, tmp_path, start_method, stop_grace=5.0)
    eventually(lambda: noted(tmp_path, "ready", 2))
    begun = time.monotonic()

    launch.stop()

    assert 5.0 <= seconds_to_end(launch, begun) < STOP_LIMIT
    with pytest.raises(LaunchStoppedError, match=r"rank 0 was killed before its `finally` had ended"):
        launch.result()
    assert noted(tmp_path, "part", 2)  # it had begun
    assert not (tmp_path / "checkpoint0").exists()


def test_a_timeout_interrupts_and_leaves_time_for_finally(start_method: str, tmp_path: Path) -> None:
    timeout = 30.0 if start_method == "spawn" else 8.0  # the ranks must have begun by then
    launch = begin(checkpoint_for_a_second, tmp_path, start_method, timeout=timeout)
    eventually(lambda: noted(tmp_path, "ready", 2))

    with pytest.raises(LaunchTimeoutError, match=rf"checkpoint_for_a_second took longer than timeout={timeout:g} s"):
        launch.result()
    assert noted(tmp_path, "checkpoint", 2)


def test_a_failure_is_shown_while_others_still_save(
    start_method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = begin(fail_while_the_other_finishes, tmp_path, start_method, view="text", stop_grace=25.0)
    shown = ""

    def is_shown() -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return "rank 0 raised ValueError: rank 0 gives up" in shown

    eventually(is_shown)
    assert not launch.done
    (tmp_path / "leave").touch()

    with pytest.raises(ValueError, match="rank 0 gives up"):
        launch.result()
    assert "stopping the other ranks within 25 s" in shown
    assert f"({__file__}, line" in shown
    assert torch.load(tmp_path / "checkpoint.pt")["weights"].sum() == 1000


# ------------------------------------------------------------------ those that do not answer
def test_ranks_that_cannot_be_interrupted_end_soon(start_method: str, tmp_path: Path) -> None:
    """Signals ignored, in C with and without the GIL, under SIGSTOP, in a collective: one rank each."""
    launch = begin(be_obstinate, tmp_path, start_method, ranks=5, stop_grace=LONG)
    eventually(lambda: noted(tmp_path, "pid", 5))
    eventually(lambda: state_if_any(read(tmp_path, "pid", 3)) == "T")
    begun = time.monotonic()

    launch.stop()

    assert seconds_to_end(launch, begun) < STOP_LIMIT
    with pytest.raises(LaunchStoppedError, match="be_obstinate was stopped") as stopped:
        launch.result()
    assert stopped.value.results == {}


def test_a_child_does_not_answer_for_its_rank(start_method: str, tmp_path: Path) -> None:
    """A child has its rank's handlers: its answer to an editor's SIGINT would win a stuck rank its grace period."""
    launch = begin(stick_beside_a_child, tmp_path, start_method, ranks=1, stop_grace=LONG)
    eventually(lambda: noted(tmp_path, "child", 1))
    begun = time.monotonic()

    launch.stop()
    send_often(signal.SIGINT, [read(tmp_path, "child", 0)])

    assert seconds_to_end(launch, begun) < STOP_LIMIT


@conformance("forkserver", "spawn")
def test_a_launch_that_is_stopped_as_it_starts_ends_at_once(start_method: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    launch = begin(checkpoint_for_a_minute, tmp_path, start_method, stop_grace=LONG)

    launch.stop()

    assert seconds_to_end(launch, begun) < STOP_LIMIT
    with pytest.raises(LaunchStoppedError, match="was stopped"):
        launch.result()


def test_an_interrupt_in_the_moment_of_the_start_leaves_no_launch(
    start_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_and_be_interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin(checkpoint_for_a_minute, tmp_path, start_method)

    assert live_launches() == []
