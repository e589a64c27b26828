"""What is installed for this Python, what of it can be imported ahead of launches, and when it changes."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable
from importlib.machinery import PathFinder
from pathlib import Path

_MARKS = (".dist-info", ".egg-info", ".egg-link", ".pth")
KNOWN_SAFE = frozenset({"PIL", "accelerate", "matplotlib", "pandas", "scipy", "sklearn", "torchvision", "transformers"})
"""Packages that ranks may share from before their fork, as tests hold. Not so lightning and torchmetrics, which read
LOCAL_RANK at their import, and pyarrow, which starts threads."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
"""What fork servers have, so that libraries start no threads there; each launch has its own."""
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
_OF_LAUNCHES = (*ONE_THREAD, "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
_OF_EITHER_BEGIN = ("GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "NBLAUNCH_")
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
    own = str(Path(__file__).absolute().parents[2])
    installed = [entry for entry in sys.path if is_installed(entry)]
    return [*installed, own] if own not in installed else installed


def installed_now() -> tuple[tuple[str, frozenset[tuple[str, int]]], ...]:
    """Every installed distribution's mark, with the time of its last change; by folder, of which the first wins.

    Cheap while nothing is installed.
    """
    marks: dict[str, frozenset[tuple[str, int]]] = {}
    for folder in installed_path():
        try:
            changed = os.stat(folder).st_mtime_ns
            if folder not in _seen or _seen[folder][0] != changed:
                _seen[folder] = changed, _marks_in(folder)
        except OSError:  # the folder is gone, or a zip file
            continue
        marks[folder] = _seen[folder][1]
    return tuple(marks.items())


def _marks_in(folder: str) -> frozenset[tuple[str, int]]:
    with os.scandir(folder) as entries:
        return frozenset((e.path, e.stat().st_mtime_ns) for e in entries if e.name.endswith(_MARKS))


def differs(name: str) -> bool:
    """Whether ranks may have another value of this variable than the process that imports packages for them.

    So what it has imported is for launches with any value of it.
    """
    return name in (*_OF_RANKS, *_OF_LAUNCHES) or name.startswith(_OF_EITHER_BEGIN)


def package_of(module: str) -> str:
    """The top name of a module's."""
    return module.partition(".")[0]


def why_not_ahead(package: str) -> str:
    """Why this package must not be imported ahead of launches; empty if it may."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # it is broken, or was put among the modules by hand
        spec = None
    if spec is None:
        return "no such module is installed"
    origin = os.path.realpath(spec.origin or "")
    if spec.origin in ("built-in", "frozen") or any(origin.startswith(root) for root in _roots()):
        return ""
    return "it is no installed package: its files may be edited between launches"


def edited(modules: Iterable[str]) -> str:
    """The first of these imported modules whose file is not where packages are installed; empty if there is none.

    An installed package may import one that is not: installed as editable, or by a link.
    """
    installed = (*_roots(), os.path.join(Path(__file__).resolve().parents[1], ""))
    for name in modules:
        file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")  # asking a lazy module would import it
        if isinstance(file, str) and not os.path.realpath(file).startswith(installed):
            return name
    return ""


def _roots() -> list[str]:
    return [os.path.join(os.path.realpath(entry), "") for entry in sys.path if is_installed(entry)]


def imported_here(packages: Collection[str]) -> list[str]:
    """The modules of these packages that this process has imported, in their order."""
    present = [(name, module) for name, module in sys.modules.copy().items() if package_of(name) in packages]
    return [name for name, module in present if getattr(getattr(module, "__spec__", None), "name", None) == name]


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
