"""Which installed modules a launch has imported: the fork server may have them ready for the next.

Never a module of the notebook's own folders, nor of an editable installation: those are edited between launches.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from nblaunch.installed import is_installed

_roots: tuple[str, ...] = ()
"""The folders that the fork server finds installed modules in, with a separator at the end."""


def note_roots() -> None:
    """Note in the fork server, before it forks, where what it can import is installed."""
    global _roots
    _roots = tuple(os.path.join(os.path.realpath(entry), "") for entry in sys.path if is_installed(entry))


def loaded() -> frozenset[str]:
    """The names of all modules that this process has."""
    return frozenset(sys.modules)


def installed_since(before: frozenset[str]) -> tuple[str, ...]:
    """The modules that have been imported since `loaded`, and are installed; in the order of their import."""
    return tuple(
        name
        for name, module in list(sys.modules.items())
        if name not in before and not name.startswith("nblaunch") and _is_installed(name, module)
    )


def _is_installed(name: str, module: ModuleType | None) -> bool:
    spec = getattr(module, "__spec__", None)
    if spec is None or getattr(spec, "name", None) != name:  # another name of a module, or made by hand
        return False
    origin = getattr(spec, "origin", None)
    if origin in ("built-in", "frozen"):
        return True
    return isinstance(origin, str) and os.path.realpath(origin).startswith(_roots)
