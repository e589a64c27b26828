"""Processes forked by a child of this process."""

from __future__ import annotations

import contextlib
import os
import signal
import weakref
from typing import Protocol

from nblaunch.wire.channel import readable


class ServerProcess(Protocol):
    """The process of a fork server: the part of `subprocess.Popen` that is used."""

    @property
    def pid(self) -> int:
        """Return the pid; 0 if not known yet."""

    def poll(self) -> int | None:
        """Return None if it runs."""

    def kill(self) -> None:
        """SIGKILL."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal if the process runs."""

    def wait(self, timeout: float, /) -> object:
        """Wait up to `timeout` seconds for the exit."""


class Grandchild:
    """A process that a child has forked, known by its pidfd."""

    def __init__(self, pid: int = 0, pidfd: int | None = None) -> None:
        self.pid, self._pidfd = pid, pidfd
        if pidfd is not None:
            weakref.finalize(self, os.close, pidfd).atexit = False  # exit functions stop the servers

    def poll(self) -> int | None:
        if self._pidfd is not None and not readable(self._pidfd):
            return None
        self._collect()
        return 0

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)

    def wait(self, timeout: float) -> None:
        if self._pidfd is not None:
            readable(self._pidfd, timeout)
        self._collect()

    def _collect(self) -> None:
        """Collect the exit status if this process, as a subreaper or PID 1, has adopted it."""
        if self._pidfd is not None:
            with contextlib.suppress(OSError):  # it is not ours, or a sandbox lacks the system call
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
