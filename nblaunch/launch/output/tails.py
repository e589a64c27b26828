"""Followers of growing logs: `Tail` for printed output, `Spool` for reports. Nothing here waits."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nblaunch.engines.protocol import Log
from nblaunch.launch.output.terminal_lines import LineAssembler, without_colours

_log = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20
_MAX_COUNTED_BYTES = 1 << 20
"""Lines of a larger skipped part are not counted: it is not read at all."""
_MAX_RECORD_BYTES = 1 << 20
_RECORDS_BLOCK_BYTES = 1 << 17
"""Of a spool, parsed at a time: parsed records take ten times their bytes."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Piece:
    """What was appended to a log: all of it in ``head``, or its beginning and end."""

    head: bytes
    skipped_lines: int = 0
    """Line ends between head and tail; -1 if they were not counted."""
    skipped_bytes: int = 0
    tail: bytes = b""


class _Follower:
    """A growing log, and the offset up to which it was read.

    Attributes:
        log: The log, which can also be read when this reader is closed.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self._opened = log.open()
        self._offset = 0

    def _appended(self) -> tuple[int, int]:
        """Return from where to where the log has grown since the last call."""
        size = self._opened.size()
        start, self._offset = min(self._offset, size), size  # truncated: continue from its new end
        return start, size

    def _between(self, start: int, end: int) -> bytes:
        """Return these bytes; fewer if the log was truncated meanwhile."""
        return self._opened.read(start, end)

    def close(self) -> None:
        """Close the log. Idempotent."""
        self._opened.close()


class Tail(_Follower):
    """Follows a log. Of a flood it reads only the beginning and the end."""

    def grown(self) -> bool:
        """Return True if the log has grown since the last call; skip what was appended."""
        start, end = self._appended()
        return start != end

    @property
    def offset(self) -> int:
        """The size of the log at the last call."""
        return self._offset

    def read(self, limit: int) -> Piece | None:
        """Return what was appended since the last call, or None.

        Args:
            limit: The maximum number of bytes to return. If more were appended: a quarter of them from the beginning
                and three quarters from the end, cut at a line end if one is near.
        """
        start, end = self._appended()
        if start == end:
            return None
        if end - start <= limit:
            return Piece(self._between(start, end))
        near = limit // 8
        head = _cut_after_line(self._between(start, start + limit // 4), near)
        # The byte before the tail shows whether the tail begins a line.
        tail = _cut_before_line(self._between(end - limit * 3 // 4 - 1, end), near)
        skipped_from, skipped_to = start + len(head), end - len(tail)
        return Piece(head, self._count_lines(skipped_from, skipped_to), skipped_to - skipped_from, tail)

    def _count_lines(self, start: int, end: int) -> int:
        if end - start > _MAX_COUNTED_BYTES:
            return -1
        return sum(
            self._between(at, min(at + _BLOCK_BYTES, end)).count(b"\n") for at in range(start, end, _BLOCK_BYTES)
        )


def _cut_after_line(data: bytes, near: int) -> bytes:
    at = data.rfind(b"\n", len(data) - near)
    return data[: at + 1] if at >= 0 else data


def _cut_before_line(data: bytes, near: int) -> bytes:
    return data[data.find(b"\n", 0, near) + 1 or 1 :]


class Spool(_Follower):
    """Follows a rank's reports.

    Attributes:
        log: The log, as for every follower.
        malformed: The number of malformed lines so far.
    """

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.malformed = 0
        self._rest = b""

    def read(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the complete records since the last call, block by block to bound memory."""
        start, end = self._appended()
        for at in range(start, end, _RECORDS_BLOCK_BYTES):
            *lines, self._rest = (self._rest + self._between(at, min(at + _RECORDS_BLOCK_BYTES, end))).split(b"\n")
            if len(self._rest) > _MAX_RECORD_BYTES:
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
        _log.warning("nblaunch: %s contains a malformed report: %.80r", self.log.name, line)
        return None


def last_lines(log: Log, count: int = 20, max_bytes: int = 16384, since: int = 0) -> str:
    """Return the end of a log from the byte `since` on, as a terminal would show it; empty if there is no log."""
    size = log.size()
    start = max(since, size - max_bytes)
    data = log.read(start, size)
    if start > since:
        data = data[data.find(b"\n", 0, -1) + 1 :]
    assembler = LineAssembler()
    lines = assembler.feed(data) + assembler.finish()
    return "\n".join(_CONTROL.sub("", without_colours(line)) for line in lines[-count:])
