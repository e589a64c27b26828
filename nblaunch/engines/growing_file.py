"""A file that another process appends to."""

from __future__ import annotations

import os
from pathlib import Path


class GrowingFile:
    """A file that grows, and may not exist yet. An `engines.protocol.Log`."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._fd: int | None = None

    def size(self) -> int:
        """Return its size; 0 before the file exists."""
        if self._fd is None:
            try:
                self._fd = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return 0
        return os.fstat(self._fd).st_size

    def read(self, start: int, end: int) -> bytes:
        """Return these bytes; fewer if the file was truncated meanwhile."""
        if self._fd is None:
            return b""
        blocks = []
        while start < end and (block := os.pread(self._fd, end - start, start)):
            blocks.append(block)
            start += len(block)
        return b"".join(blocks)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
