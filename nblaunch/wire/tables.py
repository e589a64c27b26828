"""A table that ranks write and the kernel reads, also while a rank hangs. Its size is fixed: it needs no room later.

Ranks map it for their collectives; they have a row for each process group, whose version number guards it against
being read while it is written. What a rank could not write, it and its forked children note by flags.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from nblaunch.errors import ArgumentError
from nblaunch.wire.launch_files import rank_table

# ------------------------------------------------------------------ the last collective of each process group
_ROW = struct.Struct("=Qqqq32s96s24s48s256s")
"""The fields of `Begun`, after the version: odd while the row is written, 0 before."""
_VERSION = struct.Struct("=Q")
ROWS = 8
"""Per rank: of the process groups that it has used last."""
_BLOCK = _ROW.size * ROWS
_DROPS = struct.Struct("=??xxi")
"""The fields of `Dropped`, behind the rows."""
_RANK_BYTES = _BLOCK + _DROPS.size
_READS = 3
_MAX_MEMBERS = 96
UNKNOWN = "?"
POINT_TO_POINT = {"SEND", "RECV", "RECVANYSOURCE", "SPLIT", "NEW_WINDOW"}
"""Operations that not every rank of a group calls, as torch names them."""
_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all", "recvanysource": "recv"}


def name_of_call(operation: str) -> str:
    """Return the name of torch's function, such as ``all_reduce``, by that of its operation."""
    return _NAMES.get(operation, operation)


@dataclass(frozen=True, slots=True)
class Begun:
    """The collectives that a rank has begun in one process group, and the last of them."""

    count: int = 0
    line: int = 0
    """The user's line that called it, in `file`; 0 if it is not known."""
    time_ns: int = 0
    group: str = ""
    members: str = ""
    """The ranks of the process group, such as ``0-3,6``; empty: all; `UNKNOWN`: not known."""
    call: str = ""
    """Its name, such as ``allreduce``."""
    detail: str = ""
    """The size and dtype of its tensors, such as ``8 float32``."""
    file: str = ""
    """The user's file or cell; empty if it is not known."""

    @property
    def is_transfer(self) -> bool:
        return self.call.upper() in POINT_TO_POINT


class RankTable:
    """What all ranks of a group have begun and dropped; for the kernel, which reads it."""

    def __init__(self, scratch: str, ranks: int) -> None:
        self._file = io.FileIO(rank_table(scratch), "x+")  # which is read after the folder is removed
        if self._file.write(bytes(ranks * _RANK_BYTES)) < ranks * _RANK_BYTES:  # a hole is a SIGBUS where it is mapped
            self._file.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def begun(self, rank: int) -> list[Begun]:
        rows = (self._begun(rank * _RANK_BYTES + number * _ROW.size) for number in range(ROWS))
        return sorted((row for row in rows if row is not None), key=lambda row: -row.time_ns)

    def _begun(self, at: int) -> Begun | None:
        for _ in range(_READS):
            before = os.pread(self._file.fileno(), _ROW.size, at)
            (version,) = _VERSION.unpack_from(os.pread(self._file.fileno(), _VERSION.size, at))
            fields = _ROW.unpack(before)
            if fields[0] == version and not version % 2:
                texts = (text.rstrip(b"\0").decode(errors="replace") for text in fields[4:])
                return Begun(*fields[1:4], *texts) if version else None
        return None

    def dropped(self, rank: int) -> Dropped:
        return Dropped(*_DROPS.unpack(os.pread(self._file.fileno(), _DROPS.size, rank * _RANK_BYTES + _BLOCK)))

    def clear_begun(self, rank: int) -> None:
        os.pwrite(self._file.fileno(), bytes(_BLOCK), rank * _RANK_BYTES)

    def clear_dropped(self, rank: int) -> None:
        os.pwrite(self._file.fileno(), bytes(_DROPS.size), rank * _RANK_BYTES + _BLOCK)

    def close(self) -> None:
        self._file.close()


class CollectiveRows:
    """The rows of one rank, which writes them. Nothing here raises: counting must never fail a collective."""

    def __init__(self, scratch: str, rank: int) -> None:
        self._map: mmap.mmap | None = None
        self._groups: dict[str, int] = {}
        self._versions = [0] * ROWS
        with suppress(OSError, ValueError), open(rank_table(scratch), "rb+", buffering=0) as file:
            self._map = mmap.mmap(file.fileno(), (rank + 1) * _RANK_BYTES)
        self._base, self._owner = rank * _RANK_BYTES, os.getpid()

    def clear(self) -> None:
        if self._map is not None and os.getpid() == self._owner:
            self._map[self._base : self._base + _BLOCK] = bytes(_BLOCK)
        self._groups, self._versions = {}, [0] * ROWS

    def write(self, begun: Begun) -> None:
        """Write the row of a process group, which takes the place of the group that was used first if none is free."""
        if self._map is None or os.getpid() != self._owner:  # a forked child must not write its parent's rows
            return
        number = self._groups.get(begun.group)
        if number is None:
            number = len(self._groups) if len(self._groups) < ROWS else self._groups.pop(next(iter(self._groups)))
        self._groups.pop(begun.group, None)
        self._groups[begun.group] = number  # the last is the one used last
        texts = (begun.group, begun.members, begun.call, begun.detail, begun.file)
        encoded = [text.encode(errors="replace") for text in texts]
        at, version = self._base + number * _ROW.size, self._versions[number] + 2
        self._versions[number] = version
        row = _ROW.pack(version - 1, begun.count, begun.line, begun.time_ns, *encoded)
        _VERSION.pack_into(self._map, at, version - 1)
        self._map[at : at + _ROW.size] = row
        _VERSION.pack_into(self._map, at, version)


def fitting(members: str) -> str:
    return members if len(members) <= _MAX_MEMBERS else UNKNOWN


def in_ranges(ranks: Iterable[int]) -> str:
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][-1] + 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    return ",".join("-".join(map(str, each)) for each in found)


def members_of(begun: Begun, world_size: int) -> Sequence[int] | None:
    if begun.members == UNKNOWN:
        return None
    found: list[int] = []
    for part in begun.members.split(",") if begun.members else [f"0-{world_size - 1}"]:
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


# ------------------------------------------------------------------ what ranks could not write
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
        return os.strerror(self.reason) if self.reason else _LIMIT


class Drops:
    """The flags of one rank; for the rank and its forked children, which set them."""

    def __init__(self, scratch: str, rank: int) -> None:
        self._path, self._row = rank_table(scratch), rank * _RANK_BYTES + _BLOCK

    def note(self, kind: Literal["output", "reports"], reason: int) -> None:
        """Note that something was dropped. Never raises."""
        with suppress(OSError):
            # Opened each time: user code may have closed the descriptor, and its number may now belong to a checkpoint.
            table = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.pwrite(table, _REASON.pack(reason), self._row + _DROPS.size - _REASON.size)
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
