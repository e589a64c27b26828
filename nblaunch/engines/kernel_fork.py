"""Forks the kernel, for ``start_method="fork"``."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import warnings

from nblaunch.engines.fork_servers import Reaper
from nblaunch.errors import StartError, warn
from nblaunch.machine import named_resources
from nblaunch.machine.inventory import has_used_cuda
from nblaunch.wire.channel import channel_pair
from nblaunch.wire.messages import Payload


def check_fork(cuda_cell: str) -> None:
    """Refuse a fork of the kernel if CUDA is initialized; else warn about its risks.

    Args:
        cuda_cell: The cell that initialized CUDA; empty if unknown.

    Raises:
        StartError: CUDA is initialized in this process; it does not work after a fork.
    """
    if has_used_cuda():
        started = f", started by {cuda_cell}," if cuda_cell else ""
        raise StartError(
            f"start_method='fork': CUDA runs in the notebook{started} and does not work after a fork: "
            "use start_method='auto'"
        )
    warn(
        "start_method='fork' copies a process with threads: ranks hang if a lock is held, or if OpenMP has run in the "
        "notebook. start_method='auto' is as fast and safe"
    )


def fork_kernel(payload: Payload) -> Reaper:
    """Fork a reaper from the kernel. Its ranks share the notebook's memory, copy-on-write.

    Import before the fork: another thread may hold an import lock, which the child would never see released.
    """
    from nblaunch.ranks import reaper, worker

    if "IPython" in sys.modules:
        importlib.import_module("nblaunch.ranks.rank_shell")

    named_resources.tracker()  # the ranks inherit it
    here, there = channel_pair()
    kernel = os.getpid()
    pid = _quiet_fork()
    if pid == 0:
        try:
            reaper.run(there, [kernel], worker.forked_with(payload))
        finally:
            os._exit(1)
    there.close()
    return Reaper(here, pid)


_fork_lock = threading.Lock()
"""``catch_warnings`` is not thread-safe: two at a time may restore the wrong filters."""


def _quiet_fork() -> int:
    with _fork_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # duplicates our own warning
        return os.fork()
