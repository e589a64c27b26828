"""How ranks are made to stop: SIGINT, then patience for those that answer, then SIGKILL.

Pure: it is told the time and says which signals are due. The supervisor sends them.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

Reason = Literal["user", "failure", "timeout"]

_LEAVE_WITHIN = 1.0
"""Seconds that a rank whose function has ended gets to leave once the others are being stopped."""
_ANSWER_WITHIN = 3.0
"""Seconds to acknowledge SIGINT. Python sees it between two instructions: a write or a large product holds it up."""
_WAITER_WITHIN = 0.3
"""The same after a failure for a rank that waits in a collective, in C: its peer is gone, so it would never answer."""
_SILENT_AFTER = 0.2
"""Seconds without an acknowledgement after a failure, from which on it matters where a rank is."""


@dataclass(frozen=True, slots=True)
class Due:
    """A signal to send now."""

    rank: int
    signum: int
    group: bool


@dataclass(slots=True)
class Ladder:
    """The stopping of one attempt; made when it begins.

    Args:
        reason: Who asked.
        begun: Now, in seconds of the monotonic clock.
        grace: Seconds that a rank which answers has for its ``finally`` and checkpoints.
    """

    reason: Reason
    begun: float
    grace: float
    answered: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    """Those of the `silent` ranks that wait in a collective."""
    killed: set[int] = field(default_factory=set)
    interrupted: set[int] = field(default_factory=set)
    left: dict[int, float] = field(default_factory=dict)
    """When each rank was first seen leaving."""
    at_once: bool = False

    def due(self, now: float, live: Iterable[int], running: Collection[int], leaving: Collection[int]) -> list[Due]:
        """The signals that are due.

        Args:
            now: The time.
            live: Ranks whose process has not ended.
            running: Ranks whose function has begun; the others have nothing to finish.
            leaving: Ranks whose function has ended; they are not interrupted any more.
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
        """The live ranks that may wait in a collective for the one that failed, as they have not answered for long."""
        if self.reason != "failure" or now < self.begun + _SILENT_AFTER:
            return []
        asked = self.interrupted - self.answered - self.killed
        return [rank for rank in live if rank in asked and rank not in self.left]

    def kill(self) -> None:
        """From now on nobody has time."""
        self.at_once = True

    def _deadline(self, rank: int) -> float:
        last = self.begun if self.at_once else self.begun + self.grace
        if rank in self.left:
            return min(last, self.left[rank] + _LEAVE_WITHIN)
        if rank in self.answered:
            return last
        return min(last, self.begun + (_WAITER_WITHIN if rank in self.waiting else _ANSWER_WITHIN))

    def countdown(self, now: float) -> str:
        """What to show meanwhile."""
        left = max(0.0, self.begun + self.grace - now)
        if not self.answered or self.at_once:
            return "stopping"
        how_often = "again" if self.reason == "user" else "twice"
        return f"stopping: {left:.0f} s left for checkpoints; interrupt {how_often} to kill now"
