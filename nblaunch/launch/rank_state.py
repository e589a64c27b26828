"""The state of one rank in a task."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from nblaunch.engines.protocol import Descriptors
from nblaunch.launch.group import Member
from nblaunch.launch.views import RankState
from nblaunch.wire.messages import Done, Failed, Names, NamesTaken, RankExited


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
