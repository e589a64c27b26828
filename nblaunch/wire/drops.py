"""Counters of the output and reports that a rank dropped: the rank and its forked children write, the kernel reads.

The counters are a table in a file of fixed size, which can be updated on a full disk. Each process has its own row, and
waits for no other's lock. Processes whose pids are equal modulo the number of rows share one: a count may then be lost
if they update it at the same moment.
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
from nblaunch.machine.processes import open_table
from nblaunch.machine.segments import in_words
from nblaunch.wire.launch_files import drop_counters

Kind = Literal["out", "err", "reports"]
_ROW = struct.Struct("=qqqq")
"""Bytes of stdout, bytes of stderr, reports, and the reason: an errno, or 0 for the user's limit."""
_ROWS = 64
"""Per rank."""
_BLOCK = _ROW.size * _ROWS
_COLUMNS: dict[Kind, int] = {"out": 0, "err": 1, "reports": 2}
_LIMIT = "NBLAUNCH_MAX_LOG_BYTES"
_MAX_LOG_BYTES = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Dropped:
    output: int = 0
    """Bytes of stdout and stderr."""
    reports: int = 0
    """Calls of ``nblaunch.report``."""
    reason: int = 0
    """An errno, or 0 if the user's limit was the only reason."""

    def __bool__(self) -> bool:
        return bool(self.output or self.reports)

    @property
    def amount(self) -> str:
        """The amount, such as ``1.2 MB of output and 3 reports``."""
        parts = [f"{in_words(self.output)} of output"] if self.output else []
        parts += [f"{self.reports:,} report{'s' * (self.reports != 1)}"] if self.reports else []
        return " and ".join(parts)

    @property
    def why(self) -> str:
        """The reason: a system error, or the variable that sets the limit."""
        return os.strerror(self.reason) if self.reason else _LIMIT


class Table:
    """The counters of all ranks of a launch; for the kernel, which reads them."""

    def __init__(self, scratch: str, ranks: int) -> None:
        self._file = open_table(drop_counters(scratch), ranks * _BLOCK)  # read after the folder is removed

    def read(self, rank: int) -> Dropped:
        rows = list(_ROW.iter_unpack(os.pread(self._file.fileno(), _BLOCK, rank * _BLOCK)))
        out, err, reports, _ = map(sum, zip(*rows, strict=True))
        return Dropped(out + err, reports, max(row[3] for row in rows))

    def close(self) -> None:
        self._file.close()


class Counter:
    """The counters of one rank; for the rank and its forked children, which add to them."""

    def __init__(self, scratch: str, rank: int) -> None:
        self._path = drop_counters(scratch)
        self._block = rank * _BLOCK
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may print

    def add(self, kind: Kind, count: int, reason: int) -> None:
        """Count what was dropped. Never raises: a count that cannot be written is lost."""
        with self._lock, suppress(OSError, struct.error):
            # Opened each time: user code may have closed the descriptor, and its number may now belong to a checkpoint.
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
    """Return the maximum size of each log in bytes, ``$NBLAUNCH_MAX_LOG_BYTES``, else 1 GB; None for no limit."""
    chosen = env.get(_LIMIT)
    if not chosen:
        return _MAX_LOG_BYTES
    if not chosen.isdecimal():
        raise ArgumentError(f"{_LIMIT}={chosen!r}: must be a number of bytes; 0 means no limit")
    return int(chosen) or None
