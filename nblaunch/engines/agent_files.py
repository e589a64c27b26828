"""The files that the ranks of a node write, as an agent sends them on to the kernel, which keeps copies.

The files of the node are complete. If a link cannot keep up, the middle of a log is left out of the copy, with a line
that says where it is. What an agent leaves behind, for that or because it was killed, stays for a day.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nblaunch.engines.outbox import Message
from nblaunch.machine import timeouts
from nblaunch.machine.own_modules import OwnFile
from nblaunch.machine.segments import in_words
from nblaunch.wire import directory_lock
from nblaunch.wire.launch_files import INCOMPLETE, LOCK, rank_file
from nblaunch.wire.link_messages import Written

_log = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 18
"""Of files in one message."""
MAX_BACKLOG_BYTES = 32 << 20
"""Of a log that a running rank writes, before its middle is left out."""
MAX_LATE_BYTES = 8 << 20
"""The same once the rank has ended and `timeouts.AGENT_REST_S` have passed."""
_KEPT_END_BYTES = 1 << 20
"""Of a log whose middle is left out, at its end."""
_KEPT_DIRECTORIES = 3
"""Of the last tasks of kept ranks; the first directory of a group stays."""
_STREAMS: tuple[Literal["spool", "out", "err"], ...] = ("spool", "out", "err")


class AgentFolder:
    """The folder of one agent, locked while it lives. Removes the old ones that other agents of this user have left."""

    def __init__(self) -> None:
        temporary = Path(tempfile.gettempdir())
        prefix = f"nblaunch-agent-{socket.gethostname()}-"  # a shared disk may have locks that other nodes do not see
        for old in temporary.glob(f"{glob.escape(prefix)}*"):
            with contextlib.suppress(OSError):  # another user's, or another agent is removing it
                found = old.lstat()
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > timeouts.AGENT_FILES_KEPT_S:
                    _remove_unlocked(old)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=temporary))
        self._lock: int | None = None
        try:
            self._lock = directory_lock.acquire(self.path)
        except OSError as error:
            if error.errno not in directory_lock.UNSUPPORTED:
                raise
            _log.warning("nblaunch: %s may stay: its file system does not support locks", self.path)

    def touch(self) -> None:
        """Let the day begin that the folder stays."""
        with contextlib.suppress(OSError):  # someone has removed it
            os.utime(self.path)

    def close(self) -> None:
        """Remove the folder, unless a group has left files that the kernel lacks."""
        (self.path / LOCK).unlink(missing_ok=True)
        if self._lock is not None:
            directory_lock.release(self._lock)
            self._lock = None
        with contextlib.suppress(OSError):  # not empty
            self.path.rmdir()


def _remove_unlocked(folder: Path) -> None:
    lock = directory_lock.acquire(folder)
    if lock is not None:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            directory_lock.release(lock)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of one file."""

    log_dir: str
    """The kernel's."""
    file: str
    data: bytes


