"""The debuggers of a task's ranks as one console: what it shows, and where a typed line goes.

Ranks open debuggers; the supervisor passes their messages in. The user types in one or several places at once: in the
cell, whose thread waits, and in the panel. One rank is in front, whose prompt is shown; the others wait.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from nblaunch.launch.output.transcript import Prompt, Shown, Transcript
from nblaunch.machine import timeouts
from nblaunch.wire.debug_messages import (
    Asked,
    Closed,
    Complete,
    Completions,
    Debugging,
    FromDebugger,
    Look,
    Opened,
    Printed,
    ToDebugger,
    Typed,
)
from nblaunch.wire.messages import Source

_HELP = {
    "breakpoint": "n: next line, s: step into, c: continue, q: stop all ranks, ",
    "exception": "q: close, ",
    "look": "q: close, ",
}
_MORE_HELP = (
    "p x: print x, w: stack, u, d: up, down, h: help\n"
    "ranks: what they do, rank 0: turn to rank 0, all p x: ask every rank\n"
)
_STATES = {"breakpoint": "at a breakpoint", "exception": "has raised", "look": "runs on", "input": "waits for input"}


@dataclass(slots=True)
class _Debugger:
    """An open debugger or ``input`` of a rank."""

    opened: Opened
    asked: Asked | None = None
    held: list[str] = field(default_factory=list)
    """What it has printed while another rank was in front."""
    is_called: bool = False
    """``all`` has sent it a command: show its answer, whichever rank is in front."""
    answer: list[str] = field(default_factory=list)
    """What it has printed for that."""


class DebugConsole:
    """See the module. Thread-safe.

    Args:
        world_size: The number of ranks.
        sources: The cells that define what the ranks run, by file name.
        debugging: What the ranks do where they would stop for the user. Default: no one can type.

    Attributes:
        has_quit: The user has ended the task by quitting a debugger.
        has_examined: The user has closed the debugger of an exception.
        on_withdrawn: Called when a prompt ends, in any thread, with the lock held.
    """

    def __init__(self, world_size: int, sources: Mapping[str, Source], debugging: Debugging | None = None) -> None:
        self._world_size, self._sources = world_size, sources
        self.debugging = debugging or Debugging()
        self.has_quit = self.has_examined = False
        self.on_withdrawn: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        """Guards everything below."""
        self._open: dict[int, list[_Debugger]] = {}
        """By rank, the last one on top."""
        self._front: int | None = None
        self._steps_since: float | None = None
        """When the rank in front has gone on to open again."""
        self._answers_until = 0.0
        """How long answers to ``all`` are waited for."""
        self._has_left: set[int] = set()
        """Ranks that have returned, failed or exited."""
        self._looks: dict[int, float] = {}
        """When a look at a rank was asked for."""
        self._transcript = Transcript()
        self._prompt: Prompt | None = None
        self._prompted: Asked | None = None
        """What the prompt is for."""
        self._prompts = 0
        self._outgoing: deque[tuple[int, ToDebugger]] = deque()
        self._task = 0
        self._completing: dict[int, Future[tuple[str, ...]]] = {}
        self._completions = 0
        self._wake: Callable[[], None] = lambda: None
        self._has_helped = False

    # -------------------------------------------------------------- the supervisor
    def begin(self, task: int, wake: Callable[[], None]) -> None:
        """Begin a task, or an attempt of it.

        Args:
            task: Its number.
            wake: Makes the supervisor call `outgoing`.
        """
        with self._changed:
            self._task, self._wake = task, wake
            self._has_left.clear()
            self.has_examined = False
            self._open.clear()
            self._outgoing.clear()
            self._front = self._steps_since = None
            self._choose()

    def take(self, message: FromDebugger, now: float) -> None:
        """Take a message of a rank."""
        with self._changed:
            open_here = self._open.setdefault(message.rank, [])
            if isinstance(message, Opened):
                self._looks.pop(message.rank, None)
                open_here.append(_Debugger(message, is_called=bool(message.command)))
                self._note_opened(message)
            elif isinstance(message, Completions):
                waiting = self._completing.pop(message.request, None)
                if waiting is not None:
                    waiting.set_result(message.names)
            elif open_here:
                self._take_from(open_here, message, now)
            self._choose()

    def _take_from(self, open_here: list[_Debugger], message: FromDebugger, now: float) -> None:
        top = open_here[-1]
        if isinstance(message, Printed):
            text = self._with_labels(message.text)
            if top.is_called:
                top.answer.append(text)
            elif message.rank == self._front:
                self._show(text)
            else:
                top.held.append(text)
        elif isinstance(message, Asked):
            top.asked = message
            self._show_called(message.rank, top)
        elif isinstance(message, Closed):
            self._show_called(message.rank, top)
            open_here.pop()
            self.has_quit = self.has_quit or message.quits
            self.has_examined = self.has_examined or top.opened.by == "exception"
            if message.rank == self._front and not open_here:
                self._steps_since = now if message.steps else None
                self._front = message.rank if message.steps else None

    def left(self, ranks: Collection[int]) -> None:
        """Close what ranks that have left the task had open."""
        with self._changed:
            self._has_left.update(ranks)
            for rank in ranks:
                if self._looks.pop(rank, None) is not None:
                    self._show(f"rank {rank} runs no code of yours now\n")
                if self._open.pop(rank, None) and rank == self._front:
                    self._front = None
            self._choose()

    def step(self, now: float) -> None:
        """Do what is due: let another rank come to the front, give up looks."""
        with self._changed:
            if self._steps_since is not None and now > self._steps_since + timeouts.STEP_TIMEOUT_S:
                if self._asking():
                    self._show(f"rank {self._front} runs on\n")
                self._front = self._steps_since = None
            for rank in [rank for rank, since in self._looks.items() if now > since + timeouts.LOOK_TIMEOUT_S]:
                del self._looks[rank]
                self._show(f"rank {rank} does not answer: it may be in C code that blocks Python\n")
            self._choose()

    def outgoing(self) -> Iterator[tuple[int, ToDebugger]]:
        """Return the messages to send, by rank."""
        with self._changed:
            taken, self._outgoing = self._outgoing, deque()
        return iter(taken)

    @property
    def is_open(self) -> bool:
        """Return True if the user debugs: a debugger is open, or a rank steps."""
        return self._front is not None

    def end(self) -> None:
        """End the task: nothing is asked any more."""
        with self._changed:
            self._open.clear()
            self._front = self._steps_since = None
            self._choose()

    # -------------------------------------------------------------- what is shown
    def _note_opened(self, opened: Opened) -> None:
        if opened.command or opened.by == "input":
            return
        if self._front is None or opened.by == "look":
            self._front = opened.rank
            self._introduce(opened)
        elif opened.rank != self._front:
            self._show(f"rank {opened.rank} {self._state_of(opened)}: `rank {opened.rank}` switches to it\n")
        self._steps_since = None if opened.rank == self._front else self._steps_since

    def _introduce(self, opened: Opened) -> None:
        self._show(f"rank {opened.rank} {self._state_of(opened)}\n")
        if not self._has_helped:
            self._has_helped = True
            self._show(_HELP[opened.by] + _MORE_HELP)

    def _state_of(self, opened: Opened) -> str:
        """Return what the rank does, and where."""
        source = self._sources.get(opened.filename)
        where = f", {(source.label if source else '') or opened.filename}, line {opened.line}" if opened.line else ""
        error = f" {opened.error}" if opened.error else ""
        verb = "has stopped " if opened.by == "breakpoint" else ""
        return f"{verb}{_STATES[opened.by]}{error}{where}"

    def _show_called(self, rank: int, debugger: _Debugger) -> None:
        """Show the answer to a command that went to several ranks."""
        if debugger.is_called:
            debugger.is_called = False
            self._show(f"rank {rank}: {''.join(debugger.answer) or chr(10)}")
            debugger.answer.clear()

    def _show(self, text: str, typed_in: str = "") -> None:
        self._transcript.add(text, typed_in)

    def shown(self, start: int) -> tuple[int, Sequence[Shown]]:
        """Return the number of parts that the console has shown, and those from number `start` on."""
        with self._changed:
            return len(self._transcript), self._transcript.since(start)

    # -------------------------------------------------------------- the prompt
    def _asking(self) -> list[int]:
        """Return the ranks that wait for a line."""
        return [rank for rank, stack in sorted(self._open.items()) if stack and stack[-1].asked is not None]

    def _with_labels(self, text: str) -> str:
        """Name cells as the notebook does."""
        for filename, source in self._sources.items():
            if source.label:
                text = text.replace(filename, source.label)
        return text

    def _choose(self) -> None:
        """Choose the rank in front, and set its prompt. Requires the lock."""
        if time.monotonic() < self._answers_until and self._awaits_answers():
            self._set_prompt(None)  # what is shown now would come after the prompt
            return
        asking = [] if self.has_quit or self.has_examined else self._asking()
        if self._front is None and asking:
            self._front = asking[0]
            top = self._open[self._front][-1]
            if top.opened.by != "input" and top.held:
                self._introduce(top.opened)
        front = self._open.get(self._front, []) if self._front is not None else []
        top_asked = None
        if front:
            for text in front[-1].held:
                self._show(text)
            front[-1].held.clear()
            top_asked = front[-1].asked
        self._set_prompt(top_asked)
        self._changed.notify_all()

    def _awaits_answers(self) -> bool:
        return bool(self._looks) or any(stack[-1].is_called for stack in self._open.values() if stack)

    def _set_prompt(self, asked: Asked | None) -> None:
        if asked is self._prompted and (asked is None) == (self._prompt is None):
            return
        self._prompt, self._prompted = None, asked
        if asked is not None:
            self._prompts += 1
            text = f"(rank {asked.rank} of {self._world_size}) {asked.prompt}"
            self._prompt = Prompt(self._prompts, asked.rank, text, asked.is_secret)
        self.on_withdrawn()

    @property
    def prompt(self) -> Prompt | None:
        """The line that is waited for; None if there is none now."""
        return self._prompt

    @property
    def stopped(self) -> list[int]:
        """The ranks whose debugger is open, or whose ``input`` waits."""
        return self._asking()

    def wait(self, start: int, seconds: float) -> None:
        """Wait until there is a prompt, or something is shown after part `start`."""
        with self._changed:
            self._changed.wait_for(lambda: self._prompt or len(self._transcript) > start, seconds)

    # -------------------------------------------------------------- the user
    def type(self, number: int, line: str | None, typed_in: str) -> bool:
        """Take the line that a prompt waits for.

        Args:
            number: Of the prompt.
            line: What was typed; None: the end of the input.
            typed_in: Where.

        Returns:
            False if the prompt is answered already, or the rank does not wait any more.
        """
        with self._changed:
            prompt = self._prompt
            if prompt is None or prompt.number != number:
                return False
            self._show(f"{prompt.text}{'…' if prompt.is_secret else line or ''}\n", typed_in)
            top = self._open[prompt.rank][-1]
            if top.opened.by == "input" or line is None or not self._is_ours(line.strip()):
                self._send(prompt.rank, top, line)
            self._choose()
            self._wake()
            return True

    def _send(self, rank: int, debugger: _Debugger, line: str | None) -> None:
        asked, debugger.asked = debugger.asked, None
        if asked is not None:
            self._outgoing.append((rank, Typed(self._task, asked.number, line)))

    def _is_ours(self, line: str) -> bool:
        """Obey a command of the console; return False if the line is the debugger's."""
        self._prompted = None  # whatever happens, ask again
        if line == "ranks":
            for rank in range(self._world_size):
                stack = self._open.get(rank)
                self._show(f"rank {rank} {self._state_of(stack[-1].opened) if stack else 'runs'}\n")
            return True
        if found := re.fullmatch(r"rank\s+(\d+)", line):
            self._turn_to(int(found[1]))
            return True
        if found := re.fullmatch(r"all\s+([^=(].*)", line):
            self._ask_all(found[1])
            return True
        return False

    def _turn_to(self, rank: int) -> None:
        if rank >= self._world_size:
            self._show(f"there is no rank {rank}: the ranks are 0 to {self._world_size - 1}\n")
        elif stack := self._open.get(rank):
            self._front, self._steps_since = rank, None
            self._introduce(stack[-1].opened)
            if not stack[-1].held and stack[-1].opened.by != "input":
                self._send(rank, stack[-1], "place")  # it may have moved since
        else:
            self._look(rank)

    def _look(self, rank: int, command: str = "") -> None:
        if rank in self._has_left:
            self._show(f"rank {rank} runs no code of yours now\n")
            return
        self._looks[rank] = time.monotonic()
        self._answers_until = self._looks[rank] + timeouts.LOOK_TIMEOUT_S
        self._outgoing.append((rank, Look(self._task, command)))

    def _ask_all(self, command: str) -> None:
        self._answers_until = time.monotonic() + timeouts.LOOK_TIMEOUT_S
        for rank in range(self._world_size):
            stack = self._open.get(rank)
            if not stack:
                self._look(rank, command)
            elif stack[-1].opened.by != "input":
                stack[-1].is_called = True
                self._send(rank, stack[-1], command)

    def look(self, rank: int) -> None:
        """Open a debugger on a rank, unless one is open."""
        with self._changed:
            self._turn_to(rank)
            self._choose()
            self._wake()

    def complete(self, text: str) -> Future[tuple[str, ...]]:
        """Return a future of the names that may follow in the rank in front."""
        future: Future[tuple[str, ...]] = Future()
        with self._changed:
            if self._prompt is None:
                future.set_result(())
                return future
            self._completions += 1
            self._completing = {self._completions: future}  # an older one is forgotten
            self._outgoing.append((self._prompt.rank, Complete(self._task, self._completions, text)))
            self._wake()
        return future
