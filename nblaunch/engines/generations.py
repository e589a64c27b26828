"""The fork servers of this kernel, and which of them starts a launch.

No server changes once it serves. The first of a line has torch and serves at once. While no launch starts, it forks a
successor that has what the first optimizer of a process imports, which takes its place; and that one forks another
with the packages that this notebook uses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from nblaunch.engines.import_environment import Where
from nblaunch.engines.server_client import ForkServer, LeftOutError, Reaper, Successor, remedy
from nblaunch.errors import StartError, warn
from nblaunch.machine.packages import (
    KNOWN_SAFE,
    imported_here,
    installed_now,
    package_of,
    shadowed,
    why_not_ahead,
)
from nblaunch.wire.messages import Method

_log = logging.getLogger(__name__)
_Server = TypeVar("_Server", bound=ForkServer)
_PRELOAD = ("torch", "torch.distributed", "numpy")
_SOON: tuple[str, ...] = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
"""The first optimizer or DistributedDataParallel of a process imports torch._dynamo, which takes longer than torch."""
_QUIET = 1.0
"""Seconds without a launch's start after which servers may be built."""
_MOST_OTHERS = 2
"""Servers with an environment that ``env=`` has named; each takes 150 MB. Those that launches wait for may be more."""
_MOST_TRIES = 5
"""Servers that a launch waits for, where other threads retire one after the other."""
_OTHERS_STAY = 600.0
"""Seconds that such a server stays unused; it goes when a cell or the next launch ends."""


class _Step(NamedTuple):
    """A successor to be built."""

    parent: ForkServer
    modules: Sequence[str]
    where: Where | None = None
    """For which launches it is; None: it takes its parent's place."""


