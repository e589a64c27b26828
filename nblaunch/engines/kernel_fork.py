"""The fork of the kernel itself, for ``start_method="fork"``."""

from __future__ import annotations

import os
import sys
import threading
import warnings

from nblaunch.engines.server_client import Reaper
from nblaunch.errors import StartError, warn
from nblaunch.wire.channel import channel_pair
from nblaunch.wire.messages import Payload


def check_fork(cuda_cell: str) -> None:
    """Refuse a fork of the kernel where it cannot work, and warn where it may not.

    Args:
        cuda_cell: The cell that started CUDA; empty if none is known.

    Raises:
        StartError: CUDA runs in this process, which no fork survives.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        started = f", started by {cuda_cell}" if cuda_cell else ""
        raise StartError(
            f"start_method='fork': CUDA runs in the notebook{started}, and no fork survives that: use 'auto'"
        )
    warn(
        "start_method='fork' copies a process with threads: ranks hang if a lock is held, or if OpenMP has run in the "
        "notebook. start_method='auto' is as fast and safe"
    )


def fork_kernel(payload: Payload) -> Reaper:
    """Fork a reaper off the kernel itself; its ranks share the notebook's memory, copy-on-write.

    The one place where the kernel's room reaches into the ranks': the child becomes theirs. It imports before the
    fork: another thread may hold an import's lock, which the child would never see released.
    """
    from nblaunch.ranks import reaper, worker

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
"""``catch_warnings`` puts back what it found: two at a time would leave the other's filters in place."""


def _quiet_fork() -> int:
    with _fork_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own warning says what ours has said
        return os.fork()
