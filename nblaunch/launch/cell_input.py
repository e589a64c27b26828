"""The debug console in the cell: the main thread, which waits for the launch, lets the user type."""

from __future__ import annotations

import getpass
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence

from nblaunch.launch.debug_console import Console, Prompt
from nblaunch.launch.frontend import host
from nblaunch.launch.options import Options
from nblaunch.launch.text_view import is_terminal
from nblaunch.launch.views import Note, Stream, View
from nblaunch.machine import timeouts
from nblaunch.wire.messages import Debugging

_log = logging.getLogger(__name__)


def debugging_of(options: Options, *, is_seen: bool) -> Debugging:
    """Return where the ranks of a launch may stop for the user; `is_seen`: the user would see that one waits."""
    can_type = host().can_type() and threading.current_thread() is threading.main_thread() and is_seen
    post_mortem = options.on_error == "debug" or host().examines()
    return Debugging(can_type or options.on_breakpoint == "wait", options.on_breakpoint == "fail", post_mortem)


class CellInput:
    """See the module."""

    def __init__(self, console: Console, view: View) -> None:
        self.console, self._view = console, view
        self._is_attended = False
        """A caller waits in the main thread."""
        self._noted: Sequence[str] = ()
        """What ranks were doing when a note named them last."""
        self._reading: Prompt | None = None
        """What the cell waits for."""
        self._asked: Prompt | None = None
        """What it has waited for last."""
        self._write: Callable[[str, Stream], None] = lambda text, stream: None
        """Writes to the cell that waits, from any thread."""

    def begin(self, *, blocking: bool) -> None:
        """Begin the launch; `blocking`: its caller waits at once."""
        self._is_attended = blocking
        self.console.on_step = self._meanwhile

    def wait(self, over: threading.Event, timeout: float | None, *, is_stopping: bool = False) -> bool:
        """Wait as `Frontend.wait` does. In the main thread, let a user who can type debug meanwhile.

        `is_stopping`: the user has interrupted the launch. The prompt is about to end, and is not shown again.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if threading.current_thread() is not threading.main_thread() or not host().can_type():
            return host().wait(over, timeout)  # a run may ask: to answer with the end of the input would end it
        try:
            self._is_attended = True
            return host().wait(over, timeout, lambda: self._serve(deadline, is_stopping))
        finally:
            self._is_attended = False

    def _serve(self, deadline: float, is_stopping: bool) -> None:
        """Print what debuggers have printed, and read lines while one is open. A line may come after `deadline`."""
        console = self.console
        while console.is_open and time.monotonic() < deadline:
            prompt = console.prompt  # first: the text before it is then printed
            self._print()
            if prompt is None or (is_stopping and prompt is self._asked):
                console.wait(max(0.0, min(timeouts.SIGNAL_CHECK_INTERVAL_S, deadline - time.monotonic())))
            else:
                self._asked = prompt
                console.type(prompt, self._read(prompt))
        self._print()
        if console.has_examined:
            host().was_examined()

    def _print(self) -> None:
        if text := self.console.take_text():
            sys.stdout.write(text)
            sys.stdout.flush()

    def _read(self, prompt: Prompt) -> str | None:
        try:
            self._write = host().writer()  # first: `_meanwhile` writes once there is a prompt
            self._reading = prompt
            if self.console.prompt is not prompt:  # nothing would say that its rank has gone
                return None
            return getpass.getpass(prompt.text) if prompt.asked.is_secret else input(prompt.text)
        except EOFError:
            return None
        finally:
            self._reading = None

    def _meanwhile(self) -> None:
        """While the main thread waits for a line: print what is new, from the supervisor's thread."""
        if not self._is_attended:
            states = self.console.states
            new, self._noted = [state for state in states if state not in self._noted], states
            if new:
                how = "to type there, call wait() or result(), or run %distributed debug"
                self._view.on(Note(f"{'; '.join(new)}: {how}"))
        prompt = self._reading
        if prompt is None:
            return
        text = self.console.take_text()
        if self.console.prompt is not prompt and self._reading is prompt:
            self._reading = None
            text += "this prompt has ended: press Enter, nothing that you type here is used\n"
        if not text:
            return
        again = f"\n{{}}{prompt.text}" if is_terminal(sys.stdout) else "{}"
        try:
            self._write(again.format(text), "out")
        except Exception:  # noqa: BLE001  # a replaced stdout may raise anything; the task goes on
            _log.warning("nblaunch: the cell could not show debugger output", exc_info=True)
