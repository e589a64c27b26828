"""Anonymous files that are written once and then handed to other processes read-only.

A file is memory (a memfd). Where the system has no memfds, or a container's seccomp filter refuses them, or memory is
short, it is an unlinked file: in /dev/shm if there is room, else on disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_LEFT_SHARE = 2
"""At least 1/2 of /dev/shm stays free: containers have 64 MB, which DataLoader workers and NCCL need too."""
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Draft:
    """A file that is being written. End with `seal`, `leave_writable` or `close`.

    Attributes:
        fd: The descriptor to write to.
        in_memory: Whether the file is a memfd.
    """

    def __init__(self, fd: int, reader: int | None = None) -> None:
        self.fd, self.in_memory = fd, reader is None
        self._reader = reader
        """Opened while the file had a name: /proc, which could open it again, may be missing."""

    def seal(self) -> int:
        """Return a descriptor that nothing can be written through. Root could still reopen a file on disk."""
        if self._reader is None:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            return self.fd
        os.close(self.fd)
        return self._reader

    def leave_writable(self) -> int:
        """Return the descriptor, for a file that its receivers write to."""
        if self._reader is not None:
            os.close(self._reader)
        return self.fd

    def close(self) -> None:
        """Drop the file."""
        os.close(self.leave_writable())


def create(size: int = 0, folder: Path | None = None, name: str = "nblaunch") -> Draft:
    """Open an anonymous file for writing.

    Args:
        size: The bytes that it will have. Default: few.
        folder: Put the file on disk, in this folder. Default: in memory where the system has memfds.
        name: What the descriptor is called in ``/proc``.
    """
    if folder is None:
        memory = _memory_file(name)
        if memory is not None:
            return Draft(memory)
        if _fits_shared_memory(size):
            draft = _unlinked(name, SHARED_MEMORY)
            with contextlib.suppress(OSError):  # another process has taken the room
                if size:
                    os.posix_fallocate(draft.fd, 0, size)
                return draft
            draft.close()
    return _unlinked(name, folder)


def _unlinked(name: str, folder: Path | None) -> Draft:
    fd, path = tempfile.mkstemp(prefix=f"{name}-", dir=folder)
    try:
        reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        os.close(fd)
        raise
    finally:
        os.unlink(path)
    os.fchmod(fd, 0o400)  # or another process could open it for writing through /proc
    return Draft(fd, reader)


def fits(size: int) -> bool:
    """Return True if a file of `size` bytes would be in memory, as far as the system's limits of files say."""
    memory = _memory_file("nblaunch")
    if memory is None:
        return _fits_shared_memory(size)
    os.close(memory)
    return True


def _memory_file(name: str) -> int | None:
    """Return a memfd; None where the system has none or refuses them: EPERM by seccomp, ENOSYS, EACCES by a sysctl."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except AttributeError:
        return None
    except OSError as error:
        if error.errno in _NO_MORE_FILES:
            raise
        return None


def _fits_shared_memory(size: int) -> bool:
    if not os.access(SHARED_MEMORY, os.W_OK):
        return False
    room = shutil.disk_usage(SHARED_MEMORY)
    return room.free - size >= room.total // _LEFT_SHARE
