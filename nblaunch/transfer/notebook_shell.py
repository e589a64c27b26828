"""The notebook's ``get_ipython`` on its way to another process, where it means that process's own shell."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

_provider: Callable[[], Any] | None = None


def provide(shell: Callable[[], Any]) -> None:
    """Set what returns the shell of this process. Ranks have one; others have that of their ``__main__``, if any."""
    global _provider
    _provider = shell


def get_ipython() -> Any:
    """Return the shell of the process that calls this; None if it has none, as IPython's function does."""
    if _provider is not None:
        return _provider()
    own = getattr(sys.modules["__main__"], "get_ipython", None)
    return None if own is None or own is get_ipython else own()


def is_shells(obj: Any) -> bool:
    """Return True for ``get_ipython``, which a cell's function with a ``!command`` refers to."""
    return isinstance(obj, types.MethodType) and obj.__func__.__qualname__ == "InteractiveShell.get_ipython"


def reduce_shell(obj: Any) -> tuple[Any, ...] | None:
    """Reduce the notebook's ``get_ipython`` to the function above; None for anything else."""
    return (_stand_in, ()) if is_shells(obj) else None


def _stand_in() -> Callable[[], Any]:
    return get_ipython