class AgentFiles:
    """The files of the ranks of one group on this node.

    Args:
        folder: Where to make its own folder.
        group: The id of the group.
        node: The name of the node, for the user.

    Attributes:
        has_gaps: The kernel lacks part of a log, so the files must stay.
    """

    def __init__(self, folder: Path, group: str, node: str) -> None:
        self._group, self._node = group, node
        self.root = folder / group
        folder.mkdir(mode=0o700, exist_ok=True)  # a cleaner of /tmp may have removed it
        self.root.mkdir(mode=0o700)
        self._directories: dict[str, Path] = {}
        """By the kernel's path for the same directory."""
        self._sent: dict[Path, int] = {}
        """How much of each file was sent."""
        self._made = 0
        self.has_gaps = False

    def directory(self, log_dir: str) -> Path:
        """Return the directory here that stands for one of the kernel's."""
        if log_dir not in self._directories:
            self._made += 1
            made = self.root / str(self._made)
            made.mkdir(mode=0o700)
            self._directories[log_dir] = made
            if not self.has_gaps:
                for name, old in list(self._directories.items())[1:-_KEPT_DIRECTORIES]:
                    shutil.rmtree(old, ignore_errors=True)
                    del self._directories[name]
                    self._sent = {path: sent for path, sent in self._sent.items() if path.parent != old}
        return self._directories[log_dir]

    def write_modules(self, modules: Sequence[OwnFile], contents: Mapping[bytes, bytes]) -> str:
        """Write files of the user's modules; return the directory, for ``sys.path``."""
        root = self.root / "modules"
        for file in modules:
            path = root / file.name
            if file.digest in contents and root in path.resolve().parents:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(contents[file.digest])
        return str(root)

    def has_new(self, rank: int) -> bool:
        """Return True if a rank has written something that was not sent. Looks at its present and last task."""
        return any(self._size(path) > self._sent.get(path, 0) for _, path in self._streams(rank))

    def unsent(self, ranks: Iterable[int], *, is_over: bool = False) -> Iterator[Message]:
        """Yield what ranks have written since the last call: what they display before the records that refer to it.

        Small pieces of many files share a message: each costs the kernel as much as a large one.

        Args:
            ranks: The ranks.
            is_over: Whether it is the last call of their task.
        """
        batch: list[_Piece] = []
        for piece in (piece for rank in ranks for piece in self._unsent_of(rank, is_over)):
            size = sum(len(each.data) for each in batch)
            if batch and (piece.log_dir != batch[0].log_dir or size + len(piece.data) > _PIECE_BYTES):
                yield self._message(batch)
                batch = []
            batch.append(piece)
        if batch:
            yield self._message(batch)

    def _message(self, batch: Sequence[_Piece]) -> Message:
        files = [(each.file, len(each.data)) for each in batch]
        return Written(self._group, batch[0].log_dir, files), [b"".join(each.data for each in batch)]

    def _unsent_of(self, rank: int, is_over: bool) -> Iterator[_Piece]:
        for log_dir, path in self._streams(rank):
            size = self._size(path)
            if size <= self._sent.get(path, 0):
                continue
            if path.suffix == ".spool":
                yield from self._displays(rank, log_dir, path.parent)
            elif is_over:
                yield from self._rest(log_dir, path, size)
            elif size - self._sent.get(path, 0) > MAX_BACKLOG_BYTES:
                yield self._gap(log_dir, path, size)
            yield from self._pieces(log_dir, path, size)

    def _streams(self, rank: int) -> Iterator[tuple[str, Path]]:
        for log_dir, directory in list(self._directories.items())[-2:]:
            for stream in _STREAMS:
                yield log_dir, rank_file(directory, rank, stream)

    def _displays(self, rank: int, log_dir: str, directory: Path) -> Iterator[_Piece]:
        for path in sorted(directory.glob(f"rank{rank}-output*")):
            if path not in self._sent and path.suffix != ".part":  # which is being written
                yield from self._pieces(log_dir, path, self._size(path))

    def _pieces(self, log_dir: str, path: Path, end: int) -> Iterator[_Piece]:
        start = self._sent.setdefault(path, 0)
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < end and (data := file.read(min(_PIECE_BYTES, end - start))):
                start += len(data)
                self._sent[path] = start
                yield _Piece(log_dir, path.name, data)

    def _rest(self, log_dir: str, path: Path, end: int) -> Iterator[_Piece]:
        """Yield the rest of a log, or as much as is sent in time, and where the middle of the log is."""
        until = time.monotonic() + timeouts.AGENT_REST_S
        for piece in self._pieces(log_dir, path, end):
            yield piece
            if time.monotonic() > until and end - self._sent[path] > MAX_LATE_BYTES:
                break
        if end - self._sent[path] > MAX_LATE_BYTES:
            yield self._gap(log_dir, path, end)

    def _gap(self, log_dir: str, path: Path, size: int) -> _Piece:
        """Leave out the middle of a log."""
        self.has_gaps = True
        (self.root.parent / INCOMPLETE).touch()
        start = self._sent.get(path, 0)
        self._sent[path] = size - _KEPT_END_BYTES
        omitted = in_words(self._sent[path] - start)
        said = f"\n[nblaunch: {omitted} are left out here; all is in {path} on {self._node}]\n"
        return _Piece(log_dir, path.name, said.encode())

    @staticmethod
    def _size(path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError:  # not yet there
            return 0

    def close(self) -> None:
        """Remove the files, unless the kernel lacks some of them."""
        if not self.has_gaps:
            shutil.rmtree(self.root, ignore_errors=True)


def is_rank_file(name: str) -> bool:
    """Return True if a name is one of a rank's files: what a kernel may write for an agent."""
    return name == os.path.basename(name) and name.startswith("rank")
