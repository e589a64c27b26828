"""Follows the output and reports of a group's ranks, for the view and the result.

A printed line is read once and split once, in the supervisor's thread, and given to every view. Of a flood, what no
view could show is not read.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nblaunch.engines.protocol import Log
from nblaunch.engines.protocol import Stream as FileStream
from nblaunch.launch.output.reports import PrintedMetrics, ReportList
from nblaunch.launch.output.terminal_lines import LineAssembler, fair_shares
from nblaunch.launch.views import Displays, LogLines, Logs, Note, NullView, Output, Reports, Stream, View
from nblaunch.machine.segments import in_words
from nblaunch.wire.display_records import MAX_KEPT_BYTES, MAX_OUTPUTS, Cleared, LeftOut, Shown, from_line, is_display
from nblaunch.wire.tables import Dropped

_log = logging.getLogger(__name__)

_MAX_READ_BYTES = 256 << 10
"""Of all logs together in one poll."""
_MAX_BACKLOG_BYTES = 2 << 20
"""Unread bytes of all logs together; more are skipped, up to the last ones."""
_LINE_START_BYTES = 64 << 10
"""Searched for the first line after skipped bytes."""
_MAX_RECORD_BYTES = 1 << 20
_RECORDS_BLOCK_BYTES = 1 << 18
"""Of a spool, parsed at a time: parsed records take ten times their bytes."""


class PrintedLog:
    def __init__(self, rank: int, stream: Stream, log: Log) -> None:
        self.rank, self.stream, self.log = rank, stream, log
        self.at = self._size = 0
        self._assembler = LineAssembler()

    def grow(self) -> int:
        """Look at the size of the log. Return how many bytes are unread."""
        self._size = self.log.size()
        if self._size < self.at:  # the user has truncated the file
            self.at = 0
        return self._size - self.at

    def read(self, most: int, max_backlog: int) -> LogLines:
        """Read at most `most` bytes. Of more than `max_backlog`, skip those between a first part and the last ones."""
        lines: list[str] = []
        retracted = 0
        if self._size - self.at > max_backlog:
            head = self.log.read(self.at, self.at + max_backlog // 8)
            head = head[: head.rfind(b"\n") + 1] or head
            begin = self._size - max_backlog * 3 // 4
            begin += max(0, self.log.read(begin - 1, begin + _LINE_START_BYTES).find(b"\n"))
            lines = self._assembler.feed(head)
            retracted = self._assembler.retracted
            lines += self._assembler.finish()
            lines.append(f"… {begin - self.at - len(head):,} bytes not shown …")
            self.at = begin
        data = self.log.read(self.at, min(self._size, self.at + most))
        self.at += len(data)  # none if no file can be opened now
        return self._lines(lines + self._assembler.feed(data), retracted)

    def finish(self) -> LogLines:
        return self._lines(self._assembler.finish())

    def skip(self) -> None:
        self.at = self._size

    def _lines(self, lines: Sequence[str], retracted: int = 0) -> LogLines:
        retracted += self._assembler.retracted
        return LogLines(self.rank, self.stream, self.log.name, lines, self._assembler.partials, retracted)


class Spool:
    def __init__(self, log: Log) -> None:
        self.log = log
        self._at = 0
        self._rest = b""

    def read(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the complete records since the last call, block by block to bound memory."""
        size = self.log.size()
        self._at = min(self._at, size)
        while data := self.log.read(self._at, min(self._at + _RECORDS_BLOCK_BYTES, size)):
            self._at += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _MAX_RECORD_BYTES:
                lines.append(self._rest)
                self._rest = b""
            yield self._records(lines)

    def _records(self, lines: Sequence[bytes]) -> list[dict[str, Any]]:
        try:
            found = json.loads(b"[%b]" % b",".join(lines))  # twice as fast as line by line
        except (ValueError, RecursionError):
            found = []
        if len(found) == len(lines) and all(type(record) is dict for record in found):
            return found  # type: ignore[no-any-return]  # they are
        return [record for line in lines if (record := self._record(line)) is not None]

    def _record(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            return record
        _log.warning("nblaunch: %s contains a malformed report: %.80r", self.log.name, line)
        return None


class Written(Protocol):
    """What a rank writes: a `Worker`, or the files that one has left."""

    rank: int

    def log(self, stream: FileStream) -> Log: ...

    def output(self, key: str, mime: str) -> Path: ...

    def dropped(self) -> Dropped: ...


class RankOutput:
    def __init__(self, worker: Written) -> None:
        self.rank, self.worker = worker.rank, worker
        self.printed = [
            PrintedLog(worker.rank, "out", worker.log("out")),
            PrintedLog(worker.rank, "err", worker.log("err")),
        ]
        self.spool = Spool(worker.log("spool"))
        self.dropped = Dropped()

    @property
    def logs(self) -> dict[Stream, Log]:
        return {printed.stream: printed.log for printed in self.printed}


class OutputFollower:
    """See the module. Without `notes_unmatched`, patterns that match no line are not noted.

    Without `lists_reports`, which takes memory and time, reports are only shown; `listed` lists them later.
    """

    def __init__(
        self,
        workers: Sequence[Written],
        patterns: Sequence[re.Pattern[str]],
        view: View,
        *,
        notes_unmatched: bool = True,
        lists_reports: bool = True,
    ) -> None:
        self.ranks = [RankOutput(worker) for worker in workers]
        self.view = view
        self.reports = ReportList()
        self._printed = [printed for rank in self.ranks for printed in rank.printed]
        self._metrics = PrintedMetrics(patterns) if patterns else None
        self._notes_unmatched, self._lists_reports = notes_unmatched, lists_reports
        self._has_noted_drops = False
        self._noted_limits: set[int] = set()

    def poll(self, most: int = _MAX_READ_BYTES) -> None:
        """Show what the ranks have written since the last call, at most so many bytes of their logs."""
        unread = {printed: size for printed in self._printed if (size := printed.grow())}
        if self.view.shows_notes or self._metrics is not None:
            shares = fair_shares(list(unread.values()), most)
            backlog = _MAX_BACKLOG_BYTES // max(1, len(unread))
            self._show_lines([log.read(share, backlog) for log, share in zip(unread, shares, strict=True)])
        else:
            for printed in unread:
                printed.skip()
        for rank in self.ranks:
            for records in rank.spool.read():
                self._take(rank, records)
        self._poll_drops()

    def _show_lines(self, logs: Sequence[LogLines]) -> None:
        if not logs:
            return
        self.view.on(Logs(logs))
        if self._metrics is not None:
            for log in logs:
                self._report(log.rank, self._metrics.search(log.lines, time.time()), is_printed=True)

    def _take(self, rank: RankOutput, records: Sequence[Mapping[str, Any]]) -> None:
        displayed = displays_in(rank.worker, records)
        if displayed is not None:
            self._show(displayed)
            records = [record for record in records if not is_display(record)]
        self._report(rank.rank, records)

    def _report(self, rank: int, records: Sequence[Mapping[str, Any]], *, is_printed: bool = False) -> None:
        if records:
            kept = [self._kept(rank, record) for record in records] if self._lists_reports else records
            self.view.on(Reports(rank, kept, is_printed))

    def _kept(self, rank: int, record: Mapping[str, Any]) -> Mapping[str, Any]:
        if "metrics" in record:
            self.reports.add(rank, record["time"], record["step"], record["metrics"])
        elif "best" in record:
            return {**record, "value": self.reports.mark(rank, record["best"], record["step"], record["value"]).value}
        return record

    def _show(self, displayed: Displays) -> None:
        """Show what a rank displays. Note the first time that a limit leaves something out."""
        self.view.on(displayed)
        if displayed.left_out and displayed.rank not in self._noted_limits:
            self._noted_limits.add(displayed.rank)
            self.view.on(
                Note(
                    f"rank {displayed.rank} exceeded the limit of displayed outputs ({MAX_OUTPUTS}, or "
                    f"{in_words(MAX_KEPT_BYTES)}): further outputs are dropped until clear_output()"
                )
            )

    def _poll_drops(self) -> None:
        """Note the first rank that cannot write; the others usually fail for the same reason."""
        for rank in self.ranks:
            rank.dropped = rank.worker.dropped()
            if rank.dropped and not self._has_noted_drops:
                self._has_noted_drops = True
                self.view.on(Note(_first_drop(rank)))

    def listed(self, printed: Sequence[Reports]) -> ReportList:
        """Return the reports of all spools, read again, and those that were found in printed lines."""
        again = OutputFollower([rank.worker for rank in self.ranks], (), NullView())
        again.poll()
        for event in printed:
            again._report(event.rank, event.records)
        return again.reports

    def finish(self) -> None:
        """Read the rest: every rank has exited. Note what was dropped."""
        self.poll(_MAX_BACKLOG_BYTES)
        ends = [printed.finish() for printed in self._printed]
        self._show_lines([end for end in ends if end.lines])
        if self._metrics is not None and self._notes_unmatched and self._metrics.lines and not self._metrics.matches:
            self.view.on(Note(f"--metric (metric_patterns=) matched none of {self._metrics.lines} lines"))
        for rank in self.ranks:
            if rank.dropped:
                self.view.on(Note(f"rank {rank.rank} lost {rank.dropped.what} ({rank.dropped.why})"))


def _first_drop(rank: RankOutput) -> str:
    if not rank.dropped.reason:
        return f"rank {rank.rank}'s log is full ({rank.dropped.why}, by default 1 GB): further output is dropped"
    return (
        f"rank {rank.rank} cannot write its logs ({rank.dropped.why}): it keeps running, but its output and reports "
        f"are dropped until there is space. Free space for {rank.spool.log.name}"
    )


def displays_in(worker: Written, records: Sequence[Mapping[str, Any]]) -> Displays | None:
    """Return what a rank displays by the end of these records of its spool; None if they hold no display.

    Outputs that a later record removes or replaces are left out: a flood of them costs little.
    """
    if not any(map(is_display, records)):
        return None
    outputs: dict[str, Output] = {}
    is_cleared, left_out = False, None
    for line in records:
        match record := from_line(line):
            case Shown():
                outputs[record.key] = _output(worker, record)
            case Cleared():
                outputs.clear()
                is_cleared, left_out = True, 0
            case LeftOut(count):
                left_out = count
    return Displays(worker.rank, list(outputs.values()), is_cleared, left_out)


def _output(worker: Written, record: Shown) -> Output:
    body = worker.output(record.key, record.mime) if record.body is None else record.body
    return Output(record.key, record.mime, record.text, record.size, body, record.width, record.height)
