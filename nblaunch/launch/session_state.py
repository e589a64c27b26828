"""What a session is doing, for its text and its display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nblaunch.machine.segments import in_words


@dataclass(frozen=True, slots=True)
class RankHolding:
    """One rank of a session."""

    rank: int
    pid: int
    """0: it is dead."""
    names: int
    """How many names it has bound."""
    size: int
    """Bytes of their values, as far as they are known."""


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session at one moment."""

    name: str
    device: str
    running: str
    """The task that the ranks run; empty if there is none."""
    queued: Sequence[str]
    """The tasks that wait."""
    idle: float
    """Seconds since the last task; 0.0 while one runs."""
    ranks: Sequence[RankHolding]
    is_open: bool

    def heading(self) -> str:
        """Return the state in one line."""
        ranks = f"session {self.name}: {len(self.ranks)} ranks on {self.device}"
        if not self.is_open:
            return f"{ranks}, stopped"
        doing = f"busy: {self.running}" if self.running else f"idle for {self.idle:.0f} s"
        return f"{ranks}, {doing}{f', {len(self.queued)} more queued' if self.queued else ''}"

    def text(self) -> str:
        """Return the state and what each rank holds, as lines."""
        lines = [self.heading()]
        for each in self.ranks:
            process = f"pid {each.pid}" if each.pid else "dead"
            lines.append(f"  rank {each.rank}: {process}, {each.names} names, {in_words(each.size)}")
        return "\n".join(lines)
