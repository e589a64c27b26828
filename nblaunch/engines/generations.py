"""The fork servers of this kernel, and which of them starts a launch.

A server never changes once it serves. The first of a line has torch and serves at once. While no launch starts, it
forks a successor with the imports of a process's first optimizer, which replaces it. The successor forks another one
with the packages that this notebook uses.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from nblaunch.engines.import_environment import Where
from nblaunch.engines.preloads import Preloads
from nblaunch.engines.server_client import ForkServer, Reaper
from nblaunch.engines.successor import Successor
from nblaunch.engines.successor_builder import Step, SuccessorBuilder
from nblaunch.errors import StartError, warn
from nblaunch.machine.limits import remedy
from nblaunch.machine.packages import installed_now, package_of, shadowed
from nblaunch.wire.messages import Method

_log = logging.getLogger(__name__)
_Server = TypeVar("_Server", bound=ForkServer)
_PRELOAD: tuple[str, ...] = ("torch", "torch.distributed")
if importlib.util.find_spec("numpy") is not None:  # torch works without it
    _PRELOAD += ("numpy",)
_SOON: tuple[str, ...] = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo", "nblaunch.training")
"""The first optimizer or DistributedDataParallel of a process imports torch._dynamo, which takes longer than torch; the
toolkit takes 0.1 to 0.2 s in each rank that uses it."""
MAX_ENV_SERVERS = 2
"""Servers with an environment of their own (``env=``), 150 MB each. Servers that launches wait for do not count."""
MAX_SERVER_TRIES = 5
"""Servers that a launch waits for, if other threads retire one after the other."""


class Servers:
    """The fork servers of this kernel, each started when needed.

    One has torch imported, one is bare, for ``spawn``. Launches whose ``env=`` names what torch reads at its import
    have a server of their own. The stocked one also has the notebook's packages, and serves launches that would import
    them the same way.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._warm: ForkServer | None = None
        self._bare: ForkServer | None = None
        self._others: list[ForkServer] = []
        """Servers with an environment of their own (``env=``), the most recently used last."""
        self._stocked: Successor | None = None
        self._given_up: list[tuple[Mapping[str, str], str]] = []
        """Environments whose server did not start, and why: no launch waits for it again."""
        self._preloads = Preloads()
        self._last: Where | None = None
        """Where the last launch ran."""
        self._before: Where | None = None
        """Where the launch before that ran."""
        self._builder = SuccessorBuilder(self, self._lock)
        self._retired: list[ForkServer] = []
        """Replaced servers whose launches still run."""

    def warm_up(self) -> None:
        """Start the fork server in the background, if it does not run; also if it could not before.

        Raises:
            StartError: The system refuses to start it.
        """
        with self._lock:
            self._given_up = []
            self._current()

    def refresh(self) -> None:
        """Start a server in the background if the present one is out of date or has ended."""
        with self._lock:
            if self._warm is not None and (self._warm.hello is not None or self._warm.alive()):
                self._current()
            self._builder.start()

    def forget(self) -> None:
        """Forget all servers: in a forked child of the kernel they are the parent's."""
        inherited = self.__dict__.copy()
        self.__init__()  # type: ignore[misc]  # the lock may be held by a thread of the parent
        self._inherited = inherited  # Popen.__del__ would warn of a running process

    def preload(self, modules: Sequence[str], where: Where | None = None, *, again: bool = False) -> None:
        """Import modules ahead of later launches, besides those that the notebook imports.

        Args:
            modules: Their names.
            where: Where launches will run, if none has run yet. Default: not known.
            again: Retry modules that could not be imported before. Default: only after an installation.
        """
        with self._lock:
            self._preloads.add(modules, again=again)
            if self._last is None:
                self._last = self._before = where
            self._builder.start()

    def reaper(self, method: Method, launch_id: str, ranks: int, where: Where | None = None) -> Reaper:
        """Return the reaper of a new launch, from a running server.

        Args:
            method: ``forkserver`` or ``spawn``.
            launch_id: Names the launch.
            ranks: Number of ranks.
            where: Its ranks' environment and folder. Default: those of this process.

        Raises:
            StartError: No server could be started, or this process may not open the files for it.
        """
        where = where or Where.here()
        with self._builder.paused():
            for last in (False, True):
                server = self._for(method, where)
                try:
                    server.ready()
                    return server.fork_reaper(launch_id, ranks if method == "forkserver" else 0)
                except (ConnectionError, BlockingIOError) as error:  # it was killed; the next round starts another
                    if last:
                        raise StartError(f"the fork server died twice: {error}") from error
                    self.give_up(server)  # though the system may not tell of its end yet
                except StartError:
                    if last or self.has_place(server):  # else another thread has retired it meanwhile
                        raise
                except OSError as error:  # this process, and not the server, is in trouble
                    raise StartError(f"the ranks could not be started: {error}{remedy(error)}") from error
        raise AssertionError  # not reached

    def usable(
        self, method: Method, where: Where | None = None, show: Callable[[str], None] = lambda text: None
    ) -> Method:
        """Return `method`, or ``spawn`` with a warning if the fork server cannot fork ranks.

        Args:
            method: The method that the user chose.
            where: The ranks' environment. Default: that of this process.
            show: Gets what is awaited, unless the fork server is ready.
        """
        if method != "forkserver":
            return method
        problem = self._problem(where or Where.here(), show)
        if not problem:
            return method
        warn(f"the fork server cannot be used, so ranks are spawned, which is slower: {problem}")
        return "spawn"

    def _problem(self, where: Where, show: Callable[[str], None]) -> str:
        """Return why ranks cannot be forked; empty if they can."""
        for _ in range(MAX_SERVER_TRIES):
            with self._lock, self._builder.paused():  # its payload comes next, and then its start
                for env, reason in self._given_up:
                    if env == where.read_at_import:
                        return reason
                server = self._server(where)
            if server.is_importing():
                why = "first launch with this env="
                if server is self._warm:
                    why = "first launch" if self._last is None else "the fork server starts again"
                show(f"importing torch ({why}) …")
            problem = self.problem_of(server)
            if problem is not None:
                return problem
        return f"it was replaced {MAX_SERVER_TRIES} times before it was ready"

    def problem_of(self, server: ForkServer) -> str | None:
        """Wait for its Hello; return why it cannot fork ranks, None if it was replaced meanwhile."""
        try:
            return server.ready().problem
        except StartError as error:
            with self._lock:
                if not self.has_place(server):
                    return None
                reason = f"{error} (%reload_ext nblaunch tries again)"
                self._given_up.append((server.where.read_at_import, reason))
                return reason

    def status(self) -> list[str]:
        """Return the lines of ``%distributed status``."""
        with self._lock:
            lines = self._status_of_warm()
            for other in self._others:
                lines.append(f"for another environment (env=): {other.state()}")
            stocked = self._alive(self._stocked)
            if stocked is not None:
                had = ", ".join(sorted(set(map(package_of, stocked.preload))))
                lines.append(f"with {had} imported: {stocked.state()}")
            if self._builder.building is not None:
                last = package_of(self._builder.building.preload[-1])
                lines.append(f"in preparation: a fork server that imports {last} and others ahead of launches")
            return lines + self._preloads.status()

    def _status_of_warm(self) -> list[str]:
        server = self._warm
        if server is None or not server.alive():
            starter = "launch" if server is None or server.hello is None else "cell"
            given_up = f"given up: {self._given_up[-1][1]}" if self._given_up else f"the next {starter} starts it"
            return [f"fork server: not running; {given_up}"]
        hello = server.hello
        if hello is None:
            return [f"fork server: pid {server.process.pid}, importing {', '.join(server.preload)}"]
        state = f"refuses to fork: {hello.problem}" if hello.problem else f"ready after {hello.seconds:.1f} s"
        return [f"fork server: {server.state()}, {state}"]

    def stop(self) -> None:
        """Kill every server of this process."""
        with self._lock:
            self._builder.kill()  # its thread waits for the successor's exit
            present = self.all()
            self._warm = self._bare = self._stocked = self._last = self._before = None
            self._preloads, self._given_up = Preloads(), []
            self._others, self._retired = [], []
            for server in present:
                server.stop()

    def all(self) -> list[ForkServer]:
        """Return every server of this process, including those that are being built or are retired."""
        with self._lock:
            present = (self._builder.building, self._stocked, self._warm, self._bare, *self._others, *self._retired)
            return [server for server in present if server is not None]

    # -------------------------------------------------------------- which server
    def _for(self, method: Method, where: Where) -> ForkServer:
        with self._lock:
            self._retired = [old for old in self._retired if old.alive()]
            warm = self._alive(self._warm)
            if method == "forkserver":
                server = self._server(where)
                self._before, self._last = self._last, where
                stocked = self._alive(self._stocked)
                if stocked is not None and stocked.installed == server.installed and _fits(stocked, where):
                    server = stocked
            elif warm is not None and warm.hello is not None and not warm.hello.problem:
                server = warm  # of whatever generation: what it spawns reads its own environment
            else:
                self._bare = server = self._alive(self._bare) or ForkServer(())
        return server

    def _server(self, where: Where) -> ForkServer:
        """Return a server whose imports saw the environment of launches there; start it if there is none."""
        if where.read_at_import == Where.here().read_at_import:
            return self._current()
        found = self._other(where)
        if found is not None and found.installed != installed_now():
            self.give_up(found)
            found = None
        if found is None:
            found = ForkServer(_PRELOAD, where._replace(cwd=os.path.abspath(os.sep)))
        self._others = [*(other for other in self._others if other is not found), found]
        too_many = max(0, len(self._others) - MAX_ENV_SERVERS)
        for old in list(filter(_is_spare, self._others[:-1]))[:too_many]:
            self.give_up(old)
        self._builder.start()
        return found

    def _other(self, where: Where) -> ForkServer | None:
        self._others = [other for other in self._others if self._alive(other) is not None]
        wanted = where.read_at_import
        return next((o for o in self._others if o.where.read_at_import == wanted), None)

    def _current(self) -> ForkServer:
        """Return the warm server; a new one if the environment or the installation has changed."""
        self._retired = [old for old in self._retired if old.alive()]
        server = self._alive(self._warm)
        if server is not None and not _is_outdated(server):
            return server
        if server is not None:
            _log.info("the environment or what is installed has changed: starting a new fork server")
            self._preloads.retry()
        for old in (self._stocked, server):
            self._retire(old)
        self._stocked = self._warm = None  # also where no other can be started
        self._warm = server = ForkServer(_PRELOAD)
        self._builder.start()
        return server

    def _retire(self, server: ForkServer | None) -> None:
        if server is None:
            return
        self._builder.kill(server)
        server.retire()
        self._retired.append(server)

    def give_up(self, server: ForkServer) -> None:
        """Replace a server that does not answer; its other launches run on."""
        with self._lock:
            self._retire(server)
            self._warm = None if server is self._warm else self._warm
            self._bare = None if server is self._bare else self._bare
            self._stocked = None if server is self._stocked else self._stocked
            self._others = [other for other in self._others if other is not server]

    def has_place(self, server: ForkServer) -> bool:
        """Return True if launches may use it: it was not retired."""
        with self._lock:
            return server in (self._warm, self._bare, self._stocked, *self._others)

    def _alive(self, server: _Server | None) -> _Server | None:
        if server is None or server.alive():
            return server
        server.retire()
        return None

    # -------------------------------------------------------------- for the builder
    def leave_out(self, package: str, reason: str) -> None:
        """Import this package no more."""
        self._preloads.leave_out(package, reason)

    def build_soon(self) -> None:
        """Build what the next launch can use, in the background."""
        with self._lock:
            self._builder.start()

    def next_step(self) -> Step | None:
        """Return what to build next; None if everything is built."""
        for server in filter(None, (self._warm, *self._others)):
            if not server.is_complete and server.alive():
                return Step(server, self._preloads.allowed(_SOON))
        if self._last is None:
            return None
        parent = self._warm if self._last.read_at_import == Where.here().read_at_import else self._other(self._last)
        modules = self._preloads.wanted()
        if parent is None or not modules or parent.hello is None or parent.hello.problem:
            return None
        stocked = self._alive(self._stocked)
        if stocked is not None and self._last.is_like(stocked.where):
            missing = [name for name in modules if name not in stocked.preload]
            return Step(stocked, (*stocked.preload, *missing), self._last) if missing else None
        if stocked is not None and not (self._before is not None and self._last.is_like(self._before)):
            return None  # a sweep over environments would build one after every launch
        return Step(parent, modules, self._last)

    def adopt(self, successor: Successor, step: Step) -> None:
        """Give a successor to launches; the lock is held."""
        before: ForkServer | None = step.parent
        if not self.has_place(step.parent):  # a new line has begun meanwhile
            before = successor
        elif step.where is not None:
            before, self._stocked = self._stocked, successor
        elif before is self._warm:
            self._warm = successor
        else:
            self._others = [successor if other is before else other for other in self._others]
        self._retire(before)


servers = Servers()
os.register_at_fork(after_in_child=servers.forget)


def _fits(server: Successor, where: Where) -> bool:
    """Return True if ranks there would import what the server has imported."""
    return where.is_like(server.where) and not shadowed(server.packages)


def _is_spare(server: ForkServer) -> bool:
    """Return True if no launch waits for this server of an environment to get ready."""
    refuses = server.hello is not None and bool(server.hello.problem)
    return server.launches > 0 or refuses or isinstance(server, Successor)


def _is_outdated(server: ForkServer) -> bool:
    return server.where.read_at_import != Where.here().read_at_import or server.installed != installed_now()
