"""What a launch asks of the place that it is called from: a notebook registers itself here, else it is a script."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from nblaunch.errors import ArgumentError
from nblaunch.launch.views.text_view import TextView, is_terminal, plain_writer
from nblaunch.launch.views.view import NullView, View

_registered: Host | None = None
_LOOK_UP_EVERY_S = 0.5
"""Python does not see a signal that comes as it begins to wait, until the wait is over."""


class Host(Protocol):
    """The place that a launch is called from."""

    def view(self, choice: str) -> View:
        """What shows a launch; see `view_choice`."""

    def cell_label(self, filename: str) -> str:
        """How the notebook names the cell of this file name, such as ``Cell In[3]``; empty where it is no cell's."""

    def cuda_cell(self) -> str:
        """The cell that started CUDA in this process, such as ``cell [7]``; empty where none did."""

    def notebook_names(self) -> dict[str, Any] | None:
        """The notebook's global names; None outside a notebook."""

    def wait(self, over: threading.Event, timeout: float | None = None) -> bool:
        """Wait in the caller's thread until this is set, for `timeout` seconds at most; return whether it is."""


class ScriptHost:
    """A script, or a plain Python prompt."""

    def view(self, choice: str) -> View:
        if view_choice(choice) == "none":
            return NullView()
        terminal = is_terminal(sys.stdout)
        return TextView(plain_writer(), is_terminal=terminal, status=terminal)

    def cell_label(self, filename: str) -> str:
        return ""

    def cuda_cell(self) -> str:
        return ""

    def notebook_names(self) -> dict[str, Any] | None:
        return None

    def wait(self, over: threading.Event, timeout: float | None = None) -> bool:
        return wait_in_steps(over, timeout)


def wait_in_steps(
    over: threading.Event,
    timeout: float | None,
    step: float = _LOOK_UP_EVERY_S,
    between: Callable[[], None] = lambda: None,
) -> bool:
    """Wait until this is set, for `timeout` seconds at most, and call `between` after every `step` seconds of it.

    Returns:
        Whether it is set.
    """
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while not over.wait(max(0.0, min(step, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return False
        between()
    return True


def host() -> Host:
    """The host that is registered, else a script's."""
    return _registered or ScriptHost()


def register(host: Host | None) -> None:
    """Make this the host of later launches; None for a script's."""
    global _registered
    _registered = host


def view_choice(choice: str) -> Literal["auto", "text", "none"]:
    """The view that is wanted: `choice`, or for "auto" what ``NBLAUNCH_VIEW`` says where it is set.

    Raises:
        ArgumentError: It, or the variable, is none of "auto", "text" and "none".
    """
    argument, value = "view", choice
    if choice == "auto" and os.environ.get("NBLAUNCH_VIEW"):
        argument, value = "NBLAUNCH_VIEW", os.environ["NBLAUNCH_VIEW"]
    for known in ("auto", "text", "none"):
        if value == known:
            return known
    raise ArgumentError(f'{argument}={value!r}: use "auto", "text" or "none"')
