"""A worker group: the processes of a launch from start to exit, on any engine; and each as a rank of a task."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from nblaunch.engines.protocol import Descriptors, Event, Lost, Worker, Workers
from nblaunch.errors import StartError
from nblaunch.launch.views import RankState
from nblaunch.machine import timeouts
from nblaunch.wire.messages import Done, Failed, Names, NamesTaken, NotStarted, RankExited, RankStarted, Swept


@dataclass(slots=True)
class Member:
    rank: int
    worker: Worker
    pid: int = 0
    """Shown to the user; 0 before the rank has started."""
    exited: RankExited | None = None

    @property
    def listens(self) -> bool:
        """Return True if the rank runs our code: after exec, the signal for stacks would kill it."""
        return self.exited is None and self.worker.is_open


class WorkerGroup:
    """The processes. It knows no tasks. Used from the supervisor's thread. A kept group lives on without any rank.

    Attributes:
        members: The ranks, once started.
        refusal: Why a rank could not be started; empty if all could.
        is_lost: The process that supervises the ranks is dead or hangs; the ranks are killed.
        stuck: Pids that survived SIGKILL.
    """

    def __init__(self, workers: Workers, note: Callable[[str], None], is_kept: bool = False) -> None:
        self.workers, self._note, self._is_kept = workers, note, is_kept
        self.members: list[Member] = []
        self.refusal = ""
        self.is_lost = False
        self.stuck: tuple[int, ...] = ()
        self._is_swept = False
        self._killed: set[int] = set()
        self._begun_at = time.monotonic()
        self._exited_at: float | None = None
        self._killed_at: float | None = None
        self._was_nudged = False

    @property
    def is_over(self) -> bool:
        return self._is_swept or self.is_lost

    @property
    def live(self) -> list[int]:
        return [member.rank for member in self.members if member.exited is None]

    def start(self, environment: Callable[[int], Mapping[str, str]]) -> None:
        self.members = [Member(worker.rank, worker) for worker in self.workers.start(environment)]

    def restart(self, rank: int, environment: Mapping[str, str]) -> None:
        self.refusal = ""
        self._killed.discard(rank)
        self._exited_at = self._killed_at = None
        self.members[rank] = Member(rank, self.workers.restart(rank, environment))

    def raise_refusal(self) -> None:
        refusal, self.refusal = self.refusal, ""
        if refusal:
            raise StartError(refusal)

    def end(self) -> None:
        self._is_kept = False
        self.workers.dismiss()

    def wait(self, seconds: float) -> Iterator[Event]:
        """Wait for events, at most `seconds`; update the group with each and yield it."""
        yield from map(self._noted, self.workers.wait(seconds))
        self._check(time.monotonic())

    def drain(self) -> Iterator[Event]:
        yield from map(self._noted, self.workers.drain())

    def _noted(self, event: Event) -> Event:
        if isinstance(event, RankStarted):
            self.members[event.rank].pid = event.pid
        elif isinstance(event, RankExited):
            self.members[event.rank].exited = event
        elif isinstance(event, NotStarted):
            which = f"rank {event.rank}" if event.rank >= 0 else "no rank"
            if self._is_kept and event.rank >= 0:
                self.members[event.rank].exited = RankExited(event.rank, 1, time.monotonic_ns())
            self.refusal = self.refusal or f"{which} could {'not ' * (event.rank >= 0)}be started: {event.reason}"
        elif isinstance(event, Swept):
            self._is_swept, self.stuck = True, event.stuck
        elif isinstance(event, Lost):
            self.is_lost = True
        return event

    def kill(self, rank: int) -> None:
        self.members[rank].worker.signal(signal.SIGKILL, True)
        self._killed.add(rank)

    def _check(self, now: float) -> None:
        """Give up on workers that give no sign of life: after the last exit, after SIGKILL, or at the start."""
        live = self.live
        if self.members and not live and not self._is_kept:
            self._exited_at = self._exited_at or now
            if now - self._silent_since(self._exited_at) > timeouts.GROUP_SWEEP_TIMEOUT_S:
                self.is_lost = True
        if live and self._killed.issuperset(live):
            self._killed_at = self._killed_at or now
        if self._is_kept and not live:
            self._killed_at = None
        is_killed = self._killed_at is not None
        if is_killed and now - self._silent_since(self._killed_at or now) > timeouts.GROUP_DEAF_TIMEOUT_S:
            self.workers.abandon()
            self.is_lost = True
        late = now - self._begun_at > timeouts.GROUP_BEGIN_TIMEOUT_S
        if late and not self.is_over and not self.workers.has_begun and not self._was_nudged:
            self._was_nudged = True
            note = self.workers.nudge()
            if note is None:
                self.is_lost = True
            else:
                self._note(note)

    def _silent_since(self, begin: float) -> float:
        """Return since when nothing has come, after `begin`: on a slow link the exits come after the logs."""
        return max(begin, min(self.workers.heard_at, begin + timeouts.GROUP_TRANSFER_TIMEOUT_S))

    def close(self) -> None:
        """Release the processes' files. Descriptors of unread messages are closed."""
        self._is_swept = True
        self.workers.close()


@dataclass(frozen=True, slots=True)
class RankEnd:
    rank: int
    done: Done | None
    failed: Failed | None
    exited: RankExited | None


@dataclass(slots=True)
class Rank:
    member: Member
    is_running: bool = False
    """Its function has begun."""
    interrupted: bool = False
    """It has acknowledged SIGINT, from us or from an editor."""
    is_leaving: bool = False
    """Its function and its threads have ended."""
    done: Done | None = None
    failed: Failed | None = None
    result: Descriptors = field(default_factory=Descriptors)
    shown: RankState | None = None
    is_absent: bool = False
    """It had exited before the task began: a kept rank that was not restarted."""
    taken: NamesTaken = field(default_factory=NamesTaken)
    """What a kept rank has made of the names that the task has sent."""
    names: Names | None = None
    """What a kept rank has bound; None: not reported yet."""

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def end(self) -> RankEnd:
        return RankEnd(self.rank, self.done, self.failed, self.member.exited)

    @property
    def has_failed(self) -> bool:
        has_died = self.member.exited is not None and not self.is_absent
        return self.failed is not None or (has_died and self.done is None)

    @property
    def is_over(self) -> bool:
        return self.done is not None or self.has_failed or self.is_absent

    def state(self, stopped: Collection[int]) -> RankState:
        """Return the state to show; `stopped` are the ranks that were interrupted or killed."""
        was_stopped = self.rank in stopped
        if self.failed is not None:
            return "ended" if self.failed.collective or was_stopped else "failed"
        if self.member.exited is not None:
            if not self.has_failed and not self.is_absent:
                return "ended" if self.done is not None and self.done.was_stopped else "returned"
            return "ended" if was_stopped else "failed"
        if was_stopped:
            return "stopping"
        return "running" if self.is_running else "starting"
