"""The kernel's end of a fork server: starting one, asking it for reapers, and for a successor that has more modules."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol, cast

from nblaunch.channel import Channel, channel_pair, readable
from nblaunch.errors import StartError
from nblaunch.installed import ONE_THREAD, installed_now, installed_path
from nblaunch.messages import PROTOCOL, Hello, Importing, LeftOut, NewReaper, Succeed

_READY_LIMIT = 120.0
"""Seconds that a fork server gets to import torch; a cold disk needs most of a minute."""
_IMPORT_LIMIT = 60.0
"""Seconds that a successor gets for a package."""
_LAST_MOMENT = 1.0
"""Seconds that a successor gets to leave by itself."""
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
    """One fork server process and the channel to it. `nblaunch.launch.servers` decides when there is one.

    Args:
        preload: What it imports before it forks; nothing for a server that only starts fresh interpreters.

    Raises:
        StartError: The system refuses to start it.
    """

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._begin(preload, os.environ)
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

    def _begin(self, preload: Sequence[str], env: Mapping[str, str]) -> None:
        """What a successor has too."""
        self.preload, self.environment = tuple(preload), dict(env)
        self.hello: Hello | None = None
        self.launches = 0
        self._problem = ""
        self._lock = threading.Lock()
        self._is_retired = False

    def _start(self, there: socket.socket) -> subprocess.Popen[bytes]:
        arguments = json.dumps([there.fileno(), os.getpid(), installed_path(), self.preload])
        return subprocess.Popen(
            [sys.executable, "-c", _MAIN, arguments],
            env={**os.environ, **_OWN_ENVIRONMENT},
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
                self._hear_again()
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
        self.launches += 1
        return Reaper(channel, server=self)

    def ask_for_successor(self, modules: Sequence[str], env: Mapping[str, str], cwd: str) -> Channel:
        """Have it fork a successor, which imports these modules; the channel to that.

        Raises:
            OSError: It is gone.
        """
        return self._ask(Succeed(tuple(modules), {**env, **_OWN_ENVIRONMENT}, cwd))

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

    def stop(self) -> None:
        """End it, and with it any launch of its own."""
        self.process.kill()
        self.process.wait()
        self.retire()

    def retire(self) -> None:
        """Have it end once its launches have; its end is read by whoever asks `alive`."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self.channel.sock.shutdown(socket.SHUT_RDWR)  # closing is not enough: a forked child may hold a copy
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

    def _hear_again(self) -> None:
        """Take note of a problem that an import in an idle moment has brought."""
        with contextlib.suppress(OSError):  # another thread has retired it: whoever asks it for a reaper is told
            self.channel.poll()
        for message, _ in self.channel.drain():
            if isinstance(message, Hello):
                self.hello = message

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
    """A fork server that another forked, and that has the modules which launches have imported.

    Args:
        parent: Who forks it.
        modules: What it is to import.
        env: The environment of launches, which modules may read while they are imported.
        cwd: And their folder.

    Raises:
        OSError: The parent is gone.
    """

    def __init__(self, parent: ForkServer, modules: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        self._begin(modules, env)
        self.parent, self.cwd = parent, cwd
        self._errors = parent.errors_again()
        try:
            self.channel = parent.ask_for_successor(modules, env, cwd)
        except OSError:
            self._errors.close()
            raise
        self.process: _Grandchild = _Grandchild()

    def leave(self) -> None:
        """End it in order, if that takes but a moment: its exit removes what its packages have made."""
        self.retire()
        self.process.wait(_LAST_MOMENT)

    @property
    def packages(self) -> frozenset[str]:
        """What it has besides what its parent has."""
        return frozenset(name.partition(".")[0] for name in self.preload)

    @property
    def names(self) -> frozenset[str]:
        """What it has found, or not, where the notebook's own folders are not looked in."""
        return self.packages.union(self.hello.not_found if self.hello is not None else ())

    def edited(self) -> bool:
        """Whether a file that it has imported has changed since."""
        return self.hello is not None and any(_changed(*file) for file in self.hello.files)

    def import_all(self) -> None:
        """Wait until it has imported everything.

        Raises:
            LeftOutError: It cannot have a package. It was ended.
            StartError: It could not be made at all.
        """
        try:
            self.hello = self._wait_for_imports()
        except BaseException:
            self.stop()
            raise

    def _wait_for_imports(self) -> Hello:
        package = ""
        while True:
            for message, fds in self.channel.drain():
                if isinstance(message, Importing):
                    package = message.package
                    if fds:
                        self.process = _Grandchild(message.pid, fds[0])
                    elif not package:
                        raise StartError("this system does not tell of the end of a process (pidfd_open)")
                elif isinstance(message, LeftOut):
                    raise LeftOutError(message.package, message.reason)
                elif isinstance(message, Hello):
                    return message
            if self.channel.closed and (not package or not self.parent.alive()):
                raise StartError("the fork server is gone, or cannot fork")
            if self.channel.closed:
                raise LeftOutError(package, "importing it ends the process")
            if not readable(self.channel, _IMPORT_LIMIT if package else _READY_LIMIT):
                if not package:
                    raise StartError("the fork server does not answer")
                raise LeftOutError(package, f"importing it takes more than {_IMPORT_LIMIT:.0f} s")
            self.channel.poll()


def _changed(path: str, mtime_ns: int) -> bool:
    try:
        return os.stat(path).st_mtime_ns != mtime_ns
    except OSError:
        return True


class _Process(Protocol):
    """What is asked of a process."""

    @property
    def pid(self) -> int:
        """Its pid; 0 while that is not known."""

    def poll(self) -> int | None:
        """None while it lives."""

    def kill(self) -> None:
        """SIGKILL."""

    def wait(self) -> object:
        """Wait for its end."""


class _Grandchild:
    """A process that another has forked: its pidfd tells of its end."""

    def __init__(self, pid: int = 0, pidfd: int | None = None) -> None:
        self.pid, self._pidfd = pid, pidfd
        if pidfd is not None:
            weakref.finalize(self, os.close, pidfd)

    def poll(self) -> int | None:
        return 0 if self._pidfd is None or readable(self._pidfd) else None

    def kill(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> None:
        if self._pidfd is not None:
            readable(self._pidfd, seconds)


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
