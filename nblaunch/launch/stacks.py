"""What each rank is doing now: asking, reading what it writes (as faulthandler does), telling it as a traceback does.

Runs in a launch's supervisor thread, a step at each of its looks: nothing here waits. The other half is
`nblaunch.ranks.stack_dumps`.
"""

from __future__ import annotations

import functools
import json
import linecache
import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nblaunch.launch.commands import Commands
from nblaunch.launch.views.view import View
from nblaunch.machine.own_code import RANK_STACK_DUMPS, RANK_WORKER, is_rank_runtime, is_users
from nblaunch.wire.launch_files import rank_file
from nblaunch.wire.messages import Source

WITHIN = 2.0
"""Seconds that a rank has to answer."""
_TIMEOUT_WITHIN = 1.0
"""Seconds that a launch which has run out of time is asked for, before it is stopped."""
_NO_ANSWER = "no answer within {:g} s: the process is stopped (SIGSTOP), or waits in the operating system"
_STARTING = "it is still starting, and has run no Python code of this launch"
_PATIENCE = 1.0
"""Seconds, but at most half of those that it has, after which a rank is sent the signal: something keeps the GIL."""
_QUIET = 0.2
"""Seconds without growth after which faulthandler's dump is whole: it puts no mark at the end."""
_BEGIN, _WHOLE = "(answer)\n", "(whole)\n"
"""The ends of an answer that the rank's own thread gives."""
_MOST = 1 << 20
"""Bytes that are read of one dump; 100 threads of 100 frames, which is all that faulthandler writes, fit."""
_LONGEST_LINE = 200
_THREAD = re.compile(
    r"(?:Current thread|Thread) (?P<thread>0x[0-9a-f]+)(?: \[(?P<name>.*)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_NEVER_BEGAN = re.compile(r"  Worker (?P<number>\d+) pid (?P<pid>\d+) never began in (?P<age>\d+) s")
_OF_WORKER = (
    "DataLoader worker {number} (pid {pid}) never began: it has run none of its code since it was started {age} s ago. "
    "If it was forked, it waits for a lock that a thread held at that moment: interrupt, and run again, or give the "
    'loader multiprocessing_context="forkserver"'
)
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_COLLECTIVE = re.compile(r"[/\\]torch[/\\](distributed[/\\](?!checkpoint[/\\])|nn[/\\]parallel[/\\]distributed\.py)")
"""Files whose calls into C are collectives; those of distributed checkpoints write files."""


# ------------------------------------------------------------------ what a dump says
@dataclass(frozen=True, slots=True)
class Frame:
    """One call; `line` is 0 where it is not known."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Stack:
    """What one thread is doing, the oldest call first."""

    thread: str
    """As faulthandler names it, such as ``0x00007f7c39423b80``."""
    frames: tuple[Frame, ...]
    cut: bool = False
    """Whether there are older calls, which were left out."""
    name: str = ""
    """As the user named it; empty where that is not known."""
    workers: tuple[str, ...] = ()
    """What there is to say of the workers that a DataLoader waits for here."""


def parse(dump: str) -> list[Stack]:
    """The threads of a dump in its order; of a thread that is in it twice, the later stack."""
    stacks: dict[str, Stack] = {}
    thread, name, frames, cut, workers = "", "", list[Frame](), False, list[str]()
    for line in [*dump.split("\n"), "Thread 0x0 (most recent call first):"]:
        if found := _THREAD.match(line):
            if thread:
                stacks[thread] = Stack(thread, tuple(reversed(frames)), cut, name, tuple(workers))
            thread, name, frames, cut, workers = found["thread"], _unescaped(found["name"] or ""), [], False, []
        elif found := _FRAME.match(line):
            number = int(found["line"]) if found["line"].isdigit() else 0
            frames.append(Frame(_unescaped(found["file"]), number, _unescaped(found["function"])))
        elif found := _NEVER_BEGAN.match(line):
            workers.append(_OF_WORKER.format_map(found.groupdict()))
        cut = cut or line == "  ..."
    return list(stacks.values())


def _unescaped(text: str) -> str:
    """A name as it is; a dump is ASCII alone."""
    return _ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)


def _without_ours(stack: Stack) -> tuple[Frame, ...]:
    """The calls from the user's function on; all from nblaunch's own on where there are no others."""
    plumbing = [is_rank_runtime(frame.file) or _starts_a_thread(frame) for frame in stack.frames]
    begin = next((i for i, frame in enumerate(stack.frames) if frame.file == RANK_WORKER), 0)
    end = next((i for i in range(begin, len(plumbing)) if not plumbing[i]), begin)
    return stack.frames[end:]


def waits_in_collective(stacks: Sequence[Stack], main: str) -> bool:
    """Return True if the main thread's last call is one of torch.distributed."""
    frames = next((stack.frames for stack in stacks if stack.thread == main), ())
    return bool(frames) and _COLLECTIVE.search(frames[-1].file) is not None


def _answers(stack: Stack) -> bool:
    """Whether it is the rank's own thread that answers, which faulthandler tells of too."""
    return any(frame.file == RANK_STACK_DUMPS for frame in stack.frames)


def _starts_a_thread(frame: Frame) -> bool:
    return frame.file == threading.__file__ and frame.function in ("_bootstrap", "_bootstrap_inner", "run")


class Teller:
    """Tells of stacks as the notebook tells of errors: cells by their names, the most recent call last.

    Args:
        sources: The cells that the ranks' functions come from.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    def tell(self, stacks: Sequence[Stack], main: str) -> str:
        """All of a rank's threads: the main one, then those in the user's code, then those of libraries."""
        return "\n\n".join(
            self._told(stack, main) for stack in sorted(stacks, key=lambda stack: self._place_in_order(stack, main))
        )

    def where(self, stacks: Sequence[Stack], main: str) -> str:
        """The user's own line that the main thread is in, such as ``Cell In[3], line 7: dist.barrier()``."""
        frames = next((_without_ours(stack) for stack in stacks if stack.thread == main), ())
        in_cells = [frame for frame in frames if frame.file in self._sources]
        own = [frame for frame in frames if self._is_users(frame)]
        for frame in (in_cells or own or frames)[-1:]:
            text = self._text(frame)
            return f"{self._place(frame).removeprefix('File ')}{': ' + text if text else ''}"
        return "C code that no Python called"  # a thread of the main interpreter that runs none is rare

    def _place_in_order(self, stack: Stack, main: str) -> int:
        if stack.thread == main:
            return 0
        return 1 if any(map(self._is_users, stack.frames)) else 2

    def _told(self, stack: Stack, main: str) -> str:
        thread = f"Thread {stack.name or stack.thread}"
        name = ("Main thread", thread, f"{thread} of a library")[self._place_in_order(stack, main)]
        lines = [f"{name} (most recent call last):"]
        if stack.cut:
            lines.append("  … older calls are left out …")
        for frame in _without_ours(stack):
            text = self._text(frame)
            lines += [f"  {self._place(frame)}, in {frame.function}", *([f"    {text}"] if text else [])]
        if len(lines) == 1:
            lines.append("  no Python code")
        lines += [f"  {worker}" for worker in stack.workers]
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
            linecache.checkcache(frame.file)  # the user may have edited it since it was read
            return linecache.getline(frame.file, frame.line).strip()[:_LONGEST_LINE]
        lines = source.text.splitlines()
        return lines[frame.line - 1].strip()[:_LONGEST_LINE] if 0 < frame.line <= len(lines) else ""


# ------------------------------------------------------------------ asking
@dataclass(slots=True)
class _Rank:
    """What is known of one rank's file of dumps."""

    path: Path
    send: Callable[[int], None]
    """Sends it a signal."""
    signal: int = 0
    """0 until it can answer."""
    pipe: str = ""
    """Where a byte asks it."""
    main: str = ""
    begin: int = 0
    """Where the dump begins that it was asked for last."""
    owing: bool = False
    """It was asked, and has not answered: to ask again would only wait beside the first."""
    hurry: float = 0.0
    """When it is to be sent the signal; infinity once it was."""
    size: int = 0
    grown: float = 0.0
    """When the file was seen to have grown."""
    dump: str | None = None
    """The answer of this round."""

    def ask(self, hurry: float) -> None:
        """Ask it, if it can answer and was not asked already; what has no answer then gets the signal at `hurry`."""
        self.dump = None
        if not self.signal and not self._meet():
            return
        size = self._size()
        if not (self.owing and size == self.begin):
            self.begin = self.size = size
            self.owing, self.hurry = True, hurry
            _write(self.pipe)

    def look(self, now: float) -> bool:
        """Whether its answer has come whole."""
        if not self.owing:
            return self.dump is not None
        size = self._size()
        if size != self.size:
            self.size, self.grown = size, now
        if size == self.begin:
            if now >= self.hurry:
                self.hurry = math.inf
                self.send(self.signal)
            return False
        dump = self._read()
        own = _own_answer(dump)
        self.owing = own is None and now - self.grown < _QUIET
        self.dump = dump if own is None else own
        return not self.owing

    def _meet(self) -> bool:
        """Read which signal it answers; whether it can answer yet (the file appears when it can)."""
        try:
            with open(self.path, "rb") as file:
                head = json.loads(file.readline())
        except OSError:
            return False
        self.signal, self.pipe, self.main = int(head["signal"]), str(head["pipe"]), str(head["main"])
        return True

    def _size(self) -> int:
        try:
            return os.stat(self.path).st_size
        except OSError:  # somebody removed it
            return self.begin

    def _read(self) -> str:
        with suppress(OSError), open(self.path, "rb") as file:
            file.seek(self.begin)
            return file.read(_MOST).decode("ascii", errors="replace")
        return ""


def _own_answer(dump: str) -> str | None:
    """What the rank's own thread wrote, in one piece; faulthandler, if it answers at the same time, writes around it.

    Both do where a rank that was stopped goes on: it has been sent the signal by then, and the question waits too.
    """
    until_its_end, _, _ = dump.rpartition(_WHOLE)
    _, begin, own = until_its_end.rpartition(_BEGIN)
    return own if begin else None


def _write(pipe: str) -> None:
    """Put a byte into a pipe, if somebody reads it."""
    with suppress(OSError):
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, b"?")
        finally:
            os.close(fd)


