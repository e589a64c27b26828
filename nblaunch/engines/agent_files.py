"""The files of an agent's ranks: what they write, which goes to the kernel, and the user's own modules."""

from __future__ import annotations

import contextlib
import glob
import os
import queue
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nblaunch.engines.link import Message
from nblaunch.errors import StartError
from nblaunch.machine import timeouts
from nblaunch.machine.own_code import digest_of
from nblaunch.wire import launch_files
from nblaunch.wire.launch_files import rank_file
from nblaunch.wire.link_messages import Files, NeedFiles, Place, Written

_PIECE_BYTES = 1 << 18
"""Of files in one message."""
_KEPT_DIRECTORIES = 3
"""Of the last tasks of kept ranks; the first directory of a group stays."""
_STREAMS: tuple[Literal["spool", "out", "err"], ...] = ("spool", "out", "err")


class AgentFolder:
    """The folder of one agent, locked while it lives. Removes those of this user's agents that were killed."""

    def __init__(self) -> None:
        temporary = Path(tempfile.gettempdir())
        prefix = f"nblaunch-agent-{socket.gethostname()}-"  # a shared disk may have locks that other nodes do not see
        for old in temporary.glob(f"{glob.escape(prefix)}*"):
            with contextlib.suppress(OSError):  # it has no locks, or another agent is removing it
                if old.lstat().st_uid == os.getuid() and (lock := launch_files.acquire_lock(old)) is not None:
                    shutil.rmtree(old, ignore_errors=True)
                    launch_files.release_lock(lock)
        self._lock: int | None = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=temporary))
            try:
                self._lock = launch_files.acquire_lock(self.path)  # None: another agent has just removed it
            except OSError:
                break  # there are no locks: the folder stays if everything here is killed at once

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            launch_files.release_lock(self._lock)
            self._lock = None


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
    """

    def __init__(self, folder: Path, group: str) -> None:
        self._group = group
        self.root = folder / group
        folder.mkdir(mode=0o700, exist_ok=True)  # a cleaner of /tmp may have removed it
        self.root.mkdir(mode=0o700)
        self._directories: dict[str, Path] = {}
        """By the kernel's path for the same directory."""
        self._sent: dict[Path, int] = {}
        """How much of each file was sent."""
        self._made = 0

    def directory(self, log_dir: str) -> Path:
        """Return the directory here that stands for one of the kernel's."""
        if log_dir not in self._directories:
            self._made += 1
            made = self.root / str(self._made)
            made.mkdir(mode=0o700)
            self._directories[log_dir] = made
            for name, old in list(self._directories.items())[1:-_KEPT_DIRECTORIES]:
                shutil.rmtree(old, ignore_errors=True)
                del self._directories[name]
                self._sent = {path: sent for path, sent in self._sent.items() if path.parent != old}
        return self._directories[log_dir]

    def has_new(self, rank: int) -> bool:
        """Return True if a rank has written something that was not sent. Looks at its present and last task."""
        return any(self._size(path) > self._sent.get(path, 0) for _, path in self._streams(rank))

    def unsent(self, ranks: Iterable[int]) -> Iterator[Message]:
        """Yield what ranks have written since the last call: what they display before the records that refer to it.

        Small pieces of many files share a message: each costs the kernel as much as a large one.
        """
        batch: list[_Piece] = []
        for piece in (piece for rank in ranks for piece in self._unsent_of(rank)):
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

    def _unsent_of(self, rank: int) -> Iterator[_Piece]:
        for log_dir, path in self._streams(rank):
            size = self._size(path)
            if size > self._sent.get(path, 0):
                if path.suffix == ".spool":
                    yield from self._displays(rank, log_dir, path.parent)
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

    @staticmethod
    def _size(path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError:  # not yet there
            return 0

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.root, ignore_errors=True)


class OwnModules:
    """The user's own modules on this node: those that it lacks or has otherwise come from the notebook's machine.

    Threads that place groups wait here.

    Args:
        ask: Asks the kernel for files.
    """

    def __init__(self, ask: Callable[[NeedFiles], None]) -> None:
        self._ask = ask
        self._contents: dict[bytes, bytes] = {}
        """Files by digest."""
        self._awaited: dict[str, queue.SimpleQueue[Files]] = {}
        """By group: where a thread waits."""

    def path_for(self, message: Place, root: Path) -> list[str]:
        """Return what comes first in the ranks' ``sys.path``: `root`, with the modules that differ here.

        Of a package that differs, all files are taken from the notebook's machine.

        Raises:
            StartError: The kernel does not send them.
        """
        differing = {file.package for file in message.modules if digest_of(file.path) != file.digest}
        wanted = [file for file in message.modules if file.package in differing]
        lacking = {file.digest for file in wanted} - self._contents.keys()
        if lacking:
            arrived = self._awaited[message.group] = queue.SimpleQueue()
            self._ask(NeedFiles(message.group, sorted(lacking)))
            try:
                self._contents.update(arrived.get(timeout=timeouts.PROGRAM_TIMEOUT_S).contents)
            except queue.Empty:
                raise StartError(
                    f"the notebook's own modules have not come within {timeouts.PROGRAM_TIMEOUT_S:.0f} s: is the link "
                    "slow? Launch again"
                ) from None
            finally:
                del self._awaited[message.group]
        for file in wanted:
            path = root / file.name
            if file.digest in self._contents and root in path.resolve().parents:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._contents[file.digest])
        return [str(root)] if wanted else []

    def take(self, message: Files) -> None:
        """Give files to the thread that waits for them."""
        arrived = self._awaited.get(message.group)
        if arrived is not None:
            arrived.put(message)


def is_rank_file(name: str) -> bool:
    """Return True if a name is one of a rank's files: what a kernel may write for an agent."""
    return name == os.path.basename(name) and name.startswith("rank")
