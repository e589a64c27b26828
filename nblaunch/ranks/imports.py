"""Which installed modules a launch has imported: the fork server may have them ready for the next.

Never a module of the notebook's own folders, nor of an editable installation: those are edited between launches.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from types import ModuleType


def installed_roots() -> tuple[str, ...]:
    """The folders that packages are installed in, and Python's own library; with a separator at the end."""
    paths = sysconfig.get_paths()
    found = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib") if name in paths]
    if site.ENABLE_USER_SITE:
        found.append(site.getusersitepackages())
    return tuple(sorted({os.path.join(os.path.realpath(path), "") for path in found}))


def loaded() -> frozenset[str]:
    """The names of all modules that this process has."""
    return frozenset(sys.modules)


def installed_since(before: frozenset[str]) -> tuple[str, ...]:
    """The modules that have been imported since `loaded`, and are installed; in the order of their import."""
    roots = installed_roots()
    return tuple(
        name
        for name, module in list(sys.modules.items())
        if name not in before and not name.startswith("nblaunch") and _is_installed(name, module, roots)
    )


def _is_installed(name: str, module: ModuleType | None, roots: tuple[str, ...]) -> bool:
    spec = getattr(module, "__spec__", None)
    if spec is None or getattr(spec, "name", None) != name:  # another name of a module, or made by hand
        return False
    origin = getattr(spec, "origin", None)
    if origin in ("built-in", "frozen"):
        return True
    return isinstance(origin, str) and os.path.realpath(origin).startswith(roots)
