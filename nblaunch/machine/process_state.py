"""The notebook's process as it is now: what ranks start from, besides the environment."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

_LIMITS = ("NOFILE", "CORE", "CPU", "FSIZE", "DATA", "STACK", "AS", "MEMLOCK", "NPROC")


@dataclass(frozen=True, slots=True)
class Process:
    """The notebook's process as it is now: what ranks start from besides the environment."""

    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    umask: int
    limits: tuple[tuple[int, int, int], ...]
    cpus: tuple[int, ...]
    """Those that its threads may run on; empty where the system does not tell."""


def this_process() -> Process:
    """The process that calls this."""
    limits = tuple((kind, *resource.getrlimit(kind)) for kind in _limit_kinds())
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        cwd = os.path.abspath(os.sep)
    cpus = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    return Process(cwd, tuple(map(str, sys.path)), tuple(sys.argv), _umask(), limits, cpus)


def _limit_kinds() -> list[int]:
    return [getattr(resource, f"RLIMIT_{name}") for name in _LIMITS if hasattr(resource, f"RLIMIT_{name}")]


def _umask() -> int:
    """This process's umask, read without setting it (another thread may be creating a file)."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("\nUmask:")[2].split()[0], 8)
    except (OSError, IndexError, ValueError):
        return 0o022
