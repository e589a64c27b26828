"""The rank's ``__main__``: it resolves the names that the notebook's does.

Without it pickle, torch.save, all_gather_object and multiprocessing fail on everything defined in a cell
(``PicklingError: attribute lookup Net on __main__ failed``).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

from nblaunch import pickling


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


def _teach_multiprocessing() -> None:
    """Let children that start afresh (spawn, forkserver: DataLoader workers too) get cell-defined things by value."""
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign, assignment]  # pickle's own hook


def _by_value(self: ForkingPickler, obj: Any) -> Any:
    if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__" and obj.__qualname__.isidentifier():
        return _rebuild, (pickling.dump(lambda found: obj),)
    return NotImplemented


def _rebuild(data: bytes) -> Any:
    """In the child: rebuild a class or function of ``__main__``, and let the child's own ``__main__`` know it."""
    _teach_multiprocessing()
    obj = pickling.loads(data)
    main = sys.modules["__main__"]
    if not hasattr(main, obj.__qualname__):
        setattr(main, obj.__qualname__, obj)
    return obj
