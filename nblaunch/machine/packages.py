"""Installed packages: which can be imported ahead of launches, and when they change."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable
from importlib.machinery import PathFinder
from pathlib import Path

_LIBRARIES = frozenset(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_METADATA_SUFFIXES = (".dist-info", ".egg-info", ".egg-link", ".pth")
KNOWN_SAFE = frozenset({"PIL", "accelerate", "matplotlib", "pandas", "scipy", "sklearn", "torchvision", "transformers"})
"""Packages that are safe to import before ranks are forked; each has a test."""
_READ_RANK = frozenset({"lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics"})
"""Packages that read LOCAL_RANK while they are imported."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
"""Variables of fork servers, so that libraries start no threads there; each launch sets its own."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
_LAUNCH_VARIABLES = (*ONE_THREAD, "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
_VARIABLE_PREFIXES = ("GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "NBLAUNCH_")
_seen: dict[str, tuple[int, frozenset[tuple[str, int]]]] = {}
"""By folder: its mtime, and the distributions that were installed in it at that time."""


def is_installed(folder: str) -> bool:
    """Return True for site-packages and the standard library, whose files are not edited between launches."""
    if os.path.basename(folder.rstrip(os.sep)) in ("site-packages", "dist-packages"):
        return True
    return any(folder == library or folder.startswith(library + os.sep) for library in _LIBRARIES)


def installed_path() -> list[str]:
    """Return ``sys.path`` without the notebook's own folders: modules that users edit must not be preloaded."""
    own = str(Path(__file__).absolute().parents[2])
    installed = [entry for entry in sys.path if is_installed(entry)]
    return [*installed, own] if own not in installed else installed


def installed_now() -> tuple[tuple[str, frozenset[tuple[str, int]]], ...]:
    """Return the metadata of every installed distribution, with the time of its last change, by folder of the path.

    Rereads only folders that have changed.
    """
    metadata: dict[str, frozenset[tuple[str, int]]] = {}
    for folder in installed_path():
        try:
            changed = os.stat(folder).st_mtime_ns
            if folder not in _seen or _seen[folder][0] != changed:
                with os.scandir(folder) as entries:
                    found = ((e.path, e.stat().st_mtime_ns) for e in entries if e.name.endswith(_METADATA_SUFFIXES))
                    _seen[folder] = changed, frozenset(found)
        except OSError:  # the folder does not exist, or is a zip file
            continue
        metadata[folder] = _seen[folder][1]
    return tuple(metadata.items())


def differs(name: str) -> bool:
    """Return True for variables that differ between ranks and the fork server.

    Packages that the fork server imports must not depend on them.
    """
    return name in (*_RANK_VARIABLES, *_LAUNCH_VARIABLES) or name.startswith(_VARIABLE_PREFIXES)


def package_of(module: str) -> str:
    return module.partition(".")[0]


def why_not_ahead(package: str) -> str:
    """Return why a package must not be imported ahead of launches; empty if it may be."""
    if package in _READ_RANK:
        return "it reads LOCAL_RANK when imported"
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # it is broken, or was put into sys.modules by hand
        spec = None
    if spec is None:
        return "no such module is installed"
    origin = os.path.realpath(spec.origin or "")
    if spec.origin in ("built-in", "frozen") or any(origin.startswith(root) for root in _roots()):
        return ""
    return "it is not an installed package: its files may be edited between launches"


def edited(modules: Iterable[str]) -> str:
    """Return the first of these modules whose file may be edited; empty if there is none.

    An installed package may import one that is an editable install, or a link.
    """
    installed = (*_roots(), os.path.join(Path(__file__).resolve().parents[1], ""))
    for name in modules:
        file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")  # getattr would import a lazy module
        if isinstance(file, str) and not os.path.realpath(file).startswith(installed):
            return name
    return ""


def _roots() -> list[str]:
    return [os.path.join(os.path.realpath(entry), "") for entry in sys.path if is_installed(entry)]


def imported_here(packages: Collection[str]) -> list[str]:
    """Return the modules of these packages that this process has imported, in order of import."""
    present = [(name, module) for name, module in sys.modules.copy().items() if package_of(name) in packages]
    return [name for name, module in present if getattr(getattr(module, "__spec__", None), "name", None) == name]


def shadowed(packages: frozenset[str]) -> bool:
    """Return True if a file in one of the notebook's own folders hides one of these packages."""
    own = [entry for entry in sys.path if not is_installed(entry)]
    return any(_is_shadowed(name, own) for name in packages)


def _is_shadowed(name: str, own: list[str]) -> bool:
    here = PathFinder.find_spec(name, own)
    if here is None or here.loader is not None:
        return here is not None
    anywhere = PathFinder.find_spec(name)  # a namespace package hides only its like
    return anywhere is None or anywhere.loader is None
