"""Asks the ranks of a task where they are: their stacks and use of CPU.

A round asks some ranks and ends when they have answered, or when its time is over. Runs in the supervisor's thread, a
step at a time. Never blocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from nblaunch.engines.protocol import Sampler
from nblaunch.launch.commands import Commands
from nblaunch.launch.group import WorkerGroup
from nblaunch.launch.stacks import Stack, StackFormatter, is_ours, parse
from nblaunch.launch.views import StacksShown, View
from nblaunch.machine import timeouts
from nblaunch.wire.messages import Source

MAX_WAITING_CPU = 0.1
"""Cores that a rank may use which waits in a backward pass."""
_NO_ANSWER = "no answer within {:g} s: the process is stopped (SIGSTOP), or waits in the operating system"
_STARTING = "it is still starting, and has run no Python code of this launch"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is.

    Attributes:
        stacks: Of its threads; empty if it has not answered.
        main: The main thread, as stacks name it.
        is_busy: It has used CPU since the round before.
    """

    stacks: Sequence[Stack] = ()
    main: str = ""
    is_busy: bool = False


class Inspector:
    """See the module.

    Attributes:
        places: The answers to the latest round, by rank.
        begun_at: When that has begun.
        said: Where each rank was when the task timed out, such as ``was in Cell In[3], line 7: …``; None: not known.
    """

    def __init__(self, group: WorkerGroup, sources: Mapping[str, Source], commands: Commands, view: View) -> None:
        self.places: dict[int, Place] = {}
        self.said: dict[int, str] | None = None
        self._group, self._commands, self._view = group, commands, view
        self._formatter = StackFormatter(sources)
        self._sampler: Sampler | None = None
        self._round: Collection[int] | None = None
        """The ranks that are asked now."""
        self._asked: set[int] = set()
        """Those that can answer: ranks that start meanwhile are asked once they can."""
        self.begun_at = self._timeout = 0.0
        self._signals = False
        """Whether a rank without an answer gets a signal, for C code that holds the GIL."""
        self._shows = False
        self._waiting: list[Future[dict[int, str]]] = []
        """Callers that the round is for."""
        self._located_at: float | None = None

    def step(self, now: float, ranks: Collection[int], interval: float) -> bool:
        """Begin a round or continue one. Return True if one has ended.

        Args:
            now: The current time.
            ranks: The ranks to ask.
            interval: Seconds between two rounds; 0.0: at once; infinite: none but those that the user asks for.
        """
        if not (self._shows or self._waiting):
            shows, waiting = self._commands.take_stacks()
            if shows or waiting:
                self._shows, self._waiting = shows, [future for _, future in waiting]
                wanted = [*(timeout for timeout, _ in waiting), *([timeouts.STACKS_TIMEOUT_S] if shows else [])]
                self._begin(now, range(len(self._group.members)), max(wanted), signals=True)
        is_free = self._round is None or (interval == 0.0 and not (self._shows or self._waiting))
        if is_free and ranks and now >= self.begun_at + interval:
            self._begin(now, ranks, timeouts.STACKS_TIMEOUT_S)
        return self._round is not None and self._look(now, self._round)

    def located(self, now: float) -> bool:
        """Return True once `said` is known, or its time is over. The first call begins to ask."""
        if self._located_at is None:
            self._located_at = now + timeouts.TIMEOUT_STACKS_S
            if not (self._shows or self._waiting):
                self._begin(now, range(len(self._group.members)), timeouts.TIMEOUT_STACKS_S, signals=True)
        return self.said is not None or now >= self._located_at

    def close(self) -> None:
        """Answer open requests with no stacks: the task is over."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result({})
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def _begin(self, now: float, ranks: Collection[int], timeout: float, *, signals: bool = False) -> None:
        self._round, self.begun_at, self._timeout, self._signals = ranks, now, timeout, signals
        self._asked, self.places = set(), {}

    def _look(self, now: float, ranks: Collection[int]) -> bool:
        members = self._group.members
        living = [rank for rank in ranks if members[rank].listens]
        for rank in ranks:
            stacks = members[rank].worker.stacks
            if rank in living and rank not in self._asked:
                delay = min(timeouts.STACKS_SIGNAL_DELAY_S, self._timeout / 2) if self._signals else math.inf
                stacks.ask(now + delay)
                self._asked.update([rank] if stacks.is_ready else [])
            elif rank in self._asked and rank not in self.places and stacks.look(now):
                self.places[rank] = Place(parse(stacks.dump or ""), stacks.main)
        if not self.places.keys() >= set(living) and now < self.begun_at + self._timeout:
            return False
        self._round = None
        if self._sampler is None:
            self._sampler = self._group.workers.sampler("cpu", {})
        busy = {usage.rank for usage in self._sampler.sample(living) if usage.cpu > MAX_WAITING_CPU}
        self.places = {
            rank: replace(self.places.get(rank, Place()), is_busy=rank in busy)
            for rank in sorted({*living, *self.places})  # some have answered and exited
        }
        self._answer()
        return True

    def _answer(self) -> None:
        if self._located_at is not None and self.said is None:
            self.said = {rank: self._described(rank, place)[1] for rank, place in self.places.items()}
        waiting, self._waiting = self._waiting, []
        if not (self._shows or waiting):
            return
        texts = {rank: self._described(rank, place)[0] for rank, place in self.places.items()}
        for future in waiting:
            future.set_result(texts)
        if self._shows:
            self._shows = False
            self._view.on(StacksShown(texts))

    def _described(self, rank: int, place: Place) -> tuple[str, str]:
        if not self._group.members[rank].worker.stacks.is_ready:
            return _STARTING, "was still starting"
        if not place.stacks:
            return _NO_ANSWER.format(self._timeout), "did not answer"
        stacks = [stack for stack in place.stacks if not is_ours(stack)]
        return self._formatter.format(stacks, place.main), f"was in {self._formatter.where(stacks, place.main)}"
