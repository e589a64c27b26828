"""The ranks' printed lines on their way to the panel and the record: read once, split once, numbered in each log.

The last 2,000 lines of each log stay here, for a page that is reloaded and for the record. A flood is skipped up to its
last lines, and not even read: a line says how many bytes, and the log file has them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from nblaunch.engines.protocol import Log
from nblaunch.launch.output.terminal_lines import LineAssembler, fair_shares
from nblaunch.launch.views import Stream
from nblaunch.machine import timeouts
from nblaunch.notebook.page_messages import LineEntry, LogPart
from nblaunch.notebook.record import RankTail

MAX_LINES = 2000
"""Lines of each log that are kept; the log itself has the others."""
_MAX_BACKLOG_BYTES = 2 << 20
"""Unread bytes of all logs together while the launch runs: 8 seconds at the panel's rate."""
_MAX_TAIL_BYTES = 1 << 20
"""Bytes searched for the last lines of a log."""
_TAIL_BYTES = 32 << 10
"""Bytes of a log from which its last lines are read if a flood has not been read yet."""
_MIN_SKIP_BYTES = 128 << 10
"""Logs with fewer unread bytes skip nothing."""
_BLOCK_BYTES = 64 << 10
_MAX_TIMES = 4096
_BARS = 8
"""Rows of nested progress bars."""
_LINE_COST = 16
"""Bytes of a message around a line's text."""


