"""The debuggers of a task's ranks as one console: what it shows, and where a typed line goes.

Ranks open debuggers; the supervisor passes their messages in. The user types in the cell, whose thread waits for the
launch. One rank is in front, whose prompt is shown; the others wait.

While the console is open, time limits wait (`paused_s`), and the stuck watch forgets what it saw. torch's own limit of
a collective cannot be extended once it has begun. So where the user can type, it is 24 h, and the kernel ends a task
whose ranks have waited for 30 min (``COLLECTIVE_TIMEOUT_S``). With NCCL, whose calls return at once, the kernel does
not see the wait, and torch's limit is 30 min, also while the user debugs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nblaunch.machine import timeouts
from nblaunch.wire.messages import (
    Asked,
    Closed,
    Debugging,
    FromDebugger,
    Look,
    Opened,
    OpenedBy,
    Printed,
    Source,
    ToDebugger,
    Typed,
)

_HELP: Mapping[OpenedBy, str] = {
    "breakpoint": "n: next line, s: step into, c: continue, q or EOF: stop all ranks, ",
    "exception": "q: close, ",
    "look": "q: close, ",
}
_COMMON_HELP = (
    "p x: print x, w: stack, u, d: up, down, h: help\n"
    "ranks: list the ranks, rank 0: switch to rank 0, all p x: run `p x` in every rank\n"
)
_STATES: Mapping[OpenedBy, str] = {
    "breakpoint": "stopped at a breakpoint",
    "exception": "raised",
    "look": "is running",
    "input": "is waiting for input",
}


@dataclass(slots=True)
class _OpenDebugger:
    """A debugger that is open in a rank, or its ``input``: what it waits for, and what the console says of it."""

    opened: Opened
    sources: Mapping[str, Source]
    is_news: bool = False
    """The user is to be told once it takes a command."""
    asked: Asked | None = None
    held: list[str] = field(default_factory=list)
    """What it has printed while another rank was in front."""
    is_called: bool = False
    """``all`` has sent it a command: show its answer, whichever rank is in front."""
    answer: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        opened, source = self.opened, self.sources.get(self.opened.filename)
        where = f", {(source.label if source else '') or opened.filename}, line {opened.line}" if opened.line else ""
        error = f" {opened.error}" if opened.error else ""
        return f"{_STATES[opened.by]}{error}{where}"

    @property
    def takes_command(self) -> bool:
        """True if it waits for a command, not for a line of ``input`` or the rest of a statement."""
        return self.asked is not None and self.asked.is_command

    @property
    def refusal(self) -> str:
        if self.asked is None:
            return "is still running the last command"
        return _STATES["input"] if self.opened.by == "input" else "is waiting for other input, not for a command"


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    asked: Asked
    text: str


class DebugConsole:
    """See the module. Thread-safe. Without `debugging`, no one can type.

    Attributes:
        paused_s: How long debuggers were open, in all attempts: time limits do not count it.
        has_quit: The user has ended the task by quitting a debugger.
        has_examined: The user has closed the debugger of an exception.
        prompt: What the console waits for now.
        on_step: Called by `step` and `end`, in the supervisor's thread, without the lock.
    """

    def __init__(
        self,
        world_size: int,
        sources: Mapping[str, Source],
        debugging: Debugging | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world_size, self._sources, self._clock = world_size, sources, clock
        self.debugging = debugging or Debugging()
        self.has_quit = self.has_examined = False
        self.paused_s = 0.0
        self.prompt: Prompt | None = None
        self.on_step: Callable[[], None] = lambda: None
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes `wait`. No Condition: a KeyboardInterrupt in its Python code would leave the lock locked."""
        self._lock = threading.RLock()
        """Guards all below."""
        self._open: dict[int, list[_OpenDebugger]] = {}
        """By rank, the last one on top."""
        self._front: int | None = None
        self._steps_since: float | None = None
        """When the rank in front has gone on to open again."""
        self._answers_until = 0.0
        """How long answers to ``all`` are waited for."""
        self._left: dict[int, str] = {}
        """Ranks that have returned, failed or exited, and how they failed."""
        self._unannounced: list[int] = []
        """Ranks that have failed while no debugger was open."""
        self._looks: dict[int, float] = {}
        """When a look at a rank was asked for."""
        self._unshown: list[str] = []
        self._task = 0
        self._outgoing: deque[tuple[int, ToDebugger]] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._has_helped: set[OpenedBy] = set()

    # -------------------------------------------------------------- the supervisor
    def begin(self, task: int, wake: Callable[[], None]) -> None:
        """Begin the task of this number, or an attempt of it. `wake` makes the supervisor call `outgoing`."""
        with self._lock:
            self._task, self._wake = task, wake
            self._left.clear()
            self._unannounced.clear()
            self.has_examined = False
            self._outgoing.clear()
            self._close_all()

    def take(self, message: FromDebugger) -> None:
        with self._lock:
            open_here = self._open.setdefault(message.rank, [])
            if isinstance(message, Opened):
                open_here.append(_OpenDebugger(message, self._sources, is_called=bool(message.command)))
                self._note_opened(open_here[-1], is_wanted=self._looks.pop(message.rank, None) is not None)
            elif open_here:
                self._take_from(open_here, message)
            self._choose()

    def _take_from(self, open_here: list[_OpenDebugger], message: FromDebugger) -> None:
        top = open_here[-1]
        if isinstance(message, Printed):
            text = message.text
            for filename, source in self._sources.items():
                text = text.replace(filename, source.label or filename)
            if top.is_called:
                top.answer.append(text)
            elif message.rank == self._front:
                self._show(text)
            else:
                top.held.append(text)
        elif isinstance(message, Asked):
            top.asked = message
            self._show_called(message.rank, top)
            if top.is_news and self._front not in (None, message.rank):  # only now does it take what `all` sends
                self._show(f"rank {message.rank} {top.state}: `rank {message.rank}` switches to it\n")
            top.is_news = False
        elif isinstance(message, Closed):
            self._show_called(message.rank, top)
            open_here.pop()
            self.has_quit = self.has_quit or message.quits
            self.has_examined = self.has_examined or top.opened.by == "exception"
            if message.rank == self._front and not open_here:
                self._front, self._steps_since = (message.rank, self._clock()) if message.steps else (None, None)

    def left(self, fates: Mapping[int, Callable[[], str]], *, is_stopping: bool = False) -> None:
        """Close what ranks that have left the task had open. `fates` return how each has failed; empty if it has not.

        `is_stopping`: the task is being stopped: failures are no news.
        """
        with self._lock:
            for rank, fate in fates.items():
                if rank not in self._left:
                    self._left[rank] = fate()
                    self._unannounced += [rank] if self._left[rank] and not is_stopping else []
                if self._looks.pop(rank, None) is not None:
                    self._show(f"rank {rank} is not running your code now\n")
                if self._open.pop(rank, None) and rank == self._front:
                    self._front = None
            self._choose()

    def step(self) -> None:
        """Do what is due: let another rank come to the front, give up looks."""
        with self._lock:
            now = self._clock()
            if self._steps_since is not None and now > self._steps_since + timeouts.STEP_TIMEOUT_S:
                if self.stopped:
                    self._show(f"rank {self._front} continues\n")
                self._front = self._steps_since = None
            for rank in [rank for rank, since in self._looks.items() if now > since + timeouts.LOOK_TIMEOUT_S]:
                del self._looks[rank]
                self._show(f"rank {rank} does not respond: it is busy, or C code is holding the GIL\n")
            self._choose()
        self.on_step()

    def outgoing(self) -> Iterator[tuple[int, ToDebugger]]:
        with self._lock:
            taken, self._outgoing = self._outgoing, deque()
        return iter(taken)

    @property
    def is_open(self) -> bool:
        return self._front is not None

    def end(self) -> None:
        """End the task: nothing is asked any more."""
        with self._lock:
            self._close_all()
        self.on_step()

    def _close_all(self) -> None:
        self._open.clear()
        self._front = self._steps_since = None
        self._choose()

    # -------------------------------------------------------------- what is shown
    def _note_opened(self, debugger: _OpenDebugger, *, is_wanted: bool) -> None:
        """Show that a debugger is open; `is_wanted`: the user waits for it."""
        opened, is_front = debugger.opened, debugger.opened.rank == self._front
        if is_front and not opened.command:
            self._steps_since = None
        if opened.command or opened.by == "input":
            return
        if self._front is None or (opened.by == "look" and is_wanted):
            self._front, self._steps_since = opened.rank, None
            self._introduce(debugger)
        debugger.is_news = self._front != opened.rank

    def _introduce(self, debugger: _OpenDebugger) -> None:
        by = debugger.opened.by
        self._show(f"rank {debugger.opened.rank} {debugger.state}\n")
        if by in _HELP and by not in self._has_helped:
            self._show(_HELP[by] + _COMMON_HELP)
            self._has_helped.add(by)

    def _announce_failures(self) -> None:
        while self._unannounced and not (self._front is None or self.has_quit or self.has_examined):
            rank = self._unannounced.pop(0)
            self._show(f"rank {rank} {self._left[rank]}; the launch ends when you close the debugger\n")

    def _show_called(self, rank: int, debugger: _OpenDebugger) -> None:
        if debugger.is_called:
            debugger.is_called = False
            self._show(f"rank {rank}: {''.join(debugger.answer) or chr(10)}")
            debugger.answer.clear()

    def _show(self, text: str) -> None:
        self._unshown.append(text)

    def take_text(self) -> str:
        with self._lock:
            text, self._unshown = "".join(self._unshown), []
        return text

    # -------------------------------------------------------------- the prompt
    @property
    def stopped(self) -> list[int]:
        """The ranks that wait for a line: in a debugger, or in ``input``."""
        with self._lock:
            return [rank for rank, stack in sorted(self._open.items()) if stack and stack[-1].asked is not None]

    @property
    def states(self) -> list[str]:
        with self._lock:
            return [f"rank {rank} {self._open[rank][-1].state}" for rank in self.stopped]

    def _choose(self) -> None:
        """Choose the rank in front, and set its prompt. Requires the lock."""
        asked = self._choose_asked()
        if asked is None:
            self.prompt = None
        elif self.prompt is None or self.prompt.asked is not asked:
            self.prompt = Prompt(asked, f"(rank {asked.rank} of {self._world_size}) {asked.prompt}")
        if self._news.empty():
            self._news.put(None)

    def _choose_asked(self) -> Asked | None:
        is_called = any(stack[-1].is_called for stack in self._open.values() if stack)
        if (is_called or self._looks) and self._clock() < self._answers_until:
            return None  # what is shown now would come after the prompt
        asking = [] if self.has_quit or self.has_examined else self.stopped
        if self._front is None and asking:
            self._front = asking[0]
            top = self._open[self._front][-1]
            if top.opened.by != "input" and top.held:
                self._introduce(top)
        self._announce_failures()
        front = self._open.get(self._front, []) if self._front is not None else []
        if not front:
            return None
        for text in front[-1].held:
            self._show(text)
        front[-1].held.clear()
        return front[-1].asked

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=seconds)

    # -------------------------------------------------------------- the user
    def type(self, prompt: Prompt, line: str | None) -> None:
        """Take the line (None: the end of the input) for a prompt. No effect if the prompt has ended."""
        with self._lock:
            if self.prompt is not prompt or self._front is None:
                return
            rank = self._front
            top = self._open[rank][-1]
            if line is None or not (top.takes_command and self._is_ours(line.strip())):
                self._send(rank, top, line)
            self._choose()
            self._wake()

    def _send(self, rank: int, debugger: _OpenDebugger, line: str | None) -> None:
        asked, debugger.asked = debugger.asked, None
        if asked is not None:
            self._outgoing.append((rank, Typed(self._task, asked.number, line)))

    def _is_ours(self, line: str) -> bool:
        """Obey a command of the console; return False if the line is the debugger's."""
        self.prompt = None  # whatever happens, ask again
        if line == "ranks":
            for rank in range(self._world_size):
                left = (self._left[rank] or "returned") if rank in self._left else "is running"
                self._show(f"rank {rank} {stack[-1].state if (stack := self._open.get(rank)) else left}\n")
        elif found := re.fullmatch(r"rank\s+(\d+)", line):
            self._turn_to(int(found[1]))
        elif found := re.fullmatch(r"all\s+([^=(].*)", line):
            self._ask_all(found[1])
        else:
            return False
        return True

    def _turn_to(self, rank: int) -> None:
        if rank >= self._world_size:
            self._show(f"there is no rank {rank}: the ranks are 0 to {self._world_size - 1}\n")
        elif stack := self._open.get(rank):
            self._front, self._steps_since = rank, None
            self._introduce(stack[-1])
            if not stack[-1].held and stack[-1].takes_command:
                self._send(rank, stack[-1], "place")  # it may have moved since
        else:
            self._look(rank)

    def _look(self, rank: int, command: str = "") -> None:
        if rank in self._left:
            self._show(f"rank {rank} {self._left[rank] or 'is not running your code now'}\n")
            return
        self._looks[rank] = self._clock()
        self._answers_until = self._looks[rank] + timeouts.LOOK_TIMEOUT_S
        self._outgoing.append((rank, Look(self._task, command)))

    def _ask_all(self, command: str) -> None:
        self._answers_until = self._clock() + timeouts.LOOK_TIMEOUT_S
        for rank in range(self._world_size):
            stack = self._open.get(rank)
            if not stack:
                self._look(rank, command)
            elif stack[-1].takes_command:
                stack[-1].is_called = True
                self._send(rank, stack[-1], command)
            else:
                self._show(f"rank {rank} {stack[-1].refusal}\n")

    def look(self, rank: int) -> None:
        with self._lock:
            self._turn_to(rank)
            self._choose()
            self._wake()


