"""Tab completion of the options of ``%%distributed``; completion and inspection of the names of a session's ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from IPython.core import completer
from IPython.core.getipython import get_ipython

from nblaunch.launch import session as live_sessions
from nblaunch.launch.options import TABLE
from nblaunch.launch.session import Session
from nblaunch.notebook.actions import COMMANDS, command_of
from nblaunch.notebook.cells import goes_to_session
from nblaunch.notebook.magics import CELL

# Kaggle and Colab have IPython 7.34, and their users cannot upgrade: a new one crashes these runtimes.
Completion: Callable[..., Any] = getattr(completer, "SimpleCompletion", SimpleNamespace)


def as_matcher(completions: Callable[[Any], dict[str, Any]]) -> Callable[[Any], Any]:
    """Return a function as a matcher of IPython's completer.

    Before 8.6, matchers know the cursor's line alone: a cell's options are completed, but in the cell below them not
    the names of its session's ranks.
    """
    if hasattr(completer, "context_matcher"):
        return completer.context_matcher()(completions)  # type: ignore[no-any-return]

    def matcher(token: str) -> list[str]:
        source: Any = get_ipython().Completer  # type: ignore[union-attr]  # which has called this
        line, before = source.line_buffer, source.text_until_cursor
        context = SimpleNamespace(
            full_text=line, line_with_cursor=line, text_until_cursor=before, cursor_line=0, cursor_position=len(before)
        )
        return [each.text for each in completions(context)["completions"]]

    return matcher


@as_matcher
def complete_distributed(context: Any) -> dict[str, Any]:
    line = context.line_with_cursor
    if _session_of(context.full_text, context.cursor_line) is not None:
        return _names_of_ranks(context)
    magic = next((name for name in ("%%distributed", "%distributed") if line.startswith(name + " ")), None)
    if magic is None or context.cursor_line > 0:
        return {"completions": []}
    words = line[: context.cursor_position].split(" ")
    before, token = words[-2], words[-1]
    name = command_of(words[1:-1])
    parser = CELL if magic == "%%distributed" else COMMANDS[name].parser if name else None
    flags = parser._option_string_actions if parser else {}
    option = TABLE.get(flags[before].dest) if before in flags else None
    if option is not None and option.choices:
        choices = [*option.choices]
    elif token.startswith("-") or magic == "%%distributed":
        choices = [flag for flag in flags if flag.startswith("--")]
    else:
        choices = _words_after(" ".join(words[1:-1]))
    fitting = [choice for choice in choices if choice.startswith(token)]
    return {
        "completions": [Completion(text=choice, type="option") for choice in fitting],
        "suppress": bool(fitting),
        "matched_fragment": token,
    }


def _words_after(name: str) -> list[str]:
    if name == "auto":
        return ["on", "off"]
    begin = f"{name} ".lstrip()
    return [*dict.fromkeys(each.removeprefix(begin).split()[0] for each in COMMANDS if each.startswith(begin))]


def _session_of(cell: str, line: int = 1) -> Session | None:
    """Return the session that a line of a cell would run in; None for the notebook, or for ranks of its own."""
    words = cell.lstrip().split("\n", 1)[0].split() or [""]
    if words[0] not in ("%%distributed", "%%rank"):
        return live_sessions.find() if goes_to_session(get_ipython(), cell) else None
    if "--fresh" in words or not line:
        return None
    return live_sessions.find(words[words.index("--session") + 1] if "--session" in words[:-1] else None)


def inspect_ranks(shell: Any) -> None:
    """Let Shift-Tab and ``name?`` know the names that a session's ranks have and the notebook does not.

    With ``%distributed auto on``, those of the ranks come first.
    """
    inspect_notebook = shell.object_inspect_mime

    def inspect(name: str, *args: Any, **options: Any) -> Any:
        if goes_to_session(shell, name) and (found := _inspected(name)):
            return found
        try:
            return inspect_notebook(name, *args, **options)
        except KeyError:
            if found := _inspected(name):
                return found
            raise

    shell.object_inspect_mime = inspect


def _inspected(name: str) -> dict[str, str] | None:
    session = live_sessions.find()
    text = session.inspect(name) if session is not None else ""
    return {"text/plain": f"In the ranks of session {session.name}\n{text}"} if session is not None and text else None


def _names_of_ranks(context: Any) -> dict[str, Any]:
    """Complete names that the session's ranks have; IPython adds the notebook's."""
    session = _session_of(context.full_text)
    found = re.search(r"[^\W\d][\w.]*$", context.text_until_cursor)
    if session is None or found is None:
        return {"completions": []}
    names = session.complete(found[0])
    return {
        "completions": [Completion(text=name, type="rank") for name in names],
        "suppress": False,
        "matched_fragment": found[0],
    }
