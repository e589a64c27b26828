"""One display of the cell that launches, which is updated as long as the kernel lives."""

from __future__ import annotations

import contextvars
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ipykernel.zmqshell import ZMQDisplayPublisher

T = TypeVar("T")


class CellDisplay:
    """What appears under the cell that made this, whatever cell runs later and whichever thread shows it.

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

    def show(self, bundle: Mapping[str, Any]) -> None:
        """Show this, in the place of what was shown before."""
        content = {"data": dict(bundle), "metadata": {}, "transient": {"display_id": self._id}}
        kind = "update_display_data" if self.shown else "display_data"
        self.shown = True
        publisher = self._publisher
        assert isinstance(publisher, ZMQDisplayPublisher)
        assert publisher.session is not None
        publisher.session.send(publisher.pub_socket, kind, content, parent=self._parent, ident=publisher.topic)

    def in_its_context(self, function: Callable[[], T]) -> T:
        """Call a function as if from the cell, so that what the kernel sends belongs to it. One at a time."""
        return self._context.copy().run(function)
