"""The rank's ``__main__`` module, which resolves the notebook's names.

Runs in ranks, and partly in their spawned children. Without it pickle, torch.save, all_gather_object and
multiprocessing fail on classes and functions of cells (``PicklingError: attribute lookup Net on __main__ failed``).
"""

from __future__ import annotations

import builtins
import copyreg
import importlib
import io
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle

from nblaunch.ranks import rank_display
from nblaunch.transfer import definitions, reducers


def install(namespace: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Make ``__main__`` look names up in `namespace`, the globals of the shipped functions, then in `more`."""

    class Main(types.ModuleType):
        __dict__ = property(lambda self: namespace)  # where typing looks annotations up

        def __getattr__(self, name: str) -> Any:
            for names in (namespace, more):
                if name in names:
                    return names[name]
            raise AttributeError(
                f"module '__main__' has no attribute '{name}' in this rank. A launch sends only the names that the "
                "function or cell uses: use the name there, or pass its value as an argument"
            )

        def __setattr__(self, name: str, value: Any) -> None:
            namespace[name] = value

    sys.modules["__main__"] = Main("__main__")
    _patch_multiprocessing()


# ------------------------------------------------------------------ spawned children
def _patch_multiprocessing() -> None:
    """Send cell-defined objects by value to spawned and forkserver children, DataLoader workers included."""
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign, assignment]  # pickle's own hook


def _by_value(self: ForkingPickler, obj: Any) -> Any:
    """Reduce as cloudpickle does, but within the running pickle, whose memo preserves object identity."""
    kind = type(obj)
    if isinstance(obj, types.ModuleType) and obj is sys.modules.get(obj.__name__):
        return importlib.import_module, (obj.__name__,)  # such as torch.ops
    row = reducers.row_of(kind, for_child=True)
    if row is not None and (rebuilt := row(obj, None)) is not None:
        return rebuilt
    if isinstance(obj, (type, types.FunctionType)):
        if obj.__module__ != "__main__":
            nameless = obj.__module__ == "builtins" and not hasattr(builtins, obj.__qualname__)  # such as code's type
            return _cloudpickler(self).reducer_override(obj) if nameless else NotImplemented
        reduced = _cloudpickler(self).reducer_override(obj)
        if isinstance(obj, type):  # functions are sent each time, with their current globals
            reduced = definitions.reduce_by_value(obj, reduced)
        make, made_of, *content = reduced
        return _make, (make, made_of, obj.__qualname__), *content
    if kind in _COMPONENT_TYPES and kind not in self.dispatch_table:
        return cloudpickle.Pickler.dispatch_table[kind](obj)
    return NotImplemented


_COMPONENT_TYPES = (
    set(cloudpickle.Pickler.dispatch_table) - set(copyreg.dispatch_table) - {io.TextIOWrapper, memoryview}
)
"""Types of the parts of functions and classes, such as code and cells. No files: cloudpickle copies them silently."""


def _cloudpickler(pickler: Any) -> Any:
    """Return the pickle's own cloudpickle.Pickler: through its memo, functions keep sharing their globals."""
    if not hasattr(pickler, "nblaunch"):
        pickler.nblaunch = cloudpickle.Pickler(io.BytesIO())
    return pickler.nblaunch


def _make(make: Callable[..., Any], made_of: tuple[Any, ...], name: str) -> Any:
    """Create a class or function of ``__main__`` and define it in the child's ``__main__``. Runs in the child."""
    _patch_multiprocessing()
    obj = make(*made_of)
    main = sys.modules["__main__"]
    if name.isidentifier() and not hasattr(main, name):
        setattr(main, name, obj)
    return obj


# ------------------------------------------------------------------ get_ipython and display
# In forked ranks IPython's shell exists before the fork.
def install_shell(namespace: dict[str, Any]) -> None:
    """Install the names in the shipped functions' globals, which become the shell's namespace, and in builtins."""
    reducers.provide_shell(get_ipython)
    namespace["get_ipython"] = reducers.get_ipython
    get_ipython().enter(namespace)


def get_ipython() -> Any:
    return importlib.import_module("nblaunch.ranks.rank_shell").rank_shell()


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
    get_ipython().events.trigger("post_execute")
    rank_display.finish()
