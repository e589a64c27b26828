"""What a debug console has shown: text of the ranks and of the console, and what the user has typed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_CHARS = 1 << 20
"""The oldest text goes first."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A part of the transcript."""

    text: str
    typed_in: str = ""
    """Where the user has typed it; empty if a rank or the console has printed it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A line that the console waits for."""

    number: int
    """Different for each line."""
    rank: int
    text: str
    is_secret: bool


class Transcript:
    """See the module. Its owner guards it."""

    def __init__(self) -> None:
        self._parts: deque[Shown] = deque()
        self._first = self._chars = 0

    def __len__(self) -> int:
        """Return the number of parts, with those that are dropped."""
        return self._first + len(self._parts)

    def add(self, text: str, typed_in: str = "") -> None:
        """Append a part."""
        self._parts.append(Shown(text, typed_in))
        self._chars += len(text)
        while self._chars > _MAX_CHARS and len(self._parts) > 1:
            self._chars -= len(self._parts.popleft().text)
            self._first += 1

    def since(self, start: int) -> Sequence[Shown]:
        """Return the parts from number `start` on, as far as they are kept."""
        return [self._parts[number - self._first] for number in range(max(start, self._first), len(self))]
