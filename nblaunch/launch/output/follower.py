"""Following what the ranks of an attempt print and report, for the view and for the result."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nblaunch.launch.commands import Commands
from nblaunch.launch.output.log_files import Piece, Tail
from nblaunch.launch.output.report_columns import ReportColumns
from nblaunch.launch.rank_state import Rank
from nblaunch.launch.views.view import LogPiece, View
from nblaunch.wire.drops import Table

_log = logging.getLogger(__name__)
_MOST_AT_ONCE = 1 << 16
"""Bytes of one log that are read at one look."""
_SEARCH_FOR = 0.05
"""Seconds of one look in which logs are searched for metrics."""
_TELL_AFTER = 5.0
"""Seconds of searching after which that is said."""


class Reading:
    """See the module. Called from the supervisor's thread.

    Args:
        ranks: Whose logs to follow; it may grow.
        view: What is told of them.
        commands: An interrupt in them ends a long search.

    Attributes:
        reports: What the ranks have reported.
    """

    def __init__(self, ranks: Sequence[Rank], view: View, commands: Commands) -> None:
        self.ranks, self.view, self.commands = ranks, view, commands
        self.reports = ReportColumns()
        self._drops: Table | None = None
        self._has_told_of_drops = False

    def count_drops(self, scratch: str, ranks: int) -> None:
        """Have the ranks count what they cannot write."""
        try:
            self._drops = Table(scratch, ranks)
        except OSError as error:
            _log.warning("nblaunch: what ranks cannot write will not be counted: %s", error)

    def look(self) -> None:
        """Show what has been appended to the logs."""
        pieces = []
        for rank in self.ranks:
            for stream, tail in rank.tails.items():
                piece = self._appended(tail)
                if piece is not None:
                    pieces.append(LogPiece(rank.rank, stream, piece, tail.offset))
        if pieces:
            self.view.logs(pieces)
        for rank in self.ranks:
            for records in rank.spool.read():
                self._take_in(rank, records)
            self._take_in(rank, rank.printed.read(_SEARCH_FOR / len(self.ranks)))
        self._look_at_drops()

    def _take_in(self, rank: Rank, records: Sequence[Mapping[str, Any]]) -> None:
        if not records:
            return
        for record in records:
            if "metrics" in record:
                self.reports.add(rank.rank, record["time"], record["step"], record["metrics"])
        self.view.reports(rank.rank, records)

    def _appended(self, tail: Tail) -> Piece | None:
        if self.view.wants_text:
            return tail.read(_MOST_AT_ONCE)
        return Piece(b"") if tail.grown() else None

    def _look_at_drops(self) -> None:
        """Say it once that a rank cannot write: most often, the others cannot for the same reason."""
        if self._drops is None:
            return
        for rank in self.ranks:
            rank.dropped = self._drops.read(rank.rank)
            if rank.dropped and not self._has_told_of_drops:
                self._has_told_of_drops = True
                self.view.note(_beginning(rank))

    def tell_what_was_dropped(self) -> None:
        """Say how much it was; every rank has ended."""
        self._look_at_drops()
        for rank in self.ranks:
            if rank.dropped:
                self.view.note(f"rank {rank.rank} lost {rank.dropped.amount} ({rank.dropped.why})")

    def close(self) -> None:
        """Close what was opened."""
        if self._drops is not None:
            self._drops.close()

    def search_the_rest(self) -> None:
        """Search the logs to their end. It can take long after a flood, so an interrupt (another one) ends it."""
        was_stopped, begun, told = self.commands.stop, time.monotonic(), False
        for rank in self.ranks:
            rank.printed.end_here()
        while any(rank.printed.is_behind for rank in self.ranks):
            if self.commands.kill or self.commands.stop != was_stopped:
                self.view.note("the logs were not searched for metrics to their end, as you interrupted it")
                return
            if not told and time.monotonic() - begun > _TELL_AFTER:
                told = True
                self.view.note("every rank has ended, and the rest of their logs is searched for metrics")
            self.look()
            self.view.tick()
        for rank in self.ranks:
            self._take_in(rank, rank.printed.finish())


def _beginning(rank: Rank) -> str:
    if not rank.dropped.reason:
        return f"rank {rank.rank} has reached {rank.dropped.why}: what it prints from here on is dropped"
    return (
        f"rank {rank.rank} cannot write its logs ({rank.dropped.why}): it goes on, and what it prints and reports is "
        f"dropped until there is room again. Free space at {rank.spool.path.parent}"
    )
