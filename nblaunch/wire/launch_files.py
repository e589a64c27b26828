"""The files of a launch: their paths, the lock of a directory, and the format of stack dumps.

A launch has two directories. The log directory is kept for the user; the scratch directory is removed after the last
rank's exit.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Directory: TypeAlias = "str | os.PathLike[str]"
RankFile = Literal["out", "err", "spool", "stacks", "error.json"]
"""What a rank writes to fd 1 and fd 2, its reports, its stack dumps, and what torch's ``@record`` writes."""
LOCK = "live"
"""In the log directory: locked while the directory must not be pruned."""


def rank_file(log_dir: Directory, rank: int, kind: RankFile) -> Path:
    return Path(log_dir, f"rank{rank}.{kind}")


def output_file(log_dir: Directory, rank: int, key: str, suffix: str) -> Path:
    return Path(log_dir, f"rank{rank}-output{key}.{suffix}")


def stacks_pipe(scratch: Directory, rank: int) -> Path:
    return Path(scratch, f"rank{rank}.ask")


def rank_table(scratch: Directory) -> Path:
    return Path(scratch, "table")


# ------------------------------------------------------------------ the lock of a directory of a kernel or agent
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def acquire_lock(directory: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if another process holds it or the directory is gone.

    Creating and removing a directory take the same steps: open the lock file (creating it), lock it, and check that
    the name still refers to it. So neither can slip between the steps of the other.
    """
    path = directory / LOCK
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


def release_lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a forked process may hold a copy, and with it the lock
    finally:
        os.close(fd)


# ------------------------------------------------------------------ stack dumps
BEGIN, WHOLE = "(answer)\n", "(whole)\n"
"""First and last line of an answer, which is appended in one write: faulthandler may write before and after it."""


@dataclass(frozen=True, slots=True)
class DumpHead:
    """The first line of the file: how to request the stacks of this rank."""

    signal: int
    """faulthandler answers it."""
    pipe: str
    """The FIFO that the rank's own thread reads."""
    main: str

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> DumpHead:
        return cls(**json.loads(line))
