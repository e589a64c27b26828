"""The kernel's end of a fork server: starting one, asking it for reapers, and for the server that succeeds it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Protocol, cast

from nblaunch.engines.import_environment import Where
from nblaunch.errors import StartError
from nblaunch.machine.packages import ONE_THREAD, installed_now, installed_path
from nblaunch.wire.channel import Channel, channel_pair, readable
from nblaunch.wire.messages import PROTOCOL, Hello, Importing, LeftOut, NewReaper, Succeed

_READY_LIMIT = 120.0
"""Seconds that a fork server gets to import torch; a cold disk needs most of a minute."""
_IMPORT_LIMIT = 120.0
"""Seconds that a successor gets for a package, not counting those in which it stands still."""
_END_LIMIT = 5.0
"""Seconds to wait for the end of a process that was killed; one that waits for a disk ends later."""
_LOOK_EVERY = 0.2
"""Seconds between two looks at whether a successor may go on building."""
_STAYS_WARM = 60.0
"""Seconds after a launch within which a successor begins with ranks that wait for the next."""
_OWN_ENVIRONMENT = {**ONE_THREAD, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_MAIN = (
    "import json, sys; fd, kernel, path, preload = json.loads(sys.argv[1]); sys.path[:] = path; sys.argv[1:] = []; "
    "from nblaunch.ranks.forkserver import main; main(fd, kernel, tuple(preload))"
)


@dataclass(frozen=True, slots=True)
class Reaper:
    """A launch's reaper, just started."""

    channel: Channel
    child: int | None = None
    """Its pid where it is a child of this process, whose end must be read here."""
    server: ForkServer | None = None
    """Who was asked to fork it."""


