"""Where the ranks of a task are: asks for their stacks and use of CPU, reads faulthandler's format, and formats it.

A round asks some ranks and ends when they have answered, or when its time is over. It runs in the supervisor's
thread, a step at a time, and never blocks.
"""

from __future__ import annotations

import linecache
import math
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from nblaunch.engines.protocol import Sampler
from nblaunch.launch.commands import Commands
from nblaunch.launch.group import WorkerGroup
from nblaunch.machine import timeouts
from nblaunch.machine.own_code import (
    COLLECTIVE_LOG,
    RANK_THREADS,
    RANK_WORKER,
    is_backward,
    is_collective,
    is_file,
    is_rank_runtime,
    is_users,
)
from nblaunch.wire.messages import Source

_MAX_LINE = 200
MAX_WAITING_CPU = 0.1
"""Cores that a rank may use which waits in a backward pass."""
_NO_ANSWER = "no response within {:g} s: the process is stopped (SIGSTOP), or in uninterruptible sleep"
_STARTING = "still starting: it has not run code of this launch yet"
_THREAD = re.compile(
    r"(?:Current thread|Thread) (?P<thread>0x[0-9a-f]+)(?: \[(?P<name>.*)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call; `line` is 0 if unknown."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Stack:
    thread: str
    """faulthandler's name for it, such as ``0x00007f7c39423b80``."""
    frames: tuple[Frame, ...]
    cut: bool = False
    name: str = ""
    """The user's name for it; empty if unknown."""


def parse(dump: str) -> list[Stack]:
    """Return the stacks of a dump in its order; of a thread that occurs twice, the later one."""
    stacks: dict[str, Stack] = {}
    thread, name, frames, cut = "", "", list[Frame](), False
    for line in [*dump.split("\n"), "Thread 0x0 (most recent call first):"]:
        if found := _THREAD.match(line):
            if thread:
                stacks[thread] = Stack(thread, tuple(reversed(frames)), cut, name)
            thread, name, frames, cut = found["thread"], _unescaped(found["name"] or ""), [], False
        elif found := _FRAME.match(line):
            number = int(found["line"]) if found["line"].isdigit() else 0
            frames.append(Frame(_unescaped(found["file"]), number, _unescaped(found["function"])))
        cut = cut or line == "  ..."
    return list(stacks.values())


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)


def _without_ours(stack: Stack) -> tuple[Frame, ...]:
    """Return the calls from the user's function on, or from nblaunch's own if there are no others."""
    starts = {(threading.__file__, function) for function in ("_bootstrap", "_bootstrap_inner", "run")}
    plumbing = [is_rank_runtime(frame.file) or (frame.file, frame.function) in starts for frame in stack.frames]
    begin = next((i for i, frame in enumerate(stack.frames) if is_file(frame.file, RANK_WORKER)), 0)
    end = next((i for i in range(begin, len(plumbing)) if not plumbing[i]), begin)
    return stack.frames[end:]


def frames_of(stacks: Sequence[Stack], thread: str) -> tuple[Frame, ...]:
    return next((stack.frames for stack in stacks if stack.thread == thread), ())


def waits_in_collective(stacks: Sequence[Stack], main: str) -> bool:
    frames = [frame for frame in frames_of(stacks, main) if not is_file(frame.file, COLLECTIVE_LOG)]
    return bool(frames) and is_collective(frames[-1].file)


def waits_in_backward(stacks: Sequence[Stack], main: str) -> bool:
    """Return True if the main thread's last call is autograd's: DDP's collectives begin in other threads meanwhile."""
    frames = frames_of(stacks, main)
    return bool(frames) and is_backward(frames[-1].file)


