"""The state of the kernel process that ranks inherit, besides the environment."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from nblaunch.machine.limits import affinity
from nblaunch.machine.own_code import is_users

_LIMITS = ("NOFILE", "CORE", "CPU", "FSIZE", "DATA", "STACK", "AS", "MEMLOCK", "NPROC")


@dataclass(frozen=True, slots=True)
class Process:
    """What ranks inherit from the kernel process, besides the environment."""

    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    umask: int
    limits: tuple[tuple[int, int, int], ...]
    """Resource, soft limit, hard limit; see `resource.setrlimit`."""
    cpus: tuple[int, ...]
    """The CPU affinity; empty if the platform has none."""


def this_process() -> Process:
    """Return the state of the calling process."""
    kinds = [getattr(resource, f"RLIMIT_{name}") for name in _LIMITS if hasattr(resource, f"RLIMIT_{name}")]
    limits = tuple((kind, *resource.getrlimit(kind)) for kind in kinds)
    try:
        cwd = os.getcwd()
    except FileNotFoundError:  # the directory was removed
        cwd = os.path.abspath(os.sep)
    return Process(cwd, (*map(str, sys.path), *_left_directories()), tuple(sys.argv), _umask(), limits, affinity())


def _left_directories() -> list[str]:
    """Return where the user's imported modules are that ``sys.path`` finds no more: the directory was changed since."""
    if "" not in sys.path:
        return []
    known, found = {os.path.abspath(entry) for entry in map(str, sys.path)}, []
    for name, module in sys.modules.copy().items():  # another thread may be importing
        file = None if "." in name else getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str):
            continue
        root, _, last = file.rpartition(os.sep)
        if last.startswith("__init__."):
            root = root.rpartition(os.sep)[0]
        if root not in known and os.path.isabs(root) and is_users(file):
            known.add(root)
            found.append(root)
    return found


def _umask() -> int:
    """Return the umask without setting it: `os.umask` would race with other threads."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("\nUmask:")[2].split()[0], 8)
    except (OSError, IndexError, ValueError):
        return 0o022
