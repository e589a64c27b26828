"""multiprocessing's named shared memory and semaphores in ranks: who tracks them, and who removes what is left.

Ranks use the notebook's resource tracker, as multiprocessing's own children do. With a tracker of its own, a rank's
exit would unlink each block of the notebook that the rank has attached
(https://github.com/python/cpython/issues/82300). The notebook's tracker removes what is left when the notebook ends.
That is late for blocks of ranks, so a rank records those that it creates, and the end of its launch removes them.
"""

from __future__ import annotations

import contextlib
import functools
import os
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

_RECORD = "named_resources"
"""The file in the scratch directory of a launch: a line for each block or semaphore that a rank has created."""
_FILES = {"shared_memory": "/dev/shm/{}", "semaphore": "/dev/shm/sem.{}"}


def tracker() -> int:
    """Return the descriptor of this process's resource tracker, which is started unless it runs."""
    return int(resource_tracker.getfd() or 0)


def use_tracker(fd: int) -> None:
    """Use the notebook's resource tracker. Called in the fork server and in spawned ranks."""
    os.set_inheritable(fd, False)  # multiprocessing passes it to its children by itself
    shared: Any = resource_tracker._resource_tracker
    shared._fd = fd


def record_created(folder: str) -> None:
    """Record in the scratch directory of a launch what this rank creates from now on, and its forked children."""
    kind: Any = SharedMemory
    module: Any = resource_tracker
    begin, register = kind.__init__, module.register
    record = os.path.join(folder, _RECORD)

    @functools.wraps(begin)
    def recorded_begin(self: Any, name: str | None = None, create: bool = False, *args: Any, **kwargs: Any) -> None:
        begin(self, name, create, *args, **kwargs)
        if create and getattr(self, "_track", True):  # since Python 3.13
            note("shared_memory", self._name)

    def recorded_register(name: str, rtype: str) -> None:
        register(name, rtype)
        if rtype == "semaphore":  # attaching one does not register it
            note(rtype, name)

    def note(kind: str, name: str) -> None:
        with contextlib.suppress(OSError), open(record, "a") as file:  # a full disk, or the launch has ended
            file.write(f"{kind} {_inode(kind, name)} {name}\n")

    kind.__init__, module.register = recorded_begin, recorded_register


def remove_created(folder: str) -> None:
    """Remove the blocks and semaphores that ranks have created and left. Called once the ranks have exited."""
    try:
        lines = Path(folder, _RECORD).read_text().splitlines() if folder else []
    except OSError:  # none, or another process was faster
        return
    module: Any = resource_tracker
    for line in lines:
        kind, inode, name = line.split(" ", 2)
        if _inode(kind, name) == int(inode):  # else another has made it again
            with contextlib.suppress(OSError):  # removed already
                module._CLEANUP_FUNCS[kind](name)
                resource_tracker.unregister(name, kind)


def _inode(kind: str, name: str) -> int:
    """Return the number of a block's file; 0 where the system shows no files of blocks."""
    try:
        return os.stat(_FILES[kind].format(name.lstrip("/"))).st_ino
    except OSError:
        return 0
