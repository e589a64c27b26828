"""How IPython shows the errors of nblaunch: with the user's frames alone.

IPython hides frames that ask for it, but never the last one, which is nblaunch's own.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from nblaunch.errors import NblaunchError
from nblaunch.machine.own_code import PACKAGE


class CellSyntaxError(SyntaxError):
    """The SyntaxError of a cell for the ranks.

    Attributes:
        shown: The error itself, which IPython shows.
    """

    def __init__(self, shown: SyntaxError) -> None:
        super().__init__(*shown.args)
        self.shown = shown


_SHOWN = (CellSyntaxError, NblaunchError)


def register(shell: Any) -> None:
    """Let this shell show our errors, unless the user shows some himself: IPython has one handler."""
    if not shell.custom_exceptions:
        shell.set_custom_exc(_SHOWN, _show)


def unregister(shell: Any) -> None:
    """Undo `register`."""
    if shell.custom_exceptions == _SHOWN:
        shell.set_custom_exc((), None)


def _show(shell: Any, kind: type, error: Any, trace: TracebackType | None, tb_offset: int | None = None) -> None:
    if isinstance(error, CellSyntaxError):
        shown = error.shown
        lines = shell.SyntaxTB.structured_traceback(type(shown), shown, [])
        shell._showtraceback(type(shown), shown, lines)
    elif hasattr(error, "_render_traceback_"):
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
    else:
        sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
        lines = shell.InteractiveTB.structured_traceback(kind, error, _of_user(trace), tb_offset=tb_offset)
        shell._showtraceback(kind, error, lines)


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without nblaunch's frames, and without those of IPython that called it at the end."""
    entries: list[TracebackType] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
            entries.append(trace)
        trace = trace.tb_next
    while entries and "__tracebackhide__" in entries[-1].tb_frame.f_locals:
        entries.pop()
    kept: TracebackType | None = None
    for entry in reversed(entries):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept
