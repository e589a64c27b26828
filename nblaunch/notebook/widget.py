"""The panel's widget: the one place that imports anywidget, and the JavaScript that it carries to the page."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

_STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r"^import [^;]+;\n", re.MULTILINE)
_COMMENT = re.compile(r"^ *//.*\n|/\*\*(?:[^*]|\*(?!/))*\*/[ \n]*", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async function|function|class|const|let)", re.MULTILINE)
Heard = Callable[[dict[str, Any]], None]


@functools.cache
def script() -> str:
    """The panel's modules as one, without comments: a page loads it from a Blob, where no relative import works."""
    return _COMMENT.sub("", "\n".join(_EXPORT.sub("", _IMPORT.sub("", text)) for text in _texts(".js")))


@functools.cache
def style() -> str:
    """The panel's style sheets."""
    return "\n".join(_texts(".css"))


def _texts(kind: str) -> list[str]:
    names = (_STATIC / "order.txt").read_text(encoding="utf-8").split()
    return [(_STATIC / name).read_text(encoding="utf-8") for name in names if name.endswith(kind)]


class PanelWidget(anywidget.AnyWidget):
    """One launch's panel in the page.

    Args:
        info: What the page is told of the launch at once.
        heard: Called with what the page sends, in whatever thread the kernel has for that.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    info = traitlets.Dict().tag(sync=True)
    is_prompt = True
    """The page's messages may be handled at any time and in any thread: see `nblaunch.notebook.shell_channel`."""
    sent = traitlets.Int(0).tag(sync=True)
    """The messages sent so far, for a page that asks for the widget anew; not sent by itself when it changes."""

    def __init__(self, info: dict[str, Any], heard: Heard) -> None:
        super().__init__(_esm=script(), _css=style(), info=info)
        self.on_msg(lambda widget, content, buffers: heard(content))
        # ipykernel 7.4 sends a comm's replies to the shell that has sent on it last: that of the cell, which is busy.
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda data, default: default

    def tell(self, content: dict[str, Any], data: bytes = b"") -> None:
        """Send a numbered message."""
        self._count += 1
        self.send({**content, "seq": self._count}, [data])

    _count = 0

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """The state, with how many messages a page has missed that asks for it now."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if "sent" in state:
            state["sent"] = self._count
        return state
