"""What is installed for this Python: noticed when it changes, as by ``%pip install -U`` in a cell."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from importlib.machinery import PathFinder

_MARKS = (".dist-info", ".egg-info", ".egg-link", ".pth")
_seen: dict[str, tuple[int, frozenset[tuple[str, int]]]] = {}
"""For each folder: when it was last changed, and what was installed in it."""


def is_installed(folder: str) -> bool:
    """Whether packages are installed in this folder, or it is Python's own library: nobody edits what is there."""
    if os.path.basename(folder.rstrip(os.sep)) in ("site-packages", "dist-packages"):
        return True
    return any(folder == library or folder.startswith(library + os.sep) for library in _libraries())


@functools.cache
def _libraries() -> frozenset[str]:
    return frozenset(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))


def installed_path() -> list[str]:
    """``sys.path`` without the notebook's own folders: a module that users edit must not be preloaded."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    installed = [entry for entry in sys.path if is_installed(entry)]
    return [*installed, own] if own not in installed else installed


def installed_now() -> frozenset[tuple[str, int]]:
    """Every installed distribution's mark, with the time of its last change. Cheap while nothing is installed."""
    marks: frozenset[tuple[str, int]] = frozenset()
    for folder in installed_path():
        try:
            changed = os.stat(folder).st_mtime_ns
            if folder not in _seen or _seen[folder][0] != changed:
                _seen[folder] = changed, _marks_in(folder)
        except OSError:  # the folder is gone, or a zip file
            continue
        marks |= _seen[folder][1]
    return marks


def _marks_in(folder: str) -> frozenset[tuple[str, int]]:
    with os.scandir(folder) as entries:
        return frozenset((e.path, e.stat().st_mtime_ns) for e in entries if e.name.endswith(_MARKS))


def shadowed(packages: frozenset[str]) -> bool:
    """Whether an import of one of these would find something in a folder of the notebook's own."""
    own = [entry for entry in sys.path if not is_installed(entry)]
    return any(_is_shadowed(name, own) for name in packages)


def _is_shadowed(name: str, own: list[str]) -> bool:
    here = PathFinder.find_spec(name, own)
    if here is None or here.loader is not None:
        return here is not None
    anywhere = PathFinder.find_spec(name)  # a folder without __init__.py hides no package, but becomes part of its like
    return anywhere is None or anywhere.loader is None