class RemoteConsole:
    """The debug console of a run, in a kernel that has attached to it."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self.on_step: Callable[[], None] = lambda: None
        self.prompt: Prompt | None = None
        self.is_open = self.has_examined = False
        self.states: Sequence[str] = ()
        self._send = send
        self._answered: Asked | None = None
        self._unshown: deque[str] = deque()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def take(self, shown: Mapping[str, Any]) -> None:
        if shown["text"]:
            self._unshown.append(shown["text"])
        asked = Asked(**shown["prompt"]["asked"]) if shown["prompt"] else None
        if asked != self._answered:
            self._answered = None  # ranks that are started again count from the begin
        if asked is None or asked == self._answered:
            self.prompt = None
        elif self.prompt is None or self.prompt.asked != asked:
            self.prompt = Prompt(asked, shown["prompt"]["text"])
        self.is_open, self.has_examined = shown["is_open"], shown["has_examined"]
        self.states = shown["states"]
        if self._news.empty():
            self._news.put(None)

    def take_text(self) -> str:
        text = ""
        while self._unshown:
            text += self._unshown.popleft()
        return text

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=seconds)

    def type(self, prompt: Prompt, line: str | None) -> None:
        if self.prompt is prompt:
            self.prompt, self._answered = None, prompt.asked
            self._send({"do": "type", "asked": dataclasses.asdict(prompt.asked), "line": line})

    def look(self, rank: int) -> None:
        self._send({"do": "look", "rank": rank})

    def end(self) -> None:
        """Ask nothing any more: the run has ended."""
        self.prompt, self.is_open = None, False
        self.states = ()


Console: TypeAlias = "DebugConsole | RemoteConsole"
