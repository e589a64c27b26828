"""What a launch's supervisor knows of one rank."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field

from nblaunch.launch.output.log_files import Spool, Tail
from nblaunch.launch.output.metric_patterns import PrintedMetrics
from nblaunch.launch.verdict import RankEnd
from nblaunch.launch.views.view import RankState, Stream
from nblaunch.wire.channel import Channel
from nblaunch.wire.drops import Dropped
from nblaunch.wire.messages import Done, Failed, RankExited


@dataclass(slots=True)
class Rank:
    """What is known of one rank."""

    rank: int
    channel: Channel
    tails: dict[Stream, Tail]
    spool: Spool
    printed: PrintedMetrics
    pid: int = 0
    took: bool = False
    """It has its task, if it was to say so."""
    running: bool = False
    interrupted: bool = False
    """It has seen its one SIGINT, ours or an editor's that came before."""
    leaving: bool = False
    """Its function and its threads have ended."""
    done: Done | None = None
    failed: Failed | None = None
    exited: RankExited | None = None
    result: list[int] = field(default_factory=list)
    """The descriptors of its result's parcel."""
    dropped: Dropped = field(default_factory=Dropped)
    """What it could not write."""
    shown: RankState | None = None
    """What the view was told last."""

    def end(self) -> RankEnd:
        return RankEnd(self.rank, self.done, self.failed, self.exited)

    @property
    def listens(self) -> bool:
        """Whether it has not ended, and still is what it was: one that called exec would die of a signal for stacks."""
        return self.exited is None and not self.channel.closed

    @property
    def has_failed(self) -> bool:
        """Whether it raised, cannot send its result, or ended before it had returned."""
        return self.failed is not None or (self.exited is not None and self.done is None)

    def state(self, asked: Collection[int]) -> RankState:
        """Where it stands, if these ranks have been asked to end."""
        was_asked = self.rank in asked
        if self.failed is not None:
            return "ended" if self.failed.collective or was_asked else "failed"
        if self.exited is not None:
            if not self.has_failed:
                return "returned"
            return "ended" if was_asked else "failed"
        if was_asked:
            return "stopping"
        return "running" if self.running else "starting"

    def take_result(self) -> list[int]:
        """The descriptors of its result's parcel; from now on the caller's to close."""
        taken, self.result = self.result, []
        return taken

    def close(self) -> None:
        """Close what was opened for it, and a result that was not taken."""
        for fd in self.take_result():
            os.close(fd)
        self.channel.close()
        self.spool.close()
        self.printed.close()
        for tail in self.tails.values():
            tail.close()