class StackFormatter:
    """Formats stacks as the notebook formats tracebacks: cells by name, the most recent call last."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    def format(self, stacks: Sequence[Stack], main: str) -> str:
        """Return all threads of a rank: the main one, then those in the user's code, then those of libraries."""
        return "\n\n".join(
            self._format_one(stack, main) for stack in sorted(stacks, key=lambda stack: self._order_of(stack, main))
        )

    def where(self, stacks: Sequence[Stack], main: str) -> str:
        """Return the user's line that the main thread executes, such as ``Cell In[3], line 7: dist.barrier()``."""
        frames = next((_without_ours(stack) for stack in stacks if stack.thread == main), ())
        in_cells = [frame for frame in frames if frame.file in self._sources]
        own = [frame for frame in frames if self._is_users(frame)]
        for frame in (in_cells or own or frames)[-1:]:
            return self.line_at(frame.file, frame.line)
        return "C code without a Python caller"

    def line_at(self, file: str, line: int) -> str:
        """Return a line with its place, such as ``Cell In[3], line 7: dist.barrier()``."""
        frame = Frame(file, line, "")
        text = self._text(frame)
        return f"{self._place(frame).removeprefix('File ')}{': ' + text if text else ''}"

    def is_wait(self, stacks: Sequence[Stack], main: str) -> bool:
        """Return True if the main thread is in a line of the user that calls ``wait`` of C code, as a `Work` has."""
        last = frames_of(stacks, main)[-1:]
        return any(self._is_users(frame) and ".wait(" in self._text(frame) for frame in last)

    def _order_of(self, stack: Stack, main: str) -> int:
        if stack.thread == main:
            return 0
        return 1 if any(map(self._is_users, stack.frames)) else 2

    def _format_one(self, stack: Stack, main: str) -> str:
        thread = f"Thread {stack.name or stack.thread}"
        name = ("Main thread", thread, f"{thread} of a library")[self._order_of(stack, main)]
        lines = [f"{name} (most recent call last):"]
        if stack.cut:
            lines.append("  … older calls omitted …")
        for frame in _without_ours(stack):
            text = self._text(frame)
            lines += [f"  {self._place(frame)}, in {frame.function}", *([f"    {text}"] if text else [])]
        if len(lines) == 1:
            lines.append("  no Python code")
        return "\n".join(lines)

    def _is_users(self, frame: Frame) -> bool:
        return frame.file in self._sources or is_users(frame.file)

    def _place(self, frame: Frame) -> str:
        source = self._sources.get(frame.file)
        name = source.label if source is not None and source.label else f'File "{frame.file}"'
        return f"{name}, line {frame.line or '?'}"

    def _text(self, frame: Frame) -> str:
        source = self._sources.get(frame.file)
        if source is None:
            linecache.checkcache(frame.file)  # the user may have edited it
            return linecache.getline(frame.file, frame.line).strip()[:_MAX_LINE]
        lines = source.text.splitlines()
        return lines[frame.line - 1].strip()[:_MAX_LINE] if 0 < frame.line <= len(lines) else ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is: the stacks of its threads, if it has answered, and the name of its main thread in them."""

    stacks: Sequence[Stack] = ()
    main: str = ""
    is_busy: bool = False
    """It has used CPU since the round before."""


class Inspector:
    """See the module.

    Attributes:
        places: The answers to the latest round, by rank.
        said: Where each rank was when the task timed out, such as ``was in Cell In[3], line 7: …``; None: not known.
    """

    def __init__(self, group: WorkerGroup, sources: Mapping[str, Source], commands: Commands) -> None:
        self.places: dict[int, Place] = {}
        self.said: dict[int, str] | None = None
        self._group, self._commands = group, commands
        self._formatter = StackFormatter(sources)
        self._sampler: Sampler | None = None
        self._round: Collection[int] | None = None
        self._asked: set[int] = set()
        """Those that can answer: ranks that start meanwhile are asked once they can."""
        self._begun_at = self._timeout = 0.0
        self._signals = False
        """Whether a rank without an answer gets a signal, for C code that holds the GIL."""
        self._waiting: list[Future[dict[int, str]]] = []
        self._located_at: float | None = None

    def step(self, now: float, ranks: Collection[int], interval: float) -> bool:
        """Begin a round or continue one. Return True if one has ended.

        `interval` is that between two rounds; infinite: none but those that the user asks for.
        """
        if not self._waiting and (wanted := self._commands.take_stacks()):
            self._waiting = [future for _, future in wanted]
            self._begin(now, range(len(self._group.members)), max(timeout for timeout, _ in wanted), signals=True)
        if self._round is None and ranks and now >= self._begun_at + interval:
            self._begin(now, ranks, timeouts.STACKS_TIMEOUT_S)
        return self._round is not None and self._look(now, self._round)

    def located(self, now: float) -> bool:
        """Return True once `said` is known, or its time is over. The first call begins to ask."""
        if self._located_at is None:
            self._located_at = now + timeouts.TIMEOUT_STACKS_S
            if not self._waiting:
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
        self._round, self._begun_at, self._timeout, self._signals = ranks, now, timeout, signals
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
        if not self.places.keys() >= set(living) and now < self._begun_at + self._timeout:
            return False
        self._round = None
        if self._sampler is None:
            self._sampler = self._group.workers.sampler("cpu", {})
        busy = {usage.rank for usage in self._sampler.sample(living) if usage.cpu > MAX_WAITING_CPU}
        self.places = {
            rank: replace(self.places.get(rank, Place()), is_busy=rank in busy)
            for rank in sorted({*living, *self.places})  # some have answered and exited
        }
        if self._located_at is not None and self.said is None:
            self.said = {rank: self._described(rank, place)[1] for rank, place in self.places.items()}
        waiting, self._waiting = self._waiting, []
        texts = {rank: self._described(rank, place)[0] for rank, place in self.places.items()} if waiting else {}
        for future in waiting:
            future.set_result(texts)
        return True

    def _described(self, rank: int, place: Place) -> tuple[str, str]:
        if not self._group.members[rank].worker.stacks.is_ready:
            return _STARTING, "was still starting"
        if not place.stacks:
            return _NO_ANSWER.format(self._timeout), "did not respond"
        stacks = [each for each in place.stacks if not any(is_file(it.file, *RANK_THREADS) for it in each.frames[:1])]
        return self._formatter.format(stacks, place.main), f"was in {self._formatter.where(stacks, place.main)}"
