"""A fake notebook: cells that define names in one namespace, registered as the host of launches."""

from __future__ import annotations

import linecache
from typing import Any

from nblaunch.launch.frontend import Frontend
from nblaunch.launch.views import NullView, View


class Notebook(Frontend):
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

    def cell_label(self, filename: str) -> str:
        return self.labels.get(filename, "")

    def notebook_names(self) -> dict[str, Any]:
        return self.names

    def can_type(self) -> bool:
        return False
