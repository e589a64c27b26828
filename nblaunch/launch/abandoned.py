"""Kept ranks that wait in a collective for ranks that have left the task: they would wait forever.

In a launch, a rank that has returned exits, and the collective fails. Kept ranks stay connected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from nblaunch.engines.protocol import Sampler, Worker
from nblaunch.launch.stack_text import Frame, frames_of, parse, waits_in_backward, waits_in_collective
from nblaunch.launch.stuck import MAX_WAITING_CPU, waited_for
from nblaunch.machine import timeouts
from nblaunch.wire.collective_table import Begun, members_of

_Place = tuple[tuple[Frame, ...], Sequence[Begun]]
"""The calls of a rank's main thread, and what the rank has begun."""


class AbandonedRanks:
    """See the module. Called from the supervisor's thread.

    Args:
        workers: The ranks.
        sampler: Returns what measures the ranks' use of CPU.
    """

    def __init__(self, workers: Sequence[Worker], sampler: Callable[[], Sampler]) -> None:
        self._workers, self._new_sampler = workers, sampler
        self._sampler: Sampler | None = None
        """Measures once a rank is in a backward pass."""
        self._asked: set[int] = set()
        self._places: dict[int, _Place] = {}
        """Where the ranks waited at the last look; empty if one did not wait for a collective."""
        self._since = 0.0
        self._ask_at: float | None = None
        """When to look next; None before the first look, which most tasks do not last for."""

    def found(self, waiting: Collection[int], returned: Collection[int], now: float) -> bool:
        """Return True once all these ranks have waited in the same collectives for `timeouts.ABANDONED_S`.

        Args:
            waiting: The ranks that have not finished the task.
            returned: Those that have.
            now: The current time.
        """
        if self._ask_at is None:
            self._ask_at = now + timeouts.ABANDONED_CHECK_INTERVAL_S
        if now < self._ask_at:
            return False
        if self._asked != set(waiting):
            for rank in waiting:
                self._workers[rank].stacks.ask(math.inf)  # no signal: C code that holds the GIL is not a collective
            self._asked = set(waiting)
            return False
        answered = [self._workers[rank].stacks.look(now) for rank in waiting]  # ask all of them, each time
        if not all(answered):
            return False
        self._asked, self._ask_at = set(), now + timeouts.ABANDONED_CHECK_INTERVAL_S
        places = self._places_of(waiting, returned)
        if not places or places != self._places:
            self._places, self._since = places, now
            return False
        return now >= self._since + timeouts.ABANDONED_S and any(self._misses(each, returned) for each in waiting)

    def close(self) -> None:
        """Stop measuring. Idempotent."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def _places_of(self, ranks: Collection[int], returned: Collection[int]) -> dict[int, _Place]:
        """Return where ranks wait; nothing if one does not wait for a collective.

        DDP's collectives begin inside autograd. There a rank waits if it uses no CPU and has begun more than others.
        """
        places, in_backward = {}, []
        for rank in ranks:
            dumps, begun = self._workers[rank].stacks, self._workers[rank].collectives()
            stacks = parse(dumps.dump or "")
            places[rank] = frames_of(stacks, dumps.main), begun
            if waits_in_collective(stacks, dumps.main):
                continue
            last = waited_for(*places[rank]) if waits_in_backward(stacks, dumps.main) else None
            if last is None or not any(self._count(each, last.group) < last.count for each in returned):
                return {}
            in_backward.append(rank)
        return {} if in_backward and self._are_busy(in_backward) else places

    def _misses(self, rank: int, returned: Collection[int]) -> bool:
        """Return True if a rank waits in a process group of a rank that has returned, or nothing is known of that."""
        begun = waited_for(*self._places[rank])
        members = members_of(begun, len(self._workers)) if begun is not None else None
        return members is None or not set(returned).isdisjoint(members)

    def _count(self, rank: int, group: str) -> int:
        return next((each.count for each in self._workers[rank].collectives() if each.group == group), 0)

    def _are_busy(self, ranks: Collection[int]) -> bool:
        if self._sampler is None:
            self._sampler = self._new_sampler()
        return any(usage.cpu > MAX_WAITING_CPU for usage in self._sampler.sample(ranks))
