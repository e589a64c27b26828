"""A fake notebook: cells that define names in one namespace, registered as the host of launches."""

from __future__ import annotations

import linecache
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nblaunch.launch.export.cell_statements import CellSource
from nblaunch.launch.frontend import register, wait_in_steps
from nblaunch.launch.text_view import plain_writer
from nblaunch.launch.views import NullView, Stream, View


class Notebook:
    """A host whose cells share the namespace of a module called ``__main__``."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.labels: dict[str, str] = {}

    def run(self, source: str) -> dict[str, Any]:
        """Run a cell and return the notebook's names."""
        number = len(self.labels) + 1
        filename = f"<made-up cell {number}>"
        self.labels[filename] = f"Cell In[{number}]"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        exec(compile(source, filename, "exec"), self.names)
        return self.names

    def view(self, choice: str) -> View:
        return NullView()

    def writer(self) -> Callable[[str, Stream], None]:
        return plain_writer()

    def cell_label(self, filename: str) -> str:
        return self.labels.get(filename, "")

    def cuda_cell(self) -> str:
        return ""

    def notebook_names(self) -> dict[str, Any]:
        return self.names

    def cells(self) -> list[CellSource]:
        return []

    def show_session(self, state: object, env: object, workers: object) -> None:
        pass

    def forget_thread(self) -> None:
        pass

    def can_type(self) -> bool:
        return False

    def examines(self) -> bool:
        return False

    def was_examined(self) -> None:
        pass

    def wait(
        self, over: threading.Event, timeout: float | None = None, between: Callable[[], None] = lambda: None
    ) -> bool:
        return wait_in_steps(over, timeout, between=between)


@contextmanager
def open_notebook() -> Iterator[Notebook]:
    """Register a fake notebook as the host of launches, until the context exits."""
    notebook = Notebook()
    register(notebook)
    try:
        yield notebook
    finally:
        register(None)
        for filename in notebook.labels:
            linecache.cache.pop(filename, None)
