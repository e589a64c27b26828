"""The ranks' logs on their way to the panel. The logs are the backlog, so memory stays bounded.

The feed knows a log by its size over time. It sends the oldest unsent bytes of the last 10,000 lines. A flood skips
earlier lines: the page requests them when the reader scrolls up.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nblaunch.engines.protocol import Log
from nblaunch.launch.output.terminal_lines import LineAssembler, fair_shares
from nblaunch.launch.views.events import Stream
from nblaunch.machine import timeouts
from nblaunch.notebook.page_messages import OlderLines, Span
from nblaunch.notebook.record import RankTail

MAX_LINES = 10_000
"""Lines of each log that the panel holds; the log itself has the others."""
_MAX_BACKLOG_BYTES = 2 << 20
"""Unsent bytes of all logs together while the launch runs: 8 seconds at the panel's rate."""
_MAX_TAIL_BYTES = 4 << 20
"""Bytes searched for the last 10,000 lines."""
_MIN_SKIP_BYTES = 128 << 10
"""Logs with fewer unsent bytes skip nothing."""
_BLOCK_BYTES = 64 << 10
_MAX_ANSWER_BYTES = 64 << 10
"""One answer to a reader who scrolls up."""
_MAX_MARKS = 4096
_MAX_HOLES = 1000
_RECORD_TAIL_BYTES = 32 << 10


class Chunk(NamedTuple):
    """A part of one log."""

    attempt: int
    rank: int
    stream: Stream
    offset: int
    time: float
    """Seconds from the beginning of the launch to the print."""
    data: bytes


@dataclass(slots=True)
class _SentLog:
    """One log, and how much of it has been sent."""

    log: Log
    attempt: int
    rank: int
    stream: Stream
    size: int = 0
    sent: int = 0
    sizes: list[int] = field(default_factory=list)
    """The sizes that were observed, and their times."""
    times: list[float] = field(default_factory=list)
    holes: list[tuple[int, int]] = field(default_factory=list)
    """Ranges (start, end) that were skipped."""

    def grew(self, size: int, now: float) -> None:
        if size < self.size:  # the user has truncated the file
            self.sent = 0
            for past in (self.sizes, self.times, self.holes):
                past.clear()
        self.size = size
        self.sizes.append(size)
        self.times.append(now)
        if len(self.sizes) > _MAX_MARKS:  # thin the older marks
            del self.sizes[-3::-2], self.times[-3::-2]

    def spans(self, start: int, end: int) -> Iterator[tuple[int, int, float]]:
        """Yield the range in parts of one time each: (start, end, time)."""
        at = bisect.bisect_right(self.sizes, start)
        while start < end:
            last = at
            while last + 1 < len(self.sizes) and self.times[last + 1] - self.times[at] < timeouts.LOG_TIME_RESOLUTION_S:
                last += 1
            stop = min(end, self.sizes[last]) if last < len(self.sizes) else end
            yield start, stop, self.times[min(at, len(self.times) - 1)]
            start, at = stop, last + 1

    def read(self, start: int, end: int) -> bytes:
        return self.log.read(start, end)

    def chunks(self, most: int) -> list[Chunk]:
        """Take the next unsent bytes."""
        start, end = self.sent, min(self.size, self.sent + most)
        self.sent = end
        return _chunks(self, start, end)

    def skip(self, most: int) -> None:
        """Skip to the last lines if more than `most` bytes or 10,000 lines are unsent."""
        if self.size - self.sent > min(most, _MIN_SKIP_BYTES):
            begin = max(self.sent, self.line_start(self.size - most))
            begin = self.lines_start(MAX_LINES, begin)
            if begin > self.sent:
                self.holes.append((self.sent, begin))
                self.sent = begin
                del self.holes[:-_MAX_HOLES]  # the oldest holes lie far before the last lines

    def fill(self, most: int) -> tuple[int, int] | None:
        """Return the end of the latest hole as a range of whole lines; None if no hole is among the last lines."""
        floor = self.lines_start(MAX_LINES, max(0, self.size - _MAX_TAIL_BYTES)) if self.holes else 0
        while self.holes:
            start, end = self.holes.pop()
            if end > floor:
                begin = self.part_start(max(start, floor), end, most)
                if begin > max(start, floor):
                    self.holes.append((start, begin))
                return begin, end
        return None

    def part_start(self, start: int, end: int, most: int) -> int:
        """Return the start of at most `most` bytes of whole lines before `end`, or of part of one long line."""
        begin = max(start, self.line_start(end - most))
        return begin if begin < end else max(start, end - most)

    def line_start(self, at: int) -> int:
        """Return the start of the first line at or after `at`; `at` if a block holds none."""
        if at <= 0:
            return 0
        found = self.read(at - 1, min(at + _BLOCK_BYTES, self.size)).find(b"\n")
        return at + max(0, found)

    def lines_start(self, count: int, floor: int) -> int:
        """Return the start of the last `count` lines, at least `floor`."""
        end = self.size
        while end > floor:
            start = max(floor, end - _BLOCK_BYTES)
            block = self.read(start, end)
            found = block.count(b"\n")
            if found > count:
                at = 0
                for _ in range(found - count):
                    at = block.index(b"\n", at) + 1
                return start + at
            count -= found
            end = start
        return floor


