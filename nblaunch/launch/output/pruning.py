"""Removal of the log directories of old launches."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from nblaunch.errors import StartError
from nblaunch.launch.output.log_directory import CELL_SUFFIX, is_referenced
from nblaunch.launch.output.state_root import state_root
from nblaunch.wire import directory_lock

_log = logging.getLogger(__name__)

MAX_LAUNCHES = 50
MAX_BYTES = 1 << 30
_NAME = re.compile(r"\d{8}T\d{12}Z-.+")
_sizes: dict[Path, int] = {}
"""Bytes of finished launches: listing 50 directories takes milliseconds."""


def prune(max_launches: int = MAX_LAUNCHES, max_bytes: int = MAX_BYTES) -> None:
    """Remove this user's oldest log directories; leave those that cannot be removed.

    The newest launch, running launches, and launches that their kernel still refers to are never removed.

    Args:
        max_launches: How many launches to keep, and how many cells of sessions.
        max_bytes: The total size to keep, without the newest launch and those that this process refers to.
    """
    try:
        root = state_root()
    except StartError:  # the next launch reports it
        _log.debug("no logs are pruned", exc_info=True)
        return
    names: list[str] = []
    with suppress(OSError), os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name) and _is_own(entry))
    total = 0
    ages = {True: itertools.count(), False: itertools.count()}
    for name in reversed(names):
        directory = root / name
        age = next(ages[name.endswith(CELL_SUFFIX)])  # the cells of a session must not cost a training its logs
        if name == names[-1] or is_referenced(directory):
            continue
        total += _size(directory)
        if age >= max_launches or total > max_bytes:
            _remove(directory)


def _is_own(entry: os.DirEntry[str]) -> bool:
    """Return True if this is a directory of this user's: users may share the root."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # pruned by another kernel
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _size(directory: Path) -> int:
    if directory in _sizes:
        return _sizes[directory]
    lock = _try_lock(directory)
    total = 0
    with suppress(OSError):  # pruned by another kernel, or unreadable
        total = sum(entry.lstat().st_size for entry in directory.iterdir())
    if lock is not None:  # a finished launch: its size stays
        _sizes[directory] = total
        directory_lock.release(lock)
    return total


def _remove(directory: Path) -> None:
    lock = _try_lock(directory)
    if lock is None:
        return
    _sizes.pop(directory, None)
    try:
        shutil.rmtree(directory, ignore_errors=True)  # the next pruning retries
    finally:
        directory_lock.release(lock)


def _try_lock(directory: Path) -> int | None:
    try:
        return directory_lock.acquire(directory)
    except OSError as error:
        _log.debug("nblaunch: %s cannot be locked, so it counts as in use: %s", directory, error)
        return None
