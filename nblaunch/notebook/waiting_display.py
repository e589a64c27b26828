"""What a cell shows while its launch waits for nodes: a line of text, and a button that cancels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nblaunch.notebook.cell_display import CellDisplay

WIDGET = "application/vnd.jupyter.widget-view+json"


class WaitingDisplay:
    """See the module. The same display shows the panel later.

    Args:
        display: Of the cell.
    """

    def __init__(self, display: CellDisplay) -> None:
        self._display = display
        self._box: Any = None

    def show(self, text: str, cancel: Callable[[], None] | None) -> None:
        """Show a text; nothing if it is empty."""
        if self._box is None and cancel is not None and text:
            self._open(cancel)
        bundle: dict[str, Any] = {"text/plain": text}
        if self._box is not None and text:
            self._box.children[1].value = text
            bundle[WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        self._display.show(bundle)
        if not text:
            self._close()

    def _open(self, cancel: Callable[[], None]) -> None:
        import ipywidgets  # slow, and nodes that are there need no wait

        line = ipywidgets.Label()
        button = ipywidgets.Button(description="Cancel", tooltip="Wait no longer, and free what was reserved")

        def click(clicked: Any) -> None:
            button.disabled, line.value = True, "cancelling …"
            cancel()

        button.on_click(click)
        button.is_prompt = True  # a click may be handled at any time: see `nblaunch.notebook.shell_channel`
        answer_in_main_shell(button)
        self._box = ipywidgets.HBox([button, line])

    def _close(self) -> None:
        if self._box is not None:
            for widget in (*self._box.children, self._box):
                for each in (widget.layout, getattr(widget, "style", None), widget):
                    if each is not None:
                        each.close()
            self._box = None


def answer_in_main_shell(widget: Any) -> None:
    """Let messages of the page to a widget not follow what the kernel has sent on its comm last.

    ipykernel 7.4 sends replies to the subshell that sent on the comm last: that of the busy cell.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda data, default: default
