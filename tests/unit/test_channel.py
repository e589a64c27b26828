"""The channel: framing of messages, descriptors in flight, blobs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.machine import segments
from nblaunch.wire import messages
from nblaunch.wire.channel import Channel, LostDescriptorsError, channel_pair, write_blob
from nblaunch.wire.messages import Done, Running, Source

DETERMINISTIC = settings(derandomize=True, deadline=None)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    here, there = channel_pair()
    other = Channel(there)
    yield here, other
    here.close()
    other.close()


def frame_of(message: object) -> bytes:
    """The bytes that a channel sends for a message."""
    here, there = channel_pair()
    here.send(message)
    here.sock.shutdown(socket.SHUT_WR)
    with there, there.makefile("rb") as stream:
        data = stream.read()
    here.close()
    return data


def drained(channel: Channel) -> list[object]:
    return [message for message, _ in channel.drain()]


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# ------------------------------------------------------------------ framing
def test_messages_arrive_equal_and_in_order(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    sent = [Running(1, 1), Done(0, 1, 123, ("model",)), Source("text", "Cell In[3]"), ("any", {"plain": [1, None]})]
    for message in sent * 25:
        here.send(message)
    there.poll()
    assert drained(there) == sent * 25
    assert drained(there) == []


@given(st.lists(st.binary(max_size=300), max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=8))
@DETERMINISTIC
def test_reads_may_cut_the_stream_anywhere(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame_of, bodies))
    channel, there = channel_pair()
    got: list[object] = []
    with there:
        position = 0
        while position < len(stream):
            size = cuts[position % len(cuts)]
            there.sendall(stream[position : position + size])
            position += size
            channel.poll()
            got += drained(channel)
    channel.close()
    assert got == bodies


# ------------------------------------------------------------------ the other end is gone
def test_the_end_of_the_other_side_is_noticed_after_its_last_message(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    here.send(Running(0, 1))
    here.close()
    assert there.receive() == (Running(0, 1), [])
    assert there.receive() is None
    assert there.closed
    there.poll()
    assert there.closed


# ------------------------------------------------------------------ descriptors
def test_descriptors_travel_with_their_own_message(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    for number in range(3):
        blob = write_blob(b"blob %d" % number)
        here.send(number, [blob] * number)
        os.close(blob)
    for number in range(3):
        received = there.receive()
        assert received is not None
        message, fds = received
        assert (message, len(fds)) == (number, number)
        for fd in fds:
            assert _read(fd) == b"blob %d" % number
            assert not os.get_inheritable(fd)  # by programs that users start
            os.close(fd)


def test_closing_a_channel_closes_descriptors_not_taken(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    blob = write_blob(b"")
    here.send("blob", [blob])
    there.poll()
    arrived = list(there._fds)
    assert len(arrived) == 1
    there.close()
    assert not is_open(arrived[0])
    assert is_open(blob), "the sender's own stays the sender's"
    os.close(blob)


def test_an_ordinary_user_sends_more_once_descriptors_are_taken() -> None:
    """In a process of its own, and of a user of its own: Linux counts them for each user."""
    code = """
import os, resource, socket
from nblaunch.wire.channel import Channel
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
if os.getuid() == 0:
    own = 20_000 + os.getpid() % 40_000
    os.setresuid(own, own, own)
ends = [tuple(map(Channel, socket.socketpair())) for _ in range(4)]
flushed = []
for number, (here, _) in enumerate(ends):
    here.post(number, [0] * 70)
    flushed.append(here.flush())
print(flushed)
for here, there in ends:
    here.flush()
    number, fds = there.receive()
    print(number, len(fds), end=" ")
    for fd in fds:
        os.close(fd)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[True, True, True, False]\n0 70 1 70 2 70 3 70 "


def test_lost_descriptors_raise_with_their_message(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    here.send("a message", [0] * 50)
    here.send("the next")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(LostDescriptorsError, match=r"too many open files .* to receive 50 more") as caught:
            there.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert caught.value.message == "a message"
    assert there.receive() == ("the next", [])


def test_hundreds_of_descriptors_travel_with_a_message_in_pieces(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    message = os.urandom(3_000_000)
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(600)]
    sender = threading.Thread(target=here.send, args=(message, fds))
    sender.start()
    received = there.receive()
    sender.join()
    assert received is not None
    assert (received[0], len(received[1])) == (message, 600)
    for fd in (*fds, *received[1]):
        os.close(fd)


def test_reading_a_message_never_runs_what_users_sent(ends: tuple[Channel, Channel]) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return pytest.fail, ("the message's reader rebuilt it",)

    here, there = ends
    here.send(messages.Failed(0, 1, 0, "exception", "Bomb", "", "", pickled=pickle.dumps(Bomb())))
    received = there.receive()
    assert received is not None
    assert isinstance(received[0], messages.Failed)


# ------------------------------------------------------------------ blobs
def _read(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"x"],
        [os.urandom(3_000_000)],
        [b"ab", memoryview(b"cd"), bytearray(b"ef")],
        [memoryview(b"abcd").cast("I")],
    ],
)
def test_a_blob_reads_as_its_parts_were_written(parts: list[Any]) -> None:
    fd = write_blob(*parts)
    assert _read(fd) == b"".join(map(bytes, parts))
    os.close(fd)


def test_without_anonymous_memory_a_blob_is_an_unlinked_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    fd = write_blob(b"data")
    assert os.fstat(fd).st_nlink == 0
    assert _read(fd) == b"data"
    assert not os.get_inheritable(fd)
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)


def test_a_limit_of_open_files_is_no_reason_for_a_file_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        segments.create_file()


def test_a_blob_that_cannot_be_written_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    create = os.memfd_create

    def noted(*args: Any) -> int:
        made.append(create(*args))
        return made[-1]

    def full(fd: int, data: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "memfd_create", noted)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=r"no space left$"):
            write_blob(b"data")
        patched.delattr(os, "memfd_create")
        with pytest.raises(OSError, match=r"no space left in /\S+: free space there, or set TMPDIR"):
            write_blob(b"data")
    assert not is_open(made[0])


def interrupt_a_send(thread: int) -> None:
    """Send SIGINT once a thread is inside the system call of a send."""
    while sys._current_frames()[thread].f_code.co_name != "_send_with":
        time.sleep(0.001)
    signal.pthread_kill(thread, signal.SIGINT)


def test_an_interrupted_message_is_not_sent_with_the_next(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    filler = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filler += here.sock.send(bytes(1 << 12), socket.MSG_DONTWAIT)
    with open(os.devnull) as file:
        threading.Thread(target=interrupt_a_send, args=[threading.get_ident()]).start()
        with pytest.raises(KeyboardInterrupt):
            here.send("interrupted", [file.fileno()])
    while filler:
        filler -= len(there.sock.recv(filler))
    here.send("next")
    assert there.receive() == ("next", [])
