"""What a rank could not write: counted by the rank and its forked children, read by the kernel.

The counters are a table in a file that has its size from the beginning: on a full disk it can still be changed. Each
process has a row of its own, so that none waits for another's lock. Two processes share a row where their pids are the
same modulo the number of rows; what they count at the same moment may be counted once.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from nblaunch.errors import ArgumentError
from nblaunch.machine.segments import in_words
from nblaunch.wire.launch_files import drop_counters

Kind = Literal["out", "err", "reports"]
_ROW = struct.Struct("=qqqq")
"""Bytes of out, bytes of err, reports; and why: an errno, 0 for the limit that the user has set."""
_ROWS = 64
"""For the processes of one rank."""
_BLOCK = _ROW.size * _ROWS
_COLUMNS: dict[Kind, int] = {"out": 0, "err": 1, "reports": 2}
_LIMIT = "NBLAUNCH_MAX_LOG_BYTES"


@dataclass(frozen=True, slots=True)
class Dropped:
    """What one rank could not write."""

    output: int = 0
    """Bytes that it printed."""
    reports: int = 0
    """Calls of ``nblaunch.report``."""
    reason: int = 0
    """An errno; 0 where all of it was beyond the limit that the user has set."""

    def __bool__(self) -> bool:
        return bool(self.output or self.reports)

    @property
    def amount(self) -> str:
        """How much, in words."""
        parts = [f"{in_words(self.output)} of output"] if self.output else []
        parts += [f"{self.reports:,} report{'s' * (self.reports != 1)}"] if self.reports else []
        return " and ".join(parts)

    @property
    def why(self) -> str:
        """The reason in words."""
        return os.strerror(self.reason) if self.reason else _LIMIT


class Table:
    """The counters of all ranks of a launch, for the kernel to read.

    Args:
        scratch: The launch's own temporary folder: often on another disk than the logs.
        ranks: How many ranks there are.
    """

    def __init__(self, scratch: str, ranks: int) -> None:
        self._file = open(drop_counters(scratch), "xb+", buffering=0)  # kept open: the folder goes with the last rank
        self._file.write(bytes(ranks * _BLOCK))

    def read(self, rank: int) -> Dropped:
        """What a rank has counted so far."""
        rows = list(_ROW.iter_unpack(os.pread(self._file.fileno(), _BLOCK, rank * _BLOCK)))
        out, err, reports, _ = map(sum, zip(*rows, strict=True))
        return Dropped(out + err, reports, max(row[3] for row in rows))

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        self._file.close()


class Counter:
    """The counters of one rank, for it and its forked children to add to."""

    def __init__(self, scratch: str, rank: int) -> None:
        self._path = drop_counters(scratch)
        self._block = rank * _BLOCK
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()  # a signal handler may print, too

    def add(self, kind: Kind, count: int, reason: int) -> None:
        """Count what could not be written. It never fails: what cannot be counted is not."""
        with self._lock, suppress(OSError, struct.error):
            # Opened each time: user code may have closed a descriptor, and its number may be a checkpoint's by now.
            table = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                at = self._block + os.getpid() % _ROWS * _ROW.size
                row = list(_ROW.unpack(os.pread(table, _ROW.size, at)))
                row[_COLUMNS[kind]] += count
                row[3] = reason
                os.pwrite(table, _ROW.pack(*row), at)
            finally:
                os.close(table)


def log_limit(env: Mapping[str, str]) -> int | None:
    """Bytes that each log of a rank may have: ``$NBLAUNCH_MAX_LOG_BYTES``; None for no limit.

    Raises:
        ArgumentError: The variable is no number.
    """
    chosen = env.get(_LIMIT)
    if not chosen:
        return None
    if not chosen.isdecimal():
        raise ArgumentError(f"{_LIMIT}={chosen!r}: must be a number of bytes; leave it out for no limit")
    return int(chosen)