class LogFeed:
    """The logs of a launch, on their way to the page. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: dict[tuple[int, int, Stream], _SentLog] = {}

    def grew(self, attempt: int, rank: int, stream: Stream, log: Log, size: int, now: float) -> None:
        """Note the current size of a log."""
        with self._lock:
            key = attempt, rank, stream
            sent = self._logs.get(key)
            if sent is None:
                sent = self._logs[key] = _SentLog(log, *key)
            sent.grew(size, now)

    @property
    def waiting(self) -> int:
        """Unsent bytes of all logs."""
        with self._lock:
            return sum(log.size - log.sent for log in self._logs.values())

    @property
    def has_more(self) -> bool:
        """True if bytes or holes are unsent."""
        with self._lock:
            return any(log.size > log.sent or log.holes for log in self._logs.values())

    def take(self, most: int, *, is_over: bool = False) -> list[Chunk]:
        """Take the next unsent bytes: a fair share of each log, in order of time.

        Args:
            most: Bytes of all logs together.
            is_over: The launch has ended: all last lines may be sent, however long that takes.
        """
        with self._lock:
            waiting = [log for log in self._logs.values() if log.sent < log.size]
            for log in waiting:
                log.skip(_MAX_TAIL_BYTES if is_over else _MAX_BACKLOG_BYTES // len(waiting))
            shares = fair_shares([log.size - log.sent for log in waiting], most)
            chunks = [chunk for log, share in zip(waiting, shares, strict=True) for chunk in log.chunks(share)]
        return sorted(chunks, key=lambda chunk: chunk.time)

    def rewind(self, ends: Mapping[tuple[int, int, Stream], int]) -> None:
        """Mark as unsent what a page lacks of the last lines.

        Args:
            ends: Where what the page has of each log ends. Default for a log: at its beginning.
        """
        with self._lock:
            for key, log in self._logs.items():
                end = ends.get(key, 0)
                if end < log.sent:
                    log.sent = min(log.sent, log.lines_start(MAX_LINES, max(end, log.size - _MAX_TAIL_BYTES)))
                    log.holes = [hole for hole in log.holes if hole[1] <= log.sent]

    def fill(self, most: int) -> list[Chunk]:
        """Take whole lines that were skipped though they are among the last lines; empty if there are none."""
        with self._lock:
            for log in self._logs.values():
                part = log.fill(most)
                if part is not None:
                    return _chunks(log, *part)
        return []

    def older(self, attempt: int, rank: int, stream: Stream, start: int, end: int) -> list[Chunk]:
        """Return the last whole lines of a part of a log; empty if there is no such log."""
        with self._lock:
            log = self._logs.get((attempt, rank, stream))
        if log is None:
            return []
        end = max(0, min(end, log.size))
        return _chunks(log, log.part_start(min(end, max(0, start)), end, _MAX_ANSWER_BYTES), end)

    def tails(self, lines: int) -> list[RankTail]:
        """Return the last lines of each rank in the last attempt, stdout and stderr in order of time."""
        with self._lock:
            last = max((log.attempt for log in self._logs.values()), default=0)
            logs = [log for log in self._logs.values() if log.attempt == last]
        ranks = sorted({log.rank for log in logs})
        return [_tail(rank, [log for log in logs if log.rank == rank], lines) for rank in ranks]


def older_lines(request: int | None, chunks: Sequence[Chunk]) -> tuple[OlderLines, bytes]:
    """Return an earlier part of a log as a message and its buffer.

    Args:
        request: The number of the request; None: unrequested.
        chunks: Adjacent parts of one log.
    """
    first, data = chunks[0], b"".join(chunk.data for chunk in chunks)
    message = OlderLines(
        request=request,
        attempt=first.attempt,
        rank=first.rank,
        stream=first.stream,
        start=first.offset,
        end=first.offset + len(data),
        spans=[Span(len(chunk.data), chunk.time) for chunk in chunks if chunk.data],
    )
    return message, data


def _chunks(log: _SentLog, start: int, end: int) -> list[Chunk]:
    data = log.read(start, end)
    return [
        Chunk(log.attempt, log.rank, log.stream, a, t, data[a - start : b - start])
        for a, b, t in log.spans(start, start + len(data))
    ]


def _tail(rank: int, logs: list[_SentLog], count: int) -> RankTail:
    timed: list[tuple[float, str]] = []
    more = False
    for log in logs:
        start = log.line_start(log.size - _RECORD_TAIL_BYTES)
        assembler = LineAssembler()
        at = 0.0
        for a, b, at in log.spans(start, log.size):
            timed += [(at, line) for line in assembler.feed(log.read(a, b))]
        timed += [(at, line) for line in assembler.finish()]
        more = more or start > 0
    timed.sort(key=lambda line: line[0])  # stable: lines of one time keep their order
    lines = tuple(line for _, line in timed[-count:])
    return RankTail(rank, lines, more or len(timed) > count, logs[0].log.name)
