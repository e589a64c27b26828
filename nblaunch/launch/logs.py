"""The files of a launch: where ranks write, and how the kernel follows what they have written.

Ranks write to these files directly, so nothing that the kernel does (or fails to do) can stall them. Runs in the
kernel, most of it in a launch's supervisor thread; nothing here waits.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import platformdirs

from nblaunch.errors import StartError, warn
from nblaunch.launch.lines import LineAssembler, without_colours

_log = logging.getLogger(__name__)

_LIVE = "live"
_OURS = re.compile(r"\d{8}T\d{12}Z-.+")
_BLOCK = 1 << 20
_MOST_COUNTED = 1 << 20
"""Lines of a skipped part are counted up to this size: a flood is not read for its own sake."""
_LONGEST_RECORD = 1 << 20
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MOST_LOCKED = 100
"""Launches that are over and whose directories stay locked, the latest: each lock takes a descriptor."""
_sizes: dict[Path, int] = {}
_in_use: weakref.WeakValueDictionary[Path, LaunchFiles] = weakref.WeakValueDictionary()
"""The directories that something in this process refers to, oldest first."""
_told_of_temporary = False
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def state_root() -> Path:
    """The directory of all launches: ``$NBLAUNCH_STATE_DIR``, else one in this user's state directory. It is made.

    Where the user's state directory cannot be written to, it is a temporary one, and a warning says so.

    Raises:
        StartError: There is no directory to write to.
    """
    chosen = os.environ.get("NBLAUNCH_STATE_DIR")
    try:
        if chosen:
            return _writable(Path(chosen).expanduser().absolute())
        with suppress(OSError):
            return _writable(platformdirs.user_state_path("nblaunch") / "launches")
        return _temporary_root()
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of a user that there is not
        name = f"NBLAUNCH_STATE_DIR={chosen!r}" if chosen else "the temporary directory"
        raise StartError(
            f"{name} cannot hold the logs of launches: {error}: set NBLAUNCH_STATE_DIR to a directory of your own"
        ) from error


def _writable(root: Path) -> Path:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(root, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "it cannot be written to", str(root))
    return root


def _temporary_root() -> Path:
    """A directory among the temporary ones, where others could have made it before."""
    global _told_of_temporary
    root = Path(tempfile.gettempdir(), f"nblaunch-{os.getuid()}")
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EACCES, "it is not this user's alone", str(root))
    if not _told_of_temporary:
        _told_of_temporary = True
        warn(f"logs of launches go to {root}, as your home directory cannot be written to: set NBLAUNCH_STATE_DIR")
    return _writable(root)


def log_path(directory: Path, rank: int, stream: str) -> Path:
    """Where a rank's ``out``, ``err`` or ``spool`` is."""
    return directory / f"rank{rank}.{stream}"


class LaunchFiles:
    """The directory of one attempt of a launch, which is not pruned while anything refers to this object.

    Other kernels see that by its lock. Of launches that are over only the latest 100 have one; the others are safe from
    this kernel's pruning alone.

    Attributes:
        directory: Where the files are.
        is_over: Nothing is written there any more.
    """

    def __init__(self, directory: Path, live: int | None) -> None:
        self.directory = directory
        self.is_over = False
        self._hold = None if live is None else weakref.finalize(self, _release, live, os.getpid())
        if self._hold is not None:
            self._hold.atexit = False  # the lock ends with the process

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.directory,)  # a copy of a result refers to the same files, and has no lock of its own

    @classmethod
    def create(cls, launch_id: str) -> LaunchFiles:
        """Make the directory, for this user alone, and mark it as live."""
        root = state_root()
        while True:
            directory = root / f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S%f}Z-{launch_id}"
            with suppress(FileExistsError):  # the same launch and microsecond: take the next
                directory.mkdir(mode=0o700)
                try:
                    live = _lock(directory)
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                    _log.warning("nblaunch: %s will not be pruned: its file system has no locks", directory)
                    return cls(directory, None)
                if live is not None:
                    files = _in_use[directory] = cls(directory, live)
                    return files

    def out(self, rank: int) -> Path:
        """What the rank and its children write to file descriptor 1."""
        return log_path(self.directory, rank, "out")

    def err(self, rank: int) -> Path:
        """What the rank and its children write to file descriptor 2."""
        return log_path(self.directory, rank, "err")

    def spool(self, rank: int) -> Path:
        """The rank's metrics and progress; see `nblaunch.ranks.report`."""
        return log_path(self.directory, rank, "spool")

    def close(self) -> None:
        """The launch is over: its directory may be pruned once nothing refers to this object."""
        self.is_over = True
        known = [files for reference in _in_use.valuerefs() if (files := reference()) is not None]
        locked = [files for files in known if files.is_over and files._hold is not None and files._hold.alive]
        for files in locked[:-_MOST_LOCKED]:
            files._hold()


