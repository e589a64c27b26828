"""Why ranks are stopped, and how: SIGINT, a grace period for those that acknowledge it, then SIGKILL.

Pure: the caller passes the time and sends the signals that are due.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from nblaunch.errors import CollectiveError, LaunchStoppedError, LaunchTimeoutError, NblaunchError
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.stuck import StuckVerdict
from nblaunch.machine import timeouts

_TIMES = {2: "twice", 3: "three times"}


# ------------------------------------------------------------------ why
@dataclass(frozen=True, slots=True)
class Told:
    """What the error of a stopped launch is made from.

    Attributes:
        name: The function's name.
        seconds: How long the launch has run.
        timeout: How long it may.
        incomplete: Failures during the stop, as a clause: a checkpoint may be incomplete.
        places: Where the ranks were, as lines.
        difference: See `Task.difference`.
        files: The logs.
    """

    name: str
    seconds: float
    timeout: float | None
    incomplete: str
    places: str
    difference: str
    files: LaunchFiles

    @property
    def logs(self) -> str:
        """The sentence that ends every message."""
        return f"Logs: {self.files.directory}"


@dataclass(frozen=True, slots=True)
class ByUser:
    """A Stop, an interrupt, or ``quit`` in a debugger."""

    def error(self, told: Told) -> NblaunchError:
        """Return the error of a launch that this has ended; so for all reasons."""
        return LaunchStoppedError(f"{told.name} was stopped after {told.seconds:.1f} s{told.incomplete}. {told.logs}")


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """Another rank has failed, which the verdict tells. The others may wait for it."""

    def error(self, told: Told) -> NblaunchError:
        return ByUser().error(told)


@dataclass(frozen=True, slots=True)
class TimedOut:
    """``timeout=`` is over."""

    def error(self, told: Told) -> NblaunchError:
        said = f"{told.name} took longer than timeout={told.timeout:g} s and was stopped."
        return LaunchTimeoutError(f"{said}{told.places}{told.logs}")


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A node, and the task with it, is being taken back."""

    why: str

    def error(self, told: Told) -> NblaunchError:
        return LaunchStoppedError(f"{self.why}, so {told.name} was stopped{told.incomplete}. {told.logs}")


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A kept rank waits in a collective for one that has returned."""

    waiting: int
    returned: int

    def error(self, told: Told) -> NblaunchError:
        why = f"{told.difference}\n" if told.difference else "Every rank must call each collective. "
        return CollectiveError(
            f"rank {self.waiting} waited in a collective for rank {self.returned}, which had finished {told.name}. "
            f"{why}The variables are kept, the process group is new. {told.logs}",
            self.waiting,
            told.files.err(self.waiting),
        )


@dataclass(frozen=True, slots=True)
class NoProgress:
    """No collective has made progress for `timeouts.COLLECTIVE_TIMEOUT_S`."""

    verdict: StuckVerdict

    def error(self, told: Told) -> NblaunchError:
        rank = self.verdict.ranks[0] if self.verdict.ranks else 0
        lines = "".join(f"\n    {line}" for line in self.verdict.lines)
        return CollectiveError(f"{told.name} was stopped:{lines}\n{told.logs}", rank, told.files.err(rank))


Reason = ByUser | PeerFailed | TimedOut | TakenBack | Abandoned | NoProgress


# ------------------------------------------------------------------ how
@dataclass(frozen=True, slots=True)
class Due:
    """A signal that is due."""

    rank: int
    signum: int
    group: bool


@dataclass(slots=True)
class Ladder:
    """The stop of one task; created when it begins.

    Args:
        reason: Why the task is stopped.
        begun: The current time, in seconds of the monotonic clock.
        grace: Seconds that a rank has for ``finally`` and checkpoints once it has acknowledged SIGINT.

    Attributes:
        answered: Ranks that have acknowledged SIGINT.
        waiting: `silent` ranks that wait in a collective.
        left: When each rank was first seen leaving.
        at_once: Skip the grace period.
    """

    reason: Reason
    begun: float
    grace: float
    answered: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    interrupted: set[int] = field(default_factory=set)
    left: dict[int, float] = field(default_factory=dict)
    at_once: bool = False

    def due(self, now: float, live: Iterable[int], running: Collection[int], leaving: Collection[int]) -> list[Due]:
        """Return the signals that are due.

        Args:
            now: The current time.
            live: Ranks whose process has not exited.
            running: Ranks whose function has begun; the others have nothing to finish.
            leaving: Ranks whose function has ended; they are not interrupted.
        """
        signals = []
        for rank in leaving:
            self.left.setdefault(rank, now)
        for rank in live:
            if rank in self.killed:
                continue
            if rank not in running or now >= self._deadline(rank):
                self.killed.add(rank)
                signals.append(Due(rank, signal.SIGKILL, group=True))
            elif rank not in self.interrupted and rank not in leaving:
                self.interrupted.add(rank)
                signals.append(Due(rank, signal.SIGINT, group=False))
        return signals

    def silent(self, now: float, live: Iterable[int]) -> list[int]:
        """Return the live ranks that are overdue with their acknowledgement after a failure.

        They may wait in a collective for the rank that failed.
        """
        if not self._may_wait_for_others or now < self.begun + timeouts.COLLECTIVE_CHECK_DELAY_S:
            return []
        asked = self.interrupted - self.answered - self.killed
        return [rank for rank in live if rank in asked and rank not in self.left]

    def kill(self) -> None:
        """Skip the grace period."""
        self.at_once = True

    @property
    def is_by_user(self) -> bool:
        """Return True if the user has stopped the task."""
        return isinstance(self.reason, ByUser)

    @property
    def _may_wait_for_others(self) -> bool:
        """Return True if ranks may wait in a collective that will not end."""
        return not (self.is_by_user or isinstance(self.reason, TimedOut))

    def _deadline(self, rank: int) -> float:
        last = self.begun if self.at_once else self.begun + self.grace
        if rank in self.left:
            return min(last, self.left[rank] + timeouts.STOP_EXIT_TIMEOUT_S)
        if rank in self.answered:
            return last
        is_blocked = rank in self.waiting
        return min(last, self.begun + (timeouts.COLLECTIVE_ACK_TIMEOUT_S if is_blocked else timeouts.ACK_TIMEOUT_S))

    def countdown(self, now: float, interrupts_to_kill: int) -> str:
        """Return what to show meanwhile.

        Args:
            now: The current time.
            interrupts_to_kill: How many more interrupts kill the ranks; 0: none does.
        """
        if not self.answered or self.at_once:
            return "stopping"
        return f"stopping: {self._seconds_left(now)} s left for checkpoints{self._how_to_kill(interrupts_to_kill)}"

    def _seconds_left(self, now: float) -> str:
        return f"{max(0.0, self.begun + self.grace - now):.0f}"

    def _how_to_kill(self, interrupts: int) -> str:
        if interrupts < 2:
            return "; interrupt again to kill now" * interrupts
        more = " more" if self.is_by_user else ""
        return f"; interrupt {_TIMES[interrupts]}{more} to kill now"


@dataclass(slots=True)
class KeptLadder(Ladder):
    """The stop of one task on ranks that stay: they are interrupted, then freed from collectives, never killed early.

    A rank is killed when its grace period is over, or when the user insists with a third interrupt.
    """

    freed: dict[int, float] = field(default_factory=dict)
    """When each rank was last freed."""
    _left_at: float | None = None
    """When the first rank was seen to have left the task."""

    def due(self, now: float, live: Iterable[int], running: Collection[int], leaving: Collection[int]) -> list[Due]:
        """Return the signals that are due; see `Ladder.due`. `live` are the ranks that have not finished the task."""
        signals = []
        for rank in live:
            if rank in self.killed:
                continue
            if self.at_once or now >= self.begun + self.grace:
                self.killed.add(rank)
                signals.append(Due(rank, signal.SIGKILL, group=True))
            elif rank not in self.interrupted:
                self.interrupted.add(rank)
                signals.append(Due(rank, signal.SIGINT, group=False))
        return signals

    def to_free(self, now: float, live: Iterable[int], *, has_left: bool) -> list[int]:
        """Return the ranks to free from what they wait for.

        A rank that has acknowledged is in its ``finally``, which may have collectives: it is freed only once another
        rank has left the task, and cannot answer them, or when half of the grace period is over.

        Args:
            now: The current time.
            live: The ranks that have not finished the task.
            has_left: Whether another rank has.
        """
        delay = timeouts.FREE_AFTER_FAILURE_S if self._may_wait_for_others else timeouts.FREE_DELAY_S
        if now < self.begun + delay:
            return []
        if has_left and self._left_at is None:
            self._left_at = now
        is_alone = self._left_at is not None and now >= self._left_at + delay
        is_late = now >= self.begun + self.grace / 2
        cutting = self.interrupted - self.killed - (set() if is_alone or is_late else self.answered)
        waiting = [rank for rank in live if rank in cutting]
        found = [rank for rank in waiting if now >= self.freed.get(rank, 0.0) + timeouts.FREE_INTERVAL_S]
        self.freed.update(dict.fromkeys(found, now))
        return found

    def silent(self, now: float, live: Iterable[int]) -> list[int]:
        """Return none: a rank that waits in a collective is freed, not killed."""
        return []

    def countdown(self, now: float, interrupts_to_kill: int) -> str:
        """Return what to show meanwhile; see `Ladder.countdown`."""
        if self.at_once:
            return "stopping"
        return f"stopping: {self._seconds_left(now)} s left{self._how_to_kill(interrupts_to_kill)}"
