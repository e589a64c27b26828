"""Anonymous files that are written once and then handed to other processes read-only.

A file is memory (a memfd) or, where there is none or memory is short, an unlinked file on disk.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path


def create(folder: Path | None = None) -> tuple[int, bool]:
    """Open an anonymous file for writing.

    Args:
        folder: Put the file on disk, in this folder. Default: in memory where the system has memfds.

    Returns:
        The descriptor, and whether the file is memory.
    """
    if folder is None and hasattr(os, "memfd_create"):
        return os.memfd_create("nblaunch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), True
    fd, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    os.fchmod(fd, 0o400)  # or another process could open it for writing through /proc
    return fd, False


def seal(fd: int, in_memory: bool) -> int:
    """Return a descriptor that nothing can be written through. `fd` is closed if it is a different one.

    Memory is sealed. A file on disk is reopened for reading, where /proc exists; root could still open it for writing.
    """
    if in_memory:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd
    if not os.path.exists(link := f"/proc/self/fd/{fd}"):
        return fd
    readable = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    os.close(fd)
    return readable
