"""The debug console in the cell: the main thread, which waits for the launch, lets the user type."""

from __future__ import annotations

import getpass
import signal
import sys
import threading
from collections.abc import Mapping

from nblaunch.launch.debug_console import DebugConsole
from nblaunch.launch.frontend import host
from nblaunch.launch.output.transcript import Prompt
from nblaunch.launch.plan import Plan
from nblaunch.machine import timeouts
from nblaunch.wire.debug_messages import Debugging
from nblaunch.wire.messages import Payload, Source
from nblaunch.wire.session_messages import Question

HERE = "cell"


def console_for(plan: Plan, payload: Payload, sources: Mapping[str, Source]) -> DebugConsole:
    """Return the console of a launch that the current thread starts.

    Args:
        plan: Its settings.
        payload: What it runs.
        sources: The cells that define that.
    """
    can_type = host().can_type() and threading.current_thread() is threading.main_thread()
    is_question = isinstance(payload.function, Question)
    post_mortem = not is_question and (plan.on_error == "debug" or host().examines())
    return DebugConsole(plan.world_size, sources, Debugging(can_type, plan.on_breakpoint == "fail", post_mortem))


class _WithdrawnError(Exception):
    """The line is not needed any more: the launch has ended, or it was typed elsewhere."""


class CellInput:
    """See the module.

    Args:
        console: The console of the launch.
    """

    def __init__(self, console: DebugConsole) -> None:
        self._console = console
        self._printed = 0
        """Parts of the console that the cell shows."""
        self._lock = threading.Lock()
        self._prompt: Prompt | None = None
        """What the cell waits for."""
        self._is_withdrawn = False
        self._is_elsewhere = False
        """The user has typed in the panel, and goes on there."""

    def serve(self) -> None:
        """Print what debuggers have printed, and read lines while one is open. Call it in the main thread.

        Raises:
            KeyboardInterrupt: The user has interrupted the cell.
        """
        console = self._console
        while console.is_open:
            prompt = console.prompt  # first: the text before it is then printed
            self._print()
            if self._is_elsewhere:
                break
            if prompt is None:
                console.wait(self._printed, timeouts.SIGNAL_CHECK_INTERVAL_S)
                continue
            try:
                console.type(prompt.number, self._read(prompt), HERE)
            except _WithdrawnError:
                continue
        self._print()
        if console.has_examined:
            host().was_examined()

    def _print(self) -> None:
        self._printed, parts = self._console.shown(self._printed)
        self._is_elsewhere = self._is_elsewhere or any(part.typed_in not in ("", HERE) for part in parts)
        text = "".join(part.text for part in parts if part.typed_in != HERE)  # the page shows what was typed in its box
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _read(self, prompt: Prompt) -> str | None:
        """Read a line; None at the end of the input.

        Raises:
            KeyboardInterrupt: The user has interrupted the cell.
        """
        try:
            try:
                self._prompt, self._is_withdrawn = prompt, False
                self._console.on_withdrawn = self._withdraw
                if self._console.prompt is not prompt:
                    raise _WithdrawnError
                return getpass.getpass(prompt.text) if prompt.is_secret else input(prompt.text)
            finally:
                with self._lock:
                    self._prompt = None
        except EOFError:
            return None
        except KeyboardInterrupt:
            if self._is_withdrawn:
                raise _WithdrawnError from None
            raise

    def _withdraw(self) -> None:
        """End the main thread's wait, from another thread."""
        with self._lock:
            if self._prompt is None or threading.current_thread() is threading.main_thread():
                return
            self._prompt, self._is_withdrawn = None, True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
