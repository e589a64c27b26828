"""The fork servers of this process, and which of them starts a launch."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nblaunch.errors import StartError, warn
from nblaunch.machine import named_resources, timeouts
from nblaunch.machine.limits import remedy
from nblaunch.machine.packages import (
    KNOWN_SAFE,
    ONE_THREAD,
    differs,
    imported_here,
    installed_now,
    installed_path,
    package_of,
    shadowed,
    why_not_ahead,
)
from nblaunch.wire.channel import Channel, channel_pair, readable
from nblaunch.wire.messages import PROTOCOL, Hello, Importing, Method, NewReaper

_log = logging.getLogger(__name__)
_PRELOAD: tuple[str, ...] = ("torch", "torch.distributed")
if importlib.util.find_spec("numpy") is not None:  # torch works without it
    _PRELOAD += ("numpy",)
_SOON: tuple[str, ...] = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo", "nblaunch.training")
"""The first optimizer or DistributedDataParallel of a process imports torch._dynamo, which takes longer than torch; the
toolkit takes 0.1 to 0.2 s in each rank that uses it."""
MAX_ENV_SERVERS = 2
"""Servers with an environment of their own (``env=``), 150 MB each. Servers that launches wait for do not count."""
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
    "SYMPY_",
    "MPMATH_",
    "TRITON_",
)
"""Prefixes of variables that torch, its libraries and Python read once, when they are loaded."""
_SET_BY_LIBRARIES = (
    "KMP_DUPLICATE_LIB_OK",  # by scikit-learn and torchvision, with the next
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # by lightning
    "TORCHINDUCTOR_CACHE_DIR",  # by torch's compiler, with the next
    "TRITON_CACHE_DIR",
)
"""Variables that libraries set when the notebook imports them. They count only if ``env=`` names them."""
SERVER_START_TIMEOUT_S = 120.0
"""For a fork server to import torch, which takes most of a minute from a cold disk."""
PRELOAD_TIMEOUT_S = 120.0
"""For a fork server to import one package ahead of launches."""
BUILD_QUIET_S = 1.0
"""Without a launch's start before a fresh fork server is started in the background."""


