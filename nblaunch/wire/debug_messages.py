"""The messages between a rank's debugger, or its ``input``, and the kernel, where the user types.

A rank asks for one line at a time. Requests are numbered, because an answer may cross an interrupt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OpenedBy = Literal["breakpoint", "exception", "look", "input"]
"""Why a rank waits for the user. ``look``: another thread shows the frames of the main one, which runs on."""


@dataclass(frozen=True, slots=True)
class Debugging:
    """What a task does where it would stop for the user."""

    can_type: bool = False
    """Whether the user can type lines for the ranks."""
    fails: bool = False
    """Whether ``breakpoint()`` raises an exception where no one can type; else it prints its place."""
    post_mortem: bool = False
    """Whether a rank that fails opens the debugger on its exception first."""


# ------------------------------------------------------------------ rank -> kernel
@dataclass(frozen=True, slots=True)
class Opened:
    """A debugger has opened, or the rank has called ``input``."""

    rank: int
    task: int
    by: OpenedBy
    filename: str = ""
    """Of the frame."""
    line: int = 0
    function: str = ""
    error: str = ""
    """Of ``exception``: its type and message."""
    command: str = ""
    """Of ``look``: the only command that it runs; empty if the user types."""


@dataclass(frozen=True, slots=True)
class Printed:
    """Text of the debugger, with colours as ANSI sequences."""

    rank: int
    task: int
    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """The rank waits for a line."""

    rank: int
    task: int
    number: int
    prompt: str
    """What to show after the rank's own prompt; of ``input``: its argument."""
    is_secret: bool = False
    is_command: bool = False
    """Whether the debugger takes a command: no line of ``interact``, of ``commands`` or of ``input``."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The debugger is closed, or ``input`` has its line, or was interrupted."""

    rank: int
    task: int
    steps: bool = False
    """Whether the debugger is to open again: the rank runs to its next line or breakpoint."""
    quits: bool = False
    """Whether the user has quit: the task is to be stopped."""


# ------------------------------------------------------------------ kernel -> rank
@dataclass(frozen=True, slots=True)
class Typed:
    """The line that the rank has asked for; None: the end of the input."""

    task: int
    number: int
    line: str | None


@dataclass(frozen=True, slots=True)
class Look:
    """Open a debugger beside the main thread, on the frames that it is in. No effect if one is open."""

    task: int
    command: str = ""
    """Run this alone, and close; empty: stay."""


FromDebugger = Opened | Printed | Asked | Closed
ToDebugger = Typed | Look