def _again(directory: Path) -> LaunchFiles:
    return _in_use.get(directory) or LaunchFiles(directory, None)


def _release(live: int, owner: int) -> None:
    if os.getpid() == owner:  # in a forked child the lock is still the parent's, and the number may be another file's
        _unlock(live)


def _lock(directory: Path) -> int | None:
    """A descriptor that holds the directory's lock; None where it is held elsewhere, or the directory has gone.

    Whoever makes a directory and whoever removes one do the same: open the file, making it if need be, lock it, and
    look whether it is still the one by that name. So neither can come between the other's steps.
    """
    path = directory / _LIVE
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _unlock(fd: int) -> None:
    # Closing would not be enough: a process that was forked meanwhile holds a copy, and with it the lock.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def prune(keep: int = 50, most_bytes: int = 1 << 30) -> None:
    """Remove the oldest launches' files. What cannot be removed stays.

    Never those of the newest launch, of one that is live, or of one that something in its kernel refers to.

    Args:
        keep: How many launches to keep.
        most_bytes: How much they may take in all, besides the newest and those that this process refers to.
    """
    root = state_root()
    names: list[str] = []
    with suppress(OSError), os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if _OURS.fullmatch(entry.name) and _is_directory(entry))
    total = 0
    for age, name in enumerate(reversed(names)):
        directory = root / name
        if age == 0 or directory in _in_use:
            continue
        total += _size(directory)
        if age >= keep or total > most_bytes:
            _remove(directory)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _size(directory: Path) -> int:
    """Bytes of a launch's files; remembered once it is over, as to read 50 directories takes milliseconds."""
    if directory in _sizes:
        return _sizes[directory]
    live = _try_lock(directory)
    total = 0
    with suppress(OSError):  # another kernel prunes, too; another user's is not ours to read
        total = sum(entry.lstat().st_size for entry in directory.iterdir())
    if live is not None:
        _sizes[directory] = total
        _unlock(live)
    return total


def _remove(directory: Path) -> None:
    live = _try_lock(directory)
    if live is None:
        return
    _sizes.pop(directory, None)
    try:
        shutil.rmtree(directory, ignore_errors=True)  # what is left is another kernel's to remove, or the next time's
    finally:
        _unlock(live)


def _try_lock(directory: Path) -> int | None:
    try:
        return _lock(directory)
    except OSError as error:  # a file system without locks: whether it is in use cannot be told
        _log.debug("nblaunch: %s counts as in use, since it cannot be locked: %s", directory, error)
        return None


@dataclass(frozen=True, slots=True)
class Piece:
    """What was appended to a file: all of it in ``head``, or its beginning and end."""

    head: bytes
    skipped_lines: int = 0
    """Line ends between head and tail; -1 where nobody counted them."""
    skipped_bytes: int = 0
    tail: bytes = b""


