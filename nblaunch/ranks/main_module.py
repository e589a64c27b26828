"""The rank's ``__main__``: it resolves the names that the notebook's does.

Without it pickle, torch.save, all_gather_object and multiprocessing fail on everything defined in a cell
(``PicklingError: attribute lookup Net on __main__ failed``).
"""

from __future__ import annotations

import builtins
import copyreg
import io
import sys
import types
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle

from nblaunch.transfer import definitions


def install(namespace: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Make ``__main__`` look names up in `namespace`, the globals of the shipped functions, then in `more`."""
    module = types.ModuleType("__main__")

    def resolve(name: str) -> Any:
        for names in (namespace, more):
            if name in names:
                return names[name]
        raise AttributeError(
            f"module '__main__' has no attribute '{name}': the notebook's name was not sent to this rank"
        )

    vars(module)["__getattr__"] = resolve  # PEP 562
    sys.modules["__main__"] = module
    _teach_multiprocessing()


# ------------------------------------------------------------------ children that start afresh
def _teach_multiprocessing() -> None:
    """Let children that start afresh (spawn, forkserver: DataLoader workers too) get cell-defined things by value."""
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign, assignment]  # pickle's own hook


def _by_value(self: ForkingPickler, obj: Any) -> Any:
    """As cloudpickle does it, but within the pickle at hand, where objects that meet again stay the same object."""
    if isinstance(obj, (type, types.FunctionType)):
        if obj.__module__ != "__main__":
            nameless = obj.__module__ == "builtins" and not hasattr(builtins, obj.__qualname__)  # such as code's type
            return _cloudpickler(self).reducer_override(obj) if nameless else NotImplemented
        reduced = _cloudpickler(self).reducer_override(obj)
        if isinstance(obj, type):  # a function is sent as it is each time, with the globals that it has now
            reduced = definitions.reduce_by_value(obj, reduced)
        make, made_of, *content = reduced
        return _make, (make, made_of, obj.__qualname__), *content
    kind = type(obj)
    if kind in _INSIDE and kind not in self.dispatch_table:
        return cloudpickle.Pickler.dispatch_table[kind](obj)
    return NotImplemented


_INSIDE = set(cloudpickle.Pickler.dispatch_table) - set(copyreg.dispatch_table) - {io.TextIOWrapper, memoryview}
"""What functions and classes are made of, such as code and cells; a file would be copied, and its user not know."""


def _cloudpickler(pickler: Any) -> Any:
    """The one of this pickle: functions that share their globals here share them in the child, by its notes."""
    if not hasattr(pickler, "nblaunch"):
        pickler.nblaunch = cloudpickle.Pickler(io.BytesIO())
    return pickler.nblaunch


def _make(make: Callable[..., Any], made_of: tuple[Any, ...], name: str) -> Any:
    """In the child: begin a class or function of ``__main__``, and let the child's own ``__main__`` know it."""
    _teach_multiprocessing()
    obj = make(*made_of)
    main = sys.modules["__main__"]
    if name.isidentifier() and not hasattr(main, name):
        setattr(main, name, obj)
    return obj
