"""A debugger that is open in a rank, or its ``input``: what it waits for, and what the console says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nblaunch.wire.debug_messages import Asked, Opened, OpenedBy
from nblaunch.wire.messages import Source

_HELP: Mapping[OpenedBy, str] = {
    "breakpoint": "n: next line, s: step into, c: continue, q or EOF: stop all ranks, ",
    "exception": "q: close, ",
    "look": "q: close, ",
}
_COMMON_HELP = (
    "p x: print x, w: stack, u, d: up, down, h: help\n"
    "ranks: what they do, rank 0: turn to rank 0, all p x: ask every rank\n"
)
HELP_ON = {
    "ranks": "ranks: show what every rank does\n",
    "rank": "rank N: turn to rank N; if no debugger is open there, look at its frames while it runs on\n",
    "all": "all COMMAND: run a command in every rank, as in `all p loss` or `all c`\n",
}
"""By word of the console."""
_STATES = {"breakpoint": "at a breakpoint", "exception": "has raised", "look": "runs on", "input": "waits for input"}


@dataclass(slots=True)
class OpenDebugger:
    """See the module."""

    opened: Opened
    sources: Mapping[str, Source]
    """The cells, by file name."""
    is_news: bool = False
    """The user is to be told once it takes a command."""
    asked: Asked | None = None
    held: list[str] = field(default_factory=list)
    """What it has printed while another rank was in front."""
    is_called: bool = False
    """``all`` has sent it a command: show its answer, whichever rank is in front."""
    answer: list[str] = field(default_factory=list)
    """What it has printed for that."""
    in_step: bool = False
    """An ``input`` in a line that the user has stepped over: the debugger opens again after it."""

    @property
    def state(self) -> str:
        """What the rank does, and where."""
        opened, source = self.opened, self.sources.get(self.opened.filename)
        where = f", {(source.label if source else '') or opened.filename}, line {opened.line}" if opened.line else ""
        error = f" {opened.error}" if opened.error else ""
        verb = "has stopped " if opened.by == "breakpoint" else ""
        return f"{verb}{_STATES[opened.by]}{error}{where}"

    @property
    def takes_command(self) -> bool:
        """True if it waits for a command, not for a line of ``interact``, of ``commands`` or of ``input``."""
        return self.asked is not None and self.asked.is_command

    @property
    def refusal(self) -> str:
        """Why it takes no command now."""
        if self.asked is None:
            return "is busy with its last command"
        return _STATES["input"] if self.opened.by == "input" else "waits for another line, not for a command"

    def help(self, *, is_first: bool) -> str:
        """Return which commands it has; `is_first`: also those of all debuggers. Empty for ``input``."""
        special = _HELP.get(self.opened.by, "")
        return special and special + (_COMMON_HELP if is_first else "h: help\n")


def with_labels(text: str, sources: Mapping[str, Source]) -> str:
    """Name cells as the notebook does."""
    for filename, source in sources.items():
        if source.label:
            text = text.replace(filename, source.label)
    return text
