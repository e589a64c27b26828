"""Channels: framed messages with file descriptors over a Unix stream socket, and blobs for large payloads.

A message is a pickle behind a header with its length and the number of descriptors that travel with it (SCM_RIGHTS).
Only for processes that this user started: receiving unpickles.
"""

from __future__ import annotations

import array
import errno
import itertools
import os
import pickle
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nblaunch.machine import segments

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_SEND_TIMEOUT_S = 10
"""For a send to a process that does not read; whole seconds."""
_FDS_TAKEN_TIMEOUT_S = 600.0
"""For receivers to take descriptors in flight, once the system accepts no more."""
_FDS_RETRY_INTERVAL_S = 0.005
"""Between attempts to send descriptors while too many are in flight."""
_HEADER = struct.Struct("!II")
_MAX_FDS = 250
"""Descriptors in one sendmsg; Linux accepts 253."""
_FDS_SPACE = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class LostDescriptorsError(OSError):
    """A message arrived without its descriptors: this process has reached its limit of open files.

    Attributes:
        message: The message.
    """

    message: object = None


class Channel:
    """One end of a stream socket that carries messages and their descriptors.

    One thread may read and one may write; they may differ.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.closed = False
        """The other end is closed."""
        self._bytes = bytearray()
        self._fds: list[int] = []
        self._posted: deque[tuple[bytes, Sequence[int]]] = deque()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send one message. Blocks while the other end is slow, or too many descriptors are in flight."""
        deadline = time.monotonic() + _FDS_TAKEN_TIMEOUT_S
        try:
            self.post(message, fds)
            while not self.flush():
                if time.monotonic() > deadline:
                    self._posted.clear()
                    raise OSError(errno.ETOOMANYREFS, "too many descriptors in flight (ulimit -n)")
                time.sleep(_FDS_RETRY_INTERVAL_S)  # no event reports that a receiver has taken some
        except BaseException:
            self._posted.clear()  # the next send would send it, with whatever files have its descriptors' numbers then
            raise

    def post(self, message: object, fds: Sequence[int] = ()) -> None:
        """Queue a message for `flush`. Its descriptors must stay open until it is sent."""
        body = pickle.dumps(message, protocol=5)
        frame = _HEADER.pack(len(body), len(fds)) + body
        while len(fds) > _MAX_FDS:  # each batch needs a byte of data to travel with
            self._posted.append((frame[:1], fds[:_MAX_FDS]))
            frame, fds = frame[1:], fds[_MAX_FDS:]
        self._posted.append((frame, fds))

    def flush(self) -> bool:
        """Send the queue. Return False if messages remain because too many of this user's descriptors are in flight.

        On Linux, only root may have more descriptors in flight than ``ulimit -n``.
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
        while True:
            for item in self.drain():
                return item
            if self.closed:
                return None
            self._read(0)

    def poll(self) -> None:
        """Read what has arrived, without blocking. Call when the socket is readable, then call `drain`."""
        self._read(socket.MSG_DONTWAIT)

    def drain(self) -> Iterator[tuple[object, list[int]]]:
        while len(self._bytes) >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._bytes)
            end = _HEADER.size + size
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_HEADER.size : end])
            del self._bytes[:end]
            if len(self._fds) < count:
                self._close_fds()
                lost = LostDescriptorsError(errno.EMFILE, f"too many open files (ulimit -n) to receive {count} more")
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
            self._close_fds()  # some are lost; free the slots of the rest
        self._bytes += data
        if not data:
            self.closed = True

    def close(self) -> None:
        """Close the socket and every descriptor that was received but not taken."""
        self._close_fds()
        self.sock.close()
        self.closed = True

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors in ancillary data; ``socket.recv_fds`` would ignore its flags."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)  # macOS has no MSG_CMSG_CLOEXEC
    return list(fds)


def channel_pair() -> tuple[Channel, socket.socket]:
    """Return a channel for this process, and the socket of its other end to hand over.

    Sending from here raises BlockingIOError after `_SEND_TIMEOUT_S` if the other process does not read.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_SEND_TIMEOUT_S), 0))
    return Channel(here), there


def readable(source: FileDescriptorLike, seconds: float = 0.0) -> bool:
    """Return True if `source` is readable or at EOF, waiting up to `seconds`.

    ``select.select`` rejects descriptors from 1024 on, and a selector needs a descriptor of its own.
    """
    ready = select.poll()
    ready.register(source, select.POLLIN)
    return bool(ready.poll(seconds * 1000))


def must_be_read(source: FileDescriptorLike, seconds: float) -> bool:
    """Wait until `source` is readable or writable; return True if it is readable or at EOF.

    Check before sending much to a process that answers: each end could otherwise wait for the other to read.
    """
    ready = select.poll()
    ready.register(source, select.POLLIN | select.POLLOUT)
    return any(events & ~select.POLLOUT for _, events in ready.poll(seconds * 1000))


# ------------------------------------------------------------------ blobs
def write_blob(*parts: bytes | bytearray | memoryview) -> int:
    """Return a descriptor of an anonymous, sealed file that holds these bytes."""
    offsets = itertools.accumulate((memoryview(part).nbytes for part in parts), initial=0)
    return segments.sealed(zip(parts, offsets, strict=False))  # the last one is the end
