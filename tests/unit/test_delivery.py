"""Messages over a connection that loses some: each arrives once, in order."""

from __future__ import annotations

import itertools
import os
import pickle
import random
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.engines.blob_store import PART_BYTES, BlobStore, parts_of
from nblaunch.engines.outbox import Outbox
from nblaunch.machine import timeouts
from nblaunch.wire.channel import write_blob
from nblaunch.wire.delivery import (
    CONFIRM_BYTES,
    CONFIRM_MESSAGES,
    MAX_WINDOW_BYTES,
    MIN_WINDOW_BYTES,
    Delivery,
    Part,
)
from nblaunch.wire.link_messages import BlobPart


def exchanged(count: int, loss: float, seed: int) -> list[int]:
    """What arrives of `count` messages if each way loses this share of everything, in an order that TCP allows."""
    chance = random.Random(seed)
    here, there = Delivery(), Delivery()
    arrived: list[int] = []
    to_there: list[Sequence[Part]] = [here.wrap([str(number).encode()]) for number in range(count)]
    for _ in range(10_000):
        for parts in [parts for parts in to_there if chance.random() >= loss]:
            if there.take(parts) == "new":
                arrived.append(int(bytes(parts[1])))
        to_there = []
        back = there.request() if there.is_behind else there.confirmation()
        if chance.random() >= loss and here.take(back) == "request":
            to_there += here.again()
        to_there.append(here.confirmation())
        if here.unconfirmed_bytes == 0:
            break
    return arrived


@given(st.integers(0, 60), st.sampled_from([0.0, 0.2, 0.6]), st.integers(0, 1000))
def test_each_message_arrives_once_and_in_order(count: int, loss: float, seed: int) -> None:
    assert exchanged(count, loss, seed) == list(range(count))


def test_what_is_confirmed_is_not_kept() -> None:
    here, there = Delivery(), Delivery()
    parts = here.wrap([b"x" * 100])
    assert here.unconfirmed_bytes == 100
    assert there.take(parts) == "new"
    assert there.take(parts) == "old"
    here.take(there.confirmation())
    assert here.unconfirmed_bytes == 0
    assert here.again() == []


@pytest.mark.parametrize(("count", "size"), [(1, CONFIRM_BYTES), (CONFIRM_MESSAGES, 1)])
def test_a_receiver_owes_a_confirmation_before_a_sender_waits(count: int, size: int) -> None:
    here, there = Delivery(), Delivery()
    for _ in range(count):
        assert not there.owes_confirmation
        there.take(here.wrap([b"x" * size]))
    assert there.owes_confirmation
    there.confirmation()
    assert not there.owes_confirmation


@pytest.mark.parametrize("parts", [[], [b""], [b"short"], [b"x" * 100]])
def test_what_has_no_head_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(ValueError, match="not a message of nblaunch"):
        Delivery().take(parts)


# ------------------------------------------------------------------ what waits to be sent
def endless() -> Iterator[tuple[object, list[bytes]]]:
    while True:
        yield "part", [b"x" * (1 << 20)]


def test_lanes_wait_for_the_window_and_urgent_messages_do_not() -> None:
    delivery = Delivery()
    outbox = Outbox(delivery)
    outbox.put_in("slow", endless())
    sent = list(outbox.due())
    assert MAX_WINDOW_BYTES <= delivery.unconfirmed_bytes < MAX_WINDOW_BYTES + (2 << 20)
    assert list(outbox.due()) == []
    outbox.put("stop")
    assert len(list(outbox.due())) == 1
    other = Delivery()
    for parts in sent:
        other.take(parts)
    delivery.take(other.confirmation())
    assert list(outbox.due())


def test_lanes_take_turns_and_each_keeps_its_order() -> None:
    outbox = Outbox(Delivery())
    outbox.put_in("a", [(("a", number), ()) for number in range(3)])
    outbox.put_in("b", [(("b", number), ()) for number in range(3)])
    outbox.put_in("a", [(("a", 3), ())])

    found = [pickle.loads(parts[1]) for parts in outbox.due()]
    assert [number for lane, number in found if lane == "a"] == [0, 1, 2, 3]
    assert [number for lane, number in found if lane == "b"] == [0, 1, 2]
    assert {lane for lane, _ in found[:2]} == {"a", "b"}
    assert outbox.is_empty


def test_what_goes_first_overtakes_all_lanes_and_waits_for_the_window() -> None:
    delivery = Delivery()
    outbox = Outbox(delivery)
    outbox.put_in("a", endless())
    list(outbox.due())
    outbox.put_in("a", [("progress", ()), ("more", ())], goes_first=True)
    outbox.put_in("a", [("result", ())])
    assert list(outbox.due()) == []
    other = Delivery()
    for parts in delivery.again():
        other.take(parts)
    delivery.take(other.confirmation())
    assert [pickle.loads(parts[1]) for parts in itertools.islice(outbox.due(), 3)] == ["progress", "more", "part"]


class Link:
    """A link that delivers so many bytes a second, with a round trip, and a receiver that confirms as it goes."""

    def __init__(self, bytes_per_s: float, round_trip_s: float = 0.0) -> None:
        self.now = 0.0
        self.here, self.there = Delivery(clock=lambda: self.now), Delivery()
        self.bytes_per_s, self.round_trip_s = bytes_per_s, round_trip_s

    def send(self, pieces: int, piece: int = CONFIRM_BYTES) -> float:
        """Send pieces as the window allows; return how long the last one was under way."""
        sent: deque[tuple[float, list[Part]]] = deque()
        free_at = self.now
        took = 0.0
        while pieces or sent:
            while pieces and self.here.unconfirmed_bytes < self.here.window_bytes:
                pieces -= 1
                sent.append((self.now, self.here.wrap([b"x" * piece])))
            begun, parts = sent.popleft()
            free_at = max(free_at, begun) + piece / self.bytes_per_s
            self.now = max(self.now, free_at + self.round_trip_s)
            took = self.now - begun
            self.there.take(parts)
            self.here.take(self.there.confirmation())
        return took


@pytest.mark.parametrize("piece", [CONFIRM_BYTES, CONFIRM_BYTES // 8])
@pytest.mark.parametrize("megabytes_per_s", [2.5, 4.0])
def test_what_is_sent_over_a_slow_link_is_soon_there(megabytes_per_s: float, piece: int) -> None:
    link = Link(megabytes_per_s * (1 << 20))
    assert link.send(200 * CONFIRM_BYTES // piece, piece) < 2 * timeouts.LINK_WINDOW_S
    link.bytes_per_s = 1 << 30
    link.send(20)
    assert link.here.window_bytes == MAX_WINDOW_BYTES


def test_a_link_to_far_away_has_a_large_window() -> None:
    link = Link(100 << 20, round_trip_s=0.7)
    link.send(200)
    assert link.here.window_bytes == MAX_WINDOW_BYTES


def test_the_window_has_a_least_size() -> None:
    link = Link(1 << 10)
    link.send(20)
    assert link.here.window_bytes == MIN_WINDOW_BYTES


def test_a_source_that_fails_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Iterator[tuple[object, list[bytes]]]:
        yield "first", []
        raise OSError("the file is gone")

    outbox = Outbox(Delivery())
    outbox.put_in("a", fails())
    outbox.put_in("a", [("second", ())])
    assert len(list(outbox.due())) == 2
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
