"""The kernel's end of a fork server: its start, its reapers, its end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from nblaunch.engines.grandchild import ServerProcess
from nblaunch.engines.import_environment import Where
from nblaunch.errors import StartError
from nblaunch.machine import named_resources, processes, sealed_files, timeouts
from nblaunch.machine.limits import remedy
from nblaunch.machine.packages import ONE_THREAD, installed_now, installed_path
from nblaunch.wire.channel import Channel, channel_pair, readable
from nblaunch.wire.messages import PROTOCOL, Hello, NewReaper, Succeed

_OWN_ENVIRONMENT = {**ONE_THREAD, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_MAIN = (
    "import json, sys; fd, kernel, path, *more = json.loads(sys.argv[1]); sys.path[:] = path; sys.argv[1:] = []; "
    "from nblaunch.ranks.forkserver import main; main(fd, kernel, *more)"
)


@dataclass(frozen=True, slots=True)
class Reaper:
    """A launch's reaper, which may not have answered yet."""

    channel: Channel
    child: int | None = None
    """Its pid if it is a child of this process, which must collect its exit status."""
    server: ForkServer | None = None
    """The server that forks it."""


class ForkServer:
    """One fork server process and the channel to it. `nblaunch.engines.generations` decides when to start one.

    Args:
        preload: Modules to import before it forks; none for a server that only starts fresh interpreters.
        where: What the modules see during their import. Default: this process's environment.

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
                    self.process: ServerProcess = self._start(there)
            except OSError as error:
                raise StartError(f"the fork server could not be started: {error}{remedy(error)}") from error
            undo.pop_all()

    def _begin(self, preload: Sequence[str], where: Where) -> None:
        """Set the attributes that a successor has, too."""
        self.preload, self.where = tuple(preload), where
        self.is_complete = False
        """It has the imports of a process's first optimizer, or cannot have them."""
        self.hello: Hello | None = None
        self.launches = 0
        self.used = time.monotonic()
        """When it was last asked for a reaper."""
        self._ranks = 0
        self._problem = ""
        self._lock = threading.Lock()
        self._is_retired = False

    def _start(self, there: socket.socket) -> subprocess.Popen[bytes]:
        tracker = named_resources.tracker()
        arguments = json.dumps([there.fileno(), os.getpid(), installed_path(), tracker, self.preload])
        return subprocess.Popen(
            [sys.executable, "-c", _MAIN, arguments],
            env={**self.where.env, **_OWN_ENVIRONMENT},
            pass_fds=[there.fileno(), tracker],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            cwd=os.path.abspath(os.sep),
            start_new_session=True,
        )

    def ready(self) -> Hello:
        """Wait until its imports are over.

        Raises:
            StartError: It died, or took too long and was killed; the message has its stderr.
        """
        with self._then_close(), self._lock:
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

    def is_importing(self) -> bool:
        """Return True if `ready` would wait. Does not wait for another thread that does."""
        try:
            return self.hello is None and not self._problem and not readable(self.channel)
        except (OSError, ValueError):  # another thread has retired it
            return False

    def fork_reaper(self, launch_id: str, ranks: int) -> Reaper:
        """Fork the reaper of a launch with `ranks` forked ranks.

        Raises:
            OSError: It has exited.
        """
        channel = self._ask(NewReaper(launch_id, ranks))
        self.launches, self.used, self._ranks = self.launches + 1, time.monotonic(), ranks
        return Reaper(channel, server=self)

    def ask_for_successor(self, modules: Sequence[str], where: Where) -> Channel:
        """Fork a successor that imports these modules; return the channel to it.

        Raises:
            OSError: It has exited.
        """
        spares = self._ranks if self.launches and time.monotonic() - self.used < timeouts.SPARES_RECENT_S else None
        return self._ask(Succeed(tuple(modules), {**where.env, **_OWN_ENVIRONMENT}, where.cwd, spares))

    def _ask(self, message: NewReaper | Succeed) -> Channel:
        """Fork a process; return the channel to it."""
        here, there = channel_pair()
        with there, self._then_close(), self._lock:
            try:
                self.channel.send(message, [there.fileno()])
            except OSError as error:
                here.close()
                if self.channel.closed:
                    raise ConnectionError("another thread has retired the fork server") from error
                raise
        return here

    def errors_again(self) -> IO[bytes]:
        """Open its stderr once more.

        Raises:
            OSError: It was closed.
        """
        with self._then_close(), self._lock:
            try:
                return os.fdopen(os.dup(self._errors.fileno()), "rb")
            except ValueError as error:
                raise OSError(errno.EBADF, str(error)) from None

    def alive(self) -> bool:
        return self.process.poll() is None

    def state(self) -> str:
        """Return its pid, how many launches it has started, and the memory that it holds."""
        held = processes.memory_of(self.process.pid)
        count = f"{self.launches} launch{'' if self.launches == 1 else 'es'}"
        return f"pid {self.process.pid}, {count}" + (f", {held / 1e6:.0f} MB" if held else "")

    def wake(self) -> None:
        """Continue it, in case something has stopped it."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill it and its launches; wait for its exit."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeouts.SERVER_KILL_TIMEOUT_S)

    def kill(self) -> None:
        """Kill it and its launches."""
        self.process.kill()
        self.retire()

    def retire(self) -> None:
        """Let it exit after its launches; `alive` collects its exit status."""
        with contextlib.suppress(OSError):  # already exited
            self.channel.sock.shutdown(socket.SHUT_RDWR)  # closing is not enough: a forked child may hold a copy
        self.wake()  # a stopped process would not notice
        self._is_retired = True
        self._close()

    @contextlib.contextmanager
    def _then_close(self) -> Iterator[None]:
        """Close the files at the end, if the server was retired meanwhile. Enter it before the lock, which keeps them.

        The lock is entered by itself: an interrupt behind a generator's ``yield`` would leave it locked.
        """
        try:
            yield
        finally:
            if self._is_retired:
                self._close()

    def _close(self) -> None:
        """Close its files, or leave that to the thread that uses them.

        That thread may wait in ``poll``: the next file opened would reuse the descriptor's number there.
        """
        if self._lock.acquire(blocking=False):
            try:
                self.channel.close()
                self._errors.close()
            finally:
                self._lock.release()

    def _wait_for_hello(self) -> Hello:
        deadline = time.monotonic() + timeouts.SERVER_START_TIMEOUT_S
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
        return (
            f": {text}"
            if text
            else f" within {timeouts.SERVER_START_TIMEOUT_S:.0f} s (exit status {self.process.poll()})"
        )


def _errors_file() -> IO[bytes]:
    """Open an unnamed file for a server's stderr."""
    return os.fdopen(sealed_files.create(name="nblaunch-stderr").leave_writable(), "w+b")
