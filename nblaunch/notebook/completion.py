"""Tab completion of the options of ``%%distributed``, and of the names that a session's ranks have."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from nblaunch.launch import live_sessions
from nblaunch.launch.plan import BACKENDS, DEVICES, START_METHODS
from nblaunch.notebook.magics import ACTIONS, DistributedMagics

_VALUES = {
    "--device": DEVICES,
    "--backend": BACKENDS,
    "--start-method": START_METHODS,
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


def _names_of_ranks(context: Any) -> dict[str, Any]:
    """Complete names that the session's ranks have; IPython adds the notebook's."""
    session = live_sessions.find()
    found = re.search(r"[^\W\d][\w.]*$", context.text_until_cursor)
    if session is None or found is None:
        return {"completions": []}
    names = session.complete(found[0])
    return {
        "completions": [SimpleCompletion(name, type="rank") for name in names],
        "suppress": False,
        "matched_fragment": found[0],
    }
