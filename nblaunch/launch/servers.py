"""The fork servers of this kernel, and which of them starts a launch."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from nblaunch.errors import StartError, warn
from nblaunch.installed import ONE_THREAD, differs, installed_now, shadowed
from nblaunch.launch.forkserver import ForkServer, LeftOutError, Reaper, Successor, remedy
from nblaunch.messages import Method

_log = logging.getLogger(__name__)
_Server = TypeVar("_Server", bound=ForkServer)
_PRELOAD = ("torch", "torch.distributed", "numpy")
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


class Servers:
    """The fork servers of this kernel, each started when needed.

    One has torch imported, one is bare, for ``spawn``. A successor of the first also has what launches have imported,
    as long as it would import the same now: its packages have read its environment, and may be upgraded.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._warm: ForkServer | None = None
        self._bare: ForkServer | None = None
        self._successor: Successor | None = None
        self._given_up: tuple[Mapping[str, str], str] | None = None
        """The environment with which the warm one did not get ready, and why: no launch waits for that again."""
        self._learned: dict[str, None] = {}
        """The modules that launches have imported, in the order of their import."""
        self._left_out: dict[str, str] = {}
        """Packages that a successor cannot have, and why."""
        self._last = _Where({}, "")
        """Where the launch ran that has imported something last."""
        self._before = self._last
        """And the one before."""
        self._teacher: threading.Thread | None = None
        self._retired: list[ForkServer] = []
        """Those that stay for the launches that they have."""

    def warm_up(self) -> None:
        """Start the fork server in the background, if it does not run; also if it could not before.

        Raises:
            StartError: The system refuses to start it.
        """
        with self._lock:
            self._given_up = None
            self._current()

    def refresh(self) -> None:
        """If the server that runs is out of date, start another in the background."""
        with self._lock:
            if self._alive(self._warm) is not None:
                self._current()

    def forget(self) -> None:
        """Have none: in a forked child of the kernel they are its parent's."""
        inherited = self.__dict__.copy()
        self.__init__()  # type: ignore[misc]  # begin anew, with a lock that nobody holds
        self._inherited = inherited  # or a Popen that goes would warn of a process that still runs

    def reaper(self, method: Method, launch_id: str, ranks: int, env: Mapping[str, str], cwd: str) -> Reaper:
        """The reaper of a new launch over `method`, from a server that runs.

        Args:
            method: ``forkserver`` or ``spawn``.
            launch_id: Names the launch.
            ranks: Of it.
            env: Its ranks' environment.
            cwd: Their folder.

        Raises:
            StartError: No server could be started, or this process may not open the files for it.
        """
        for last in (False, True):
            server = self._for(method, _Where(env, cwd))
            try:
                return server.fork_reaper(launch_id, ranks if method == "forkserver" else 0)
            except (ConnectionError, BlockingIOError) as error:  # it was killed; the next round starts another
                if last:
                    raise StartError(f"the fork server died twice: {error}") from error
                self.give_up(server)  # though the system may not tell of its end yet
            except OSError as error:  # this process, and not the server, is in trouble
                raise StartError(f"the ranks could not be started: {error}{remedy(error)}") from error
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
            with self._lock:
                if server is self._warm:
                    self._given_up = read_at_import(server.environment), f"{error} (%reload_ext nblaunch tries again)"
                    return self._given_up[1]
            return self._problem()  # another generation has begun meanwhile

    def status(self) -> list[str]:
        """Lines for ``%distributed status``."""
        with self._lock:
            server, successor = self._warm, self._alive(self._successor)
            left_out = [f"not imported ahead of launches: {name}, as {why}" for name, why in self._left_out.items()]
            if server is None or not server.alive():
                given_up = f"given up: {self._given_up[1]}" if self._given_up else "the next launch starts it"
                return [f"fork server: not running; {given_up}", *left_out]
            hello = server.hello
            if hello is None:
                return [f"fork server: pid {server.process.pid}, importing {', '.join(server.preload)}", *left_out]
            state = f"refuses to fork: {hello.problem}" if hello.problem else f"ready after {hello.seconds:.1f} s"
            launches = server.launches + (successor.launches if successor is not None else 0)
            lines = [f"fork server: pid {hello.pid}, {state}, {launches} launches"]
            names = sorted(successor.packages - sys.stdlib_module_names) if successor is not None else []
            if successor is not None and names:
                lines.append(f"its successor: pid {successor.process.pid}, which has {', '.join(names)} imported")
            return [*lines, *left_out]

    def stop(self) -> None:
        """End every server that this process started."""
        with self._lock:
            if self._successor is not None:
                self._successor.leave()
            for server in (self._successor, self._warm, self._bare, *self._retired):
                if server is not None:
                    server.stop()
            self._warm = self._bare = self._successor = self._given_up = None
            self._learned, self._left_out, self._retired = {}, {}, []

    def _for(self, method: Method, where: _Where) -> ForkServer:
        with self._lock:
            self._retired = [old for old in self._retired if old.alive()]
            warm = self._alive(self._warm)
            if method == "forkserver":
                server = self._current()
                successor = self._alive(self._successor)
                if successor is not None and (successor.edited() or not learns_imports()):
                    self._retire(successor)
                    self._successor = successor = None
                if successor is not None and _fits(successor, where):
                    return successor
            elif warm is not None and warm.hello is not None and not warm.hello.problem:
                server = warm  # of whatever generation: what it spawns reads its own environment
            else:
                self._bare = server = self._alive(self._bare) or ForkServer(())
        server.ready()
        return server

    def _current(self) -> ForkServer:
        """The warm server; a new generation where what it has read at its imports has changed."""
        self._retired = [old for old in self._retired if old.alive()]
        server = self._alive(self._warm)
        if server is not None and not _is_outdated(server):
            return server
        if server is not None:
            _log.info("the environment or what is installed has changed: starting a new fork server")
            self._left_out.clear()
        for old in (self._successor, server):
            self._retire(old)
        self._successor = self._warm = None  # also where no other can be started
        self._warm = server = ForkServer(_PRELOAD)
        self._teach_soon()
        return server

    def _retire(self, server: ForkServer | None) -> None:
        if server is not None:
            server.retire()
            self._retired.append(server)

    def give_up(self, server: ForkServer) -> None:
        """Do without a server that does not answer; its other launches go on."""
        with self._lock:
            self._retire(server)
            self._warm = None if server is self._warm else self._warm
            self._bare = None if server is self._bare else self._bare
            self._successor = None if server is self._successor else self._successor

    def _alive(self, server: _Server | None) -> _Server | None:
        if server is None or server.alive():
            return server
        server.retire()
        return None

    # -------------------------------------------------------------- what launches import
    def learn(self, modules: Iterable[str], env: Mapping[str, str], cwd: str) -> None:
        """Have these ready for the next launch: a launch with this environment has imported them in this folder."""
        with self._lock:
            modules = [name for name in modules if _package(name) not in self._left_out]
            if modules and learns_imports():
                self._learned.update(dict.fromkeys(modules))
                self._before, self._last = self._last, _Where(dict(env), cwd)
                self._teach_soon()

    def _teach_soon(self) -> None:
        """Have a successor made in the background, if one is wanted and none is being made; the lock is held."""
        if self._teacher is None and self._wanted():
            teacher = threading.Thread(target=self._teach, name="nblaunch-imports", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: the next launch imports for itself
                teacher.start()
                self._teacher = teacher

    def _wanted(self) -> list[str]:
        """What the next successor is to have; nothing where there is one that has it.

        Another environment or folder must have come twice: those of a sweep, each new, would have one made after every
        launch.
        """
        names = [name for name in self._learned if learns_imports() and _package(name) not in self._left_out]
        present = self._alive(self._successor)
        if present is None:
            return names
        if not self._last.is_like(_Where(present.environment, present.cwd)):
            return names if self._last.is_like(self._before) else []
        return [] if present.preload == tuple(names) else names

    def _teach(self) -> None:
        """Make successors until one has everything, without what none can have."""
        try:
            more = True
            while more:
                with self._lock:
                    names, server, where = self._wanted(), self._warm, self._last
                    if not names or server is None:
                        self._teacher = None  # whoever learns from now on starts another
                        return
                more = self._made_successor(server, names, where)
        except Exception:  # noqa: BLE001  # ranks import for themselves; the next launch that does brings us back here
            _log.info("no successor of the fork server was made", exc_info=True)
        finally:
            with self._lock:
                if self._teacher is threading.current_thread():
                    self._teacher = None

    def _made_successor(self, server: ForkServer, names: list[str], where: _Where) -> bool:
        """Make a successor, or learn which package none can have; whether to look for what is wanted then.

        Raises:
            StartError, OSError: None can be made.
        """
        if server.ready().problem:
            return False
        successor = Successor(server, names, where.env, where.cwd)
        try:
            successor.import_all()
        except LeftOutError as error:
            with self._lock:
                if self._warm is server:
                    self._left_out[error.package] = error.reason
            return True
        with self._lock:
            if not successor.alive():
                raise StartError("the successor of the fork server has ended")
            if server is self._warm:
                before, self._successor = self._successor, successor
                self._retire(before)
            else:  # another generation has begun meanwhile
                self._retire(successor)
        return True


class _Where(NamedTuple):
    """What modules may see of a launch while they are imported."""

    env: Mapping[str, str]
    cwd: str

    def is_like(self, other: _Where) -> bool:
        return self.cwd == other.cwd and _significant(self.env) == _significant(other.env)


servers = Servers()
os.register_at_fork(after_in_child=servers.forget)


def learns_imports() -> bool:
    """Whether launches may have imports ready; that may be switched off at any time."""
    return os.environ.get("NBLAUNCH_LEARN_IMPORTS") != "0"


def _fits(server: Successor, where: _Where) -> bool:
    """Whether ranks there would import what the server has imported."""
    return where.is_like(_Where(server.environment, server.cwd)) and not shadowed(server.names)


def _significant(env: Mapping[str, str]) -> dict[str, str]:
    """What packages may have read of an environment while they were imported ahead."""
    return {name: value for name, value in env.items() if not differs(name)}


def _is_outdated(server: ForkServer) -> bool:
    return read_at_import(server.environment) != read_at_import(os.environ) or server.installed != installed_now()


def _package(name: str) -> str:
    return name.partition(".")[0]


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that a preload reads once, so that a later change needs a new fork server."""
    ignored = ("TORCHELASTIC_", *ONE_THREAD)  # of another launch, and those that every server has as 1
    return {k: v for k, v in env.items() if k.startswith(_READ_AT_IMPORT) and not k.startswith(ignored)}