class Where(NamedTuple):
    """The environment and directory of an import."""

    env: Mapping[str, str]
    cwd: str
    named: Collection[str] = ()
    """The variables that ``env=`` has named."""

    @classmethod
    def here(cls) -> Where:
        return cls(dict(os.environ), os.path.abspath(os.sep))

    @property
    def read_at_import(self) -> dict[str, str]:
        """The variables that a server reads once. Launches with equal ones can share a server."""
        ignored = ("TORCHELASTIC_", *ONE_THREAD)  # set by another launch, or 1 in every server
        return {
            name: value
            for name, value in self.env.items()
            if name.startswith(_READ_AT_IMPORT) and not name.startswith(ignored) and not self._is_librarys(name)
        }

    def is_like(self, other: Where) -> bool:
        return self.cwd == other.cwd and self._significant() == other._significant()

    def _significant(self) -> dict[str, str]:
        return {name: value for name, value in self.env.items() if not differs(name) and not self._is_librarys(name)}

    def _is_librarys(self, name: str) -> bool:
        return name in _SET_BY_LIBRARIES and name not in self.named


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
    """One fork server process and the channel to it. `Servers` decides when to start one.

    It imports the modules `preload`, none if it only starts fresh interpreters, and then those that ranks can import
    for themselves, `ahead`. They see the environment and directory `where`.

    StartError: the system refuses to start it.
    """

    def __init__(self, preload: Sequence[str], where: Where | None = None, ahead: Sequence[str] = ()) -> None:
        self.preload, self.where, self.ahead = tuple(preload), where or Where.here(), tuple(ahead)
        self.hello: Hello | None = None
        self.launches = 0
        self.is_awaited = True
        self.package = ""
        """The package of `ahead` that it imports, or that is at fault; empty if none."""
        self.problem = ""
        """Why it did not start."""
        self._lock = threading.RLock()
        self.installed = installed_now()
        with contextlib.ExitStack() as undo:
            try:
                self._errors = undo.enter_context(tempfile.TemporaryFile())
                self.channel, there = channel_pair()
                undo.callback(self.channel.close)
                with there:
                    self.process = self._start(there)
            except OSError as error:
                raise StartError(f"the fork server could not be started: {error}{remedy(error)}") from error
            undo.pop_all()

    def _start(self, there: socket.socket) -> subprocess.Popen[bytes]:
        tracker, cwd = named_resources.tracker(), self.where.cwd
        arguments = json.dumps([there.fileno(), os.getpid(), installed_path(), tracker, self.preload, self.ahead, cwd])
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

    @property
    def is_plain(self) -> bool:
        return set(self.ahead) <= set(_SOON)

    def fits(self, where: Where) -> bool:
        if self.where.read_at_import != where.read_at_import:
            return False
        return self.is_plain or (
            self.hello is not None and where.is_like(self.where) and not shadowed(self.hello.packages)
        )

    def ready(self) -> Hello:
        """Wait until its imports are over. StartError: it died, or took too long and was killed."""
        with self._lock:
            if self.problem:
                raise StartError(self.problem)
            if self.hello is not None:
                return self.hello
            try:
                self.hello = self._wait_for_hello()
            except (StartError, OSError, ValueError) as error:  # of the last two: another thread has retired it
                self.problem, self.is_awaited = str(error), False
                self.stop()
                raise StartError(self.problem) from None
            self.is_awaited = self.is_awaited and not self.hello.problem
            return self.hello

    def is_importing(self) -> bool:
        try:
            return self.hello is None and not self.problem and not readable(self.channel)
        except (OSError, ValueError):  # another thread has retired it
            return False

    def fork_reaper(self) -> Reaper:
        """Fork the reaper of a launch. OSError: the server has exited."""
        here, there = channel_pair()
        with there, self._lock:
            try:
                self.channel.send(NewReaper(), [there.fileno()])
            except OSError as error:
                here.close()
                if self.channel.closed:
                    raise ConnectionError("another thread has retired the fork server") from error
                raise
        self.launches, self.is_awaited = self.launches + 1, False
        return Reaper(here, server=self)

    def alive(self) -> bool:
        if self.process.poll() is None:
            return True
        self._close()
        return False

    def state(self) -> str:
        return f"pid {self.process.pid}, {self.launches} launch{'' if self.launches == 1 else 'es'}"

    def described(self) -> str:
        if self.problem:
            return f"fork server: disabled: {self.problem} (%reload_ext nblaunch tries again)"
        if self.hello is None:
            return f"fork server: pid {self.process.pid}, importing {', '.join(self.preload)}"
        refused, seconds = self.hello.problem, self.hello.seconds
        end = f"refuses to fork: {refused}" if refused else f"ready after {seconds:.1f} s"
        return f"fork server: {self.state()}, {end}"

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.process.kill()
        self.retire()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeouts.SERVER_KILL_TIMEOUT_S)
        self._close()

    def _close(self) -> None:
        if self._lock.acquire(blocking=False):  # else the thread in `ready` still reads them, and stops it after
            try:
                self.channel.close()
                self._errors.close()
            finally:
                self._lock.release()

    def retire(self) -> None:
        """Let it exit after its launches; `alive` collects its exit status, and closes its files.

        Not here: a thread may wait in ``poll``, and the next file opened would reuse the descriptor's number there.
        """
        with contextlib.suppress(OSError):  # already exited
            self.channel.sock.shutdown(socket.SHUT_RDWR)  # closing is not enough: a forked child may hold a copy
        self.wake()  # a stopped process would not notice

    def _wait_for_hello(self) -> Hello:
        deadline = time.monotonic() + SERVER_START_TIMEOUT_S
        while True:
            for message, _ in self.channel.drain():
                if isinstance(message, Importing):
                    self.package, deadline = message.package, time.monotonic() + PRELOAD_TIMEOUT_S
                elif isinstance(message, Hello) and message.protocol == PROTOCOL:
                    self.package = message.package
                    return message
                else:
                    raise StartError("nblaunch was upgraded: restart the kernel to use the new version")
            left = deadline - time.monotonic()
            if self.channel.closed or left <= 0 or not readable(self.channel, left):
                raise StartError(self._why_not())
            self.channel.poll()

    def _why_not(self) -> str:
        if self.package and self.channel.closed:
            return "importing it terminates the process"
        if self.package:
            return f"importing it takes more than {PRELOAD_TIMEOUT_S:.0f} s"
        self._errors.seek(0)
        said = self._errors.read()[-4000:].decode(errors="replace").strip()
        late = f" within {SERVER_START_TIMEOUT_S:.0f} s (exit status {self.process.poll()})"
        return "the fork server did not start" + (f": {said}" if said else late)


