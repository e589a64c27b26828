"""The files of a launch: where ranks write, and how the kernel follows what they have written.

Ranks write to these files directly, so nothing that the kernel does (or fails to do) can stall them. Runs in the
kernel, most of it in a launch's supervisor thread; nothing here waits.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import json
import logging
import os
import pwd
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import platformdirs

from nblaunch.engines.growing_file import GrowingFile
from nblaunch.engines.protocol import Log
from nblaunch.errors import StartError, warn
from nblaunch.launch.output.terminal_lines import LineAssembler, without_colours

_log = logging.getLogger(__name__)

_LIVE = "live"
_OURS = re.compile(r"\d{8}T\d{12}Z-.+")
_BLOCK = 1 << 20
_MOST_COUNTED = 1 << 20
"""Lines of a skipped part are counted up to this size: a flood is not read for its own sake."""
_LONGEST_RECORD = 1 << 20
_RECORDS_BLOCK = 1 << 17
"""Bytes of a spool that are records at once, which take ten times as much."""
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

    In a directory that all users share, such as ``/tmp``, it is one of this user's own. Where the user's state
    directory cannot hold it, it is a temporary one, and a warning says so.

    Raises:
        StartError: There is no directory to write to, or another user can change what is in it.
    """
    chosen = os.environ.get("NBLAUNCH_STATE_DIR")
    try:
        if chosen:
            return _safe(Path(chosen).expanduser().absolute())
        try:
            return _safe(platformdirs.user_state_path("nblaunch") / "launches")
        except OSError as error:
            return _temporary_root(error)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of a user that there is not
        name = f"NBLAUNCH_STATE_DIR={chosen!r}" if chosen else "the temporary directory"
        raise StartError(
            f"{name} cannot hold the logs of launches: {error}: set NBLAUNCH_STATE_DIR to a directory of your own"
        ) from error


def _temporary_root(reason: OSError) -> Path:
    """A directory among the temporary ones, where others could have made it before."""
    global _told_of_temporary
    root = _own_in(Path(tempfile.gettempdir()))
    if not _told_of_temporary:
        _told_of_temporary = True
        warn(
            f"logs of launches go to {root}, as the directory in your home cannot hold them ({reason}): "
            "set NBLAUNCH_STATE_DIR to another one"
        )
    return root


def _safe(root: Path) -> Path:
    """A directory that no other user can change, which is made: this one, or one in it where all users share it."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    link, found = root.lstat(), root.stat()
    if link.st_uid not in (0, os.getuid()):
        raise PermissionError(errno.EACCES, f"it belongs to another user (uid {link.st_uid})", str(root))
    if is_shared(found, os.getuid()):
        return _own_in(root)
    return _checked(root, found)


def _own_in(shared: Path) -> Path:
    own = shared / f"nblaunch-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    return _checked(own, own.lstat())


def _checked(root: Path, found: os.stat_result) -> Path:
    problem = objection(found, os.getuid(), _own_group() if found.st_mode & stat.S_IWGRP else None)
    if not (problem or os.access(root, os.W_OK | os.X_OK)):
        problem = "it cannot be written to"
    if problem:
        raise PermissionError(errno.EACCES, problem, str(root))
    return root


def is_shared(found: os.stat_result, user: int) -> bool:
    """Return True if all users may put files into a directory with this status, and none can touch another's."""
    return found.st_uid in (0, user) and bool(found.st_mode & stat.S_ISVTX and found.st_mode & stat.S_IWOTH)


def objection(found: os.stat_result, user: int, own_group: int | None = None) -> str:
    """Why `user` must not put logs into a directory with this status; empty where nothing speaks against it.

    Args:
        found: The status of the directory.
        user: The uid.
        own_group: The group that has this user alone, if there is one.
    """
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid not in (0, user):
        return f"it belongs to another user (uid {found.st_uid})"
    may_write = stat.S_IWOTH | (stat.S_IWGRP if found.st_gid != own_group else 0)
    if found.st_mode & may_write:
        return (
            f"other users can write to it (mode {stat.S_IMODE(found.st_mode):04o}; `chmod go-w` makes it yours alone)"
        )
    return ""


def _own_group() -> int | None:
    """The group that this user alone is in, which many systems make for each user."""
    try:
        user = pwd.getpwuid(os.getuid())
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        return None
    is_alone = group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return user.pw_gid if is_alone else None


def log_path(directory: Path, rank: int, stream: str) -> Path:
    """Where a rank's ``out``, ``err``, ``spool`` or ``error.json`` is."""
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

    def error(self, rank: int) -> Path:
        """The exception of a function under torch's ``@record``, as JSON; torch writes it."""
        return log_path(self.directory, rank, "error.json")

    def close(self) -> None:
        """The launch is over: its directory may be pruned once nothing refers to this object."""
        self.is_over = True
        known = [files for reference in _in_use.valuerefs() if (files := reference()) is not None]
        locks = [files._hold for files in known if files.is_over and files._hold is not None and files._hold.alive]
        for release in locks[:-_MOST_LOCKED]:
            release()


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
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass  # another process holds the lock or has removed the file: close ours
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
    """Remove the files of this user's oldest launches. What cannot be removed stays.

    Never those of the newest launch, of one that is live, or of one that something in its kernel refers to.

    Args:
        keep: How many launches to keep.
        most_bytes: How much they may take in all, besides the newest and those that this process refers to.
    """
    try:
        root = state_root()
    except StartError:  # the next launch says so
        _log.debug("no logs are pruned", exc_info=True)
        return
    names: list[str] = []
    with suppress(OSError), os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if _OURS.fullmatch(entry.name) and _is_own(entry))
    total = 0
    for age, name in enumerate(reversed(names)):
        directory = root / name
        if age == 0 or directory in _in_use:
            continue
        total += _size(directory)
        if age >= keep or total > most_bytes:
            _remove(directory)


def _is_own(entry: os.DirEntry[str]) -> bool:
    """Return True if this is a directory of this user's: others may share the root."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # another kernel prunes, too
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


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
    """A growing log, and how much of it was dealt with."""

    def __init__(self, source: Path | Log) -> None:
        self._log: Log = GrowingFile(source) if isinstance(source, Path) else source
        self._offset = 0

    @property
    def name(self) -> str:
        """Where the log is, for messages to the user."""
        return self._log.name

    def _appended(self) -> tuple[int, int]:
        """Return from where to where the log has grown since the last call."""
        size = self._log.size()
        start, self._offset = min(self._offset, size), size  # truncated: continue from its new end
        return start, size

    def _between(self, start: int, end: int) -> bytes:
        """Return these bytes; fewer if the log was truncated meanwhile."""
        return self._log.read(start, end)

    def close(self) -> None:
        """Close the log. Idempotent."""
        self._log.close()


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

    def __init__(self, source: Path | Log) -> None:
        super().__init__(source)
        self.malformed = 0
        self._rest = b""

    def read(self) -> Iterator[list[dict[str, Any]]]:
        """The records that have come whole since the last call, block by block: a flood is not in memory at once."""
        start, end = self._appended()
        for at in range(start, end, _RECORDS_BLOCK):
            *lines, self._rest = (self._rest + self._between(at, min(at + _RECORDS_BLOCK, end))).split(b"\n")
            if len(self._rest) > _LONGEST_RECORD:
                lines.append(self._rest)
                self._rest = b""
            yield [record for line in lines if (record := self._record(line)) is not None]

    def _record(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            return record
        self.malformed += 1
        _log.warning("nblaunch: %s holds a line that is no report: %.80r", self.name, line)
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
