"""Whose code it is: nblaunch's, a library's or the user's, judged by the directory of its file.

Also the user's own modules that this process has imported: files that another machine may lack, or have otherwise.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from nblaunch.machine.packages import is_installed

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The directory of nblaunch, with a separator at the end."""
RANK_WORKER = os.path.join(PACKAGE, "ranks", "worker.py")
"""Its first frame is where a rank begins; older frames belong to the process that was forked."""
COLLECTIVE_LOG = os.path.join(PACKAGE, "ranks", "collective_log.py")
"""With torch < 2.14 its frames stand between torch.distributed's Python code and its C code."""
RANK_THREADS = tuple(
    os.path.join(PACKAGE, "ranks", f"{name}.py") for name in ("stack_dumps", "kernel_channel", "profiler")
)
"""Their functions run in threads of their own."""
_COLLECTIVE = re.compile(r"[/\\]torch[/\\](distributed[/\\](?!checkpoint[/\\])|nn[/\\]parallel[/\\]distributed\.py)")
"""Files whose calls into C are collectives; distributed checkpoints write files instead."""
_BACKWARD = re.compile(r"[/\\]torch[/\\]autograd[/\\]")
_DATA_LOADING = re.compile(r"[/\\]torch[/\\]utils[/\\]data[/\\]")


def _as_dumped(path: str) -> str:
    """Escape a path as faulthandler does."""
    return path.encode("ascii", "backslashreplace").decode()


_RANK_RUNTIME = (os.path.join(PACKAGE, "ranks", ""), os.path.join(PACKAGE, "training", "distribute.py"))
_IN_RANK_RUNTIME = (*_RANK_RUNTIME, *map(_as_dumped, _RANK_RUNTIME))
_IN_PACKAGE_OR_STDLIB = (PACKAGE, _as_dumped(PACKAGE), os.path.join(sysconfig.get_path("stdlib"), ""))
_INTERACTIVE = ("<stdin>", "<python-input-", "<ipython-input-", "<distributed cell")
"""Code that the user typed."""
_INSTALLED = tuple(
    f"{separator}{name}{separator}" for separator in "/\\" for name in ("site-packages", "dist-packages")
)


def is_file(filename: str, *ours: str) -> bool:
    """Return True if `filename`, as a frame names it, is one of these files of the package."""
    return os.path.normpath(filename) in ours


def is_collective(filename: str) -> bool:
    """Return True for the files of torch whose calls into C code are collectives."""
    return _COLLECTIVE.search(filename) is not None


def is_backward(filename: str) -> bool:
    """Return True for autograd's files: DDP's collectives begin and end in their calls into C code."""
    return _BACKWARD.search(filename) is not None


def is_data_loading(filename: str) -> bool:
    return _DATA_LOADING.search(filename) is not None


def is_rank_runtime(filename: str) -> bool:
    """Return True for the files whose frames stand between a rank's start and the user's function."""
    return os.path.normpath(filename).startswith(_IN_RANK_RUNTIME)


def is_users(filename: str) -> bool:
    """Return True unless the file is nblaunch's, an installed library's, or generated code such as ``<string>``."""
    if filename.startswith("<"):
        return filename.startswith(_INTERACTIVE)
    filename = os.path.normpath(filename)  # an entry of sys.path may be "..": frames then name /a/b/../nblaunch/...
    return not (filename.startswith(_IN_PACKAGE_OR_STDLIB) or any(directory in filename for directory in _INSTALLED))


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the user's first frame to the user's last, without nblaunch's; None if there is none."""
    frames: list[TracebackType] = []
    while trace is not None:
        if frames or is_users(trace.tb_frame.f_code.co_filename):
            frames.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for each in reversed(frames):
        file = each.tb_frame.f_code.co_filename
        is_own = os.path.normpath(file).startswith(PACKAGE)
        if is_users(file) or (found is not None and not is_own):
            found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


# ------------------------------------------------------------------ modules that other machines may lack
_digests: dict[str, tuple[tuple[int, int], bytes]] = {}
"""By path: the size and time of the last change, and the digest then."""


@dataclass(frozen=True, slots=True)
class OwnFile:
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
    folder, name = os.path.split(file)
    root = os.path.dirname(folder) if name == "__init__.py" else folder
    if is_installed(root):
        return
    if root == folder:
        yield file, root
        return
    for place, folders, names in os.walk(folder):
        inner = [name for name in folders if not name.startswith((".", "__pycache__", "node_modules"))]
        folders[:] = sorted(name for name in inner if not os.path.exists(os.path.join(place, name, "pyvenv.cfg")))
        yield from ((os.path.join(place, name), root) for name in sorted(names) if name.endswith(".py"))