class ForkServer:
    """One fork server process and the channel to it. `nblaunch.engines.generations` decides when there is one.

    Args:
        preload: What it imports before it forks; nothing for a server that only starts fresh interpreters.
        where: What it sees at its imports. Default: what this process has.

    Raises:
        StartError: The system refuses to start it.
    """

    def __init__(self, preload: tuple[str, ...], where: Where | None = None) -> None:
        self._begin(preload, where or Where.here())
        self.installed = installed_now()
        with contextlib.ExitStack() as undo:
            try:
                self._errors = undo.enter_context(_errors_file())
                self.channel, there = channel_pair()
                undo.callback(self.channel.close)
                with there:
                    self.process: _Process = self._start(there)
            except OSError as error:
                raise StartError(f"the fork server could not be started: {error}{remedy(error)}") from error
            undo.pop_all()

    def _begin(self, preload: Sequence[str], where: Where) -> None:
        """What a successor has too."""
        self.preload, self.where = tuple(preload), where
        self.is_complete = False
        """It has what the first optimizer of a process imports, or cannot have it."""
        self.hello: Hello | None = None
        self.launches = 0
        self.used = time.monotonic()
        """When it was last asked for a reaper."""
        self._ranks = 0
        self._problem = ""
        self._lock = threading.Lock()
        self._is_retired = False

    def _start(self, there: socket.socket) -> subprocess.Popen[bytes]:
        arguments = json.dumps([there.fileno(), os.getpid(), installed_path(), self.preload])
        return subprocess.Popen(
            [sys.executable, "-c", _MAIN, arguments],
            env={**self.where.env, **_OWN_ENVIRONMENT},
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            cwd=os.path.abspath(os.sep),
            start_new_session=True,
        )

    def ready(self) -> Hello:
        """Wait until its imports are over.

        Raises:
            StartError: It died, or took too long and was ended; the message carries what it wrote to stderr.
        """
        with self._using():
            if self._problem:
                raise StartError(self._problem)
            if self.hello is not None:
                return self.hello
            try:
                self.hello = self._wait_for_hello()
            except (StartError, OSError, ValueError) as error:  # of the last two: another thread has retired it
                self._problem = str(error)
                self.stop()
                raise StartError(self._problem) from None
            return self.hello

    def fork_reaper(self, launch_id: str, ranks: int) -> Reaper:
        """Have it fork the reaper of a launch of so many forked ranks.

        Raises:
            OSError: It is gone.
        """
        channel = self._ask(NewReaper(launch_id, ranks))
        self.launches, self.used, self._ranks = self.launches + 1, time.monotonic(), ranks
        return Reaper(channel, server=self)

    def ask_for_successor(self, modules: Sequence[str], where: Where) -> Channel:
        """Have it fork a successor, which imports these modules; the channel to that.

        Raises:
            OSError: It is gone.
        """
        spares = self._ranks if self.launches and time.monotonic() - self.used < _STAYS_WARM else None
        return self._ask(Succeed(tuple(modules), {**where.env, **_OWN_ENVIRONMENT}, where.cwd, spares))

    def _ask(self, message: NewReaper | Succeed) -> Channel:
        """Have it fork a process; the channel to that."""
        here, there = channel_pair()
        with there, self._using():
            try:
                self.channel.send(message, [there.fileno()])
            except OSError as error:
                here.close()
                if self.channel.closed:
                    raise ConnectionError("another thread has retired the fork server") from error
                raise
        return here

    def errors_again(self) -> IO[bytes]:
        """What it writes to stderr, opened once more.

        Raises:
            OSError: It was closed.
        """
        with self._using():
            try:
                return os.fdopen(os.dup(self._errors.fileno()), "rb")
            except ValueError as error:
                raise OSError(errno.EBADF, str(error)) from None

    def alive(self) -> bool:
        return self.process.poll() is None

    def wake(self) -> None:
        """Let it go on, should something have stopped it."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it, and with it any launch of its own; wait for its end."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_LIMIT)

    def kill(self) -> None:
        """The same, without waiting."""
        self.process.kill()
        self.retire()

    def retire(self) -> None:
        """Have it end once its launches have; its end is read by whoever asks `alive`."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self.channel.sock.shutdown(socket.SHUT_RDWR)  # closing is not enough: a forked child may hold a copy
        self.wake()  # one that is stopped would not see that
        self._is_retired = True
        self._close()

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Hold the lock, and with it the files open."""
        try:
            with self._lock:
                yield
        finally:
            if self._is_retired:
                self._close()

    def _close(self) -> None:
        """Close its files, or leave that to the thread that uses them.

        That may wait in ``poll``, and the next file to be opened takes the number: it would wait for that one.
        """
        if self._lock.acquire(blocking=False):
            try:
                self.channel.close()
                self._errors.close()
            finally:
                self._lock.release()

    def _wait_for_hello(self) -> Hello:
        deadline = time.monotonic() + _READY_LIMIT
        while True:
            for message, _ in self.channel.drain():
                if isinstance(message, Hello) and message.protocol == PROTOCOL:
                    return message
                raise StartError("nblaunch was upgraded while this kernel ran: restart the kernel to use the new one")
            left = deadline - time.monotonic()
            if self.channel.closed or left <= 0 or not readable(self.channel, left):
                raise StartError(f"the fork server did not start{self._last_words()}")
            self.channel.poll()

    def _last_words(self) -> str:
        self._errors.seek(0)
        text = self._errors.read()[-4000:].decode(errors="replace").strip()
        return f": {text}" if text else f" within {_READY_LIMIT:.0f} s (exit status {self.process.poll()})"


class LeftOutError(Exception):
    """A successor cannot have this package."""

    def __init__(self, package: str, reason: str) -> None:
        super().__init__(package, reason)
        self.package, self.reason = package, reason


class Successor(ForkServer):
    """A fork server that another has forked, and that has more modules. It lives on when its parent ends.

    Args:
        parent: The server that forks it.
        modules: What it imports before it serves.
        where: What they see while they are imported.
        may_work: Tells whether it may build now; else it stands still.

    Raises:
        OSError: The parent is gone.
    """

    def __init__(
        self, parent: ForkServer, modules: Sequence[str], where: Where, may_work: Callable[[], bool] = lambda: True
    ) -> None:
        self._begin(modules, where)
        self.is_complete = True
        self.parent: ForkServer | None = parent
        """Who forks it; None once it serves, as a line of them may be long."""
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
        """Top names of what it has and the first server of its line has not."""
        return self.hello.packages if self.hello is not None else frozenset()

    def heed(self) -> bool:
        """Have it build or stand still, as `may_work` says now; the answer. It is never stopped once it serves."""
        with self._pausing:
            works = self._may_work()
            if self.hello is None:
                self.process.send_signal(signal.SIGCONT if works else signal.SIGSTOP)
        return works

    def build(self) -> None:
        """Wait until it serves.

        Raises:
            LeftOutError: It cannot have a package. It was ended.
            StartError: It could not be made at all.
        """
        try:
            with self._using():
                hello = self._wait_for_imports()
        except BaseException:
            self.stop()
            raise
        with self._pausing:
            self.hello, self.parent = hello, None
            self.process.send_signal(signal.SIGCONT)

    def _wait_for_imports(self) -> Hello:
        parent, package, left = self.parent, "", _READY_LIMIT
        while True:
            for message, fds in self.channel.drain():
                if isinstance(message, Importing):
                    package, left = message.package, _IMPORT_LIMIT
                    if fds:
                        self.process = Grandchild(message.pid, fds[0])
                    elif not package:
                        raise StartError("this system does not tell of the end of a process (pidfd_open)")
                elif isinstance(message, LeftOut):
                    raise LeftOutError(message.package, message.reason)
                elif isinstance(message, Hello):
                    return message
            if self.channel.closed and (not package or parent is None or not parent.alive()):
                raise StartError("the fork server is gone, or cannot fork")
            if self.channel.closed:
                raise LeftOutError(package, "importing it ends the process")
            works, begin = self.heed(), time.monotonic()
            if readable(self.channel, _LOOK_EVERY):
                self.channel.poll()
            elif works:
                left -= time.monotonic() - begin
            if left <= 0:
                if not package:
                    raise StartError("the fork server does not answer")
                raise LeftOutError(package, f"importing it takes more than {_IMPORT_LIMIT:.0f} s")


class _Process(Protocol):
    """What is asked of a process."""

    @property
    def pid(self) -> int:
        """Its pid; 0 while that is not known."""

    def poll(self) -> int | None:
        """None while it lives."""

    def kill(self) -> None:
        """SIGKILL."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, if it lives."""

    def wait(self, timeout: float, /) -> object:
        """Wait for its end, so many seconds."""


class Grandchild:
    """A process that another has forked: its pidfd tells of its end."""

    def __init__(self, pid: int = 0, pidfd: int | None = None) -> None:
        self.pid, self._pidfd = pid, pidfd
        if pidfd is not None:
            weakref.finalize(self, os.close, pidfd)

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
        """Read its exit status where this process has adopted it, as a subreaper or a container's first process."""
        if self._pidfd is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)


def _errors_file() -> IO[bytes]:
    """A file without a name for what a server says at its end."""
    if hasattr(os, "memfd_create"):  # then no temporary directory is needed
        return os.fdopen(os.memfd_create("nblaunch-stderr", os.MFD_CLOEXEC), "w+b")
    return cast("IO[bytes]", tempfile.TemporaryFile())


def remedy(error: OSError) -> str:
    """What to do about a system that starts no process."""
    if error.errno == errno.E2BIG:
        longest = max(os.environ, key=lambda name: len(os.environ[name]))
        size = len(os.environ[longest])
        return f": the environment variable {longest} has {size:,} characters: del os.environ[{longest!r}]"
    if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return ": end processes or close files that you do not need (ulimit -u, ulimit -n)"
    return ""
