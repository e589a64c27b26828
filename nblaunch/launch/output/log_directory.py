"""The log directories of launches: where they are, who may change them, and which are removed.

A directory is not removed while anything in the kernel refers to it.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import re
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import platformdirs

from nblaunch.errors import StartError, warn
from nblaunch.wire import launch_files
from nblaunch.wire.launch_files import rank_file

_log = logging.getLogger(__name__)

MAX_FINISHED_LOCKS = 100
"""Finished launches whose directories stay locked, the latest first: each lock takes a descriptor."""
CELL_SUFFIX = "-cell"
_referenced: weakref.WeakValueDictionary[Path, LaunchFiles] = weakref.WeakValueDictionary()
"""The directories that this process refers to, oldest first."""


class LaunchFiles:
    """The log directory of one attempt of a launch. It is not pruned while this object lives.

    A lock on the directory tells other kernels. Of finished launches only the latest `MAX_FINISHED_LOCKS` keep theirs;
    the others are safe from this kernel's pruning only.
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
    def create(cls, launch_id: str, root: Path | None = None) -> LaunchFiles:
        """Create the directory of an attempt in `root`, by default among those of all launches."""
        root = root or state_root()
        while True:
            directory = root / f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S%f}Z-{launch_id}"
            with suppress(FileExistsError):  # the same launch and microsecond: retry
                directory.mkdir(mode=0o700)
                try:
                    lock = launch_files.acquire_lock(directory)
                except OSError as error:
                    if error.errno not in launch_files.NO_LOCKS:
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
        launch_files.release_lock(lock)


@dataclass(frozen=True, slots=True, repr=False)
class RankLogs:
    """The logs of one rank and its child processes. They are not pruned while this object lives."""

    out: Path
    err: Path
    files: LaunchFiles | None = field(default=None, compare=False)
    """Keeps the logs from being pruned."""
    dropped: bool = False
    """True if output is missing, because the disk was full or the log reached ``NBLAUNCH_MAX_LOG_BYTES``."""

    def text(self) -> str:
        """Return the rank's whole stdout; empty if the rank never started.

        Raises:
            FileNotFoundError: The logs were removed.
        """
        if self.out.parent.exists() and not self.out.exists():
            return ""
        return self.out.read_text(encoding="utf-8", errors="replace")

    def __repr__(self) -> str:
        return f"RankLogs({str(self.out)!r}, {self.err.name!r})"


def state_root() -> Path:
    """Create the directory of all launches if necessary, and return it. Raise a StartError if none is safe.

    It is ``$NBLAUNCH_STATE_DIR`` or ``nblaunch/launches`` in the user's state directory. If that is unusable, it is a
    temporary directory, with one warning.
    """
    chosen = os.environ.get("NBLAUNCH_STATE_DIR")
    try:
        if chosen:
            return _safe(Path(chosen).expanduser().absolute())
        try:
            return _safe(platformdirs.user_state_path("nblaunch") / "launches")
        except OSError as error:
            root = _safe(Path(tempfile.gettempdir(), f"nblaunch-{os.getuid()}"))
            warn(
                f"launch logs go to {root}, because the state directory cannot be used ({error}): set "
                "NBLAUNCH_STATE_DIR to another directory to keep them",
                once="temporary logs",
            )
            return root
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        name = f"NBLAUNCH_STATE_DIR={chosen!r}" if chosen else "the temporary directory"
        raise StartError(
            f"cannot store launch logs in {name}: {error}: set NBLAUNCH_STATE_DIR to a directory that only "
            "you can write to"
        ) from error


def _safe(root: Path) -> Path:
    """Create `root` and return it, or a subdirectory of this user's own where all may create files, as in ``/tmp``."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found, user = root.stat(), os.getuid()
    foreign = {root.lstat().st_uid, found.st_uid} - {0, user}  # also of a link: its owner may change it
    if foreign:
        problem = f"it belongs to another user (uid {min(foreign)})"
    elif found.st_mode & stat.S_IWOTH and found.st_mode & stat.S_ISVTX:
        return _safe(root / f"nblaunch-{user}")
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"other users can write to it (mode {stat.S_IMODE(found.st_mode):04o}; fix it with `chmod go-w`)"
    elif not os.access(root, os.W_OK | os.X_OK):
        problem = "it is not writable"
    else:
        return root
    raise PermissionError(errno.EACCES, problem, str(root))


LAUNCH_NAME = re.compile(r"\d{8}T\d{12}Z-.+")
"""Of a log directory among those of all launches."""


def prune(max_launches: int = 50, max_bytes: int = 1 << 30) -> None:
    """Remove this user's oldest log directories; leave those that cannot be removed.

    The newest launch, running launches, and launches that their kernel still refers to are never removed, nor do they
    count towards `max_bytes`. `max_launches` are kept, and as many cells of sessions.
    """
    try:
        root = state_root()
    except StartError:  # the next launch reports it
        _log.debug("no logs are pruned", exc_info=True)
        return
    names: list[str] = []
    with suppress(OSError), os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if LAUNCH_NAME.fullmatch(entry.name) and is_own(entry))
    total = 0
    ages = {True: itertools.count(), False: itertools.count()}
    for name in reversed(names):
        directory = root / name
        age = next(ages[name.endswith(CELL_SUFFIX)])  # the cells of a session must not cost a training its logs
        if name == names[-1] or directory in _referenced:
            continue
        total += _size(directory)
        if age >= max_launches or total > max_bytes:
            _remove(directory)


def is_own(entry: os.DirEntry[str]) -> bool:
    """Return True if this is a directory of this user's: users may share the root."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # pruned by another kernel
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


@functools.cache
def _size(directory: Path) -> int:
    """Return the bytes of a finished launch; measured once, as every launch prunes."""
    with suppress(OSError):  # pruned by another kernel, or unreadable
        return sum(entry.lstat().st_size for entry in directory.iterdir())
    return 0


def _remove(directory: Path) -> None:
    try:
        lock = launch_files.acquire_lock(directory)
    except OSError as error:
        _log.debug("nblaunch: %s cannot be locked, so it counts as in use: %s", directory, error)
        return
    if lock is not None:
        try:
            shutil.rmtree(directory, ignore_errors=True)  # the next pruning retries
        finally:
            launch_files.release_lock(lock)
