"""``%distributed auto on``: every cell gets ``%%distributed`` on top, by a transformer of IPython's input."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from IPython.core.getipython import get_ipython

from nblaunch.launch import live_sessions

_OWN = re.compile(
    r"%%(?!(time|timeit|prun)\b)|%(distributed|load_ext|reload_ext|unload_ext|autoreload|pip|conda|mamba|uv)\b"
)
"""The beginning of a cell that runs in the notebook."""
_HELP = re.compile(r"\?{0,2}[\w.%*]+\?{0,2}")
"""``name?`` and its other forms."""
_paused = ContextVar("paused", default=False)
"""Of one thread: another may read the notebook's cells while the user runs one."""


def set_auto(shell: Any, is_on: bool) -> None:
    """Send every cell to the session, or no longer."""
    transformers = shell.input_transformers_cleanup
    if _to_session in transformers:
        transformers.remove(_to_session)
    if is_on:
        transformers.append(_to_session)


def goes_to_session(shell: Any, cell: str) -> bool:
    """Return True if every cell is sent to the session, this one too."""
    first = cell.lstrip().split("\n", 1)[0]
    return _to_session in getattr(shell, "input_transformers_cleanup", ()) and _OWN.match(first) is None


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Leave cells alone for a while: the body of a cell magic is transformed as well."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


def resume() -> None:
    """End a pause that an interrupt has cut short: a cell's context outlives the cell."""
    _paused.set(False)


def _is_of_ranks(help_line: str) -> bool:
    """Return True if the ranks alone have the name that help is wanted on."""
    name, session, shell = help_line.strip("?").partition(".")[0], live_sessions.find(), get_ipython()
    if session is None or shell is None or name in shell.user_ns:
        return False
    return any(bound.name == name for names in session.who() for bound in names)


def _to_session(lines: list[str]) -> list[str]:
    """Put the magic on top of a cell; remove ``%%local``, so that IPython runs the cell as any other.

    Raises:
        SyntaxError: The session has ended: the cell was not meant for the notebook.
    """
    first, *rest = [line.strip() for line in lines if line.strip()] or [""]
    is_help = not rest and "?" in first and _HELP.fullmatch(first) is not None
    if not _paused.get() and first == "%%local":
        below = list(itertools.dropwhile(lambda line: not line.strip(), lines[1:]))
        return below if below and below[0].startswith("%%") else ["\n", *lines[1:]]  # lines are counted as typed
    if _paused.get() or not first or _OWN.match(first) or (is_help and not _is_of_ranks(first)):
        return lines
    if live_sessions.find() is None:
        raise SyntaxError(
            f"%distributed auto is on, but {live_sessions.how_to_start()}, or run cells here again with "
            "`%distributed auto off`"
        )
    return ["%%distributed\n", *lines]
