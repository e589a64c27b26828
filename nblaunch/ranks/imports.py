"""Which installed modules a launch has imported: the fork server may have them ready for the next.

Never a module of the notebook's own folders, nor of an editable installation: those are edited between launches.
"""

from __future__ import annotations

import itertools
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


def latest() -> str:
    """The module that was imported last."""
    return next(reversed(sys.modules))


def installed_since(latest: str) -> tuple[str, ...]:
    """The modules that have been imported since that one was the latest, and are installed; in order.

    Those before it are not looked at: counting a reference to each of their names would copy pages that all ranks
    share, which takes 10 ms.
    """
    fresh = list(itertools.takewhile(lambda name: name != latest, reversed(sys.modules)))
    names = [name for name in reversed(fresh) if not name.startswith("nblaunch")]
    return tuple(name for name in names if _is_installed(name, sys.modules.get(name)))


def _is_installed(name: str, module: ModuleType | None) -> bool:
    spec = getattr(module, "__spec__", None)
    if spec is None or getattr(spec, "name", None) != name:  # another name of a module, or made by hand
        return False
    origin = getattr(spec, "origin", None)
    if origin in ("built-in", "frozen"):
        return True
    return isinstance(origin, str) and os.path.realpath(origin).startswith(_roots)
