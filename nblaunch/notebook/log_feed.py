"""The ranks' printed lines on their way to the panel and the record, numbered in each log.

The last lines of each log stay here, for a page that is reloaded and for the record; the log file has the others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from itertools import islice

from nblaunch.launch.output.terminal_lines import fair_shares
from nblaunch.launch.views import LogLines, Stream
from nblaunch.notebook.page_messages import LineEntry, LogPart
from nblaunch.notebook.record import RankTail

MAX_LINES = 4000
"""Lines of each log that are kept."""
_MAX_WAITING_BYTES = 1600 << 10
"""Of all logs together: 8 seconds at the panel's rate. Beyond it, only the last lines of each are sent."""
_FLOOD_LINES = 2000
_LINE_COST = 16
"""Bytes of a message around a line's text."""


class _Log:
    """The last lines of one log, and how many of its lines were sent."""

    def __init__(self, attempt: int, log: LogLines) -> None:
        self.attempt, self.rank, self.stream, self.path = attempt, log.rank, log.stream, log.path
        self.lines: deque[LineEntry] = deque(maxlen=MAX_LINES)
        self.end = self.sent = 0
        """The numbers of the next line and of the next to send."""
        self.open: list[LineEntry] = []
        self.is_open_sent = True

    def add(self, log: LogLines, now: float) -> None:
        retracted = min(log.retracted, len(self.lines))
        for _ in range(retracted):
            self.lines.pop()
        self.lines.extend(LineEntry(now, line) for line in log.lines)
        self.sent = min(self.sent, self.end - retracted)
        self.end += len(log.lines) - retracted
        self.open = [LineEntry(now, line) for line in log.open]
        self.is_open_sent = False

    @property
    def waiting(self) -> int:
        """Bytes that were not sent."""
        return sum(len(line.text) + _LINE_COST for line in self._from(self.sent)) if self.sent < self.end else 0

    @property
    def has_more(self) -> bool:
        """True if a line was not sent as it is now."""
        return self.sent < self.end or not self.is_open_sent

    def take(self, most: int) -> LogPart:
        kept = self._from(self.sent)
        first, lines = self.end - len(kept), list[LineEntry]()
        for line in kept:
            lines.append(line)
            most -= len(line.text) + _LINE_COST
            if most <= 0:
                break
        self.sent = first + len(lines)
        self.is_open_sent = self.sent == self.end
        shown = [line.text for line in self.open] if self.is_open_sent else []
        return LogPart(self.attempt, self.rank, self.stream, first, lines, shown)

    def rewind(self, end: int) -> None:
        self.sent = min(self.sent, end)
        self.is_open_sent = self.is_open_sent and not self.open

    def _from(self, number: int) -> list[LineEntry]:
        return [*islice(self.lines, max(0, number - self.end + len(self.lines)), None)]


class LogFeed:
    """The logs of a launch, on their way to the page. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: dict[tuple[int, int, Stream], _Log] = {}

    def add(self, attempt: int, log: LogLines, now: float) -> None:
        with self._lock:
            key = attempt, log.rank, log.stream
            if key not in self._logs:
                self._logs[key] = _Log(attempt, log)
            self._logs[key].add(log, now)

    @property
    def waiting(self) -> int:
        with self._lock:
            return sum(log.waiting for log in self._logs.values())

    @property
    def has_more(self) -> bool:
        with self._lock:
            return any(log.has_more for log in self._logs.values())

    def take(self, most: int) -> list[LogPart]:
        """Take the next lines, of this size together: a fair share of each log."""
        with self._lock:
            waiting = [log for log in self._logs.values() if log.has_more]
            if sum(log.waiting for log in waiting) > _MAX_WAITING_BYTES:
                for log in waiting:
                    log.sent = max(log.sent, log.end - _FLOOD_LINES)
            shares = fair_shares([log.waiting for log in waiting], most)
            return [log.take(share) for log, share in zip(waiting, shares, strict=True)]

    def rewind(self, ends: Mapping[tuple[int, int, Stream], int]) -> None:
        """Send again what a page lacks, given the number of the line after those that it has of each log."""
        with self._lock:
            for key, log in self._logs.items():
                log.rewind(ends.get(key, 0))

    def tails(self, count: int) -> list[RankTail]:
        """Return the last lines of each rank in the last attempt, stdout and stderr in order of time."""
        with self._lock:
            last = max((log.attempt for log in self._logs.values()), default=0)
            logs = [log for log in self._logs.values() if log.attempt == last]
            tails = []
            for rank in sorted({log.rank for log in logs}):
                its = [log for log in logs if log.rank == rank]
                lines = [line for log in its for line in (*log._from(log.end - count), *log.open)]
                lines.sort(key=lambda line: line.time)  # stable: lines of one time keep their order
                has_more = sum(log.end + len(log.open) for log in its) > count
                tails.append(RankTail(rank, tuple(line.text for line in lines[-count:]), has_more, its[0].path))
            return tails
