"""What of the ranks' logs goes to the panel, and when: the files themselves are the backlog, so memory stays bounded.

A rank's log is known by its size over time. What is sent is the oldest that has not been, of the last 10,000 lines;
of a flood, what lies before them is left out, and read when the reader asks for it.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nblaunch.launch.output.terminal_lines import LineAssembler, fair_shares
from nblaunch.launch.views.view import Stream
from nblaunch.notebook.record import RankTail
from nblaunch.wire.launch_files import rank_file

LINES = 10_000
"""Lines of each log that the panel holds; older ones are in the file."""
_MOST_BEHIND = 2 << 20
"""Bytes, of all logs together, that a live panel may be behind: 8 seconds at its rate."""
_MOST_LINES_BYTES = 4 << 20
"""Bytes in which to look for the last 10,000 lines."""
_LOOK_FOR_LINES = 128 << 10
_BLOCK = 64 << 10
_OLDER = 64 << 10
"""Bytes of one answer to a reader who scrolls up."""
_MOST_MARKS = 4096
_MOST_HOLES = 1000
_APART = 0.2
"""Seconds between two marks that are told apart in what is sent."""
_TAIL_BYTES = 32 << 10


class Chunk(NamedTuple):
    """A part of one log."""

    attempt: int
    rank: int
    stream: Stream
    offset: int
    time: float
    """When it was printed, in seconds since the launch began."""
    data: bytes


@dataclass(slots=True)
class _Log:
    """One file, and how much of it the page has been sent."""

    path: Path
    attempt: int
    rank: int
    stream: Stream
    size: int = 0
    sent: int = 0
    sizes: list[int] = field(default_factory=list)
    """The sizes that it was seen with, and when."""
    times: list[float] = field(default_factory=list)
    holes: list[tuple[int, int]] = field(default_factory=list)
    """What was left out on the way."""

    def grew(self, size: int, now: float) -> None:
        if size < self.size:  # the user has cut it
            self.sent = 0
            for past in (self.sizes, self.times, self.holes):
                past.clear()
        self.size = size
        self.sizes.append(size)
        self.times.append(now)
        if len(self.sizes) > _MOST_MARKS:  # the older, the coarser
            del self.sizes[-3::-2], self.times[-3::-2]

    def spans(self, start: int, end: int) -> Iterator[tuple[int, int, float]]:
        """The range in parts of one time each: (from, to, time)."""
        at = bisect.bisect_right(self.sizes, start)
        while start < end:
            last = at
            while last + 1 < len(self.sizes) and self.times[last + 1] - self.times[at] < _APART:
                last += 1
            stop = min(end, self.sizes[last]) if last < len(self.sizes) else end
            yield start, stop, self.times[min(at, len(self.times) - 1)]
            start, at = stop, last + 1

    def read(self, start: int, end: int) -> bytes:
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(start)
                return file.read(end - start)
        except OSError:  # pruned, or cut by the user
            return b""

    def chunks(self, most: int) -> list[Chunk]:
        """The next to send."""
        start, end = self.sent, min(self.size, self.sent + most)
        self.sent = end
        return _chunks(self, start, end)

    def leave_out(self, most: int) -> None:
        """Go on with the last lines, where more is waiting than `most` bytes or 10,000 lines."""
        if self.size - self.sent > min(most, _LOOK_FOR_LINES):
            begin = max(self.sent, self.line_start(self.size - most))
            begin = self.lines_start(LINES, begin)
            if begin > self.sent:
                self.holes.append((self.sent, begin))
                self.sent = begin
                del self.holes[:-_MOST_HOLES]  # those are far before the last lines

    def fill(self, most: int) -> tuple[int, int] | None:
        """The last whole lines of a hole, of those that are among the last lines; None where there is no such hole."""
        floor = self.lines_start(LINES, max(0, self.size - _MOST_LINES_BYTES)) if self.holes else 0
        while self.holes:
            start, end = self.holes.pop()
            if end > floor:
                begin = self.part_start(max(start, floor), end, most)
                if begin > max(start, floor):
                    self.holes.append((start, begin))
                return begin, end
        return None

    def part_start(self, start: int, end: int, most: int) -> int:
        """Where whole lines begin that end at `end`, of at most `most` bytes and not before `start`; else in a line."""
        begin = max(start, self.line_start(end - most))
        return begin if begin < end else max(start, end - most)

    def line_start(self, at: int) -> int:
        """Where the first line begins that does so at `at` or after it, within a block; else `at`."""
        if at <= 0:
            return 0
        found = self.read(at - 1, min(at + _BLOCK, self.size)).find(b"\n")
        return at + max(0, found)

    def lines_start(self, count: int, floor: int) -> int:
        """Where the last `count` lines begin; `floor` if that is before it."""
        end = self.size
        while end > floor:
            start = max(floor, end - _BLOCK)
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
    """The logs of a launch, on their way to the page. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: dict[tuple[int, int, Stream], _Log] = {}

    def grew(self, attempt: int, directory: Path, rank: int, stream: Stream, size: int, now: float) -> None:
        """A log has this size now."""
        with self._lock:
            key = attempt, rank, stream
            log = self._logs.get(key)
            if log is None:
                log = self._logs[key] = _Log(rank_file(directory, rank, stream), *key)
            log.grew(size, now)

    @property
    def waiting(self) -> int:
        """Bytes that have not been sent."""
        with self._lock:
            return sum(log.size - log.sent for log in self._logs.values())

    @property
    def has_more(self) -> bool:
        """Whether something has not been sent, once nothing more will come."""
        with self._lock:
            return any(log.size > log.sent or log.holes for log in self._logs.values())

    def take(self, most: int, *, is_over: bool = False) -> list[Chunk]:
        """The next to send: of each log its fair share of `most` bytes, in the order of time.

        Args:
            most: How much.
            is_over: Nothing more will come, so the last lines may take their time.
        """
        with self._lock:
            waiting = [log for log in self._logs.values() if log.sent < log.size]
            for log in waiting:
                log.leave_out(_MOST_LINES_BYTES if is_over else _MOST_BEHIND // len(waiting))
            shares = fair_shares([log.size - log.sent for log in waiting], most)
            chunks = [chunk for log, share in zip(waiting, shares, strict=True) for chunk in log.chunks(share)]
        return sorted(chunks, key=lambda chunk: chunk.time)

    def rewind(self) -> None:
        """Send the last lines again: a page has lost them."""
        with self._lock:
            for log in self._logs.values():
                log.sent = min(log.sent, log.lines_start(LINES, max(0, log.size - _MOST_LINES_BYTES)))
                log.holes.clear()

    def fill(self, most: int) -> list[Chunk]:
        """A part that was left out, though it is among the last lines: whole lines. Nothing where there is none."""
        with self._lock:
            for log in self._logs.values():
                part = log.fill(most)
                if part is not None:
                    return _chunks(log, *part)
        return []

    def older(self, attempt: int, rank: int, stream: Stream, start: int, end: int) -> list[Chunk]:
        """The last whole lines of a part of a log that has not been sent; nothing where there is no such log."""
        with self._lock:
            log = self._logs.get((attempt, rank, stream))
        if log is None:
            return []
        end = max(0, min(end, log.size))
        return _chunks(log, log.part_start(min(end, max(0, start)), end, _OLDER), end)

    def tails(self, lines: int) -> list[RankTail]:
        """The last lines of each rank in the last attempt, out and err in the order of time, for the record."""
        with self._lock:
            last = max((log.attempt for log in self._logs.values()), default=0)
            logs = [log for log in self._logs.values() if log.attempt == last]
        ranks = sorted({log.rank for log in logs})
        return [_tail(rank, [log for log in logs if log.rank == rank], lines) for rank in ranks]


def _chunks(log: _Log, start: int, end: int) -> list[Chunk]:
    data = log.read(start, end)
    return [
        Chunk(log.attempt, log.rank, log.stream, a, t, data[a - start : b - start])
        for a, b, t in log.spans(start, start + len(data))
    ]


def _tail(rank: int, logs: list[_Log], count: int) -> RankTail:
    timed: list[tuple[float, str]] = []
    more = False
    for log in logs:
        start = log.line_start(log.size - _TAIL_BYTES)
        assembler = LineAssembler()
        at = 0.0
        for a, b, at in log.spans(start, log.size):
            timed += [(at, line) for line in assembler.feed(log.read(a, b))]
        timed += [(at, line) for line in assembler.finish()]
        more = more or start > 0
    timed.sort(key=lambda line: line[0])  # stable: lines of one time stay as they were printed
    lines = tuple(line for _, line in timed[-count:])
    return RankTail(rank, lines, more or len(timed) > count, str(logs[0].path))
