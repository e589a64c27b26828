"""Notices that ranks wait in a collective and none gets on, and says why.

Looks once a second at what each rank has begun. If no rank has begun a collective for some seconds, it asks the ranks
for their stacks: those whose last call is in torch.distributed wait, and those in a backward pass or in a ``wait()``
that use no CPU.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from nblaunch.engines.protocol import Sampler
from nblaunch.launch.rank_state import Rank
from nblaunch.launch.stack_text import StackFormatter, frames_of, parse, waits_in_backward, waits_in_collective
from nblaunch.launch.stuck import MAX_WAITING_CPU, RankView, StuckVerdict, Where, judge, place_of, waited_for
from nblaunch.machine import timeouts
from nblaunch.wire.collective_table import Begun
from nblaunch.wire.messages import Source

_MAX_LAGS = 30
"""Collectives from which the usual lag is known: the last that were seen."""


class StuckWatch:
    """See the module. Called from the supervisor's thread.

    Args:
        ranks: The ranks of the task.
        sources: The cells that define its functions.
        sampler: Returns what measures the ranks' use of CPU.
    """

    def __init__(self, ranks: Sequence[Rank], sources: Mapping[str, Source], sampler: Callable[[], Sampler]) -> None:
        self._ranks, self._sources = ranks, sources
        self._formatter = StackFormatter(sources)
        self.verdict: StuckVerdict | None = None
        """Why ranks wait, as of the last look."""
        self._look_at: float | None = None
        """When to look next; None before the first look, which most tasks do not last for."""
        self._begun: dict[int, Sequence[Begun]] = {}
        """What each rank had begun at the last look."""
        self._lags: dict[int, deque[float]] = {}
        """By rank: by how many seconds it has begun collectives later than the first rank, as far as that was seen."""
        self._since = 0.0
        """When a rank was last seen to have begun a collective."""
        self._asked: list[Rank] = []
        """Ranks whose stacks were requested."""
        self._give_up_at = 0.0
        self._new_sampler = sampler
        self._sampler: Sampler | None = None
        """Measures once a collective is overdue."""
        self._busy: set[int] = set()
        """Ranks that have used CPU between the last two looks."""

    def look(self, now: float) -> StuckVerdict | None:
        """Return why ranks wait, or None as long as they get on or nothing is known.

        Args:
            now: The current time.
        """
        if self._asked:
            return self._answered(now)
        if self._look_at is None:
            self._look_at = now + timeouts.STUCK_POLL_S
        if now < self._look_at:
            return None
        self._look_at = now + timeouts.STUCK_POLL_S
        running = [rank for rank in self._ranks if not rank.is_over and rank.is_running and rank.member.listens]
        begun = {rank.rank: rank.member.worker.collectives() for rank in self._ranks if not rank.is_absent}
        self._note_lags([(rank, each[0]) for rank, each in begun.items() if each])
        if begun != self._begun or not running:
            self._begun, self._since, self.verdict = begun, now, None
            return None
        quiet = now - self._since if any(begun.values()) else 0.0
        if quiet >= timeouts.STUCK_AFTER_S / 2:
            self._measure([rank.rank for rank in running])
        if quiet >= timeouts.STUCK_AFTER_S:
            self._asked, self._give_up_at = running, now + timeouts.STACKS_TIMEOUT_S
            for rank in running:
                rank.member.worker.stacks.ask(math.inf)  # no signal: C code that holds the GIL is not a collective
        return None

    def _note_lags(self, last: Sequence[tuple[int, Begun]]) -> None:
        """Note who was late, if all ranks have begun the same collective last."""
        if len(last) < len(self._ranks) or len({(begun.group, begun.count) for _, begun in last}) > 1:
            return
        first = min(begun.time_ns for _, begun in last)
        for rank, begun in last:
            self._lags.setdefault(rank, deque(maxlen=_MAX_LAGS)).append((begun.time_ns - first) / 1e9)

    def waited(self, now: float) -> float:
        """Return for how many seconds ranks have waited in a collective; 0.0 if none does, or nothing is known."""
        return now - self._since if self.verdict is not None else 0.0

    def pause(self) -> None:
        """Forget how long the ranks have waited: the user debugs."""
        self._begun, self._asked, self.verdict = {}, [], None

    def close(self) -> None:
        """Stop measuring. Idempotent."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def _measure(self, running: Sequence[int]) -> None:
        if self._sampler is None:
            self._sampler = self._new_sampler()
        self._busy = {usage.rank for usage in self._sampler.sample(running) if usage.cpu > MAX_WAITING_CPU}

    def _answered(self, now: float) -> StuckVerdict | None:
        answers = [rank.member.worker.stacks.look(now) for rank in self._asked]  # ask all of them, each time
        if not all(answers) and now < self._give_up_at:
            return None
        asked, self._asked = self._asked, []
        self._look_at = now + timeouts.STUCK_REPEAT_S
        if any(rank.member.worker.collectives() != self._begun[rank.rank] for rank in asked):
            self.verdict = None  # they have got on meanwhile
            return None
        views = [self._view(rank, is_asked=rank in asked) for rank in self._ranks]
        self.verdict = judge(views, now - self._since, lambda begun: place_of(begun, self._sources))
        return self.verdict

    def _view(self, rank: Rank, *, is_asked: bool) -> RankView:
        begun = self._begun.get(rank.rank, ())
        lags = self._lags.get(rank.rank)
        lag = statistics.median(lags) if lags else None
        where: Where = "runs"
        if rank.done is not None:
            where = "returned"
        elif rank.failed is not None:
            where = "raised"
        elif rank.member.exited is not None:
            where = "died"
        dumps = rank.member.worker.stacks
        if where != "runs" or not is_asked or not dumps.dump:
            return RankView(rank.rank, where, "", begun, lag=lag)
        stacks = parse(dumps.dump)
        is_busy = rank.rank in self._busy
        is_wait = self._formatter.is_wait(stacks, dumps.main) and not is_busy
        may_wait = waits_in_collective(stacks, dumps.main) or (waits_in_backward(stacks, dumps.main) and not is_busy)
        if (may_wait or is_wait) and waited_for(frames_of(stacks, dumps.main), begun, is_wait=is_wait) is not None:
            where = "waits"
        return RankView(rank.rank, where, self._formatter.where(stacks, dumps.main), begun, is_busy, lag)
