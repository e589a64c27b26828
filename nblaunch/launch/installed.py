"""What is installed for this Python: noticed when it changes, as by ``%pip install -U`` in a cell."""

from __future__ import annotations

import os
import sys

import nblaunch

_MARKS = (".dist-info", ".egg-info", ".egg-link", ".pth")
_seen: dict[str, tuple[int, frozenset[tuple[str, int]]]] = {}
"""For each folder: when it was last changed, and what was installed in it."""


def installed_path() -> list[str]:
    """``sys.path`` without the notebook's own folders: a module that users edit must not be preloaded."""
    roots = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    own = os.path.dirname(os.path.dirname(os.path.abspath(nblaunch.__file__)))
    installed = [entry for entry in sys.path if entry.startswith(roots) or "site-packages" in entry]
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
    """Whether a folder of the notebook's own has a module of the name of one of these."""
    own = [entry or os.curdir for entry in sys.path if entry not in installed_path()]
    return any(
        os.path.exists(os.path.join(folder, name)) or os.path.exists(os.path.join(folder, f"{name}.py"))
        for folder in own
        for name in packages
    )
