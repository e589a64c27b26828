"""The background thread that builds fork servers while no launch starts."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from nblaunch.engines.import_environment import Where
from nblaunch.engines.server_client import ForkServer
from nblaunch.engines.successor import LeftOutError, Successor
from nblaunch.errors import StartError
from nblaunch.machine import timeouts

_log = logging.getLogger(__name__)


class Step(NamedTuple):
    """A successor to be built."""

    parent: ForkServer
    modules: Sequence[str]
    where: Where | None = None
    """The launches it is for; None: it replaces its parent."""


class Line(Protocol):
    """The servers that a builder extends. The builder's lock is held except in `problem_of`."""

    def next_step(self) -> Step | None:
        """Return what to build next; None if everything is built."""

    def has_place(self, server: ForkServer) -> bool:
        """Return True if launches may use the server: it was not retired."""

    def problem_of(self, server: ForkServer) -> str | None:
        """Wait until the server is ready. Return why it cannot fork ranks, None if it was replaced meanwhile."""

    def adopt(self, successor: Successor, step: Step) -> None:
        """Give a successor to launches."""

    def leave_out(self, package: str, reason: str) -> None:
        """Import this package no more."""


class SuccessorBuilder:
    """See the module.

    Args:
        line: Says what to build, and takes it.
        lock: Guards `line` and this builder; reentrant.

    Attributes:
        thread: None while there is nothing to build.
        building: The successor in preparation.
    """

    def __init__(self, line: Line, lock: threading.RLock) -> None:
        self.thread: threading.Thread | None = None
        self.building: Successor | None = None
        self._line, self._lock = line, lock
        self._starting = 0
        """Launches that are waiting for their reaper."""
        self._started = 0.0
        """When the last launch got its reaper, by the monotonic clock."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause building while a launch starts."""
        counted = 0
        try:
            with self._lock:
                self._starting, counted = self._starting + 1, 1
                if self.building is not None:
                    self.building.heed()
            yield
        finally:  # also on an interrupt, or building would stay paused
            with self._lock:
                self._starting, self._started = self._starting - counted, time.monotonic()

    def kill(self, parent: ForkServer | None = None) -> None:
        """Kill the successor in preparation; the lock is held.

        Args:
            parent: Kill only a successor of this server. Default: any.
        """
        if self.building is not None and parent in (None, self.building.parent):
            self.building.kill()  # the thread closes its files
            self.building = None

    def start(self) -> None:
        """Start the thread if there is something to build; the lock is held."""
        if self.thread is None and self._line.next_step() is not None:
            thread = threading.Thread(target=self._build, name="nblaunch-builder", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: ranks import for themselves
                thread.start()
                self.thread = thread

    def is_quiet(self) -> bool:
        """Return True if no launch is starting or has just started."""
        return not self._starting and time.monotonic() - self._started >= timeouts.BUILD_QUIET_S

    def _build(self) -> None:
        """Build step after step. A package that cannot be imported is left out of the next step."""
        try:
            while (step := self._await_step()) is not None:
                self._take(step)
        except Exception:  # noqa: BLE001  # ranks import for themselves
            _log.info("no successor of the fork server was built", exc_info=True)
        finally:
            with self._lock:
                self.thread = self.building = None

    def _await_step(self) -> Step | None:
        """Wait until no launch starts; return the next step."""
        while True:
            with self._lock:
                step = self._line.next_step()
                if step is None or (step.parent.hello is not None and self.is_quiet()):
                    self.thread = None if step is None else self.thread  # a later request starts another thread
                    return step
            if self._line.problem_of(step.parent) != "":
                step.parent.is_complete = True
            time.sleep(
                max(0.05, min(timeouts.BUILD_QUIET_S, self._started + timeouts.BUILD_QUIET_S - time.monotonic()))
            )

    def _take(self, step: Step) -> None:
        """Build one successor, and give it to launches.

        Raises:
            StartError, OSError: No successor can be built.
        """
        where = step.where or step.parent.where
        try:
            with self._lock:
                if not self._line.has_place(step.parent):
                    return
                self.building = successor = Successor(step.parent, step.modules, where, self.is_quiet)
            successor.build()
        except LeftOutError as error:
            with self._lock:
                if self.building is successor:  # else `kill` was called
                    self._line.leave_out(error.package, error.reason)
                    self.building = None
            return
        except (StartError, OSError):
            with self._lock:
                if not self._line.has_place(step.parent):  # `kill` was called
                    return
            step.parent.is_complete = True  # do not ask it again
            raise
        with self._lock:
            self.building = None
            self._line.adopt(successor, step)
