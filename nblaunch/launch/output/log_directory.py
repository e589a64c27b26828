"""The log directory of a launch, which is not pruned while anything in the kernel refers to it."""

from __future__ import annotations

import errno
import logging
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from nblaunch.launch.output.state_root import state_root
from nblaunch.wire import directory_lock
from nblaunch.wire.launch_files import rank_file

_log = logging.getLogger(__name__)

MAX_FINISHED_LOCKS = 100
"""Finished launches whose directories stay locked, the latest first: each lock takes a descriptor."""
CELL_SUFFIX = "-cell"
"""Ends the names of the directories of sessions' cells."""
_referenced: weakref.WeakValueDictionary[Path, LaunchFiles] = weakref.WeakValueDictionary()
"""The directories that this process refers to, oldest first."""


def is_referenced(directory: Path) -> bool:
    """Return True if something in this process refers to this log directory."""
    return directory in _referenced


class LaunchFiles:
    """The log directory of one attempt of a launch. It is not pruned while this object lives.

    A lock on the directory tells other kernels. Of finished launches only the latest `MAX_FINISHED_LOCKS` keep theirs;
    the others are safe from this kernel's pruning only.

    Attributes:
        directory: The absolute path.
        is_finished: True once no rank writes there.
    """

    def __init__(self, directory: Path, lock: int | None) -> None:
        self.directory = directory
        self.is_finished = False
        self._lock = None if lock is None else weakref.finalize(self, _release, lock, os.getpid())
        if self._lock is not None:
            self._lock.atexit = False  # the lock ends with the process

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.directory,)  # a copy refers to the same directory, and has no lock of its own

    @classmethod
    def create(cls, launch_id: str) -> LaunchFiles:
        """Create and lock a directory that only this user can read.

        Raises:
            StartError: See `state_root`.
        """
        root = state_root()
        while True:
            directory = root / f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S%f}Z-{launch_id}"
            with suppress(FileExistsError):  # the same launch and microsecond: retry
                directory.mkdir(mode=0o700)
                try:
                    lock = directory_lock.acquire(directory)
                except OSError as error:
                    if error.errno not in directory_lock.UNSUPPORTED:
                        raise
                    _log.warning("nblaunch: %s will never be pruned: its file system does not support locks", directory)
                    return cls(directory, None)
                if lock is not None:
                    files = _referenced[directory] = cls(directory, lock)
                    return files

    def out(self, rank: int) -> Path:
        """Return the path of the rank's stdout (fd 1), which its child processes share."""
        return rank_file(self.directory, rank, "out")

    def err(self, rank: int) -> Path:
        """Return the path of the rank's stderr (fd 2), which its child processes share."""
        return rank_file(self.directory, rank, "err")

    def spool(self, rank: int) -> Path:
        """Return the path of the rank's reports, as JSON lines."""
        return rank_file(self.directory, rank, "spool")

    def close(self) -> None:
        """Mark the launch as finished: the directory may be pruned once this object is gone. Idempotent."""
        self.is_finished = True
        known = [files for reference in _referenced.valuerefs() if (files := reference()) is not None]
        locks = [files._lock for files in known if files.is_finished and files._lock is not None and files._lock.alive]
        for release in locks[:-MAX_FINISHED_LOCKS]:
            release()


def _unpickle(directory: Path) -> LaunchFiles:
    return _referenced.get(directory) or LaunchFiles(directory, None)


def _release(lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not release the parent's lock; the number may be another file's
        directory_lock.release(lock)


@dataclass(frozen=True, slots=True, repr=False)
class RankLogs:
    """The logs of one rank and its child processes. They are not pruned while this object lives."""

    out: Path
    """Stdout."""
    err: Path
    """Stderr."""
    files: LaunchFiles | None = field(default=None, compare=False)
    """Keeps the logs from being pruned."""
    dropped: int = 0
    """Bytes of printed output that are missing: the disk was full, or the log was at ``NBLAUNCH_MAX_LOG_BYTES``."""

    def text(self) -> str:
        """Return the rank's whole stdout; empty if the rank never started.

        Raises:
            FileNotFoundError: The logs were removed.
        """
        if self.out.exists():
            return self.out.read_text(encoding="utf-8", errors="replace")
        if not self.out.parent.exists():
            raise FileNotFoundError(
                errno.ENOENT,
                "the logs of this launch were removed, by hand or because newer launches took their place: copy logs "
                "that you want to keep",
                str(self.out.parent),
            )
        return ""

    def __repr__(self) -> str:
        return f"RankLogs({str(self.out)!r}, {self.err.name!r})"
