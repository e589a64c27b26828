"""What a session is doing, as text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from nblaunch.machine.segments import in_words

DEFAULT_NAME = "main"


def command(name: str, action: str) -> str:
    """Return the magic that does `action` to the session of this name, quoted, for the user to paste."""
    return f"`%distributed session {action}{'' if name == DEFAULT_NAME else f' --name {name}'}`"


def debug_command(name: str) -> str:
    return f"`%distributed debug{'' if name == DEFAULT_NAME else f' --session {name}'}`"


def restart_command(name: str, ranks: Sequence[int] = ()) -> str:
    """Return the magic that restarts ranks of the session of this name; without `ranks`, all."""
    return command(name, " ".join(["restart", *(f"--rank {rank}" for rank in ranks)]))


def no_group(name: str, dead: Sequence[int]) -> str:
    """Return why the session of this name has no process group, and what to do; empty if no rank is dead."""
    if not dead:
        return ""
    is_one = len(dead) == 1
    return (
        f"rank{'' if is_one else 's'} {', '.join(map(str, dead))} {'is' if is_one else 'are'} dead, so there is no "
        f"process group: {restart_command(name, dead)} restarts {'it' if is_one else 'them'} and creates the group"
    )


@dataclass(frozen=True, slots=True)
class RankHolding:
    rank: int
    pid: int
    """0: it is dead."""
    names: int
    size: int
    """Bytes of their values, as far as they are known."""
    host: str = ""
    """Its node; empty: the notebook's own machine."""


@dataclass(frozen=True, slots=True)
class SessionState:
    name: str
    device: str
    running: str
    queued: Sequence[str]
    idle: float
    """Seconds since the last task; 0.0 while one runs."""
    ranks: Sequence[RankHolding]
    is_open: bool

    @property
    def size(self) -> str:
        return "1 rank" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks"

    def heading(self) -> str:
        ranks = f"session {self.name}: {self.size} on {self.device}"
        if not self.is_open:
            return f"{ranks}, stopped"
        since = time.strftime("%H:%M", time.localtime(time.time() - self.idle))  # a saved notebook shows it for long
        doing = f"busy: {self.running}" if self.running else f"idle since {since}"
        return f"{ranks}, {doing}{f', {len(self.queued)} more queued' if self.queued else ''}"

    def dead_line(self, rank: int) -> str:
        if not any(each.pid for each in self.ranks):
            return f"dead, its variables are lost; {restart_command(self.name)} restarts all"
        return f"dead, its variables are lost; {restart_command(self.name, [rank])} restarts it"

    def text(self) -> str:
        lines = [self.heading()]
        for each in self.ranks if self.is_open else ():
            where = f" on {each.host}" if each.host else ""
            holds = f"pid {each.pid}{where}, {each.names} name{'s' * (each.names != 1)}, {in_words(each.size)}"
            lines.append(f"  rank {each.rank}: {holds if each.pid else self.dead_line(each.rank)}")
        return "\n".join(lines)
