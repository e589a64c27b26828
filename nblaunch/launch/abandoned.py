"""Kept ranks that wait in a collective for ranks that have left the task: they would wait forever.

In a launch, a rank that has returned exits, and the collective fails. Kept ranks stay connected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from nblaunch.engines.protocol import StackDumps
from nblaunch.launch.stack_text import Frame, frames_of, parse, waits_in_collective
from nblaunch.launch.stuck import waited_for
from nblaunch.machine import timeouts
from nblaunch.wire.collective_table import Begun


class AbandonedRanks:
    """See the module. Called from the supervisor's thread.

    Args:
        dumps: Returns the `StackDumps` of a rank.
    """

    def __init__(self, dumps: Callable[[int], StackDumps]) -> None:
        self._dumps = dumps
        self._asked: set[int] = set()
        self._places: dict[int, tuple[Frame, ...]] = {}
        """Where the ranks waited at the last look; empty if one did not wait in a collective."""
        self._since = 0.0
        self._ask_at: float | None = None
        """When to look next; None before the first look, which most tasks do not last for."""

    def found(self, waiting: Collection[int], now: float) -> bool:
        """Return True once all these ranks have waited in the same calls of collectives for `timeouts.ABANDONED_S`.

        Args:
            waiting: The ranks that have not finished the task, while others have.
            now: The current time.
        """
        if self._ask_at is None:
            self._ask_at = now + timeouts.ABANDONED_CHECK_INTERVAL_S
        if now < self._ask_at:
            return False
        if self._asked != set(waiting):
            for rank in waiting:
                self._dumps(rank).ask(math.inf)  # no signal: C code that holds the GIL is not a collective
            self._asked = set(waiting)
            return False
        answered = [self._dumps(rank).look(now) for rank in waiting]  # ask all of them, each time
        if not all(answered):
            return False
        self._asked, self._ask_at = set(), now + timeouts.ABANDONED_CHECK_INTERVAL_S
        places = {rank: self._place(rank) for rank in waiting}
        if not all(places.values()) or places != self._places:
            self._places, self._since = (places if all(places.values()) else {}), now
            return False
        return now >= self._since + timeouts.ABANDONED_S

    def collective_of(self, rank: int, begun: Sequence[Begun]) -> Begun | None:
        """Return the collective that a rank waits in, by its stack; None if it is not known."""
        return waited_for(self._places.get(rank, ()), begun)

    def _place(self, rank: int) -> tuple[Frame, ...]:
        dumps = self._dumps(rank)
        stacks = parse(dumps.dump or "")
        return frames_of(stacks, dumps.main) if waits_in_collective(stacks, dumps.main) else ()