class Servers:
    """The fork servers of this kernel, each started when needed.

    One has torch imported, one is bare, for ``spawn``. Launches whose ``env=`` names what torch reads at its import
    have a server of their own. The one that is stocked also has the notebook's packages, and serves launches in which
    these would be imported the same way.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._warm: ForkServer | None = None
        self._bare: ForkServer | None = None
        self._others: list[ForkServer] = []
        """Those of environments that ``env=`` has named, the latest used last."""
        self._stocked: Successor | None = None
        self._given_up: list[tuple[Mapping[str, str], str]] = []
        """The environments with which no server got ready, and why: no launch waits for that again."""
        self._named: dict[str, None] = {}
        """Modules that the user wants to be imported ahead of launches."""
        self._left_out: dict[str, str] = {}
        """Packages that cannot be, and why."""
        self._last: Where | None = None
        """Where the last launch ran."""
        self._before: Where | None = None
        """And the one before."""
        self._builder: threading.Thread | None = None
        self._building: Successor | None = None
        self._starting = 0
        """Launches that are waiting for their reaper."""
        self._started = 0.0
        """When the last launch was on its way, by the monotonic clock."""
        self._retired: list[ForkServer] = []
        """Those that stay for the launches that they have."""

    def warm_up(self) -> None:
        """Start the fork server in the background, if it does not run; also if it could not before.

        Raises:
            StartError: The system refuses to start it.
        """
        with self._lock:
            self._given_up = []
            self._current()

    def refresh(self) -> None:
        """If the server that runs is out of date, start another in the background; prepare for the next launch."""
        with self._lock:
            if self._alive(self._warm) is not None:
                self._current()
            for old in self._others:
                if time.monotonic() - old.used > _OTHERS_STAY:
                    self.give_up(old)
            self._build_soon()

    def forget(self) -> None:
        """Have none: in a forked child of the kernel they are its parent's."""
        inherited = self.__dict__.copy()
        self.__init__()  # type: ignore[misc]  # begin anew, with a lock that nobody holds
        self._inherited = inherited  # or a Popen that goes would warn of a process that still runs

    def preload(self, modules: Sequence[str], where: Where | None = None, *, again: bool = False) -> None:
        """Have these modules ready for later launches, beside those that the notebook imports.

        Args:
            modules: Their names.
            where: Where launches will run, if none has run yet. Default: not known.
            again: Also those that could not be imported before. Default: once what is installed has changed.
        """
        with self._lock:
            self._named.update(dict.fromkeys(modules))
            for name in modules if again else ():
                self._left_out.pop(package_of(name), None)  # it may have been mended
            if self._last is None:
                self._last = self._before = where
            self._build_soon()

    def reaper(self, method: Method, launch_id: str, ranks: int, where: Where | None = None) -> Reaper:
        """The reaper of a new launch over `method`, from a server that runs.

        Args:
            method: ``forkserver`` or ``spawn``.
            launch_id: Names the launch.
            ranks: Of it.
            where: Its ranks' environment and folder. Default: those of this process.

        Raises:
            StartError: No server could be started, or this process may not open the files for it.
        """
        where = where or Where.here()
        with self._launching():
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
                    if last or self._has_place(server):  # else another thread has retired it meanwhile
                        raise
                except OSError as error:  # this process, and not the server, is in trouble
                    raise StartError(f"the ranks could not be started: {error}{remedy(error)}") from error
        raise AssertionError  # not reached

    def usable(self, method: Method, where: Where | None = None) -> Method:
        """`method`, or ``spawn`` where the fork server refuses to fork ranks; that is said as a warning."""
        if method != "forkserver":
            return method
        problem = self._problem(where or Where.here())
        if not problem:
            return method
        warn(f"the fork server cannot be used, so ranks are spawned, which is slower: {problem}")
        return "spawn"

    def _problem(self, where: Where) -> str:
        """Why ranks cannot be forked; empty where they can."""
        for _ in range(_MOST_TRIES):
            with self._lock, self._launching():  # its payload comes next, and then its start
                for env, reason in self._given_up:
                    if env == where.read_at_import:
                        return reason
                server = self._server(where)
            problem = self._problem_of(server)
            if problem is not None:
                return problem
        return f"it was replaced {_MOST_TRIES} times before it was ready"

    def _problem_of(self, server: ForkServer) -> str | None:
        """Wait for its Hello; why ranks cannot be forked there, None where another has taken its place meanwhile."""
        try:
            return server.ready().problem
        except StartError as error:
            with self._lock:
                if not self._has_place(server):
                    return None
                reason = f"{error} (%reload_ext nblaunch tries again)"
                self._given_up.append((server.where.read_at_import, reason))
                return reason

    def status(self) -> list[str]:
        """Lines for ``%distributed status``."""
        with self._lock:
            lines = self._status_of_warm()
            for other in self._others:
                lines.append(f"for another environment (env=): pid {other.process.pid}, {other.launches} launches")
            stocked = self._alive(self._stocked)
            if stocked is not None:
                had = ", ".join(sorted(set(map(package_of, stocked.preload))))
                lines.append(f"with {had} imported: pid {stocked.process.pid}, {stocked.launches} launches")
            if self._building is not None:
                lines.append(f"in preparation: one that has {', '.join(self._building.preload[-3:])}")
            return lines + [f"not imported ahead of launches: {name}, as {why}" for name, why in self._left_out.items()]

    def _status_of_warm(self) -> list[str]:
        server = self._warm
        if server is None or not server.alive():
            given_up = f"given up: {self._given_up[-1][1]}" if self._given_up else "the next launch starts it"
            return [f"fork server: not running; {given_up}"]
        hello = server.hello
        if hello is None:
            return [f"fork server: pid {server.process.pid}, importing {', '.join(server.preload)}"]
        state = f"refuses to fork: {hello.problem}" if hello.problem else f"ready after {hello.seconds:.1f} s"
        return [f"fork server: pid {hello.pid}, {state}, {server.launches} launches"]

    def stop(self) -> None:
        """End every server that this process started."""
        with self._lock:
            if self._building is not None:
                self._building.kill()  # its builder waits for its end
                self._building = None
            present = self.all()
            self._warm = self._bare = self._stocked = self._last = self._before = None
            self._named, self._left_out, self._given_up = {}, {}, []
            self._others, self._retired = [], []
            for server in present:
                server.stop()

    def all(self) -> list[ForkServer]:
        """Every server that this process has, those that are being built or retired included."""
        with self._lock:
            present = (self._building, self._stocked, self._warm, self._bare, *self._others, *self._retired)
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
        """The server that has read at its imports what launches there would have; started if there is none."""
        if where.read_at_import == Where.here().read_at_import:
            return self._current()
        found = self._other(where)
        if found is not None and found.installed != installed_now():
            self.give_up(found)
            found = None
        if found is None:
            found = ForkServer(_PRELOAD, where._replace(cwd=os.path.abspath(os.sep)))
        self._others = [*(other for other in self._others if other is not found), found]
        too_many = max(0, len(self._others) - _MOST_OTHERS)
        for old in list(filter(_is_spare, self._others[:-1]))[:too_many]:
            self.give_up(old)
        self._build_soon()
        return found

    def _other(self, where: Where) -> ForkServer | None:
        self._others = [other for other in self._others if self._alive(other) is not None]
        wanted = where.read_at_import
        return next((o for o in self._others if o.where.read_at_import == wanted), None)

    def _current(self) -> ForkServer:
        """The warm server; a new generation where what it has read at its imports has changed."""
        self._retired = [old for old in self._retired if old.alive()]
        server = self._alive(self._warm)
        if server is not None and not _is_outdated(server):
            return server
        if server is not None:
            _log.info("the environment or what is installed has changed: starting a new fork server")
            self._left_out.clear()
        for old in (self._stocked, server):
            self._retire(old)
        self._stocked = self._warm = None  # also where no other can be started
        self._warm = server = ForkServer(_PRELOAD)
        self._build_soon()
        return server

    def _retire(self, server: ForkServer | None) -> None:
        if server is None:
            return
        if self._building is not None and self._building.parent is server:
            self._building.kill()  # nothing needs it any more; its builder closes its files
            self._building = None
        server.retire()
        self._retired.append(server)

    def give_up(self, server: ForkServer) -> None:
        """Do without a server that does not answer; its other launches go on."""
        with self._lock:
            self._retire(server)
            self._warm = None if server is self._warm else self._warm
            self._bare = None if server is self._bare else self._bare
            self._stocked = None if server is self._stocked else self._stocked
            self._others = [other for other in self._others if other is not server]

    def _has_place(self, server: ForkServer) -> bool:
        """Return True if launches may go to it: it was not retired."""
        with self._lock:
            return server in (self._warm, self._bare, self._stocked, *self._others)

    def _alive(self, server: _Server | None) -> _Server | None:
        if server is None or server.alive():
            return server
        server.retire()
        return None

    # -------------------------------------------------------------- building the next
    @contextlib.contextmanager
    def _launching(self) -> Iterator[None]:
        """Have building stand still while a launch starts."""
        counted = 0
        try:
            with self._lock:
                self._starting, counted = self._starting + 1, 1
                if self._building is not None:
                    self._building.heed()
            yield
        finally:  # also where an interrupt comes before the launch: what stands still would do so for good
            with self._lock:
                self._starting, self._started = self._starting - counted, time.monotonic()

    def _is_quiet(self) -> bool:
        """Return True if no launch starts, nor has a moment ago."""
        return not self._starting and time.monotonic() - self._started >= _QUIET

    def build_soon(self) -> None:
        """Have what the next launch can use built in the background."""
        with self._lock:
            self._build_soon()

    def _build_soon(self) -> None:
        """The same; the lock is held."""
        if self._builder is None and self._next_step() is not None:
            builder = threading.Thread(target=self._build, name="nblaunch-builder", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: the next launch imports for itself
                builder.start()
                self._builder = builder

    def _next_step(self) -> _Step | None:
        """What is to be built next; None where there is everything."""
        for server in filter(None, (self._warm, *self._others)):
            if not server.is_complete and server.alive():
                return _Step(server, self._without_left_out(_SOON))
        if self._last is None:
            return None
        parent = self._warm if self._last.read_at_import == Where.here().read_at_import else self._other(self._last)
        modules = self._without_left_out(self._wanted())
        if parent is None or not modules or parent.hello is None or parent.hello.problem:
            return None
        stocked = self._alive(self._stocked)
        if stocked is not None and self._last.is_like(stocked.where):
            missing = [name for name in modules if name not in stocked.preload]
            return _Step(stocked, (*stocked.preload, *missing), self._last) if missing else None
        if stocked is not None and not (self._before is not None and self._last.is_like(self._before)):
            return None  # the environments of a sweep, each new, would have one built after every launch
        return _Step(parent, modules, self._last)

    def _wanted(self) -> list[str]:
        """The modules that are to be imported ahead of launches."""
        packages = set(map(package_of, self._named))
        if os.environ.get("NBLAUNCH_PRELOAD") != "0":
            packages |= KNOWN_SAFE
        here = imported_here(packages)
        for package in {package_of(name) for name in (*here, *self._named)} - self._left_out.keys():
            if reason := why_not_ahead(package):
                self._left_out[package] = reason
        return [*here, *(name for name in self._named if name not in here)]

    def _without_left_out(self, modules: Sequence[str]) -> list[str]:
        return [name for name in modules if package_of(name) not in self._left_out]

    def _build(self) -> None:
        """Build step after step. A package that none can have is left out of the next."""
        try:
            while (step := self._await_step()) is not None:
                self._take(step)
        except Exception:  # noqa: BLE001  # ranks import for themselves
            _log.info("no successor of the fork server was built", exc_info=True)
        finally:
            with self._lock:
                self._builder = self._building = None

    def _await_step(self) -> _Step | None:
        """Wait until no launch starts; the next step then."""
        while True:
            with self._lock:
                step = self._next_step()
                if step is None or (step.parent.hello is not None and self._is_quiet()):
                    self._builder = None if step is None else self._builder  # who wants something now starts another
                    return step
            if self._problem_of(step.parent) != "":
                step.parent.is_complete = True
            time.sleep(max(0.05, min(_QUIET, self._started + _QUIET - time.monotonic())))

    def _take(self, step: _Step) -> None:
        """Build one successor, and have launches go to it.

        Raises:
            StartError, OSError: None can be built.
        """
        where = step.where or step.parent.where
        try:
            with self._lock:
                if not self._has_place(step.parent):
                    return
                self._building = successor = Successor(step.parent, step.modules, where, self._is_quiet)
            successor.build()
        except LeftOutError as error:
            with self._lock:
                if self._building is successor:  # else it was ended from here
                    self._left_out[error.package] = error.reason
                    self._building = None
            return
        except (StartError, OSError):
            with self._lock:
                if not self._has_place(step.parent):  # it was ended from here
                    return
            step.parent.is_complete = True  # it is not asked again
            raise
        with self._lock:
            self._building = None
            self._adopt(successor, step)

    def _adopt(self, successor: Successor, step: _Step) -> None:
        """Let launches go to a successor; the lock is held."""
        before: ForkServer | None = step.parent
        if not self._has_place(step.parent):  # another generation has begun meanwhile
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
