"""The state of the kernel process that ranks inherit, besides the environment."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

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
    cpus = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    return Process(cwd, tuple(map(str, sys.path)), tuple(sys.argv), _umask(), limits, cpus)


def _umask() -> int:
    """Return the umask without setting it: `os.umask` would race with other threads."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("\nUmask:")[2].split()[0], 8)
    except (OSError, IndexError, ValueError):
        return 0o022
