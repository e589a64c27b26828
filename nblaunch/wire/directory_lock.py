"""The lock of a directory of a kernel or agent: while the process holds it, no other one removes the directory."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from nblaunch.wire import launch_files

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The errnos of a file system without locks."""


def acquire(directory: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if another process holds it or the directory is gone.

    Creating and removing a directory take the same steps: open the lock file (creating it), lock it, and check that
    the name still refers to it. So neither can slip between the steps of the other.

    Raises:
        OSError: The lock file cannot be opened or locked; see `UNSUPPORTED`.
    """
    path = directory / launch_files.LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass  # another process holds the lock or has removed the file
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def release(fd: int) -> None:
    """Release the lock and close its descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a forked process may hold a copy, and with it the lock
    finally:
        os.close(fd)
