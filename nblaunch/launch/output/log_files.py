"""Followers of growing logs: `Tail` for printed output, `Spool` for reports. Nothing here waits."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nblaunch.launch.output.terminal_lines import LineAssembler, without_colours

_log = logging.getLogger(__name__)

_BLOCK = 1 << 20
_MOST_COUNTED = 1 << 20
"""Lines of a skipped part are counted up to this size: a flood is not read for its own sake."""
_LONGEST_RECORD = 1 << 20
_RECORDS_BLOCK = 1 << 17
"""Bytes of a spool that are records at once, which take ten times as much."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Piece:
    """What was appended to a file: all of it in ``head``, or its beginning and end."""

    head: bytes
    skipped_lines: int = 0
    """Line ends between head and tail; -1 where nobody counted them."""
    skipped_bytes: int = 0
    tail: bytes = b""


class _Follower:
    """A growing file, which may not exist yet, and how much of it has been dealt with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._offset = 0

    def _appended(self) -> tuple[int, int]:
        """From where to where the file has grown since the last call."""
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return 0, 0
        size = os.fstat(self._fd).st_size
        start, self._offset = min(self._offset, size), size  # somebody cut it: go on from its new end
        return start, size

    def _between(self, start: int, end: int) -> bytes:
        """What lies there; less where the file has been cut meanwhile."""
        if self._fd is None:
            return b""
        blocks = []
        while start < end and (block := os.pread(self._fd, end - start, start)):
            blocks.append(block)
            start += len(block)
        return b"".join(blocks)

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Tail(_Follower):
    """Follows a log; of a flood it reads the beginning and the end alone."""

    def grown(self) -> bool:
        """Whether something was appended since the last call, which is not read."""
        start, end = self._appended()
        return start != end

    @property
    def offset(self) -> int:
        """The log's size when it was last looked at."""
        return self._offset

    def read(self, limit: int) -> Piece | None:
        """What was appended since the last call, or None.

        Args:
            limit: How many bytes to take at most; of more, the first quarter and the last three quarters of so many
                are taken, cut at line ends where there are any near.
        """
        start, end = self._appended()
        if start == end:
            return None
        if end - start <= limit:
            return Piece(self._between(start, end))
        near = limit // 8
        head = _cut_after_line(self._between(start, start + limit // 4), near)
        # One byte more in front tells whether the tail begins a line.
        tail = _cut_before_line(self._between(end - limit * 3 // 4 - 1, end), near)
        skipped_from, skipped_to = start + len(head), end - len(tail)
        return Piece(head, self._count_lines(skipped_from, skipped_to), skipped_to - skipped_from, tail)

    def _count_lines(self, start: int, end: int) -> int:
        if end - start > _MOST_COUNTED:
            return -1
        return sum(self._between(at, min(at + _BLOCK, end)).count(b"\n") for at in range(start, end, _BLOCK))


def _cut_after_line(data: bytes, near: int) -> bytes:
    at = data.rfind(b"\n", len(data) - near)
    return data[: at + 1] if at >= 0 else data


def _cut_before_line(data: bytes, near: int) -> bytes:
    return data[data.find(b"\n", 0, near) + 1 or 1 :]


class Spool(_Follower):
    """Follows a rank's reports.

    Attributes:
        malformed: How many lines could not be read so far.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.malformed = 0
        self._rest = b""

    def read(self) -> Iterator[list[dict[str, Any]]]:
        """The records that have come whole since the last call, block by block: a flood is not in memory at once."""
        start, end = self._appended()
        for at in range(start, end, _RECORDS_BLOCK):
            *lines, self._rest = (self._rest + self._between(at, min(at + _RECORDS_BLOCK, end))).split(b"\n")
            if len(self._rest) > _LONGEST_RECORD:
                lines.append(self._rest)
                self._rest = b""
            yield [record for line in lines if (record := self._record(line)) is not None]

    def _record(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            return record
        self.malformed += 1
        _log.warning("nblaunch: %s holds a line that is no report: %.80r", self.path, line)
        return None


def last_lines(path: Path, count: int = 20, most_bytes: int = 16384) -> str:
    """The end of a log as a terminal would show it, for error messages; empty where there is no such file."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - most_bytes)
            file.seek(start)
            data = file.read(most_bytes)
    except FileNotFoundError:
        return ""
    if start:
        data = data[data.find(b"\n", 0, -1) + 1 :]
    assembler = LineAssembler()
    lines = assembler.feed(data) + assembler.finish()
    return "\n".join(_CONTROL.sub("", without_colours(line)) for line in lines[-count:])
