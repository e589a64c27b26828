"""A cache of the segments that the last launches sent: sending the same data again takes a comparison, not a copy.

Segments are immutable: changed data goes into a new one. The cache keeps to a budget, a share of the free memory, and
shrinks when memory gets short. Launches that wait or run share a segment, whatever the budget.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from nblaunch.errors import ArgumentError
from nblaunch.machine import segments, timeouts
from nblaunch.machine.limits import free_memory
from nblaunch.machine.segments import Placed, Region, Segment

_BUDGET_SHARE = 10
"""The cache may take 1/10 of the memory that would be free without it."""
_MIN_CACHED_BYTES = 64 << 10
"""Smaller segments are not cached."""
_MAX_SEGMENTS = 64
"""Each holds a descriptor."""


class SentDataCache:
    """Segments by the region that they copy. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._known: dict[Region, tuple[weakref.ref[Segment], int]] = {}
        """Where each region was put last: the segment, which perhaps only launches still hold, and the offset."""
        self._kept: list[Segment] = []
        """Most recently used first."""
        self._watch: threading.Thread | None = None
        self._wake = threading.Event()

    def place(self, regions: Sequence[Region], folder: Path) -> list[Placed]:
        """Put regions into segments, cached ones where their content is the same."""
        budget(0)  # report a bad setting before copying
        with self._lock:
            placed = {region: known for region in regions if (known := self._same(region)) is not None}
            new = [region for region in regions if region not in placed]
            for region in new:
                self._known.pop(region, None)
            if segments.fits(sum(region.size for region in new)):
                stay = {segment() for segment, _ in self._known.values()}  # without those whose data has changed
            else:
                stay = {each.segment for each in placed.values()}
            self._kept = [segment for segment in self._kept if segment in stay]
            placed.update(zip(new, segments.write(new, folder), strict=True))
            used = {id(each.segment): each.segment for each in placed.values()}
            self._known = {region: known for region, known in self._known.items() if known[0]() is not None}
            self._known.update((region, (weakref.ref(at.segment), at.offset)) for region, at in placed.items())
            keep = [each for each in used.values() if each.in_memory and each.size >= _MIN_CACHED_BYTES]
            self._kept = keep + [segment for segment in self._kept if id(segment) not in used]
            self._evict(budget(self.size))
            self._watch_memory()
            return [placed[region] for region in regions]

    def same(self, region: Region) -> Placed | None:
        """Return the copy of a region that the cache or a launch holds, if its content is the same."""
        with self._lock:
            return self._same(region)

    @property
    def size(self) -> int:
        with self._lock:
            return sum(segment.size for segment in self._kept)

    def free(self) -> int:
        """Empty the cache and return its size in bytes. Running launches keep their data."""
        with self._lock:
            size = self.size
            self._kept.clear()
            self._wake.set()
            return size

    def _same(self, region: Region) -> Placed | None:
        reference, offset = self._known.get(region, (None, 0))
        segment = None if reference is None else reference()
        return None if segment is None or not segment.equals(offset, region) else Placed(segment, offset, False)

    def _evict(self, most: int) -> None:
        sizes = itertools.accumulate(segment.size for segment in self._kept[:_MAX_SEGMENTS])
        self._kept = self._kept[: sum(size <= most for size in sizes)]

    # -------------------------------------------------------------- memory pressure
    def _watch_memory(self) -> None:
        if self._kept and self._watch is None:
            self._wake.clear()
            watch = threading.Thread(target=self._check_memory, name="nblaunch-memory", daemon=True)
            try:
                watch.start()
            except RuntimeError:  # no thread can be started, so a shortage would go unnoticed
                self._kept.clear()
            else:
                self._watch = watch

    def _check_memory(self) -> None:
        """Shrink the cache as memory gets short, until it is empty; runs in a thread."""
        while True:
            self._wake.wait(timeouts.MEMORY_CHECK_INTERVAL_S)
            with self._lock:
                self._wake.clear()
                with contextlib.suppress(ArgumentError, OSError):  # the next launch reports it
                    if self._kept:  # asking for free memory opens files
                        self._evict(budget(self.size))
                if not self._kept:
                    self._watch = None
                    return


def budget(kept: int) -> int:
    """Return the bytes that may be cached: ``$NBLAUNCH_KEEP_BYTES``, else 1/10 of the memory free without the cache."""
    chosen = os.environ.get("NBLAUNCH_KEEP_BYTES")
    if not chosen:
        return (free_memory() + kept) // _BUDGET_SHARE
    if not chosen.isdecimal():
        raise ArgumentError(f"NBLAUNCH_KEEP_BYTES={chosen!r}: must be a number of bytes; 0 keeps nothing")
    return int(chosen)


sent_data_cache = SentDataCache()
os.register_at_fork(after_in_child=sent_data_cache.__init__)  # type: ignore[misc]  # the child lacks the thread
