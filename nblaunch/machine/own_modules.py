"""The user's own modules that this process has imported: files that another machine may lack, or have otherwise."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nblaunch.machine.own_code import is_users
from nblaunch.machine.packages import is_installed

MAX_FILES = 2000
"""Of one package; of a larger one only the modules that are imported."""
_digests: dict[str, tuple[tuple[int, int], bytes]] = {}
"""By path: the size and time of the last change, and the digest then."""


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file of a module or package."""

    package: str
    """The top-level name."""
    name: str
    """The path below the entry of ``sys.path`` that has the package."""
    path: str
    """The absolute path."""
    digest: bytes


def own_files() -> list[OwnFile]:
    """Return the files of the modules that the user has written and this process has imported.

    Those of a package are all that it has: a rank may import what the notebook has not.
    """
    found: dict[str, OwnFile] = {}
    for package in sorted({name.partition(".")[0] for name in list(sys.modules)} - {"__main__", "nblaunch"}):
        for path, root in _paths_of(package):
            digest = digest_of(path)
            if digest:
                found[path] = OwnFile(package, os.path.relpath(path, root), path, digest)
    return list(found.values())


def digest_of(path: str) -> bytes:
    """Return the digest of a file's content; empty if it cannot be read."""
    try:
        about = os.stat(path)
        changed = about.st_size, about.st_mtime_ns
        if path not in _digests or _digests[path][0] != changed:
            _digests[path] = changed, hashlib.blake2b(Path(path).read_bytes(), digest_size=16).digest()
    except OSError:
        return b""
    return _digests[path][1]


def _paths_of(package: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a top-level package or module, each with its entry of ``sys.path``."""
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or not is_users(file):
        return
    file = os.path.abspath(file)
    if os.path.basename(file) != "__init__.py":
        if not is_installed(os.path.dirname(file)):
            yield file, os.path.dirname(file)
        return
    folder = os.path.dirname(file)
    root = os.path.dirname(folder)
    if is_installed(root):
        return
    paths = _python_files(folder)
    if len(paths) > MAX_FILES:
        members = [m for name, m in sys.modules.copy().items() if name.startswith(f"{package}.")]
        paths = [file, *(path for m in members if isinstance(path := getattr(m, "__file__", None), str))]
    for path in paths:
        yield os.path.abspath(path), root


def _python_files(folder: str) -> list[str]:
    found: list[str] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__", "node_modules")))
        found += (os.path.join(place, name) for name in sorted(names) if name.endswith(".py"))
        if len(found) > MAX_FILES:
            break
    return found
