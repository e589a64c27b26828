"""What waits to be sent over a link: its order, and blobs in parts."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from nblaunch.engines.link import PART_BYTES, BlobStore, Outbox, parts_of
from nblaunch.wire.channel import write_blob
from nblaunch.wire.link_messages import BlobPart


class Connection:
    """Takes so many messages."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.sent: list[Any] = []

    def send(self, parts: list[bytes | memoryview]) -> None:
        if not self.room:
            raise zmq.Again
        self.room -= 1
        self.sent.append(pickle.loads(parts[0]))


def flushed(outbox: Outbox, connection: Connection) -> list[Any]:
    """Return what is sent until nothing waits, or the connection is full."""
    before = len(connection.sent)
    while connection.room and not outbox.is_empty:
        outbox.flush(connection.send)
    return connection.sent[before:]


def endless() -> Iterator[tuple[object, list[bytes]]]:
    for number in range(1 << 62):
        yield number, [b"x" * (1 << 20)]


def test_lanes_wait_for_a_full_connection_and_lose_nothing() -> None:
    outbox, connection = Outbox(), Connection(5)
    outbox.put_in("slow", endless())
    assert flushed(outbox, connection) == [0, 1, 2, 3, 4]
    outbox.flush(connection.send)  # it takes no more
    connection.room = 2
    assert flushed(outbox, connection) == [5, 6]


def test_a_flush_leaves_time_for_other_things() -> None:
    outbox, connection = Outbox(), Connection(1000)
    outbox.put_in("quick", endless())
    outbox.flush(connection.send)
    assert 0 < len(connection.sent) < 10


def test_lanes_take_turns_and_each_keeps_its_order() -> None:
    outbox = Outbox()
    outbox.put_in("a", [(("a", number), ()) for number in range(3)])
    outbox.put_in("b", [(("b", number), ()) for number in range(3)])
    outbox.put_in("a", [(("a", 3), ())])

    found = flushed(outbox, Connection())
    assert [number for lane, number in found if lane == "a"] == [0, 1, 2, 3]
    assert [number for lane, number in found if lane == "b"] == [0, 1, 2]
    assert {lane for lane, _ in found[:2]} == {"a", "b"}


def test_a_source_that_fails_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Iterator[tuple[object, list[bytes]]]:
        yield "first", []
        raise OSError("the file is gone")

    outbox, reasons = Outbox(), list[str]()
    outbox.put_in("a", fails(), reasons.append)
    outbox.put_in("a", [("second", ())])
    assert flushed(outbox, Connection()) == ["first", "second"]
    assert reasons == ["OSError: the file is gone"]
    assert "the file is gone" in caplog.text


# ------------------------------------------------------------------ blobs
@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1])
def test_a_blob_arrives_as_it_was(size: int) -> None:
    data = os.urandom(size)
    fd = write_blob(data)
    store = BlobStore()
    parts = list(parts_of(fd, "key", size))
    assert [store.add(part, buffers[0]) for part, buffers in parts] == [False] * (len(parts) - 1) + [True]
    assert "key" in store
    taken = store.take("key")
    assert os.pread(taken, size + 1, 0) == data
    os.close(taken)
    os.close(fd)


def test_a_blob_that_was_cut_short_begins_again() -> None:
    store = BlobStore()
    assert not store.add(BlobPart("key", 0, 4), b"ab")
    assert not store.add(BlobPart("key", 0, 4), b"ab")
    assert store.add(BlobPart("key", 2, 4), b"cd")
    assert os.pread(store.descriptor("key"), 9, 0) == b"abcd"
    store.drop_of("k")
    assert "key" not in store