class _Log:
    """One log: its last lines, and how much of it has been read and sent."""

    def __init__(self, log: Log, attempt: int, rank: int, stream: Stream) -> None:
        self.log, self.attempt, self.rank, self.stream = log, attempt, rank, stream
        self.size = self.at = 0
        """Bytes of the log, and how many of them were read."""
        self.lines: deque[LineEntry] = deque(maxlen=MAX_LINES)
        self.end = self.sent = 0
        """The numbers of the next line and of the next to send."""
        self.open: list[str] = []
        """The unfinished lines."""
        self._sent_open: list[str] | None = []
        self._times: deque[tuple[int, float]] = deque(maxlen=_MAX_TIMES)
        """The sizes that were observed and not read yet, and when."""
        self.time = 0.0
        """When the last bytes that were read were printed."""
        self._assembler = LineAssembler(_BARS)

    @property
    def first(self) -> int:
        """The number of the first line that is kept."""
        return self.end - len(self.lines)

    @property
    def unsent(self) -> int:
        """The size of the lines that were read and not sent."""
        if self.sent >= self.end:
            return 0
        return sum(len(line.text) + _LINE_COST for line in islice(self.lines, max(0, self.sent - self.first), None))

    @property
    def waiting(self) -> int:
        """The size of what was not sent."""
        return self.size - self.at + self.unsent

    @property
    def has_more(self) -> bool:
        """True if a line was not sent as it is now."""
        return self.at < self.size or self.sent < self.end or self.open != self._sent_open

    # -------------------------------------------------------------- reading
    def grew(self, size: int, now: float) -> None:
        if size < self.size:  # the user has truncated the file
            self.finish()
            self.at = 0
            self._times.clear()
        self.size = size
        if self._times and now - self._times[-1][1] < timeouts.LOG_TIME_RESOLUTION_S:
            now = self._times.pop()[1]
        self._times.append((size, now))

    def read(self, most: int) -> None:
        """Read the next bytes."""
        until = min(self.size, self.at + most)
        while self.at < until:
            while self._times and self._times[0][0] <= self.at:
                self._times.popleft()
            end, self.time = self._times[0] if self._times else (self.size, self.time)
            stop = min(end, until)
            self._add(self._assembler.feed(self.log.read(self.at, stop)))
            self.at = stop
        self.open = self._assembler.partials

    def finish(self) -> None:
        """End the unfinished lines: nothing follows them."""
        self._add(self._assembler.finish())
        self.open = []

    def _add(self, lines: Sequence[str]) -> None:
        for _ in range(min(self._assembler.retracted, len(self.lines))):
            self.lines.pop()
            self.end -= 1
        if self._assembler.retracted:
            self.sent, self._sent_open = min(self.sent, self.end), None
        self.lines.extend(LineEntry(self.time, line) for line in lines)
        self.end += len(lines)

    def skip(self, most: int) -> None:
        """Skip to the last lines if more than `most` bytes are unread."""
        if self.size - self.at <= min(most, _MIN_SKIP_BYTES):
            return
        begin = self._last_lines(max(self.at, self._line_start(self.size - most)))
        if begin > self.at:
            self.finish()
            self._add([f"… {begin - self.at:,} bytes not shown …"])
            self.at = begin

    def _line_start(self, at: int) -> int:
        """Return the start of the first line at or after `at`; `at` if a block holds none."""
        if at <= 0:
            return 0
        found = self.log.read(at - 1, min(at + _BLOCK_BYTES, self.size)).find(b"\n")
        return at + max(0, found)

    def _last_lines(self, floor: int) -> int:
        """Return the start of the last lines, at least `floor`."""
        end, count = self.size, MAX_LINES - 1  # and one that says what was skipped
        while end > floor:
            start = max(floor, end - _BLOCK_BYTES)
            block = self.log.read(start, end)
            found = block.count(b"\n")
            if found > count:
                at = 0
                for _ in range(found - count):
                    at = block.index(b"\n", at) + 1
                return start + at
            count -= found
            end = start
        return floor

    # -------------------------------------------------------------- sending
    def take(self, most: int) -> LogPart:
        """Take the next lines."""
        while self.at < self.size and self.unsent < most and self.end - self.sent < MAX_LINES // 2:
            self.read(MAX_LINES // 2)  # bytes, so that no line falls out of `lines` before it is sent
        first, lines = max(self.sent, self.first), list[LineEntry]()
        for line in islice(self.lines, first - self.first, None):
            lines.append(line)
            most -= len(line.text) + _LINE_COST
            if most <= 0:
                break
        self.sent = first + len(lines)
        self._sent_open = self.open if self.sent == self.end else []
        return LogPart(self.attempt, self.rank, self.stream, first, lines, self._sent_open)

    def tail(self, count: int) -> tuple[list[LineEntry], bool]:
        """Return the last lines, also those that were not read yet, and whether there are others."""
        if self.at < self.size:  # beside this one, which the page follows
            ahead = _Log(self.log, self.attempt, self.rank, self.stream)
            ahead.size, ahead._times = self.size, self._times.copy()
            ahead.at = begin = self._line_start(self.size - _TAIL_BYTES)
            ahead.read(self.size)
            lines, has_more = ahead.tail(count)
            return lines, has_more or begin > 0
        lines = [*islice(self.lines, max(0, len(self.lines) - count), None)]
        lines += [LineEntry(self.time, text) for text in self.open]
        return lines, self.end + len(self.open) > count

    def rewind(self, end: int) -> None:
        """Send the lines from this number on again."""
        self.sent = min(self.sent, max(end, self.first))
        self._sent_open = None if self.open else self._sent_open


class LogFeed:
    """The logs of a launch, on their way to the page. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: dict[tuple[int, int, Stream], _Log] = {}

    def grew(self, attempt: int, rank: int, stream: Stream, log: Log, size: int, now: float) -> None:
        """Note the current size of a log."""
        with self._lock:
            key = attempt, rank, stream
            known = self._logs.get(key)
            if known is None:
                known = self._logs[key] = _Log(log, *key)
            known.grew(size, now)

    @property
    def waiting(self) -> int:
        """The size of all that was not sent."""
        with self._lock:
            return sum(log.waiting for log in self._logs.values())

    @property
    def has_more(self) -> bool:
        """True if a line was not sent as it is now."""
        with self._lock:
            return any(log.has_more for log in self._logs.values())

    def take(self, most: int, *, is_over: bool = False) -> list[LogPart]:
        """Take the next lines: a fair share of each log.

        Args:
            most: The size of all of them together.
            is_over: The launch has ended: no line is unfinished.
        """
        with self._lock:
            last = self._last_attempt()
            unread = [log for log in self._logs.values() if log.at < log.size]
            for log in unread:
                log.skip(_MAX_TAIL_BYTES if is_over else _MAX_BACKLOG_BYTES // len(unread))
            for log in self._logs.values():
                if (is_over or log.attempt < last) and log.at >= log.size and log.open:
                    log.finish()
            waiting = [log for log in self._logs.values() if log.has_more]
            wanted = [log.unsent + (log.size - log.at) * (1 + _LINE_COST) for log in waiting]  # each byte may be a line
            shares = fair_shares(wanted, most)
            return [log.take(share) for log, share in zip(waiting, shares, strict=True)]

    def _last_attempt(self) -> int:
        return max((log.attempt for log in self._logs.values()), default=0)

    def rewind(self, ends: Mapping[tuple[int, int, Stream], int]) -> None:
        """Send again what a page lacks of the last lines.

        Args:
            ends: The number of the line after those of each log that the page has. Default for a log: 0.
        """
        with self._lock:
            for key, log in self._logs.items():
                log.rewind(ends.get(key, 0))

    def tails(self, count: int) -> list[RankTail]:
        """Return the last lines of each rank in the last attempt, stdout and stderr in order of time."""
        with self._lock:
            last = self._last_attempt()
            ranks: dict[int, list[_Log]] = {}
            for log in self._logs.values():
                if log.attempt == last:
                    ranks.setdefault(log.rank, []).append(log)
            return [_tail(rank, ranks[rank], count) for rank in sorted(ranks)]


def _tail(rank: int, logs: Sequence[_Log], count: int) -> RankTail:
    tails = [log.tail(count) for log in logs]
    lines = [line for its, _ in tails for line in its]
    lines.sort(key=lambda line: line.time)  # stable: lines of one time keep their order
    has_more = len(lines) > count or any(more for _, more in tails)
    return RankTail(rank, tuple(line.text for line in lines[-count:]), has_more, logs[0].log.name)
