"""Why ranks are stopped, and how: SIGINT, a grace period for those that acknowledge it, then SIGKILL.

Pure: the caller passes the time and sends the signals that are due.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nblaunch.engines.protocol import Log
from nblaunch.errors import CollectiveError, LaunchStoppedError, LaunchTimeoutError, NblaunchError
from nblaunch.launch.group import RankEnd
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.stuck import StuckVerdict
from nblaunch.launch.views import Stream
from nblaunch.machine import timeouts
from nblaunch.wire.messages import Source

_TIMES = {2: "twice", 3: "three times"}


# ------------------------------------------------------------------ why
@dataclass(frozen=True, slots=True)
class Account:
    """A task that failed or was stopped: what its error is made from."""

    name: str
    ends: Sequence[RankEnd]
    files: LaunchFiles
    sources: Mapping[str, Source]
    logs: Mapping[int, Mapping[Stream, Log]]
    hint: str = ""
    """What to do about a missing process group; empty if there is one."""
    difference: str = ""
    session: str = ""
    hosts: Sequence[str] = ()
    is_shown: bool = False
    """Whether the cell that raises the exception has shown it, with its traceback."""
    asked: str = ""
    """The expression that a session was asked for; empty for a task."""
    seconds: float = 0.0
    timeout: float | None = None
    incomplete: str = ""
    """Failures during the stop, as a clause."""
    places: str = ""

    @property
    def where(self) -> str:
        return f"Logs: {self.files.directory}"


@dataclass(frozen=True, slots=True)
class ByUser:
    """A Stop, an interrupt, or ``quit`` in a debugger."""

    def error(self, told: Account) -> NblaunchError:
        return LaunchStoppedError(f"{told.name} was stopped after {told.seconds:.1f} s{told.incomplete}. {told.where}")


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """Another rank has failed, which the verdict tells. The others may wait for it."""

    def error(self, told: Account) -> NblaunchError:
        return ByUser().error(told)


@dataclass(frozen=True, slots=True)
class TimedOut:
    def error(self, told: Account) -> NblaunchError:
        said = f"{told.name} took longer than timeout={told.timeout:g} s and was stopped."
        return LaunchTimeoutError(f"{said}{told.places}{told.where}")


@dataclass(frozen=True, slots=True)
class TakenBack:
    why: str

    def error(self, told: Account) -> NblaunchError:
        return LaunchStoppedError(f"{self.why}, so {told.name} was stopped{told.incomplete}. {told.where}")


@dataclass(frozen=True, slots=True)
class NoProgress:
    """No collective has made progress for `timeouts.COLLECTIVE_TIMEOUT_S`, or a kept rank waits for a returned one."""

    verdict: StuckVerdict

    def error(self, told: Account) -> NblaunchError:
        rank = (*(self.verdict.pair or self.verdict.ranks), 0)[0]
        lines = "".join(f"\n    {line}" for line in filter(None, (*self.verdict.lines, told.difference)))
        kept = "The ranks keep their variables, and get a new process group. " * (self.verdict.pair is not None)
        return CollectiveError(f"{told.name} was stopped:{lines}\n{kept}{told.where}", rank, told.files.err(rank))


Reason = ByUser | PeerFailed | TimedOut | TakenBack | NoProgress


# ------------------------------------------------------------------ how
class Policy(NamedTuple):
    keeps: bool = False
    """They stay: they are freed from collectives, and not killed before their grace period is over."""
    frees: bool = True
    kills: bool = True
    """False: what does not respond is left alone."""


LAUNCH, SESSION = Policy(), Policy(keeps=True)
QUESTION, EXPRESSION = Policy(keeps=True, frees=False, kills=False), Policy(keeps=True, kills=False)
"""An expression is code of the user, which may call collectives."""


@dataclass(slots=True)
class Ladder:
    """The stop of one task; created when it begins.

    Attributes:
        begun: In seconds of the monotonic clock.
        grace: Seconds that a rank has for ``finally`` and checkpoints once it has acknowledged SIGINT.
        answered: Ranks that have acknowledged SIGINT.
        left: When each rank was first seen leaving.
        freed: When each rank was last freed from a collective.
        at_once: Skip the grace period.
    """

    reason: Reason
    begun: float
    grace: float
    policy: Policy = LAUNCH
    answered: set[int] = field(default_factory=set)
    killed: set[int] = field(default_factory=set)
    interrupted: set[int] = field(default_factory=set)
    left: dict[int, float] = field(default_factory=dict)
    freed: dict[int, float] = field(default_factory=dict)
    at_once: bool = False
    _alone_since: float | None = None
    """When the first rank was seen to have left a task of kept ranks."""

    def due(
        self, now: float, live: Iterable[int], running: Collection[int], leaving: Collection[int]
    ) -> tuple[list[int], list[int]]:
        """Return the ranks to interrupt now, and those to kill.

        `live` are ranks whose process has not exited, or kept ranks that have not finished the task. `running` have
        begun their function, the others have nothing to finish. `leaving` have ended it, and are not interrupted.
        """
        interrupts, kills = [], []
        for rank in leaving:
            self.left.setdefault(rank, now)
        for rank in live:
            if rank in self.killed:
                continue
            is_idle = rank not in running and not self.policy.keeps
            if self.policy.kills and (is_idle or now >= self._deadline(rank)):
                kills.append(rank)
            elif rank not in self.interrupted and rank not in leaving:
                interrupts.append(rank)
        self.killed.update(kills)
        self.interrupted.update(interrupts)
        return interrupts, kills

    def _deadline(self, rank: int) -> float:
        last = self.begun if self.at_once else self.begun + self.grace
        if self.policy.keeps:
            return last
        if rank in self.left:
            return min(last, self.left[rank] + timeouts.STOP_EXIT_TIMEOUT_S)
        if rank in self.answered:
            return last
        return min(last, self.begun + timeouts.ACK_TIMEOUT_S)

    def to_free(self, now: float, live: Iterable[int], *, has_left: bool) -> list[int]:
        """Return the ranks to free from what they wait for.

        A rank that has acknowledged is in its ``finally``, which may have collectives: it is freed only once another
        rank has left the task (`has_left`) and cannot answer them, or when half of the grace period is over.
        """
        is_asked_for = isinstance(self.reason, (ByUser, TimedOut))
        delay = timeouts.FREE_DELAY_S if is_asked_for else timeouts.FREE_AFTER_FAILURE_S
        if not (self.policy.keeps and self.policy.frees) or now < self.begun + delay:
            return []
        if has_left and self._alone_since is None:
            self._alone_since = now
        is_alone = self._alone_since is not None and now >= self._alone_since + delay
        is_late = now >= self.begun + self.grace / 2
        cutting = self.interrupted - self.killed - (set() if is_alone or is_late else self.answered)
        waiting = [rank for rank in live if rank in cutting]
        found = [rank for rank in waiting if now >= self.freed.get(rank, 0.0) + timeouts.FREE_INTERVAL_S]
        self.freed.update(dict.fromkeys(found, now))
        return found

    def is_given_up(self, now: float) -> bool:
        return not self.policy.kills and now >= self.begun + self.grace

    def countdown(self, now: float, interrupts_to_kill: int) -> str:
        """Return what to show meanwhile; `interrupts_to_kill` more interrupts kill the ranks, 0: none does."""
        if self.at_once or not (self.answered or self.policy.keeps):
            return "stopping"
        seconds = f"{max(0.0, self.begun + self.grace - now):.0f} s left"
        kill = "; interrupt again to kill now" * interrupts_to_kill
        if interrupts_to_kill > 1:
            more = " more" if isinstance(self.reason, ByUser) else ""
            kill = f"; interrupt {_TIMES[interrupts_to_kill]}{more} to kill now"
        return f"stopping: {seconds}{'' if self.policy.keeps else ' for checkpoints'}{kill}"
