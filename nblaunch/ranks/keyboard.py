"""What the user types for this rank, for its debugger and for ``input``: lines that come from the notebook."""

from __future__ import annotations

import _thread
import os
import queue
import threading
from collections.abc import Callable

from nblaunch.ranks.kernel_channel import KernelChannel
from nblaunch.wire.debug_messages import Asked, Closed, Complete, Completions, Look, Opened, ToDebugger, Typed

_MAX_COMPLETIONS = 100


class Keyboard:
    """See the module. One thread at a time has it: see `turn`.

    Args:
        voice: The channel to the kernel.

    Attributes:
        turn: Held by the thread whose debugger or ``input`` is open. Reentrant.
        can_type: Whether the user can type in the present task.
        complete: Returns the names that may follow a text, while a debugger is open.
        look: Called by the reading thread when the kernel asks for a look.
    """

    def __init__(self, voice: KernelChannel) -> None:
        self.voice = voice
        self.turn = threading.RLock()
        self.can_type = False
        self.complete: Callable[[str], list[str]] = lambda text: []
        self.look: Callable[[Look], None] = lambda message: None
        self._lines: queue.SimpleQueue[Typed] = queue.SimpleQueue()
        self._number = 0
        """Of the last request."""
        self._waiting = 0
        """The thread that waits for a line; 0: none does."""
        voice.on_typed = self._take
        voice.on_interrupt = self._release

    @property
    def is_here(self) -> bool:
        """Return True if this process is the rank, and no child that it has forked."""
        return os.getpid() == self.voice.owner

    # -------------------------------------------------------------- lines
    def ask(self, prompt: str, *, is_secret: bool = False, is_command: bool = False) -> str:
        """Wait until the user has typed a line, and return it. Hold `turn`.

        Raises:
            EOFError: The user has ended the input, or the task was interrupted while another thread waited.
            KeyboardInterrupt: The task was interrupted.
        """
        self._number += 1
        self._waiting = _thread.get_ident()
        try:
            self.voice.say(Asked(self.voice.rank, self.voice.task, self._number, prompt, is_secret, is_command))
            while True:
                typed = self._lines.get()
                if typed.number in (self._number, _ANY):
                    break
        finally:
            self._waiting = 0
        if typed.line is None:
            raise EOFError("the input has ended")
        return typed.line

    def _take(self, message: ToDebugger) -> None:
        if isinstance(message, Typed):
            self._lines.put(message)
        elif isinstance(message, Look):
            self.look(message)
        elif isinstance(message, Complete):
            _thread.start_new_thread(self._answer, (message,))  # a property of the user's may take long

    def _answer(self, message: Complete) -> None:
        try:
            found = self.complete(message.text)[:_MAX_COMPLETIONS]
        except Exception:  # noqa: BLE001  # whatever the user's __getattr__ raises
            found = []
        self.voice.say(Completions(self.voice.rank, self.voice.task, message.request, tuple(found)))

    def _release(self) -> None:
        """End the wait of a thread that no SIGINT reaches."""
        if self._waiting not in (0, threading.main_thread().ident) or self.voice.channel.closed:
            self._lines.put(Typed(self.voice.task, _ANY, None))

    # -------------------------------------------------------------- input()
    def input(self, prompt: object = "", *, is_secret: bool = False) -> str:
        """Ask the user in the notebook, as ``input`` does.

        Raises:
            EOFError: No one can type here, as in papermill, or in a child process of the rank.
        """
        text = str(prompt)
        if not (self.can_type and self.is_here):
            raise EOFError(
                f"input({text!r}): no one can type here; pass the answer as an argument, or run the cell where a "
                "person can answer"
            )
        voice = self.voice
        with self.turn:
            voice.say(Opened(voice.rank, voice.task, "input"))
            try:
                return self.ask(text, is_secret=is_secret)
            finally:
                voice.say(Closed(voice.rank, voice.task))


_ANY = -1
"""The number of a line that ends any request."""
