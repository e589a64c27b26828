"""A guard for a rank's forks, such as of DataLoader workers: it delays a fork until libraries' threads are idle.

Runs in ranks and their children. Before 3.13, CPython's forked child takes the lock of the thread list before it
re-creates that lock (``_PyEval_ReInitThreads``). A child forked while another thread holds the lock hangs before its
first line. Python's own threads take the lock with the GIL held, as the forking thread does. Threads of libraries do
not: after each collective a gloo thread enters Python to drop tensors.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from nblaunch.machine import timeouts
from nblaunch.machine.processes import LINUX

_IDLE_STATES = b"StTXZI"
"""All but R (runnable) and D (uninterruptible: a page fault, or disk I/O)."""


class ForkGuard:
    """Waits for other threads before each fork of this process.

    Threads that compute all the time never go idle: each timeout halves the next wait.
    """

    def __init__(self) -> None:
        self._max_wait_s = timeouts.FORK_WAIT_S
        self._is_installed = False
        self._forking: list[_thread.LockType] = []
        """Locks that are held until the fork is over."""

    def install(self) -> None:
        """Wait at each fork from now on, on Pythons that need it; children inherit the guard.

        Covers ``os.fork``, multiprocessing, and subprocess with a ``preexec_fn``. Without one, a child of subprocess
        runs no Python before its program.
        """
        if LINUX and sys.version_info < (3, 13) and not self._is_installed:
            self._is_installed = True
            os.register_at_fork(
                before=self.wait, after_in_parent=self._release_locks, after_in_child=self._forking.clear
            )

    def wait(self) -> None:
        """Wait until no library's thread runs, or until the timeout. Releases the GIL meanwhile."""
        if not _library_thread_runs():
            self._max_wait_s = timeouts.FORK_WAIT_S
            return
        deadline = time.monotonic() + self._max_wait_s
        with self._interrupts_deferred():
            while _library_thread_runs():
                if time.monotonic() >= deadline:
                    self._max_wait_s = max(self._max_wait_s / 2, timeouts.MIN_FORK_WAIT_S)
                    return
                time.sleep(timeouts.FORK_POLL_S)

    @contextlib.contextmanager
    def _interrupts_deferred(self) -> Iterator[None]:
        """Deliver SIGINT after the fork: Python only prints an exception raised in a fork hook."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            yield
            return
        seen: list[int] = []
        signal.signal(signal.SIGINT, lambda signum, frame: seen.append(signum))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            if seen:
                self._forking.append(_thread.allocate_lock())
                self._forking[-1].acquire()
                _thread.start_new_thread(_interrupt_after, (self._forking[-1], _thread.get_ident()))

    def _release_locks(self) -> None:
        while self._forking:
            self._forking.pop().release()


guard = ForkGuard()


def _interrupt_after(forking: _thread.LockType, thread: int) -> None:
    forking.acquire()
    signal.pthread_kill(thread, signal.SIGINT)


def _library_thread_runs() -> bool:
    """Return True if a thread that Python did not start is running."""
    # without threading's lock, which the forking thread may hold
    known = [thread for thread in list(threading._active.values()) if type(thread) is not threading._DummyThread]  # type: ignore[attr-defined]
    own = {threading.get_native_id(), *(thread.native_id for thread in known)}
    try:
        return any(_state(task) not in _IDLE_STATES for task in os.listdir("/proc/self/task") if int(task) not in own)
    except OSError:  # no /proc
        return False


def _state(task: str) -> bytes:
    """Return a thread's state letter, such as ``R``; ``X`` if the thread is gone."""
    try:
        with open(f"/proc/self/task/{task}/stat", "rb", buffering=0) as file:
            return file.read(512).rpartition(b") ")[2][:1]
    except OSError:
        return b"X"
