"""A fork server that another fork server builds, with more modules imported."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence

from nblaunch.engines.grandchild import Grandchild
from nblaunch.engines.import_environment import Where
from nblaunch.engines.server_client import ForkServer
from nblaunch.errors import StartError
from nblaunch.machine import timeouts
from nblaunch.wire.channel import readable
from nblaunch.wire.messages import Hello, Importing, LeftOut


class LeftOutError(Exception):
    """A package that a successor cannot have."""

    def __init__(self, package: str, reason: str) -> None:
        super().__init__(package, reason)
        self.package, self.reason = package, reason


class Successor(ForkServer):
    """A fork server forked by another, with more modules. It outlives its parent.

    Args:
        parent: The server that forks it.
        modules: What it imports before it serves.
        where: What the modules see during their import.
        may_work: Returns True if it may build now; else it is paused.

    Raises:
        OSError: The parent is gone.
    """

    def __init__(
        self, parent: ForkServer, modules: Sequence[str], where: Where, may_work: Callable[[], bool] = lambda: True
    ) -> None:
        self._begin(modules, where)
        self.is_complete = True
        self.parent: ForkServer | None = parent
        """The server that forks it; None once it serves, so that a long line of servers is not kept."""
        self.installed = parent.installed
        self._may_work, self._pausing = may_work, threading.Lock()
        self._errors = parent.errors_again()
        try:
            self.channel = parent.ask_for_successor(modules, where)
        except OSError:
            self._errors.close()
            raise
        self.process: Grandchild = Grandchild()

    @property
    def packages(self) -> frozenset[str]:
        """Top-level packages that it has and the first server of its line has not."""
        return self.hello.packages if self.hello is not None else frozenset()

    def heed(self) -> bool:
        """Continue or pause it, as `may_work` says; return the answer. A server that serves is never paused."""
        with self._pausing:
            works = self._may_work()
            if self.hello is None:
                self.process.send_signal(signal.SIGCONT if works else signal.SIGSTOP)
        return works

    def build(self) -> None:
        """Wait until it serves.

        Raises:
            LeftOutError: It cannot have a package. It was killed.
            StartError: It could not be created at all.
        """
        try:
            with self._then_close(), self._lock:
                hello = self._wait_for_imports()
        except BaseException:
            self.stop()
            raise
        with self._pausing:
            self.hello, self.parent = hello, None
            self.process.send_signal(signal.SIGCONT)

    def _wait_for_imports(self) -> Hello:
        parent, package, left = self.parent, "", timeouts.SERVER_START_TIMEOUT_S
        while True:
            for message, fds in self.channel.drain():
                if isinstance(message, Importing):
                    package, left = message.package, timeouts.PRELOAD_TIMEOUT_S
                    if fds:
                        self.process = Grandchild(message.pid, fds[0])
                    elif not package:
                        raise StartError("this system has no pidfd_open")
                elif isinstance(message, LeftOut):
                    raise LeftOutError(message.package, message.reason)
                elif isinstance(message, Hello):
                    return message
            if self.channel.closed and (not package or parent is None or not parent.alive()):
                raise StartError("the fork server has exited, or cannot fork")
            if self.channel.closed:
                raise LeftOutError(package, "importing it ends the process")
            works, begin = self.heed(), time.monotonic()
            if readable(self.channel, timeouts.BUILD_POLL_S):
                self.channel.poll()
            elif works:
                left -= time.monotonic() - begin
            if left <= 0:
                if not package:
                    raise StartError("the fork server does not answer")
                raise LeftOutError(package, f"importing it takes more than {timeouts.PRELOAD_TIMEOUT_S:.0f} s")
