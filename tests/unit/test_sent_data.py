"""The cache of sent data: unchanged data is not copied again, within the budget."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from nblaunch.errors import ArgumentError
from nblaunch.machine.segments import Placed, Region
from nblaunch.transfer import parcel, sent_names
from nblaunch.transfer.parcel import SentDataCache, budget

MB = 1 << 20
SMALL = MB
ALONE = 20 * MB


class Data:
    """Memory of the notebook's."""

    def __init__(self, size: int, value: int) -> None:
        self.array = np.full(size, value, dtype=np.uint8)
        self.region = Region(self.array.ctypes.data, size)

    def is_in(self, placed: Placed) -> bool:
        return placed.segment.equals(placed.offset, self.region)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[SentDataCache]:
    monkeypatch.setenv("NBLAUNCH_KEEP_BYTES", str(200 * MB))
    cache = SentDataCache()
    yield cache
    cache.free()


def placed(cache: SentDataCache, *data: Data) -> list[Placed]:
    regions = sorted(each.region for each in data)
    by_region = dict(zip(regions, cache.place(regions), strict=True))
    return [by_region[each.region] for each in data]


def test_unchanged_data_is_not_copied_again(kept: SentDataCache) -> None:
    one, other = Data(ALONE, 1), Data(ALONE, 2)
    first = placed(kept, one, other)
    assert all(each.is_new for each in first)
    again = placed(kept, one, other)
    assert not any(each.is_new for each in again)
    assert [each.segment for each in again] == [each.segment for each in first]


def test_changed_data_gets_a_new_segment(kept: SentDataCache) -> None:
    one, other = Data(ALONE, 1), Data(ALONE, 2)
    before = placed(kept, one, other)
    one.array[-1] = 7
    after = placed(kept, one, other)
    assert [each.is_new for each in after] == [True, False]
    assert one.is_in(after[0])
    assert not one.is_in(before[0])  # a launch that runs has the data that it was sent
    one.array[-1] = 1
    assert one.is_in(before[0])


def test_small_regions_of_one_segment_are_compared_separately(kept: SentDataCache) -> None:
    data = [Data(SMALL, number) for number in range(4)]
    assert len({id(each.segment) for each in placed(kept, *data)}) == 1
    data[2].array[5] = 99
    again = placed(kept, *data)
    assert [each.is_new for each in again] == [False, False, True, False]
    assert all(each.is_in(place) for each, place in zip(data, again, strict=True))
    assert not any(each.is_new for each in placed(kept, *data))


def test_few_descriptors_are_held_whatever_changes(kept: SentDataCache) -> None:
    parts = [Data(MB // 8, value) for value in range(100)]
    before = len(os.listdir("/proc/self/fd"))
    placed(kept, *parts)
    for part in parts:
        part.array += 1
        placed(kept, *parts)
    assert len(os.listdir("/proc/self/fd")) - before <= parcel._MAX_SEGMENTS


def test_the_least_recently_used_is_evicted_first(kept: SentDataCache, monkeypatch: pytest.MonkeyPatch) -> None:
    old, middle, new = (Data(ALONE, number) for number in range(3))
    for data in (old, middle, old, new):
        placed(kept, data)
    monkeypatch.setenv("NBLAUNCH_KEEP_BYTES", str(2 * ALONE + MB))
    placed(kept, new)
    assert kept.size <= 2 * ALONE + MB
    monkeypatch.setenv("NBLAUNCH_KEEP_BYTES", str(200 * MB))
    assert not placed(kept, old)[0].is_new
    assert placed(kept, middle)[0].is_new


def test_launches_share_a_segment_beyond_the_budget(kept: SentDataCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_KEEP_BYTES", "0")
    data = Data(ALONE, 1)
    running = placed(kept, data)
    assert data.is_in(running[0])
    assert kept.size == 0
    queued = placed(kept, data)
    assert queued[0].segment is running[0].segment
    data.array[0] += 1
    assert placed(kept, data)[0].is_new
    data.array[0] -= 1
    del running, queued
    assert placed(kept, data)[0].is_new


def test_freed_segments_stay_for_launches_that_run(kept: SentDataCache) -> None:
    data = Data(ALONE, 1)
    before = len(os.listdir("/proc/self/fd"))
    running = placed(kept, data)
    assert ALONE <= kept.free() < ALONE + 2 * 4096
    assert kept.size == kept.free() == 0
    assert data.is_in(running[0])
    del running
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_budget_is_a_tenth_of_what_would_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel, "free_memory", lambda: 900)
    assert budget(100) == 100
    monkeypatch.setenv("NBLAUNCH_KEEP_BYTES", "")
    assert budget(100) == 100
    monkeypatch.setenv("NBLAUNCH_KEEP_BYTES", "77")
    assert budget(100) == 77
    monkeypatch.setenv("NBLAUNCH_KEEP_BYTES", "1 GB")
    with pytest.raises(
        ArgumentError, match="NBLAUNCH_KEEP_BYTES='1 GB': must be a number of bytes; 0 disables the cache"
    ):
        budget(100)


def test_launches_from_threads_get_what_they_sent(kept: SentDataCache) -> None:
    data = [Data(SMALL + number, number) for number in range(6)]
    wrong: list[Data] = []

    def launch(each: Data) -> None:
        for number in range(10):
            each.array[0] = number
            if not each.is_in(placed(kept, each)[0]):
                wrong.append(each)

    threads = [threading.Thread(target=launch, args=(each,)) for each in data]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_kept_data_is_evicted_for_a_launch_that_needs_the_memory(
    kept: SentDataCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nblaunch.machine.segments._MIN_CHECKED_BYTES", 0)
    monkeypatch.setattr("nblaunch.machine.segments._RESERVE_BYTES", 0)
    monkeypatch.setattr("nblaunch.machine.segments.free_memory", lambda: 3 * ALONE - kept.size)
    old, new = Data(2 * ALONE, 1), Data(2 * ALONE, 2)
    placed(kept, old)
    assert new.is_in(placed(kept, new)[0])


def test_the_digest_of_large_data_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Digest:
        """Is interrupted in its second chunk."""

        def __init__(self, digest_size: int) -> None:
            pass

        def update(self, chunk: memoryview) -> None:
            sizes.append(len(chunk))
            if len(sizes) == 2:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sent_names, "hashlib", SimpleNamespace(blake2b=Digest))
    with pytest.raises(KeyboardInterrupt):
        sent_names._hash(np.zeros(2 << 30, dtype=np.uint8).data)  # no page of it is ever written
    assert len(sizes) == 2
    assert max(sizes) <= 64 << 20  # a tenth of a second
