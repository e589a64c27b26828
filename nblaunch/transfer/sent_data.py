"""A cache of the segments that the last launches sent: sending the same data again takes a comparison, not a copy.

Segments are immutable: changed data goes into a new one. The cache keeps to a budget, a share of the free memory, and
shrinks when memory gets short. Launches that wait or run share a segment, whatever the budget.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Collection, Sequence
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
        self._kept: dict[Region, Placed] = {}
        """Least recently used first."""
        self._lent: dict[Region, tuple[weakref.ref[Segment], int]] = {}
        """Segments that a launch may still hold, with the offset of the region; also those that were evicted."""
        self._watch: threading.Thread | None = None
        self._wake = threading.Event()

    def place(self, regions: Sequence[Region], folder: Path, passing: Collection[Region] = ()) -> list[Placed]:
        """Put regions into segments, cached ones where their content is the same.

        Args:
            regions: In order; they do not overlap.
            folder: Where to put a file if memory is short.
            passing: Regions not to cache: their memory is freed after this launch.

        Raises:
            NoRoomError: There is no room.
        """
        budget(0)  # report a bad setting before copying
        with self._lock:
            placed = {region: kept for region in regions if (kept := self._same(region)) is not None}
            new = [region for region in regions if region not in placed]
            for region in new:
                self._kept.pop(region, None)
            if not segments.fits(new):  # evict what this launch does not send
                self._kept = {region: kept for region, kept in self._kept.items() if region in placed}
            # Apart, as the cache keeps whole segments.
            for group in ([r for r in new if r not in passing], [r for r in new if r in passing]):
                placed |= segments.write(group, folder)
            self._lent = {region: lent for region, lent in self._lent.items() if lent[0]() is not None}
            for region in regions:
                self._kept.pop(region, None)
                segment, offset, _ = placed[region]
                if segment.size >= _MIN_CACHED_BYTES and region not in passing:
                    self._lent[region] = weakref.ref(segment), offset
                    if segment.in_memory:
                        self._kept[region] = placed[region]._replace(is_new=False)
            self._evict(budget(self.size))
            self._watch_memory()
            return [placed[region] for region in regions]

    def same(self, region: Region) -> Placed | None:
        """Return the copy of a region that the cache or a launch holds, if its content is the same."""
        with self._lock:
            return self._same(region)

    @property
    def size(self) -> int:
        """Bytes in the cache."""
        with self._lock:
            return sum(segment.size for segment in self._segments())

    def free(self) -> int:
        """Empty the cache and return its size in bytes. Running launches keep their data."""
        with self._lock:
            size = self.size
            self._kept.clear()
            self._wake.set()
            return size

    def _segments(self) -> list[Segment]:
        """Return each segment once, most recently used first."""
        return list({id(kept.segment): kept.segment for kept in reversed(self._kept.values())}.values())

    def _same(self, region: Region) -> Placed | None:
        kept = self._kept.get(region)
        if kept is None and region in self._lent:
            reference, offset = self._lent[region]
            segment = reference()
            kept = None if segment is None else Placed(segment, offset, False)
        return kept if kept is not None and kept.segment.equals(kept.offset, region) else None

    def _evict(self, most: int) -> None:
        """Evict the least recently used segments beyond `most` bytes."""
        left, stays = most, set()
        for segment in self._segments()[:_MAX_SEGMENTS]:
            left -= segment.size
            if left < 0:
                break
            stays.add(id(segment))
        self._kept = {region: kept for region, kept in self._kept.items() if id(kept.segment) in stays}

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
    """Return the bytes that may be cached: ``$NBLAUNCH_KEEP_BYTES``, else 1/10 of the memory free without the cache.

    Args:
        kept: Bytes in the cache now.

    Raises:
        ArgumentError: The variable is not a number.
        OSError: Free memory could not be read.
    """
    chosen = os.environ.get("NBLAUNCH_KEEP_BYTES")
    if not chosen:
        return (free_memory() + kept) // _BUDGET_SHARE
    if not chosen.isdecimal():
        raise ArgumentError(f"NBLAUNCH_KEEP_BYTES={chosen!r}: must be a number of bytes; 0 keeps nothing")
    return int(chosen)


sent_data_cache = SentDataCache()
os.register_at_fork(after_in_child=sent_data_cache.__init__)  # type: ignore[misc]  # the child lacks the thread
