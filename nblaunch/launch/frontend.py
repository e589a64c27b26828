"""The frontend that a launch is called from: a script, or a notebook once it has registered."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from nblaunch.launch.cell_statements import CellSource
from nblaunch.launch.session_state import SessionState
from nblaunch.launch.text_view import TextView, is_terminal, plain_writer
from nblaunch.launch.views import NullView, Stream, View
from nblaunch.machine import timeouts
from nblaunch.machine.arguments import one_of

_registered: Frontend | None = None


class Frontend:
    """Where a launch is called from: a script, or a plain Python prompt. A notebook's overrides the methods."""

    def view(self, choice: str) -> View:
        """Return a view for one launch; see `view_choice`."""
        if view_choice(choice) == "none":
            return NullView()
        terminal = is_terminal(sys.stdout)
        return TextView(plain_writer(), is_terminal=terminal, status=terminal)

    def writer(self) -> Callable[[str, Stream], None]:
        """Return a function that writes to the present cell, also later and from other threads."""
        return plain_writer()

    def cell_label(self, filename: str) -> str:
        """Return the label of the cell with this file name, such as ``Cell In[3]``; empty if it is no cell."""
        return ""

    def notebook(self) -> str:
        """Return the path of the notebook, or of the script; empty if it is not known."""
        return sys.argv[0] if sys.argv else ""

    def show_html(self, html: str, text: str) -> None:
        """Show HTML in this cell, or the text that stands for it."""
        plain_writer()(f"{text}\n", "out")

    def notebook_names(self) -> dict[str, Any] | None:
        """Return the notebook's global namespace; None outside a notebook."""
        return None

    def cells(self) -> list[CellSource]:
        return []

    def show_session(self, state: Callable[[], SessionState]) -> None:
        """Show a session from now until it is stopped."""

    def forget_thread(self) -> None:
        """Release what the frontend holds for the calling thread, which is about to end."""

    def can_type(self) -> bool:
        """Return True if the user can answer ``input`` in this cell."""
        return sys.stdin is not None and is_terminal(sys.stdin) and is_terminal(sys.stdout)

    def examines(self) -> bool:
        """Return True if the user has asked for a debugger after each exception, by ``%pdb on``."""
        return False

    def was_examined(self) -> None:
        """Open no other debugger on the exception that this cell raises: the user has seen it in its rank."""

    def wait(
        self, over: threading.Event, timeout: float | None = None, between: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait in the calling thread for up to `timeout` seconds (None: forever). Return True if `over` is set.

        `between` is called again and again meanwhile, in the main thread only.
        """
        in_main = threading.current_thread() is threading.main_thread()
        return wait_in_steps(over, timeout, between=between if in_main else lambda: None)


def wait_in_steps(
    over: threading.Event,
    timeout: float | None,
    step: float | None = None,
    between: Callable[[], None] = lambda: None,
) -> bool:
    """Wait for `over` in steps short enough to notice signals, and call `between` after each. Return True if it is set.

    `timeout` None waits forever. A step takes `timeouts.SIGNAL_CHECK_INTERVAL_S` by default.
    """
    step = timeouts.SIGNAL_CHECK_INTERVAL_S if step is None else step
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while not over.wait(max(0.0, min(step, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return False
        between()
    return True


def host() -> Frontend:
    return _registered or Frontend()


def register(frontend: Frontend | None) -> None:
    global _registered
    _registered = frontend


def view_choice(choice: str) -> str:
    wanted = os.environ.get("NBLAUNCH_VIEW") if choice == "auto" else ""
    return one_of("NBLAUNCH_VIEW" if wanted else "view", wanted or choice, ("auto", "text", "none"))
