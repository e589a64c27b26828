"""Timeouts for contenders: a hang is reported as one, and the benchmark continues."""

from __future__ import annotations

import contextlib
import math
import queue

import psutil

from tests.conftest import LONG
from tests.kernel.harness import Kernel


def seconds_of(kernel: Kernel, expression: str, limit: float = LONG) -> float:
    """The seconds that an expression in the kernel gives; infinite where it has none within `limit` seconds."""
    try:
        return float(kernel.run(f"print(repr({expression}))", limit).check().stdout)
    except queue.Empty:
        kill_children(kernel)
        return math.inf


def kill_children(kernel: Kernel) -> None:
    """Kill the child processes of a kernel that hangs: they could outlive it and hold on to their ports."""
    for child in psutil.Process(kernel.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def shown(seconds: float, digits: int = 2, base: float = 0.0) -> str:
    """Seconds for a table, with the ratio to `base` in brackets unless that is 0."""
    if not math.isfinite(seconds):
        return "hangs"
    ratio = f" ({seconds / base:.2f})" if base and math.isfinite(base) else ""
    return f"{seconds:.{digits}f}{ratio}"
