"""How messages cross from one process to another: a stream socket with framing, and blobs for what is large.

A message is pickled, behind a header of its length and the number of file descriptors that travel with it
(SCM_RIGHTS). Not for: talking to anything that this user did not start; both ends of every channel are our own.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import pickle
import select
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_HEADER = struct.Struct("!II")
_SEND_LIMIT = struct.pack("ll", 10, 0)
_MOST_FDS = 250
"""Descriptors that may travel at once; Linux takes 253."""
_TAKEN_WITHIN = 600.0
"""Seconds that others get to take the descriptors that are on their way, where the system lets no more be sent."""
_FDS_SPACE = socket.CMSG_SPACE(_MOST_FDS * array.array("i").itemsize)
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class LostDescriptorsError(OSError):
    """A message has come without its descriptors: this process may not open so many.

    Attributes:
        message: What came.
    """

    message: object = None


class Channel:
    """One end of a stream socket over which messages travel, with descriptors where they have any.

    Reads are meant for one thread, writes for one thread; the two may differ.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.closed = False
        """The other end is gone: nothing more will come."""
        self._bytes = bytearray()
        self._fds: list[int] = []
        self._posted: deque[tuple[bytes, Sequence[int]]] = deque()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send one message; blocks while the other end is slow, or nobody takes the descriptors that are on their way.

        Raises:
            OSError: The other end is gone.
        """
        self.post(message, fds)
        deadline = time.monotonic() + _TAKEN_WITHIN
        while not self.flush():
            if time.monotonic() > deadline:
                self._posted.clear()
                raise OSError(errno.ETOOMANYREFS, "too many descriptors are on their way (ulimit -n)")
            time.sleep(0.005)  # no event tells that another process has taken some

    def post(self, message: object, fds: Sequence[int] = ()) -> None:
        """Have `flush` send one message; its descriptors must stay open until then."""
        body = pickle.dumps(message, protocol=5)
        frame = _HEADER.pack(len(body), len(fds)) + body
        while len(fds) > _MOST_FDS:  # a byte carries them
            self._posted.append((frame[:1], fds[:_MOST_FDS]))
            frame, fds = frame[1:], fds[_MOST_FDS:]
        self._posted.append((frame, fds))

    def flush(self) -> bool:
        """Send what was posted; False where some is left, as too many descriptors of this user's are on their way.

        Linux lets only root have more of them on their way than ``ulimit -n``.

        Raises:
            OSError: The other end is gone.
        """
        while self._posted:
            data, fds = self._posted[0]
            try:
                sent = self._send_with(data, fds)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                return False
            self._posted.popleft()
            if sent < len(data):
                self.sock.sendall(data[sent:])
        return True

    def _send_with(self, data: bytes, fds: Sequence[int]) -> int:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        return self.sock.sendmsg([data], ancillary)

    def receive(self) -> tuple[object, list[int]] | None:
        """Wait for one message and its descriptors; None when the other end is gone."""
        while True:
            for item in self.drain():
                return item
            if self.closed:
                return None
            self._read(0)

    def poll(self) -> None:
        """Take in what has arrived, without waiting. Call when the socket is readable, then ``drain``."""
        self._read(socket.MSG_DONTWAIT)

    def drain(self) -> Iterator[tuple[object, list[int]]]:
        """The messages that have arrived whole.

        Raises:
            LostDescriptorsError: One has, without its descriptors.
        """
        while len(self._bytes) >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._bytes)
            end = _HEADER.size + size
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_HEADER.size : end])
            del self._bytes[:end]
            if len(self._fds) < count:
                self._close_fds()
                lost = LostDescriptorsError(errno.EMFILE, f"too many open files (ulimit -n) for {count} more")
                lost.message = pickle.loads(body)
                raise lost
            fds, self._fds = self._fds[:count], self._fds[count:]
            yield pickle.loads(body), fds

    def _read(self, flags: int) -> None:
        try:
            data, ancillary, about, _ = self.sock.recvmsg(1 << 16, _FDS_SPACE, flags | _CLOEXEC)
        except BlockingIOError:
            return
        except ConnectionError:
            data, ancillary, about = b"", [], 0
        self._fds += _descriptors_in(ancillary)
        if about & socket.MSG_CTRUNC:
            self._close_fds()  # some are lost, and others need the room
        self._bytes += data
        if not data:
            self.closed = True

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took."""
        self._close_fds()
        self.sock.close()
        self.closed = True

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with some bytes; what ``socket.recv_fds`` does, which ignores its flags."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)  # no program that users start is to hold it; macOS has no flag for that
    return list(fds)


def channel_pair() -> tuple[Channel, socket.socket]:
    """A channel for this process, and the other end to hand over.

    Sending from here fails with BlockingIOError after 10 s in which nobody reads: the other process is stopped.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_LIMIT)
    return Channel(here), there


def readable(source: FileDescriptorLike, seconds: float | None = 0.0) -> bool:
    """Whether something can be read there, or nobody is left to write; waits for it so long, or without end for None.

    ``select.select`` takes no descriptor from 1024 on, and a selector needs one of its own where the last may be taken.
    """
    ready = select.poll()
    ready.register(source, select.POLLIN)
    return bool(ready.poll(None if seconds is None else seconds * 1000))


def must_be_read(source: FileDescriptorLike, seconds: float) -> bool:
    """Wait until `source` is readable or writable; return True if it is readable or at EOF.

    Check this before sending much to a process that answers, or each could wait for the other to read.
    """
    ready = select.poll()
    ready.register(source, select.POLLIN | select.POLLOUT)
    return any(events & ~select.POLLOUT for _, events in ready.poll(seconds * 1000))


# ------------------------------------------------------------------ blobs
def write_blob(*parts: bytes | bytearray | memoryview) -> int:
    """A descriptor of anonymous memory (off Linux: of an unlinked file) that holds these; sealed where possible."""
    if not hasattr(os, "memfd_create"):
        return _write_unlinked(parts)
    fd = os.memfd_create("nblaunch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write_all(fd, parts)
        _seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_all(fd: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            view = view[os.write(fd, view[: 1 << 30]) :]


def _seal(fd: int) -> None:
    if sys.platform == "linux":
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _write_unlinked(parts: Sequence[bytes | bytearray | memoryview]) -> int:
    with tempfile.TemporaryFile() as file:
        _write_all(file.fileno(), parts)
        return os.dup(file.fileno())
