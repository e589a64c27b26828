"""One updatable display under a cell: what waits for nodes, a panel, or a session."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from ipykernel.zmqshell import ZMQDisplayPublisher

from nblaunch.launch.session_state import SessionState
from nblaunch.machine import timeouts
from nblaunch.machine.server_cells import runs_on_server

_log = logging.getLogger(__name__)


class CellDisplay:
    """A display under the cell that constructs it, from any thread, also while later cells run."""

    def __init__(self, shell: Any) -> None:
        self._publisher = shell.display_pub
        self._kernel = shell.kernel
        self._parent = shell.kernel.get_parent()
        self.context = contextvars.copy_context()
        """What runs in a copy of it sends messages that belong to the cell."""
        self._id = uuid.uuid4().hex
        self.shown = False
        self.is_append_only = runs_on_server(shell.kernel)
        """Nothing that the cell shows can be replaced, and nothing can be added after its end."""
        self._kinds: set[str] = set()
        """MIME types and widgets that an append-only cell has been sent."""

    def show(self, bundle: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        """Show this bundle, with the metadata of its parts, in place of the previous one.

        An append-only cell shows it below the previous one, and only if it has a new MIME type or widget. There, the
        panel's script alone keeps the record current: see ``static/record.js``.
        """
        if self.is_append_only:
            kinds = {f"{mime} {value}" if isinstance(value, dict) else mime for mime, value in bundle.items()}
            if kinds <= self._kinds:
                return
            self._kinds |= kinds
            self.shown = False
        content = {"data": dict(bundle), "metadata": dict(metadata or {}), "transient": {"display_id": self._id}}
        kind = "update_display_data" if self.shown else "display_data"
        if not self.shown:
            for stream in (sys.stdout, sys.stderr):  # what the cell has printed before stays above
                with contextlib.suppress(Exception):  # the user may have replaced or closed it
                    stream.flush()
        self.shown = True
        publisher = self._publisher
        assert isinstance(publisher, ZMQDisplayPublisher)
        assert publisher.session is not None
        publisher.session.send(publisher.pub_socket, kind, content, parent=self._parent, ident=publisher.topic)

    def forget(self) -> None:
        """Let an append-only cell show the next bundle whatever it has shown."""
        self._kinds.clear()

    @property
    def cell(self) -> str:
        """The id of the cell, as JupyterLab says it; else empty."""
        return str(self._parent.get("metadata", {}).get("cellId", ""))

    @property
    def is_in_its_cell(self) -> bool:
        """True while the kernel runs the cell that has constructed it."""
        header = self._kernel.get_parent().get("header", {})
        return bool(header.get("msg_id") == self._parent.get("header", {}).get("msg_id"))


WIDGET = "application/vnd.jupyter.widget-view+json"


class WaitingDisplay:
    """A line of text and a button that cancels, while nodes are awaited. The same display shows the panel later."""

    def __init__(self, display: CellDisplay) -> None:
        self._display = display
        self._box: Any = None

    def show(self, text: str, cancel: Callable[[], None] | None) -> None:
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
        button = ipywidgets.Button(description="Cancel", tooltip="Stop waiting, and release the reserved nodes")

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


# ------------------------------------------------------------------ sessions
def show_session(shell: Any, state: Callable[[], SessionState]) -> None:
    """Show the text of a session under this cell, from now until it ends. A saved notebook keeps the last one."""
    display, shown = CellDisplay(shell), state().text()
    display.show({"text/plain": shown})
    follow = threading.Thread(
        target=_follow_session, args=(display, state, shown), name="nblaunch-session-display", daemon=True
    )
    follow.start()


def _follow_session(display: CellDisplay, state: Callable[[], SessionState], shown: str) -> None:
    try:
        is_open = True
        while is_open:
            time.sleep(timeouts.SESSION_POLL_S)
            now = state()
            is_open = now.is_open
            if now.text() != shown:
                shown = now.text()
                display.show({"text/plain": shown})
    except Exception:  # noqa: BLE001  # the page is gone; the session goes on
        _log.exception("failed to update the display of a session")
