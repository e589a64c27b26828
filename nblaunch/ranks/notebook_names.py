"""The notebook's names in a rank: ``get_ipython`` and ``display`` work.

IPython's shell exists before the fork in forked ranks. A spawned rank creates it on first use: a function that needs no
shell does not wait for IPython's import.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nblaunch.ranks import rank_display
from nblaunch.transfer import notebook_shell

_namespace: dict[str, Any] = {}


def prepare() -> None:
    """Create the shell in the fork server, once for all ranks."""
    importlib.import_module("nblaunch.ranks.rank_shell").rank_shell()


def install(namespace: dict[str, Any]) -> None:
    """Install the names in builtins and in the shipped functions' globals, which become the shell's namespace."""
    global _namespace
    _namespace = namespace
    notebook_shell.provide(get_ipython)
    namespace["get_ipython"] = notebook_shell.get_ipython
    if "IPython" in sys.modules:
        _enter()
    else:
        builtins.display = _display  # type: ignore[attr-defined]  # as IPython does
        if not isinstance(sys.meta_path[0], _ShellBesideIPython):  # installed by a kept rank's previous task
            sys.meta_path.insert(0, _ShellBesideIPython())


def get_ipython() -> Any:
    """Return this rank's shell, an `IPython.core.interactiveshell.InteractiveShell`."""
    importlib.import_module("IPython")  # which creates the shell in a spawned rank
    return importlib.import_module("nblaunch.ranks.rank_shell").rank_shell()


def show_value(value: Any) -> None:
    """Display the value of a cell."""
    get_ipython().displayhook(value)


def before_cell(source: str) -> None:
    """Run the hooks that extensions, such as autoreload, have registered for the start of a cell."""
    module = sys.modules.get("nblaunch.ranks.rank_shell")
    if module is not None:
        module.rank_shell().begin_cell(source)


def after_task() -> None:
    """Show figures that are still open, and run the hooks that extensions have registered for the end of a cell.

    A figure that cannot be drawn does not fail the task: its traceback goes to the log.
    """
    backend = sys.modules.get("nblaunch.ranks.matplotlib_backend")
    if backend is not None:
        try:
            backend.show_open_figures()
        except Exception:  # noqa: BLE001  # whatever the user's artists raise
            traceback.print_exc()
    module = sys.modules.get("nblaunch.ranks.rank_shell")
    if module is not None:
        module.rank_shell().events.trigger("post_execute")
    rank_display.finish()


def _enter() -> None:
    get_ipython().enter(_namespace)


def _display(*objects: Any, **options: Any) -> Any:
    """Display objects as IPython's function does. Import IPython first."""
    return importlib.import_module("IPython.display").display(*objects, **options)


class _ShellBesideIPython(MetaPathFinder):
    """Creates the rank's shell when user code imports IPython: its ``display`` looks the shell up."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "IPython":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _then_enter(loader.exec_module)
        return spec


def _then_enter(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        _enter()

    return exec_module
