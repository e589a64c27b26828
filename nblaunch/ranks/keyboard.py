"""The terminal of this rank in the notebook: lines that the user types for its debugger and ``input``, and a screen."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from nblaunch.machine import timeouts
from nblaunch.ranks.kernel_channel import KernelChannel
from nblaunch.wire.debug_messages import Asked, Closed, Look, Opened, Printed, ToDebugger, Typed

_MAX_TEXT = 1 << 20
"""Characters that one command may print."""


class Keyboard:
    """See the module. One thread at a time has it: see `turn`.

    Args:
        link: The channel to the kernel.

    Attributes:
        turn: Held by the thread whose debugger or ``input`` is open. Reentrant.
        can_type: Whether the user can type in the present task.
        look: Called by the reading thread when the kernel asks for a look.
    """

    def __init__(self, link: KernelChannel) -> None:
        self.link = link
        self.turn = threading.RLock()
        self.can_type = False
        self.look: Callable[[Look], None] = lambda message: None
        self._lines: queue.SimpleQueue[Typed | None] = queue.SimpleQueue()
        """Answers to the last request. None: something has happened."""
        self._number = 0
        """Of the last request."""
        self._is_let_go = False
        """The thread that waits for a line is to end its input."""
        link.on_typed = self._take
        link.on_interrupt = self._release

    @property
    def is_here(self) -> bool:
        """Return True if this process is the rank, and no child that it has forked."""
        return os.getpid() == self.link.owner

    # -------------------------------------------------------------- lines
    def ask(self, prompt: str, *, is_secret: bool = False, is_command: bool = False) -> str:
        """Wait until the user has typed a line, and return it. Hold `turn`.

        Raises:
            EOFError: The user has ended the input, or the task was interrupted while another thread waited.
            KeyboardInterrupt: The task was interrupted.
        """
        link = self.link
        self._number, self._lines, self._is_let_go = self._number + 1, queue.SimpleQueue(), False
        link.send(Asked(link.rank, link.task, self._number, prompt, is_secret, is_command))
        typed: Typed | None = None
        while typed is None or typed.number != self._number:
            self._check_interrupt()
            with contextlib.suppress(queue.Empty):
                typed = self._lines.get(timeout=timeouts.TYPED_CHECK_INTERVAL_S)
        if typed.line is None:
            raise EOFError("the input has ended")
        return typed.line

    def _check_interrupt(self) -> None:
        """Raise an error if no one waits for the line any more."""
        if self.link.channel.closed or self._is_let_go:
            raise EOFError("the input has ended")
        if threading.current_thread() is threading.main_thread():
            if self.link.interrupted:  # and has not raised: it came between two lines of ours
                raise KeyboardInterrupt
        elif self.link.is_stopping:
            raise EOFError("the task was interrupted")

    def let_go(self) -> None:
        """End the input of the thread that waits for a line, if one does."""
        self._is_let_go = True
        self._lines.put(None)

    def _take(self, message: ToDebugger) -> None:
        if isinstance(message, Typed):
            self._lines.put(message)
        else:
            self.look(message)

    def _release(self) -> None:
        """Let the thread that waits for a line see the interrupt: no SIGINT reaches any but the main one."""
        self._lines.put(None)

    # -------------------------------------------------------------- input()
    def input(self, prompt: object = "", *, is_secret: bool = False) -> str:
        """Ask the user in the notebook, as ``input`` does.

        Raises:
            EOFError: No one can type here, as in papermill, or in a child process of the rank.
        """
        text = str(prompt)
        call = f"{'getpass' if is_secret else 'input'}({text!r})"
        if not self.is_here:
            raise EOFError(f"{call}: this is a child process of the rank, which has no keyboard; ask in the rank")
        if not self.can_type:
            raise EOFError(
                f"{call}: no one can type here; pass the answer as an argument, or run the cell where a person can "
                "answer"
            )
        link = self.link
        if link.is_stopping:
            raise EOFError(f"{call}: the task is being stopped, so no one is asked")
        with self.turn:
            link.send(Opened(link.rank, link.task, "input"))
            try:
                return self.ask(text, is_secret=is_secret)
            finally:
                link.send(Closed(link.rank, link.task))


class Screen(io.TextIOBase):
    """Where the debugger prints: text goes to the notebook before each request for a line.

    It stands in for ``sys.stdout`` while a command runs. What other threads print meanwhile goes where it would go.
    """

    def __init__(self, keyboard: Keyboard) -> None:
        super().__init__()
        self._keyboard = keyboard
        self._parts: deque[str] = deque()
        self.thread = 0
        """The debugger's."""
        self.others: Any = sys.stdout
        """Where other threads print."""

    def write(self, text: str, /) -> int:
        """Print text."""
        if threading.get_ident() != self.thread:
            return int(self.others.write(text))
        self._parts.append(text)
        return len(text)

    def send(self) -> None:
        """Send what was printed."""
        text = "".join(self._parts.popleft() for _ in range(len(self._parts)))
        if len(text) > _MAX_TEXT:
            text = f"{text[:_MAX_TEXT]}\n… {len(text) - _MAX_TEXT:,} more characters\n"
        if text:
            link = self._keyboard.link
            link.send(Printed(link.rank, link.task, text))


class ErrorScreen(io.TextIOBase):
    """Stands in for ``sys.stderr`` as a screen does for ``sys.stdout``."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen, self._others = screen, sys.stderr

    def write(self, text: str, /) -> int:
        """Print text."""
        is_others = threading.get_ident() != self._screen.thread
        return int((self._others if is_others else self._screen).write(text))


class Lines:
    """The debugger's stdin."""

    def __init__(self, keyboard: Keyboard, screen: Screen, is_command: Callable[[], bool]) -> None:
        self._keyboard, self._screen, self._is_command = keyboard, screen, is_command

    def readline(self) -> str:
        """Return what the user types; empty at the end of the input."""
        self._screen.send()
        with contextlib.suppress(EOFError):
            return self._keyboard.ask("", is_command=self._is_command()) + "\n"
        return ""
