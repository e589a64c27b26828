"""The file in which a rank answers requests for its stacks: its first line, and the marks around an answer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

BEGIN, WHOLE = "(answer)\n", "(whole)\n"
"""First and last line of an answer, which is appended in one write: faulthandler may write before and after it."""


@dataclass(frozen=True, slots=True)
class DumpHead:
    """The first line of the file: how to request the stacks of this rank."""

    signal: int
    """faulthandler answers it."""
    pipe: str
    """The FIFO that the rank's own thread reads."""
    main: str
    """The main thread, as dumps name it."""

    def to_line(self) -> bytes:
        """Return the line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> DumpHead:
        """Return the head that a line holds."""
        return cls(**json.loads(line))
