"""The IPython extension, ``%load_ext nblaunch``: loading, unloading, and completion of options and of ranks' names."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from IPython.core import completer
from IPython.core.getipython import get_ipython

from nblaunch.engines import current as engines
from nblaunch.errors import StartError, warn
from nblaunch.launch import frontend
from nblaunch.launch import session as live_sessions
from nblaunch.launch.options import TABLE
from nblaunch.launch.session import Session
from nblaunch.notebook.actions import COMMANDS, command_of
from nblaunch.notebook.cells import goes_to_session, set_auto
from nblaunch.notebook.magics import CELL, DistributedMagics
from nblaunch.notebook.notebook_frontend import NotebookFrontend, can_show_panels, import_widget
from nblaunch.notebook.record import profile_html
from nblaunch.profiles.profile import Profile
from nblaunch.transfer.parcel import sent_data_cache

_BEFORE, _AFTER = "pre_run_cell", "post_run_cell"


def register_frontend(shell: Any) -> NotebookFrontend:
    """Make this shell the frontend of launches. Repeated calls do nothing."""
    current = frontend.host()
    if isinstance(current, NotebookFrontend) and current.shell is shell:
        return current
    notebook = NotebookFrontend(shell)
    frontend.register(notebook)
    colab = sys.modules.get("google.colab.output")
    if colab is not None:  # here, in the main thread: a thread that enables widgets enables its own displays alone
        colab.enable_custom_widget_manager()
    shell.events.register(_BEFORE, notebook.before_cell)
    shell.events.register(_AFTER, notebook.after_cell)
    shell.display_formatter.formatters["text/html"].for_type(Profile, profile_html)
    return notebook


def load(shell: Any) -> None:
    register_frontend(shell)
    shell.register_magics(DistributedMagics)
    matchers = _matchers(shell)
    if complete_distributed not in matchers:
        matchers.append(complete_distributed)
    warm_up()


def warm_up() -> None:
    """Prepare for the first launch in the background: the fork server, and the panel's packages.

    Not torch: while a thread imports it, code of the user's that finds it in ``sys.modules`` would fail.
    """
    if os.environ.get("NBLAUNCH_WARM_UP") == "0":
        return
    try:
        engines.engine.warm_up()
    except StartError as error:  # the next launch raises it
        warn(str(error))
    if can_show_panels():
        with contextlib.suppress(RuntimeError):  # no more threads: the first panel imports it
            threading.Thread(target=import_widget, name="nblaunch-imports", daemon=True).start()


def unload(shell: Any) -> None:
    """Remove the magic and the hook, stop the engine, and free cached data.

    ``%reload_ext`` unloads, too: sessions stay, with their variables and the engine, until they are stopped.
    """
    current = frontend.host()
    if isinstance(current, NotebookFrontend):
        shell.events.unregister(_BEFORE, current.before_cell)
        shell.events.unregister(_AFTER, current.after_cell)
        frontend.register(None)
    set_auto(shell, False)
    for kind, name in (("line", "distributed"), ("cell", "distributed"), ("cell", "rank"), ("cell", "local")):
        shell.magics_manager.magics[kind].pop(name, None)
    matchers = _matchers(shell)
    if complete_distributed in matchers:
        matchers.remove(complete_distributed)
    if not live_sessions.live_sessions():
        engines.stop()
        sent_data_cache.free()


def _matchers(shell: Any) -> list[Any]:
    matchers: list[Any] = getattr(getattr(shell, "Completer", None), "custom_matchers", [])
    return matchers


# ------------------------------------------------------------------ completion
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
