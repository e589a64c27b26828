"""What `engines.protocol.Workers.wait` returns: what the ranks of a group have sent, and how they have ended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from nblaunch.wire.messages import NotStarted, RankExited, RankStarted, Swept


class Descriptors:
    """What has arrived with a message: descriptors of files in this machine's memory, which their holder closes."""

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self._fds = list(fds)

    def __bool__(self) -> bool:
        return bool(self._fds)

    def take(self) -> list[int]:
        """Return the descriptors, which the caller closes; none at the next call."""
        taken, self._fds = self._fds, []
        return taken

    def close(self) -> None:
        """Close the descriptors, unless they were taken. Idempotent."""
        for fd in self.take():
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Received:
    """A rank has sent a message. The receiver takes or closes the parcel."""

    rank: int
    message: object
    parcel: Descriptors


@dataclass(frozen=True, slots=True)
class LostDescriptors:
    """A message has arrived without its descriptors: this process may not open that many."""

    rank: int
    message: object
    error: OSError


@dataclass(frozen=True, slots=True)
class Lost:
    """The process that supervises the ranks is dead, and the ranks with it."""


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """A node is being taken back, with its ranks: they have as long as its engine grants them."""

    reason: str


Event = RankStarted | NotStarted | RankExited | Swept | Received | LostDescriptors | NodeLeaving | Lost
"""`Swept` and `Lost` are the last event of a group."""
