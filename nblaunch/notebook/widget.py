"""The panel's widgets: the only module that imports anywidget.

A saved notebook keeps the state of each widget. So one widget holds the page's script for all panels of this kernel,
and each panel carries a loader of 2 KB.

The page loads a widget's script as one module from a Blob, where relative imports fail, so this joins the modules of
``static/`` by regular expressions. A bundler would need Node where nblaunch is built, and a built file that editable
installs and tests must keep current. The expressions rely on a form that ``tests/unit/test_panel_js.py`` checks: static
imports of files in this folder, imported modules first, names that are unique across modules, and no string that spans
lines.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from nblaunch.notebook.cell_display import answer_in_main_shell
from nblaunch.notebook.page_messages import Delta, PanelInfo, Snapshot, to_content


class PanelScript(ipywidgets.Widget):  # type: ignore[misc]  # ipywidgets has no types
    """The script and style sheet of all panels. It is never shown itself."""

    script = traitlets.Unicode().tag(sync=True)
    sheet = traitlets.Unicode().tag(sync=True)

    @classmethod
    def shared(cls) -> PanelScript:
        """Return this kernel's, made on the first call, or after ``Widget.close_all()``."""
        global _shared
        with _lock:
            if _shared is None or _shared.comm is None:
                _shared = cls(script=script(), sheet=style())
            return _shared


_shared: PanelScript | None = None
_lock = threading.Lock()


class PanelWidget(anywidget.AnyWidget):
    """One launch's panel in the page. `receive` gets each message of the page, in any thread of the kernel."""

    _esm = traitlets.Unicode().tag(sync=True)
    info = traitlets.Dict().tag(sync=True)
    script = traitlets.Unicode().tag(sync=True)
    """Refers to the `PanelScript`, or is the script."""
    sheet = traitlets.Unicode().tag(sync=True)
    is_prompt = True
    """Messages of the page may be handled at any time, in any thread: see `nblaunch.notebook.shell_channel`."""
    sent = traitlets.Int(0).tag(sync=True)
    """Messages sent so far, for a page that reloads the widget. Never sent on its own."""

    def __init__(self, info: PanelInfo, receive: Callable[[dict[str, Any]], None]) -> None:
        # In Colab each output is a page of its own, which never finds a model that it has asked for too early.
        if "google.colab.output" in sys.modules:
            texts = {"script": script(), "sheet": style()}
        else:
            texts = {"script": f"IPY_MODEL_{PanelScript.shared().model_id}"}
        super().__init__(_esm=loader(), info=to_content(info), **texts)
        self.on_msg(lambda widget, content, buffers: receive(content))
        answer_in_main_shell(self)

    def send_numbered(self, message: Delta | Snapshot, data: bytes = b"") -> int:
        """Send a numbered message; return its size in bytes."""
        self._count += 1
        content = to_content(dataclasses.replace(message, seq=self._count))
        self.send(content, [data])
        return len(json.dumps(content)) + len(data)

    _count = 0

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Return the state, with the number of messages that a reloading page has missed."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if "sent" in state:
            state["sent"] = self._count
        return state


STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r'^import [^;]+ from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async function|function|class|const|let)", re.MULTILINE)
_COMMENT = re.compile(r"^ *//.*\n|^ */\*\*(?:[^*]|\*(?!/))*\*/\n|/\*\*(?:[^*\n]|\*(?!/))*\*/ ?", re.MULTILINE)
_INDENT = re.compile(r"^ +", re.MULTILINE)


@functools.cache
def script() -> str:
    """Return the panel's modules as one, without comments and indentation."""
    texts = [_EXPORT.sub("", _IMPORT.sub("", text)) for text in modules("panel.js").values()]
    return _bare("\n".join(texts))


@functools.cache
def loader() -> str:
    return _bare((STATIC / "loader.js").read_text(encoding="utf-8"))


def _bare(text: str) -> str:
    return _INDENT.sub("", _COMMENT.sub("", text))


@functools.cache
def style() -> str:
    return (STATIC / "panel.css").read_text(encoding="utf-8")


def modules(name: str, found: dict[str, str] | None = None) -> dict[str, str]:
    """Return the text of a module and of all that it imports, imported modules first; `found` is extended in place."""
    found = {} if found is None else found
    text = (STATIC / name).read_text(encoding="utf-8")
    for imported in _IMPORT.findall(text):
        if imported not in found:
            modules(imported, found)
    found[name] = text
    return found