class Stacks:
    """Asks the ranks of one attempt for their stacks, whenever someone wants them.

    Args:
        directory: Where the ranks' files are.
        sources: The cells that their functions come from.
        commands: Who wants to know.
        view: What shows it, where a view asked.
        send: Sends a rank a signal.
    """

    def __init__(
        self,
        directory: Path,
        sources: Mapping[str, Source],
        commands: Commands,
        view: View,
        send: Callable[[int, int], None],
    ) -> None:
        self.places: dict[int, str] | None = None
        """What to say of where each rank was when it was asked last, such as ``was in Cell In[3], line 7: …``."""
        self._directory, self._commands, self._view, self._send = directory, commands, view, send
        self._teller = Teller(sources)
        self._ranks: dict[int, _Rank] = {}
        self._asked: set[int] = set()
        """The ranks that have been asked in this round; those that start meanwhile are asked as they can answer."""
        self._asking = False
        self._due = 0.0
        """When this round ends at the latest."""
        self._within = WITHIN
        self._shows = False
        self._waiting: list[Future[dict[int, str]]] = []
        self._located: float | None = None
        self._in_collective: dict[int, bool | None] = {}
        """Whether ranks wait in a collective; None for one that was asked and has not answered."""

    def look(self, living: Collection[int]) -> None:
        """Go on with what was asked for.

        Args:
            living: The ranks that have not ended.
        """
        now = time.monotonic()
        if not self._asking:
            shows, waiting = self._commands.take_stacks()
            if not (shows or waiting):
                return
            self._shows, self._waiting = shows, [future for _, future in waiting]
            self._begin(now, max([*(within for within, _ in waiting), *([WITHIN] if shows else [])]))
        answered = [self._look_at(rank, now) for rank in living]  # at all of them, each time
        if all(answered) or now >= self._due:
            self._end(living, now)

    def located(self, now: float) -> bool:
        """Whether it is known where each rank is, or has been asked for long enough; the first call begins to ask."""
        if self._located is None:
            self._located, self.places = now + _TIMEOUT_WITHIN, None
            if not self._asking:
                self._begin(now, _TIMEOUT_WITHIN)
        return self.places is not None or now >= self._located

    def in_collectives(self, ranks: Collection[int]) -> list[int]:
        """Those of these ranks that wait in a collective. Each is asked once; without an answer it is not among them.

        None is sent the signal: C code that keeps the GIL is no collective.
        """
        now = time.monotonic()
        for number in ranks:
            rank = self._rank(number)
            if number not in self._in_collective:
                rank.ask(math.inf)
                self._in_collective[number] = None
            elif self._in_collective[number] is None and rank.look(now) and rank.dump:
                self._in_collective[number] = waits_in_collective(parse(rank.dump), rank.main)
        return [number for number in ranks if self._in_collective[number]]

    def close(self) -> None:
        """The attempt is over: whoever waits hears of no rank."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result({})

    def _begin(self, now: float, within: float) -> None:
        self._asking, self._due, self._within = True, now + within, within
        self._asked.clear()

    def _rank(self, number: int) -> _Rank:
        if number not in self._ranks:
            path = rank_file(self._directory, number, "stacks")
            self._ranks[number] = _Rank(path, functools.partial(self._send, number))
        return self._ranks[number]

    def _look_at(self, number: int, now: float) -> bool:
        rank = self._rank(number)
        if number not in self._asked:
            rank.ask(now + min(_PATIENCE, self._within / 2))
            if rank.signal:
                self._asked.add(number)
            return False
        return rank.look(now)

    def _end(self, living: Collection[int], now: float) -> None:
        answered = {number for number in self._asked if self._ranks[number].look(now)}  # some have ended since
        told = {number: self._told(self._ranks[number]) for number in sorted(answered.union(living))}
        self.places = {number: where for number, (_, where) in told.items()}
        texts = {number: text for number, (text, _) in told.items()}
        waiting, self._waiting, self._asking = self._waiting, [], False
        for future in waiting:
            future.set_result(texts)
        if self._shows:
            self._shows = False
            self._view.stacks(texts)

    def _told(self, rank: _Rank) -> tuple[str, str]:
        """What a rank is doing, and where it was in one line."""
        if not rank.signal:
            return _STARTING, "was still starting"
        if not rank.dump:
            return _NO_ANSWER.format(self._within), "did not answer"
        stacks = [stack for stack in parse(rank.dump) if not _answers(stack)]
        return self._teller.tell(stacks, rank.main), f"was in {self._teller.where(stacks, rank.main)}"
