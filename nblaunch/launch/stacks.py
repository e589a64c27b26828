"""Asks the ranks of a task for their stacks: for a view, for a caller, or for the message of a timeout.

Runs in the supervisor's thread, one step at each log poll. Never blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future

from nblaunch.engines.protocol import StackDumps
from nblaunch.launch.commands import Commands
from nblaunch.launch.stack_text import StackFormatter, is_ours, parse, waits_in_collective
from nblaunch.launch.views import StacksShown, View
from nblaunch.machine import timeouts
from nblaunch.wire.messages import Source

_NO_ANSWER = "no answer within {:g} s: the process is stopped (SIGSTOP), or waits in the operating system"
_STARTING = "it is still starting, and has run no Python code of this launch"


class Stacks:
    """Asks the ranks of one task for their stacks.

    Args:
        dumps: Returns the `StackDumps` of a rank.
        sources: The cells that define the ranks' functions.
        commands: Callers that wait for stacks.
        view: Shows stacks, if a view asked.

    Attributes:
        places: Where each rank was when last asked, such as ``was in Cell In[3], line 7: …``; None: not asked yet.
    """

    def __init__(
        self, dumps: Callable[[int], StackDumps], sources: Mapping[str, Source], commands: Commands, view: View
    ) -> None:
        self.places: dict[int, str] | None = None
        self._dumps, self._commands, self._view = dumps, commands, view
        self._formatter = StackFormatter(sources)
        self._asked: set[int] = set()
        """Ranks asked in this round; those that start meanwhile are asked once they can answer."""
        self._is_asking = False
        self._ends_at = 0.0
        """When this round ends at the latest."""
        self._timeout = timeouts.STACKS_TIMEOUT_S
        self._shows = False
        self._waiting: list[Future[dict[int, str]]] = []
        self._located_at: float | None = None
        self._in_collective: dict[int, bool | None] = {}
        """Whether ranks wait in a collective; None: asked, no answer yet."""

    def look(self, living: Collection[int]) -> None:
        """Begin or continue a round.

        Args:
            living: The ranks that have not exited.
        """
        now = time.monotonic()
        if not self._is_asking:
            shows, waiting = self._commands.take_stacks()
            if not (shows or waiting):
                return
            self._shows, self._waiting = shows, [future for _, future in waiting]
            wanted = [*(timeout for timeout, _ in waiting), *([timeouts.STACKS_TIMEOUT_S] if shows else [])]
            self._begin(now, max(wanted))
        answered = [self._look_at(rank, now) for rank in living]  # ask all of them, each time
        if all(answered) or now >= self._ends_at:
            self._end(living, now)

    def located(self, now: float) -> bool:
        """Return True once `places` is known, or the timeout is over. The first call begins to ask."""
        if self._located_at is None:
            self._located_at, self.places = now + timeouts.TIMEOUT_STACKS_S, None
            if not self._is_asking:
                self._begin(now, timeouts.TIMEOUT_STACKS_S)
        return self.places is not None or now >= self._located_at

    def in_collectives(self, ranks: Collection[int]) -> list[int]:
        """Return those of `ranks` that wait in a collective. Each is asked once; silence means no.

        No rank is sent the signal: C code that holds the GIL is not a collective.
        """
        now = time.monotonic()
        for number in ranks:
            rank = self._dumps(number)
            if number not in self._in_collective:
                rank.ask(math.inf)
                self._in_collective[number] = None
            elif self._in_collective[number] is None and rank.look(now) and rank.dump:
                self._in_collective[number] = waits_in_collective(parse(rank.dump), rank.main)
        return [number for number in ranks if self._in_collective[number]]

    def close(self) -> None:
        """Answer open requests with no stacks: the task is over."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result({})

    def _begin(self, now: float, timeout: float) -> None:
        self._is_asking, self._ends_at, self._timeout = True, now + timeout, timeout
        self._asked.clear()

    def _look_at(self, number: int, now: float) -> bool:
        rank = self._dumps(number)
        if number not in self._asked:
            rank.ask(now + min(timeouts.STACKS_SIGNAL_DELAY_S, self._timeout / 2))
            if rank.is_ready:
                self._asked.add(number)
            return False
        return rank.look(now)

    def _end(self, living: Collection[int], now: float) -> None:
        answered = {number for number in self._asked if self._dumps(number).look(now)}  # some have exited since
        found = {number: self._described(self._dumps(number)) for number in sorted(answered.union(living))}
        self.places = {number: place for number, (_, place) in found.items()}
        texts = {number: text for number, (text, _) in found.items()}
        waiting, self._waiting, self._is_asking = self._waiting, [], False
        for future in waiting:
            future.set_result(texts)
        if self._shows:
            self._shows = False
            self._view.on(StacksShown(texts))

    def _described(self, rank: StackDumps) -> tuple[str, str]:
        """Return the stacks of a rank, and its place in a few words."""
        if not rank.is_ready:
            return _STARTING, "was still starting"
        if not rank.dump:
            return _NO_ANSWER.format(self._timeout), "did not answer"
        stacks = [stack for stack in parse(rank.dump) if not is_ours(stack)]
        return self._formatter.format(stacks, rank.main), f"was in {self._formatter.where(stacks, rank.main)}"
