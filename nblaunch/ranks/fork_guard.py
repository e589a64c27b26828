"""Forks of a rank, such as of a DataLoader's workers: they wait until the threads of libraries are at rest.

Before 3.13, a forked child of CPython's takes the lock of the list of threads before it makes that lock anew
(``_PyEval_ReInitThreads``): a child that is forked while another thread holds the lock never gets to its first line.
Python's own threads take it with the GIL, which the forking thread has. Those of libraries take it without: after each
collective a thread of gloo's enters Python to drop tensors.
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

from nblaunch.machine.processes import LINUX

_WAIT_S = 0.5
"""At most, at one fork."""
_SHORTEST_WAIT_S = 0.01
_LOOK_EVERY_S = 0.0005
_AT_REST = b"StTXZI"
"""All but R (running, or about to) and D (in a page fault, or waiting for a disk)."""


class Settling:
    """Waits for threads at each fork of this process.

    Threads that compute all the time never rest: after a futile wait the next one is half as long.
    """

    def __init__(self) -> None:
        self._longest_s = _WAIT_S
        self._is_installed = False
        self._forking: list[_thread.LockType] = []
        """Let go after the fork."""

    def install(self) -> None:
        """Wait at each fork from now on, where Python needs it; children inherit it.

        It covers ``os.fork``, multiprocessing, and subprocess with a ``preexec_fn``; without one a child of subprocess
        runs no Python before its program.
        """
        if LINUX and sys.version_info < (3, 13) and not self._is_installed:
            self._is_installed = True
            os.register_at_fork(before=self.wait, after_in_parent=self._let_go, after_in_child=self._forking.clear)

    def wait(self) -> None:
        """Return once no thread of a library runs, or after the longest wait. Lets other threads have the GIL."""
        if not _runs_a_library():
            self._longest_s = _WAIT_S
            return
        end = time.monotonic() + self._longest_s
        with self._interrupts_deferred():
            while _runs_a_library():
                if time.monotonic() >= end:
                    self._longest_s = max(self._longest_s / 2, _SHORTEST_WAIT_S)
                    return
                time.sleep(_LOOK_EVERY_S)

    @contextlib.contextmanager
    def _interrupts_deferred(self) -> Iterator[None]:
        """Have SIGINT come after the fork: what its handler raises here Python only prints, and the rank goes on."""
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

    def _let_go(self) -> None:
        while self._forking:
            self._forking.pop().release()


settling = Settling()


def _interrupt_after(forking: _thread.LockType, thread: int) -> None:
    forking.acquire()
    signal.pthread_kill(thread, signal.SIGINT)


def _runs_a_library() -> bool:
    """Whether a thread runs that Python did not start."""
    # no lock is taken: the fork may be within one
    known = [thread for thread in list(threading._active.values()) if type(thread) is not threading._DummyThread]  # type: ignore[attr-defined]
    own = {threading.get_native_id(), *(thread.native_id for thread in known)}
    try:
        return any(_state(task) not in _AT_REST for task in os.listdir("/proc/self/task") if int(task) not in own)
    except OSError:  # no /proc
        return False


def _state(task: str) -> bytes:
    """A thread's state as the system names it, such as ``R``; that of a dead one where it has ended meanwhile."""
    try:
        with open(f"/proc/self/task/{task}/stat", "rb", buffering=0) as file:
            return file.read(512).rpartition(b") ")[2][:1]
    except OSError:
        return b"X"
