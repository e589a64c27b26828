"""The files that a rank of this machine writes, as the kernel reads them: logs, and bodies of displays."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


class LogFile:
    """A file that a rank appends to. It may not exist yet, or no longer. An `engines.protocol.Log`.

    Args:
        path: The file. It is opened for each read: 20 panels of 64 ranks would hold too many descriptors.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)

    def open(self) -> GrowingFile:
        """Return the file for a reader that follows it."""
        return GrowingFile(self.name)

    def size(self) -> int:
        """Return its size; 0 if it does not exist."""
        try:
            return os.stat(self.name, follow_symlinks=False).st_size
        except OSError:
            return 0

    def read(self, start: int, end: int) -> bytes:
        """Return these bytes; fewer if the file was truncated meanwhile, none if it was removed."""
        with contextlib.suppress(OSError), contextlib.closing(self.open()) as file:
            return file.read(start, end)
        return b""


class GrowingFile:
    """A log file that stays open. An `engines.protocol.OpenLog`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._fd: int | None = None

    def size(self) -> int:
        """Return its size; 0 before the file exists."""
        fd = self._descriptor()
        return 0 if fd is None else os.fstat(fd).st_size

    def read(self, start: int, end: int) -> bytes:
        """Return these bytes; fewer if the file was truncated meanwhile."""
        fd = self._descriptor()
        blocks = []
        while fd is not None and start < end and (block := os.pread(fd, end - start, start)):
            blocks.append(block)
            start += len(block)
        return b"".join(blocks)

    def _descriptor(self) -> int | None:
        """Return the open file, or None as long as there is no file."""
        if self._fd is None:
            with contextlib.suppress(FileNotFoundError):
                self._fd = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._fd

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass(frozen=True, slots=True)
class OutputFile:
    """The body of something that a rank has displayed. An `engines.protocol.Body`."""

    path: Path

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def read(self) -> bytes | None:
        """Return the body; None if the file was removed."""
        try:
            return self.path.read_bytes()
        except OSError:  # pruned, or replaced meanwhile
            return None