class _Follower:
    """A growing file, which may not exist yet, and how much of it has been dealt with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._offset = 0

    def _appended(self) -> tuple[int, int]:
        """From where to where the file has grown since the last call."""
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return 0, 0
        size = os.fstat(self._fd).st_size
        start, self._offset = min(self._offset, size), size  # somebody cut it: go on from its new end
        return start, size

    def _between(self, start: int, end: int) -> bytes:
        """What lies there; less where the file has been cut meanwhile."""
        if self._fd is None:
            return b""
        blocks = []
        while start < end and (block := os.pread(self._fd, end - start, start)):
            blocks.append(block)
            start += len(block)
        return b"".join(blocks)

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Tail(_Follower):
    """Follows a log; of a flood it reads the beginning and the end alone."""

    def grown(self) -> bool:
        """Whether something was appended since the last call, which is not read."""
        start, end = self._appended()
        return start != end

    @property
    def offset(self) -> int:
        """The log's size when it was last looked at."""
        return self._offset

    def read(self, limit: int) -> Piece | None:
        """What was appended since the last call, or None.

        Args:
            limit: How many bytes to take at most; of more, the first quarter and the last three quarters of so many
                are taken, cut at line ends where there are any near.
        """
        start, end = self._appended()
        if start == end:
            return None
        if end - start <= limit:
            return Piece(self._between(start, end))
        near = limit // 8
        head = _cut_after_line(self._between(start, start + limit // 4), near)
        # One byte more in front tells whether the tail begins a line.
        tail = _cut_before_line(self._between(end - limit * 3 // 4 - 1, end), near)
        skipped_from, skipped_to = start + len(head), end - len(tail)
        return Piece(head, self._count_lines(skipped_from, skipped_to), skipped_to - skipped_from, tail)

    def _count_lines(self, start: int, end: int) -> int:
        if end - start > _MOST_COUNTED:
            return -1
        return sum(self._between(at, min(at + _BLOCK, end)).count(b"\n") for at in range(start, end, _BLOCK))


def _cut_after_line(data: bytes, near: int) -> bytes:
    at = data.rfind(b"\n", len(data) - near)
    return data[: at + 1] if at >= 0 else data


def _cut_before_line(data: bytes, near: int) -> bytes:
    return data[data.find(b"\n", 0, near) + 1 or 1 :]


class Spool(_Follower):
    """Follows a rank's reports.

    Attributes:
        malformed: How many lines could not be read so far.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.malformed = 0
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """The records that have come whole since the last call."""
        start, end = self._appended()
        *lines, self._rest = (self._rest + self._between(start, end)).split(b"\n")
        if len(self._rest) > _LONGEST_RECORD:
            lines.append(self._rest)
            self._rest = b""
        records = (self._record(line) for line in lines)
        return [record for record in records if record is not None]

    def _record(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            return record
        self.malformed += 1
        _log.warning("nblaunch: %s holds a line that is no report: %.80r", self.path, line)
        return None


def last_lines(path: Path, count: int = 20, most_bytes: int = 16384) -> str:
    """The end of a log as a terminal would show it, for error messages; empty where there is no such file."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - most_bytes)
            file.seek(start)
            data = file.read(most_bytes)
    except FileNotFoundError:
        return ""
    if start:
        data = data[data.find(b"\n", 0, -1) + 1 :]
    assembler = LineAssembler()
    lines = assembler.feed(data) + assembler.finish()
    return "\n".join(_CONTROL.sub("", without_colours(line)) for line in lines[-count:])


@dataclass(frozen=True, slots=True, repr=False)
class RankLogs:
    """The files that hold all that a rank and its children printed. They stay while anything refers to this object."""

    out: Path
    err: Path
    files: LaunchFiles | None = field(default=None, compare=False)
    """Keeps them from being pruned."""
    dropped: int = 0
    """Bytes that Python code printed and that could not be written: the disk was full, or the log at its limit."""

    def text(self) -> str:
        """All that was written to stdout; see ``err`` for the rest.

        Raises:
            FileNotFoundError: The files were removed.
        """
        if self.out.exists():
            return self.out.read_text(encoding="utf-8", errors="replace")
        if not self.out.parent.exists():
            raise FileNotFoundError(
                errno.ENOENT,
                "the logs of this launch were removed, by hand or with those of old launches: copy the files that you "
                "want to keep",
                str(self.out.parent),
            )
        return ""  # the rank never started

    def __repr__(self) -> str:
        return f"RankLogs({str(self.out)!r}, {self.err.name!r})"
