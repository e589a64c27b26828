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
import types
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle

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
                f"module '__main__' has no attribute '{name}': the launch did not send this name of the notebook. "
                "Use it in the function or cell, or pass it as an argument"
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
    if kind is types.CodeType and (operators := reducers.operators_in(obj)):
        return definitions.in_file, (obj.co_filename, *cloudpickle.Pickler.dispatch_table[kind](obj), operators)
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
