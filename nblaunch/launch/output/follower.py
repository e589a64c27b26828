"""Follows the output and reports of a group's ranks, for the view and the result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nblaunch.engines.protocol import Log, Worker
from nblaunch.launch.output.reports import PrintedMetrics, ReportColumns
from nblaunch.launch.output.tails import Piece, Spool, Tail, last_lines
from nblaunch.launch.views import Displays, LogPiece, Logs, Note, Output, Reports, Stream, View
from nblaunch.machine.segments import in_words
from nblaunch.wire.display_records import MAX_KEPT_BYTES, MAX_OUTPUTS, Cleared, LeftOut, Shown, from_line, is_display
from nblaunch.wire.tables import Dropped

MAX_READ_BYTES = 1 << 16
"""Of one log in one poll."""
_MAX_LATE_LINES = 20
"""Of each rank, the last lines; the log has all."""


class RankOutput:
    """The streams of one rank.

    Attributes:
        dropped: What the rank could not write, at the last poll.
    """

    def __init__(self, worker: Worker, patterns: Sequence[re.Pattern[str]]) -> None:
        self.rank, self.worker = worker.rank, worker
        self.tails: dict[Stream, Tail] = {"out": Tail(worker.log("out")), "err": Tail(worker.log("err"))}
        self.spool = Spool(worker.log("spool"))
        self.printed = {stream: PrintedMetrics(patterns) for stream in self.tails if patterns}
        self.dropped = Dropped()

    @property
    def logs(self) -> dict[Stream, Log]:
        """What the rank has printed, also after its end."""
        return {stream: tail.log for stream, tail in self.tails.items()}

    def close(self) -> None:
        """Close the streams."""
        self.spool.close()
        for tail in self.tails.values():
            tail.close()


class OutputFollower:
    """See the module. Called from the supervisor's thread.

    Args:
        workers: The ranks.
        patterns: Searched for in every printed line.
        view: Shows output and reports.
        notes_unmatched: Whether to note that patterns matched no line. Default: True.

    Attributes:
        reports: What the ranks have reported.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        patterns: Sequence[re.Pattern[str]],
        view: View,
        *,
        notes_unmatched: bool = True,
    ) -> None:
        self.ranks = [RankOutput(worker, patterns) for worker in workers]
        self.view = view
        self._searches = bool(patterns)
        self.reports = ReportColumns()
        self._notes_unmatched = notes_unmatched
        self._has_noted_drops = False
        self._noted_limits: set[int] = set()

    def poll(self) -> None:
        """Show what the ranks have written since the last call."""
        pieces = []
        found: dict[int, list[dict[str, Any]]] = {rank.rank: [] for rank in self.ranks}
        for rank in self.ranks:
            for stream, tail in rank.tails.items():
                piece = self._appended(tail)
                if piece is not None:
                    pieces.append(LogPiece(rank.rank, stream, piece, tail.log, tail.offset))
                    if self._searches:
                        found[rank.rank] += rank.printed[stream].search(piece)
        if pieces:
            self.view.on(Logs(pieces))
        for rank in self.ranks:
            for records in rank.spool.read():
                self._take(rank, records)
            self._take(rank, found[rank.rank])
        self._poll_drops()

    def _take(self, rank: RankOutput, records: Sequence[Mapping[str, Any]]) -> None:
        if not records:
            return
        displayed = displays_in(rank.worker, records)
        if displayed is not None:
            self._show(displayed)
            records = [record for record in records if not is_display(record)]
        if records:
            self.view.on(Reports(rank.rank, [self._kept(rank.rank, record) for record in records]))

    def _kept(self, rank: int, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep a report. Return it, a mark of the best step with its value."""
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
                    f"rank {displayed.rank} displays more than is kept ({MAX_OUTPUTS} outputs, "
                    f"{in_words(MAX_KEPT_BYTES)}): further outputs are left out until clear_output()"
                )
            )

    def _appended(self, tail: Tail) -> Piece | None:
        if self.view.wants_text or self._searches:
            return tail.read(MAX_READ_BYTES)
        return Piece(b"") if tail.grown() else None

    def _poll_drops(self) -> None:
        """Note the first rank that cannot write; the others usually fail for the same reason."""
        for rank in self.ranks:
            rank.dropped = rank.worker.dropped()
            if rank.dropped and not self._has_noted_drops:
                self._has_noted_drops = True
                self.view.on(Note(_first_drop(rank)))

    def finish(self) -> None:
        """Read the rest: every rank has exited. Note what was dropped."""
        self.poll()
        for rank in self.ranks:
            for printed in rank.printed.values():
                self._take(rank, printed.finish())
        self._poll_drops()
        searched = [printed for rank in self.ranks for printed in rank.printed.values()]
        lines = sum(printed.lines for printed in searched)
        if lines and self._notes_unmatched and not any(printed.matches for printed in searched):
            self.view.on(Note(f"--metric (metric_patterns=) matched none of {lines} lines"))
        for rank in self.ranks:
            if rank.dropped:
                self.view.on(Note(f"rank {rank.rank} lost {rank.dropped.what} ({rank.dropped.why})"))

    def close(self) -> None:
        """Close the streams."""
        for rank in self.ranks:
            rank.close()


@dataclass(slots=True)
class _Unshown:
    """The last lines that a rank has printed between two tasks."""

    lines: list[str] = field(default_factory=list)
    cut_in: str = ""
    """The log that has more; empty if these are all."""


class LateOutput:
    """What the ranks of a session print between two tasks, such as from threads: it is in the log of the first."""

    def __init__(self) -> None:
        self._logs: list[tuple[int, Log, int]] = []
        """Rank, log, and how much of the log was read."""
        self._unshown: dict[int, _Unshown] = {}

    def follow(self, output: OutputFollower) -> None:
        """Watch the logs of a task that has ended."""
        self._logs = [(rank.rank, tail.log, tail.offset) for rank in output.ranks for tail in rank.tails.values()]

    def show(self, view: View) -> None:
        """Show what the logs have gained; a view that shows nothing leaves it to the next task."""
        self._logs = [(rank, log, self._read(rank, log, since)) for rank, log, since in self._logs]
        if not view.shows_notes:
            return
        for rank, late in self._unshown.items():
            lines = [*([f"… (more in {late.cut_in})"] if late.cut_in else []), *late.lines]
            said = "\n".join(f"    {line}" for line in lines)
            view.on(Note(f"rank {rank} has printed this since its last cell ended:\n{said}"))
        self._unshown.clear()

    def _read(self, rank: int, log: Log, since: int) -> int:
        size = log.size()
        if size > since:
            late = self._unshown.setdefault(rank, _Unshown())
            late.lines += last_lines(log, _MAX_LATE_LINES + 1, since=since).splitlines()
            if len(late.lines) > _MAX_LATE_LINES:
                late.cut_in = str(log.name)
            late.lines = late.lines[-_MAX_LATE_LINES:]
        return max(size, since)


def _first_drop(rank: RankOutput) -> str:
    if not rank.dropped.reason:
        return f"rank {rank.rank}'s log is full ({rank.dropped.why}, by default 1 GB): further output is dropped"
    return (
        f"rank {rank.rank} cannot write its logs ({rank.dropped.why}): it runs on, and its output and reports are "
        f"dropped until there is room. Free space for {rank.spool.log.name}"
    )


def displays_in(worker: Worker, records: Sequence[Mapping[str, Any]]) -> Displays | None:
    """Return what a rank displays by the end of these records of its spool; None if they hold no display.

    Outputs that a later record removes or replaces are left out: a flood of them costs little.
    """
    outputs: dict[str, Output] = {}
    is_cleared, left_out, is_any = False, None, False
    for line in records:
        record = from_line(line)
        is_any = is_any or record is not None
        match record:
            case Shown():
                outputs[record.key] = _output(worker, record)
            case Cleared():
                outputs.clear()
                is_cleared, left_out = True, 0
            case LeftOut(count):
                left_out = count
    return Displays(worker.rank, list(outputs.values()), is_cleared, left_out) if is_any else None


def _output(worker: Worker, record: Shown) -> Output:
    body = worker.output(record.key, record.mime) if record.body is None else record.body
    return Output(record.key, record.mime, record.text, record.size, body, record.width, record.height)