class Servers:
    """The fork servers of this process, each started when needed.

    A server never changes once it serves. The first has torch and serves at once. While no launch starts, a fresh one
    imports more in the background, and takes over when it is ready: what a process's first optimizer imports, and the
    packages that the notebook uses or the user names. A server with packages serves launches that would import them the
    same way; for others one without them stays.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._servers: list[ForkServer] = []
        """Those that launches may use, the most recently used last."""
        self._is_started = False
        """A server of the notebook's environment was started, and has served: a cell may start the next one."""
        self._bare: ForkServer | None = None
        """For ``spawn``: it imports nothing."""
        self._retired: list[ForkServer] = []
        """Replaced servers whose launches still run."""
        self._named: dict[str, None] = {}
        """Modules that the user has named."""
        self._left_out: dict[str, str] = {}
        """Packages that cannot be imported ahead, and why."""
        self._last: list[Where] = []
        """Where the last two launches ran."""
        self._starting = 0
        """Launches that are waiting for their reaper."""
        self._started = 0.0
        """When the last launch got its reaper, by the monotonic clock."""
        self._builder: threading.Thread | None = None
        self._building: ForkServer | None = None
        """A fresh server in the background."""

    def warm_up(self) -> None:
        """Start the fork server in the background, if it does not run; also if it could not before."""
        with self._lock:
            self._servers = [server for server in self._servers if not server.problem]
            self._server(Where.here())
            self.build_soon()

    def refresh(self) -> None:
        """Start a server in the background if the notebook's is out of date or has ended."""
        with self._lock:
            self._collect()
            if self._is_started:
                self._server(Where.here())
            self.build_soon()

    def forget(self) -> None:
        """Forget all servers: in a forked child of the kernel they are the parent's."""
        inherited = self.__dict__.copy()
        self.__init__()  # type: ignore[misc]  # the lock may be held by a thread of the parent
        self._inherited = inherited  # Popen.__del__ would warn of a running process

    def preload(self, modules: Sequence[str], where: Where | None = None) -> None:
        """Import modules ahead of later launches, besides those that the notebook imports.

        With `where`, in which launches will run if none has run yet, what could not be imported is tried again.
        """
        with self._lock:
            self._named.update(dict.fromkeys(modules))
            for name in modules if where is not None else ():
                self._left_out.pop(package_of(name), None)
            if not self._last and where is not None:
                self._last = [where, where]
            self.build_soon()

    def reaper(self, method: Method, where: Where | None = None) -> Reaper:
        """Return the reaper of a new launch there, from a running server.

        StartError: no server could be started, or this process may not open the files for it.
        """
        where = where or Where.here()
        with self._launching():
            for last in (False, True):
                server, problem = self._ready(lambda: self._for(method, where))
                if problem:
                    raise StartError(problem)
                try:
                    reaper = server.fork_reaper()
                    self.build_soon()  # once the server forks: looking for what to import takes some milliseconds
                    return reaper
                except (ConnectionError, BlockingIOError) as error:  # it was killed; the next round starts another
                    if last:
                        raise StartError(f"the fork server died twice: {error}") from error
                    self.retire(server)  # though the system may not tell of its end yet
                except OSError as error:  # this process, and not the server, is in trouble
                    raise StartError(f"the ranks could not be started: {error}{remedy(error)}") from error
        raise AssertionError  # not reached

    def _ready(self, find: Callable[[], ForkServer]) -> tuple[ForkServer, str]:
        """Wait for a server; return it, and why it cannot be used. One that another thread retires does not count."""
        while True:
            server = find()
            try:
                server.ready()
                return server, ""
            except StartError as error:
                if self.has_place(server):
                    return server, str(error)

    @contextlib.contextmanager
    def _launching(self) -> Iterator[None]:
        """Start no server in the background meanwhile."""
        counted = 0
        try:
            with self._lock:
                self._starting, counted = self._starting + 1, 1
            yield
        finally:  # also on an interrupt
            with self._lock:
                self._starting, self._started = self._starting - counted, time.monotonic()

    def usable(
        self, method: Method, where: Where | None = None, show: Callable[[str], None] = lambda text: None
    ) -> Method:
        """Return `method`, or ``spawn`` with a warning if the fork server cannot fork ranks there.

        `show` gets what is awaited, unless the fork server is ready.
        """
        if method != "forkserver":
            return method
        where = where or Where.here()

        def find() -> ForkServer:
            with self._lock:
                server = self._server(where)
            if server.is_importing():
                why = "first launch with these environment variables"
                if where.read_at_import == Where.here().read_at_import:
                    why = "first launch" if not self._last else "the fork server starts again"
                show(f"importing torch ({why}) …")
            return server

        with self._launching():
            server, problem = self._ready(find)
        problem = f"{problem} (%reload_ext nblaunch tries again)" if server.hello is None else server.hello.problem
        if not problem:
            return method
        warn(f"the fork server cannot be used, so ranks are spawned (slower): {problem}")
        return "spawn"

    def status(self) -> list[str]:
        with self._lock:
            here = Where.here().read_at_import
            present = [server for server in self._servers if server.alive() or server.problem]
            own = [server for server in present if server.where.read_at_import == here]
            starter = "cell" if self._is_started else "launch"
            lines = [own[0].described() if own else f"fork server: not running; the next {starter} starts it"]
            for server in (each for each in present if not each.problem):
                if not server.is_plain:
                    lines.append(f"with {_packages_in(server.ahead)} imported: {server.state()}")
                elif server not in own:
                    lines.append(f"for another environment (env=): {server.state()}")
            if self._building is not None:
                lines.append(f"starting: a fork server that preloads {_packages_in(self._building.ahead)}")
            return lines + [f"not preloaded: {name} ({why})" for name, why in self._left_out.items()]

    def stop(self) -> None:
        with self._lock:
            present = self.all()
            self._servers, self._retired, self._bare, self._building = [], [], None, None
            self._last, self._named, self._left_out = [], {}, {}
            self._is_started = False
            for server in present:
                server.stop()

    def all(self) -> list[ForkServer]:
        with self._lock:
            return [each for each in (self._building, self._bare, *self._servers, *self._retired) if each is not None]

    # -------------------------------------------------------------- which server
    def _for(self, method: Method, where: Where) -> ForkServer:
        with self._lock:
            self._collect()
            if method == "forkserver":
                self._last = [*self._last[-1:], where]
                return self._server(where)
            if self._bare is None:
                self._bare = ForkServer(())
            return self._bare

    def _server(self, where: Where) -> ForkServer:
        """Return the best server whose imports saw the environment of launches there; start one if there is none."""
        self._collect()
        here = Where.here().read_at_import
        server = self._best(where)
        if server is None:
            self._is_started = False  # unless the system starts it
            server = ForkServer(_PRELOAD, where._replace(cwd=os.path.abspath(os.sep)))
            self._is_started = True
        self._servers = [*(other for other in self._servers if other is not server), server]
        others = [each for each in self._servers if each.where.read_at_import != here and not each.is_awaited]
        kept = [each for each in others if each.where.named or each.problem][-MAX_ENV_SERVERS:]
        for old in others:
            if old not in kept:
                self.retire(old)
        return server

    def _best(self, where: Where) -> ForkServer | None:
        return max((each for each in self._servers if each.fits(where)), key=lambda each: len(each.ahead), default=None)

    def _collect(self) -> None:
        """Forget servers that have exited, and retire those of an earlier installation."""
        self._retired = [old for old in self._retired if old.alive()]
        if self._bare is not None and not self._bare.alive():
            self.retire(self._bare)
        for server in list(self._servers):
            if server.installed != installed_now():
                _log.info("installed packages have changed: starting a new fork server")
                self._left_out.clear()
                self.retire(server)
            elif not (server.alive() or server.problem):  # a server that did not start stays, or launches would wait
                self._is_started = self._is_started and server.hello is not None
                self.retire(server)

    def retire(self, server: ForkServer) -> None:
        """Let it end after its launches."""
        with self._lock:
            self._servers = [other for other in self._servers if other is not server]
            self._bare = None if server is self._bare else self._bare
            server.retire()
            if server not in self._retired:
                self._retired.append(server)

    def has_place(self, server: ForkServer) -> bool:
        """Return True if launches may use it: it was not retired."""
        with self._lock:
            return server in (self._bare, *self._servers)

    # -------------------------------------------------------------- a fresh server, in the background
    def build_soon(self) -> None:
        """Start a server in the background that has more imported, if there is more to import."""
        with self._lock:
            if self._builder is None and self._next_step() is not None:
                thread = threading.Thread(target=self._build, name="nblaunch-builder", daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads: ranks import for themselves
                    thread.start()
                    self._builder = thread

    def _build(self) -> None:
        """Build one server after the other while no launch starts, until nothing is missing."""
        try:
            while True:
                with self._lock:
                    step = self._next_step()
                    if step is None:
                        self._builder = None  # a later request starts another thread
                        return
                    old, where, ahead = step
                    pause = BUILD_QUIET_S - (0.0 if self._starting else time.monotonic() - self._started)
                    new = ForkServer(_PRELOAD, where, ahead) if old.hello is not None and pause <= 0 else None
                    self._building = new
                if new is None:
                    old.ready()
                    time.sleep(max(0.05, pause))
                else:
                    self._finish(old, new)
        except (StartError, OSError):  # ranks import for themselves
            _log.info("no fork server was started in the background", exc_info=True)
        finally:
            with self._lock:
                if self._builder is threading.current_thread():  # else another has begun
                    self._builder = self._building = None

    def _finish(self, old: ForkServer, new: ForkServer) -> None:
        """Wait for a server that is being built, and give it to launches in the place of the old one."""
        try:
            problem = new.ready().problem
        except StartError as error:
            problem = str(error)
        with self._lock:
            if self._building is not new:  # `stop` was called
                return
            self._building = None
            if problem:
                new.stop()
                for package in [new.package] if new.package else map(package_of, new.ahead):
                    self._left_out[package] = problem
            elif not self.has_place(old) or new.installed != installed_now():
                self.retire(new)
            else:  # one without packages stays beside one that has some: not all launches may use those
                new.is_awaited = False
                replaced = [each for each in self._servers if (each is old if new.is_plain else not each.is_plain)]
                self._servers.append(new)
                for server in replaced:
                    self.retire(server)

    def _next_step(self) -> tuple[ForkServer, Where, list[str]] | None:
        """Return a server, and where the next one has to import what it lacks; None if nothing is missing."""
        last = self._last[-1] if self._last else Where.here()
        rich = [each for each in self._servers if not each.is_plain and last.is_like(each.where)]
        old = rich[0] if rich else self._best(last)  # also if a file of the notebook hides what it has
        if old is None or old.problem or (old.hello is not None and old.hello.problem):
            return None
        is_sweep = not all(each.is_plain for each in self._servers) and not last.is_like(self._last[0])
        packages = self._wanted() if self._last and not is_sweep else []  # else one would be built after every launch
        soon = _SOON if os.environ.get("NBLAUNCH_PRELOAD") != "0" else ()
        ahead = [name for name in (*soon, *packages) if package_of(name) not in self._left_out]
        missing = set(map(package_of, ahead)) - set(map(package_of, old.ahead))  # libraries import more of their own
        missing |= self._named.keys() & set(ahead) - set(old.ahead)
        return (old, last, ahead) if missing else None

    def _wanted(self) -> list[str]:
        packages = set(map(package_of, self._named))
        if os.environ.get("NBLAUNCH_PRELOAD") != "0":
            packages |= KNOWN_SAFE
        here = imported_here(packages)
        for package in {package_of(name) for name in (*here, *self._named)} - self._left_out.keys():
            if reason := why_not_ahead(package):
                self._left_out[package] = reason
        return [*here, *(name for name in self._named if name not in here)]


def _packages_in(modules: Sequence[str]) -> str:
    """Return the packages of these modules that not every server has soon; of all, if there are none."""
    own = [name for name in modules if name not in _SOON]
    return ", ".join(sorted(set(map(package_of, own or modules))))


servers = Servers()
os.register_at_fork(after_in_child=servers.forget)
