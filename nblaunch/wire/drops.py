"""What ranks could not write, as flags: the rank and its forked children set them, the kernel reads.

They are in a file of fixed size, which can be written to on a full disk.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from nblaunch.errors import ArgumentError
from nblaunch.machine.processes import open_table
from nblaunch.wire.launch_files import drop_flags

_ROW = struct.Struct("=??i")
_REASON = struct.Struct("=i")
_LIMIT = "NBLAUNCH_MAX_LOG_BYTES"
_MAX_LOG_BYTES = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Dropped:
    """What one rank has dropped."""

    output: bool = False
    reports: bool = False
    reason: int = 0
    """An errno, or 0 for the user's limit."""

    def __bool__(self) -> bool:
        return self.output or self.reports

    @property
    def what(self) -> str:
        return " and ".join(["output"] * self.output + ["reports"] * self.reports)

    @property
    def why(self) -> str:
        """The reason: a system error, or the variable that sets the limit."""
        return os.strerror(self.reason) if self.reason else _LIMIT


class Table:
    """The flags of all ranks of a launch; for the kernel."""

    def __init__(self, scratch: str, ranks: int) -> None:
        self._file = open_table(drop_flags(scratch), ranks * _ROW.size)  # read after the folder is removed

    def read(self, rank: int) -> Dropped:
        return Dropped(*_ROW.unpack(os.pread(self._file.fileno(), _ROW.size, rank * _ROW.size)))

    def clear(self, rank: int) -> None:
        """Forget what a rank has dropped: it turns to another task."""
        os.pwrite(self._file.fileno(), bytes(_ROW.size), rank * _ROW.size)

    def close(self) -> None:
        self._file.close()


class Drops:
    """The flags of one rank; for the rank and its forked children, which set them."""

    def __init__(self, scratch: str, rank: int) -> None:
        self._path, self._row = drop_flags(scratch), rank * _ROW.size

    def note(self, kind: Literal["output", "reports"], reason: int) -> None:
        """Note that something was dropped. Never raises."""
        with suppress(OSError):
            # Opened each time: user code may have closed the descriptor, and its number may now belong to a checkpoint.
            table = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.pwrite(table, _REASON.pack(reason), self._row + _ROW.size - _REASON.size)
                os.pwrite(table, b"\1", self._row + (kind == "reports"))
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
