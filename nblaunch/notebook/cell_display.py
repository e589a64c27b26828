"""One updatable display under the launching cell."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ipykernel.zmqshell import ZMQDisplayPublisher

from nblaunch.machine.server_cells import runs_on_server

T = TypeVar("T")


class CellDisplay:
    """A display under the cell that constructs it, from any thread, also while later cells run.

    Args:
        shell: The notebook's shell.
    """

    def __init__(self, shell: Any) -> None:
        self._publisher = shell.display_pub
        self._kernel = shell.kernel
        self._parent = shell.kernel.get_parent()
        self._context = contextvars.copy_context()
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

    def in_its_context(self, function: Callable[[], T]) -> T:
        """Call `function` in the cell's context, so that the kernel's messages belong to it. Not reentrant."""
        return self._context.copy().run(function)
