"""Tab completion of the options of ``%%distributed``, and of the names that a session's ranks have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from nblaunch.engines.current import engine
from nblaunch.launch import live_sessions
from nblaunch.launch.plan import BACKENDS, DEVICES
from nblaunch.launch.session import Session
from nblaunch.notebook.magics import ACTIONS, DistributedMagics

_VALUES = {
    "--device": DEVICES,
    "--backend": BACKENDS,
    "--start-method": engine.start_methods,
    "--view": ("auto", "text", "none"),
}


@context_matcher()
def complete_distributed(context: Any) -> dict[str, Any]:
    """Complete options and their values, as an IPython matcher."""
    line = context.line_with_cursor
    if context.cursor_line > 0 and context.full_text.lstrip().startswith(("%%distributed", "%%rank")):
        return _names_of_ranks(context)
    magic = next((name for name in ("%%distributed", "%distributed") if line.startswith(name + " ")), None)
    if magic is None or context.cursor_line > 0:
        return {"completions": []}
    words = line[: context.cursor_position].split(" ")
    before, token = words[-2], words[-1]
    actions = DistributedMagics.distributed.parser._actions
    options = tuple(option for action in actions for option in action.option_strings if option.startswith("--"))
    choices = _VALUES.get(before) or (ACTIONS if magic == "%distributed" else options)
    fitting = [choice for choice in choices if choice.startswith(token)]
    return {
        "completions": [SimpleCompletion(choice, type="option") for choice in fitting],
        "suppress": bool(fitting),
        "matched_fragment": token,
    }


def _session_of(cell: str) -> Session | None:
    """Return the session that a cell would run in; None for ranks of its own."""
    words = cell.lstrip().split("\n", 1)[0].split()
    if "--fresh" in words:
        return None
    return live_sessions.find(words[words.index("--session") + 1] if "--session" in words[:-1] else None)


def inspecting(shell: Any) -> Callable[..., Any]:
    """Return a replacement of `shell.object_inspect_mime` that also knows the names of a session's ranks.

    The notebook's own names come first: the shell is not told which cell a name stands in.
    """
    of_notebook = shell.object_inspect_mime

    def inspect(name: str, *args: Any, **options: Any) -> Any:
        try:
            return of_notebook(name, *args, **options)
        except KeyError:
            session = live_sessions.find()
            text = session.inspect(name) if session is not None else ""
            if session is None or not text:
                raise
            return {"text/plain": f"In the ranks of session {session.name}\n{text}"}

    return inspect


def _names_of_ranks(context: Any) -> dict[str, Any]:
    """Complete names that the session's ranks have; IPython adds the notebook's."""
    session = _session_of(context.full_text)
    found = re.search(r"[^\W\d][\w.]*$", context.text_until_cursor)
    if session is None or found is None:
        return {"completions": []}
    names = session.complete(found[0])
    return {
        "completions": [SimpleCompletion(name, type="rank") for name in names],
        "suppress": False,
        "matched_fragment": found[0],
    }
