"""The files that a rank of this machine writes, as the kernel reads them: logs and stacks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nblaunch.engines.protocol import Stream
from nblaunch.wire.display_records import SUFFIXES
from nblaunch.wire.launch_files import BEGIN, WHOLE, DumpHead, output_file, rank_file
from nblaunch.wire.tables import Dropped

MAX_DUMP_BYTES = 1 << 20
"""Room for 100 threads of 100 frames, faulthandler's own limits."""
_MAX_FILE_BYTES = 4 * MAX_DUMP_BYTES
"""Earlier answers are dropped from a longer file."""
_DUMP_QUIET_S = 0.2
"""Without growth before faulthandler's dump counts as complete: it has no end mark."""


class LogFile:
    """A file that a rank appends to. It may not exist yet, or no longer. An `engines.protocol.Log`.

    It is opened for each read: many panels of many ranks would hold too many descriptors.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)

    def size(self) -> int:
        try:
            return os.stat(self.name, follow_symlinks=False).st_size
        except OSError:
            return 0

    def read(self, start: int, end: int) -> bytes:
        blocks = []
        with suppress(OSError):
            fd = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                while start < end and (block := os.pread(fd, end - start, start)):
                    blocks.append(block)
                    start += len(block)
            finally:
                os.close(fd)
        return b"".join(blocks)


class RankFiles:
    """The part of an `engines.protocol.Worker` that reads the files of its rank on this machine, or their copies."""

    def __init__(self, rank: int, log_dir: Path) -> None:
        self.rank = rank
        self.log_dir = log_dir
        """Where its present task writes."""

    def log(self, stream: Stream) -> LogFile:
        return LogFile(rank_file(self.log_dir, self.rank, stream))

    def output(self, key: str, mime: str) -> Path:
        return output_file(self.log_dir, self.rank, key, SUFFIXES[mime])


class LeftFiles(RankFiles):
    """The files of a rank that another process supervises, which notes what they lack."""

    def dropped(self) -> Dropped:
        return Dropped()


class StackFile:
    """Asks a rank for its stacks: a byte into a pipe, the answer in a file. `ranks.stack_dumps` is the rank's side.

    An `engines.protocol.StackDumps`. The file appears once the rank can answer; `send` sends it a signal.
    """

    def __init__(self, path: Path, send: Callable[[int], None]) -> None:
        self.main = ""
        self.dump: str | None = None
        self._path, self._send = path, send
        self._signal = 0
        self._pipe = ""
        self._head = 0
        """Bytes of the first line."""
        self._begin = 0
        """Offset of the answer to the last question."""
        self._is_owing = False
        """The last question has no answer: another would only queue behind it."""
        self._signal_at = 0.0
        """When to send the signal, unless it was sent."""
        self._was_sent = False
        """The signal was sent for the answer that is owed."""
        self._size_seen = 0
        self._grown_at = 0.0

    @property
    def is_ready(self) -> bool:
        return self._signal > 0

    def ask(self, signal_at: float) -> None:
        self.dump = None
        if not self._signal and not self._read_head():
            return
        size = self._size()
        if size > _MAX_FILE_BYTES and not self._is_owing:  # both ends append: the next answer follows the first line
            with suppress(OSError):
                os.truncate(self._path, self._head)
            size = self._size()
        if not (self._is_owing and size == self._begin):
            self._begin = self._size_seen = size
            self._is_owing, self._signal_at, self._was_sent = True, signal_at, False
            with suppress(OSError):  # the rank is gone
                fd = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    os.write(fd, b"?")
                finally:
                    os.close(fd)
        else:
            self._signal_at = min(self._signal_at, signal_at)  # an earlier request may have ruled the signal out

    def look(self, now: float) -> bool:
        if not self._is_owing:
            return self.dump is not None
        size = self._size()
        if size != self._size_seen:
            self._size_seen, self._grown_at = size, now
        if size == self._begin:
            if now >= self._signal_at and not self._was_sent:
                self._was_sent = True
                self._send(self._signal)
            return False
        dump = self._read()
        own = _own_answer(dump)
        self._is_owing = own is None and now - self._grown_at < _DUMP_QUIET_S
        self.dump = dump if own is None else own
        return not self._is_owing

    def _read_head(self) -> bool:
        try:
            with open(self._path, "rb") as file:
                line = file.readline()
        except OSError:
            return False
        head = DumpHead.from_line(line)
        self._head = len(line)
        self._signal, self._pipe, self.main = head.signal, head.pipe, head.main
        return True

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:  # removed
            return self._begin

    def _read(self) -> str:
        with suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._begin)
            return file.read(MAX_DUMP_BYTES).decode("ascii", errors="replace")
        return ""


def _own_answer(dump: str) -> str | None:
    """Return the answer of the rank's own thread, if it is there: one piece, with faulthandler's output around it.

    Both answer when a stopped rank continues: the signal and the question were pending.
    """
    until_its_end, _, _ = dump.rpartition(WHOLE)
    _, begin, own = until_its_end.rpartition(BEGIN)
    return own if begin else None
