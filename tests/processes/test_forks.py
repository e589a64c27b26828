"""Forks of a rank while C threads run: no child may inherit a held lock."""

from __future__ import annotations

import _thread
import ctypes
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from nblaunch.ranks import process_group
from tests.conftest import LONG
from tests.processes.conftest import Launcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a rank waits for its threads on Linux alone")
FORKS = 60
"""Without the wait some 6 of them hang."""
CALLS = 50_000
"""Of one burst: some 3 ms, and the fork happens in the first."""
HUNG_AFTER = 30.0


def burst() -> None:
    """Return while a C thread takes and releases the interpreter's list of threads, as gloo's does after a collective.

    C's ``lfind`` calls its comparison, which is given the key, until it returns 0: here a look-up of interpreter 0.
    """
    begun = threading.Event()
    look_up = ctypes.cast(ctypes.pythonapi._PyInterpreterState_LookUpID, ctypes.c_void_p)
    calls = ctypes.c_size_t(CALLS)
    none = ctypes.c_void_p(None)

    def run() -> None:
        begun.set()
        ctypes.CDLL(None).lfind(none, none, ctypes.byref(calls), ctypes.c_size_t(0), look_up)

    _thread.start_new_thread(run, ())  # in none of threading's lists, like a library's own
    begun.wait()


def ends(pid: int) -> bool:
    """Whether a child ends; one that does not is killed."""
    fd = os.pidfd_open(pid)
    try:
        ended = bool(select.select([fd], [], [], HUNG_AFTER)[0])
        if not ended:
            os.kill(pid, signal.SIGKILL)
        return ended
    finally:
        os.close(fd)


def by_os() -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    ended = ends(pid)
    os.waitpid(pid, 0)
    return ended


def by_multiprocessing() -> bool:
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    assert child.pid is not None
    ended = ends(child.pid)
    child.join()
    return ended


def by_subprocess() -> bool:
    """With code of Python's between fork and exec: without it the child of a subprocess runs none."""
    child = subprocess.Popen(["true"], preexec_fn=int)  # that is what is tested
    ended = ends(child.pid)
    child.wait()
    return ended


def hung(forks: int = FORKS) -> int:
    """How many of so many children that were forked within a burst did not get to their first line."""
    ways: list[Callable[[], bool]] = [by_os, by_multiprocessing, by_subprocess]
    count = 0
    for number in range(forks):
        burst()
        count += not ways[number % len(ways)]()
    return count


def test_no_child_of_a_rank_hangs_whatever_c_threads_do(launch: Launcher) -> None:
    assert launch(hung, num_processes=1, timeout=240)[0] == 0


# ------------------------------------------------------------------ the wait
class Clock:
    """Stands for the module ``time``: sleeping takes no time of the test's."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_thread_that_never_rests_costs_less_at_each_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, guard, waits = Clock(), process_group.ForkGuard(), list[float]()
    monkeypatch.setattr(process_group, "time", clock)
    for is_running in [*[True] * 10, False, True]:
        monkeypatch.setattr(process_group, "_library_thread_runs", lambda is_running=is_running: is_running)
        begun = clock.now
        guard.wait()
        waits.append(clock.now - begun)

    assert waits == pytest.approx([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, *[0.01] * 4, 0.0, 0.5], abs=0.001)


def test_threads_of_pythons_own_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_state", lambda task: b"R")
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    own = [str(threading.get_native_id()), *(str(thread.native_id) for thread in threads)]
    monkeypatch.setattr(process_group, "os", SimpleNamespace(listdir=lambda folder: own))

    assert not process_group._library_thread_runs()
    own.append("1")
    assert process_group._library_thread_runs()
    stop.set()
    for thread in threads:
        thread.join()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python re-creates the lock in the child")
def test_an_interrupt_within_the_wait_comes_after_the_fork() -> None:
    code = """if True:
        import os, signal, time
        from nblaunch.ranks import process_group
        looks = iter([lambda: True, lambda: signal.raise_signal(signal.SIGINT) or True, lambda: False])
        process_group._library_thread_runs = lambda: next(looks)()
        process_group.guard.install()
        try:
            pid = os.fork()
            if pid == 0:
                time.sleep(0.2)
                os._exit(7)
            for _ in range(3000):  # the signal may come just before a sleep begins
                time.sleep(0.01)
        except KeyboardInterrupt:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG)
    assert (done.stdout, done.stderr) == ("7\n", "")
