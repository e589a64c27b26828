"""Starting the processes of a launch: the fork server's client, and the fork of the kernel itself.

Whatever the start method, what comes back is a `Channel` to a reaper, which starts the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, cast

import nblaunch
from nblaunch.channel import Channel, channel_pair
from nblaunch.errors import StartError, warn
from nblaunch.launch.host import host
from nblaunch.messages import PROTOCOL, Hello, Method, NewReaper, Payload

_log = logging.getLogger(__name__)
_PRELOAD = ("torch", "torch.distributed", "numpy")
_READY_LIMIT = 120.0
"""Seconds that a fork server gets to import torch; a cold disk needs most of a minute."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
_READ_AT_IMPORT = (
    "TORCH",
    "PYTORCH",
    "PYTHON",
    "LD_",
    "DYLD_",
    "MKL_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "MALLOC_",
    "GLIBC_TUNABLES",
    "NUMPY",
    "NPY_",
)
"""Prefixes of variables that torch, its libraries and Python read once, when they are loaded."""
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
    """One fork server process and the channel to it. `Servers` below decides when there is one.

    Args:
        preload: What it imports before it forks; nothing for a server that only starts fresh interpreters.

    Raises:
        StartError: The system refuses to start it.
    """

    def __init__(self, preload: tuple[str, ...]) -> None:
        self.preload = preload
        self.environment = read_at_import(os.environ)
        self.hello: Hello | None = None
        self.launches = 0
        self._problem = ""
        self._lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            try:
                self._errors = undo.enter_context(_errors_file())
                self.channel, there = channel_pair()
                undo.callback(self.channel.close)
                with there:
                    self.process = self._start(there)
            except OSError as error:
                raise StartError(f"the fork server could not be started: {error}{_remedy(error)}") from error
            undo.pop_all()

    def _start(self, there: socket.socket) -> subprocess.Popen[bytes]:
        arguments = json.dumps([there.fileno(), os.getpid(), installed_path(), self.preload])
        return subprocess.Popen(
            [sys.executable, "-c", _MAIN, arguments],
            env={**os.environ, **_ONE_THREAD, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
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
        with self._lock:
            if self._problem:
                raise StartError(self._problem)
            if self.hello is not None:
                self._hear_again()
            else:
                try:
                    self.hello = self._wait_for_hello()
                except StartError as error:
                    self._problem = str(error)
                    self.stop()
                    raise
            assert self.hello is not None
            return self.hello

    def fork_reaper(self, launch_id: str) -> Reaper:
        """Have it fork the reaper of a launch.

        Raises:
            OSError: It is gone.
        """
        here, there = channel_pair()
        with there, self._lock:
            try:
                self.channel.send(NewReaper(launch_id), [there.fileno()])
            except OSError:
                here.close()
                raise
            self.launches += 1
        return Reaper(here, server=self)

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """End it, and with it any launch of its own."""
        self.process.kill()
        self.process.wait()
        self.close()

    def retire(self) -> None:
        """Have it end once its launches have; its end is read by whoever asks `alive`."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self.channel.sock.shutdown(socket.SHUT_RDWR)  # closing is not enough: a forked child may hold a copy
        self.close()

    def close(self) -> None:
        self.channel.close()
        self._errors.close()

    def _wait_for_hello(self) -> Hello:
        deadline = time.monotonic() + _READY_LIMIT
        while True:
            for message, _ in self.channel.drain():
                if isinstance(message, Hello) and message.protocol == PROTOCOL:
                    return message
                raise StartError("nblaunch was upgraded while this kernel ran: restart the kernel to use the new one")
            left = deadline - time.monotonic()
            if self.channel.closed or left <= 0 or not select.select([self.channel], [], [], left)[0]:
                raise StartError(f"the fork server did not start{self._last_words()}")
            self.channel.poll()

    def _hear_again(self) -> None:
        """Take note of a problem that an import in an idle moment has brought."""
        self.channel.poll()
        for message, _ in self.channel.drain():
            if isinstance(message, Hello):
                self.hello = message

    def _last_words(self) -> str:
        self._errors.seek(0)
        text = self._errors.read()[-4000:].decode(errors="replace").strip()
        return f": {text}" if text else f" within {_READY_LIMIT:.0f} s (exit status {self.process.poll()})"


def _errors_file() -> IO[bytes]:
    """A file without a name for what a server says at its end."""
    if hasattr(os, "memfd_create"):  # then no temporary directory is needed
        return os.fdopen(os.memfd_create("nblaunch-stderr", os.MFD_CLOEXEC), "w+b")
    return cast("IO[bytes]", tempfile.TemporaryFile())


def _remedy(error: OSError) -> str:
    """What to do about a system that starts no process."""
    if error.errno == errno.E2BIG:
        longest = max(os.environ, key=lambda name: len(os.environ[name]))
        size = len(os.environ[longest])
        return f": the environment variable {longest} has {size:,} characters: del os.environ[{longest!r}]"
    if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return ": end processes or close files that you do not need (ulimit -u, ulimit -n)"
    return ""


class Servers:
    """The fork servers of this kernel: one with torch imported, one bare for ``spawn``; each started when needed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._warm: ForkServer | None = None
        self._bare: ForkServer | None = None
        self._given_up: tuple[Mapping[str, str], str] | None = None
        """The environment with which the warm one did not get ready, and why: no launch waits for that again."""

    def warm_up(self) -> None:
        """Start the fork server in the background, if it does not run; also if it could not before.

        Raises:
            StartError: The system refuses to start it.
        """
        with self._lock:
            self._given_up = None
            self._current()

    def reaper(self, method: Method, launch_id: str) -> Reaper:
        """The reaper of a new launch over `method`, from a server that runs.

        Raises:
            StartError: No server could be started.
        """
        for last in (False, True):
            server = self._for(method)
            try:
                return server.fork_reaper(launch_id)
            except OSError as error:  # it was killed; the next round starts another
                if last:
                    raise StartError(f"the fork server died twice: {error}") from error
                if isinstance(error, (ConnectionError, BlockingIOError)):  # it, and not this process, is in trouble
                    self.give_up(server)  # though the system may not tell of its end yet
        raise AssertionError  # not reached

    def usable(self, method: Method) -> Method:
        """`method`, or ``spawn`` where the fork server refuses to fork ranks; that is said as a warning."""
        if method != "forkserver":
            return method
        problem = self._problem()
        if not problem:
            return method
        warn(f"the fork server cannot be used, so ranks are spawned, which is slower: {problem}")
        return "spawn"

    def _problem(self) -> str:
        """Why ranks cannot be forked; empty where they can."""
        with self._lock:
            if self._given_up is not None and self._given_up[0] == read_at_import(os.environ):
                return self._given_up[1]
            server = self._current()
        try:
            return server.ready().problem
        except StartError as error:
            self._given_up = server.environment, f"{error} (%reload_ext nblaunch tries again)"
            return self._given_up[1]

    def status(self) -> str:
        """One line for ``%distributed status``."""
        with self._lock:
            server = self._warm
            if server is None or not server.alive():
                given_up = f"given up: {self._given_up[1]}" if self._given_up else "the next launch starts it"
                return f"fork server: not running; {given_up}"
            hello = server.hello
            if hello is None:
                return f"fork server: pid {server.process.pid}, importing {', '.join(server.preload)}"
            state = f"refuses to fork: {hello.problem}" if hello.problem else f"ready after {hello.seconds:.1f} s"
            return f"fork server: pid {hello.pid}, {state}, {server.launches} launches"

    def stop(self) -> None:
        """End every server that this process started."""
        with self._lock:
            for server in (self._warm, self._bare, *_retired):
                if server is not None:
                    server.stop()
            self._warm = self._bare = self._given_up = None
            _retired.clear()

    def _for(self, method: Method) -> ForkServer:
        with self._lock:
            warm = self._alive(self._warm)
            if method == "forkserver":
                server = self._current()
            elif warm is not None and warm.hello is not None and not warm.hello.problem:
                server = warm  # of whatever generation: what it spawns reads its own environment
            else:
                self._bare = server = self._alive(self._bare) or ForkServer(())
        server.ready()
        return server

    def _current(self) -> ForkServer:
        """The warm server; a new generation where variables that it has read at import have changed."""
        server = self._alive(self._warm)
        if server is not None and server.environment != read_at_import(os.environ):
            _log.info("environment read at import has changed: starting a new fork server")
            server.retire()
            _retired.append(server)
            server = None
        _retired[:] = [old for old in _retired if old.alive()]
        if server is None:
            self._warm = server = ForkServer(_PRELOAD)
        return server

    def give_up(self, server: ForkServer) -> None:
        """Do without a server that does not answer; its other launches go on."""
        with self._lock:
            server.retire()
            _retired.append(server)
            self._warm = None if server is self._warm else self._warm
            self._bare = None if server is self._bare else self._bare

    def _alive(self, server: ForkServer | None) -> ForkServer | None:
        if server is None or os.getpid() != self._owner:
            self._owner = os.getpid()
            return None
        if server.alive():
            return server
        server.close()
        return None


_retired: list[ForkServer] = []
servers = Servers()


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that a preload reads once, so that a later change needs a new fork server."""
    ignored = ("TORCHELASTIC_", *_ONE_THREAD)  # of another launch, and those that every server has as 1
    return {k: v for k, v in env.items() if k.startswith(_READ_AT_IMPORT) and not k.startswith(ignored)}


def installed_path() -> list[str]:
    """``sys.path`` without the notebook's own folders: a module that users edit must not be preloaded."""
    roots = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    own = os.path.dirname(os.path.dirname(os.path.abspath(nblaunch.__file__)))
    installed = [entry for entry in sys.path if entry.startswith(roots) or "site-packages" in entry]
    return [*installed, own] if own not in installed else installed


def check_fork() -> None:
    """Refuse a fork of the kernel where it cannot work, and warn where it may not.

    Raises:
        StartError: CUDA runs in this process, which no fork survives.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        cell = host().cuda_cell()
        started = f", started by {cell}" if cell else ""
        raise StartError(
            f"start_method='fork': CUDA runs in the notebook{started}, and no fork survives that: use 'auto'"
        )
    warn(
        "start_method='fork' copies a process with threads: ranks hang if a lock is held, or if OpenMP has run in the "
        "notebook. start_method='auto' is as fast and safe"
    )


def fork_kernel(payload: Payload) -> Reaper:
    """Fork a reaper off the kernel itself; its ranks share the notebook's memory, copy-on-write.

    The one place where the kernel's room reaches into the ranks': the child becomes theirs. It imports before the
    fork: another thread may hold an import's lock, and in the child nobody would release it.
    """
    from nblaunch.ranks import bootstrap, reaper

    here, there = channel_pair()
    kernel = os.getpid()
    pid = _quiet_fork()
    if pid == 0:
        try:
            reaper.run(there, [kernel], bootstrap.forked_with(payload))
        finally:
            os._exit(1)
    there.close()
    return Reaper(here, pid)


_fork_lock = threading.Lock()
"""``catch_warnings`` puts back what it found: two at a time would leave the other's filters in place."""


def _quiet_fork() -> int:
    with _fork_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own warning says what ours has said
        return os.fork()
