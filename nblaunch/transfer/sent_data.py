"""The last launches' data, kept in the segments that they were sent in: sending it again costs a compare, not a copy.

A segment is never written to again: data that has changed goes into a new one. What is kept stays within a budget, a
part of the memory that is free, and goes when memory gets short.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

from nblaunch.errors import ArgumentError
from nblaunch.machine import segments
from nblaunch.machine.limits import free_memory
from nblaunch.machine.segments import Placed, Region, Segment

_SHARE = 10
"""One part in so many of the free memory may be kept."""
_LOOK_EVERY = 1.0
"""Seconds between looks at the free memory while something is kept."""
_LEAST = 64 << 10
"""Smaller segments are not worth being kept."""
_MOST_SEGMENTS = 64
"""Each holds a descriptor."""


class Snapshots:
    """Segments by the memory that they are a copy of. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kept: dict[Region, Placed] = {}
        """Oldest use first."""
        self._watch: threading.Thread | None = None
        self._wake = threading.Event()

    def place(self, regions: Sequence[Region], folder: Path, passing: Collection[Region] = ()) -> list[Placed]:
        """Put regions into segments: into the kept ones where they hold the same.

        Args:
            regions: In order; they do not overlap.
            folder: Where to put a file if memory is short.
            passing: Those of them that are not to be kept, as their memory is there this once.

        Raises:
            NoRoomError: There is no room.
        """
        budget(0)  # a bad setting is told before anything is copied
        with self._lock:
            placed = {region: kept for region in regions if (kept := self._same(region)) is not None}
            new = [region for region in regions if region not in placed]
            for region in new:
                self._kept.pop(region, None)
            if not segments.fits(new):  # what is kept and not sent now gives way
                self._kept = {region: kept for region, kept in self._kept.items() if region in placed}
            for group in ([r for r in new if r not in passing], [r for r in new if r in passing]):  # kept as a whole
                placed |= segments.write(group, folder)
            for region in regions:
                self._kept.pop(region, None)
                segment = placed[region].segment
                if segment.in_memory and segment.size >= _LEAST and region not in passing:
                    self._kept[region] = placed[region]._replace(is_new=False)
            self._keep_within(budget(self.size))
            self._watch_memory()
            return [placed[region] for region in regions]

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        with self._lock:
            return sum(segment.size for segment in self._segments())

    def free(self) -> int:
        """Keep nothing more; how many bytes that were. A launch that runs has its data all the same."""
        with self._lock:
            size = self.size
            self._kept.clear()
            self._wake.set()
            return size

    def _segments(self) -> list[Segment]:
        """Each once, the last used first."""
        return list({id(kept.segment): kept.segment for kept in reversed(self._kept.values())}.values())

    def _same(self, region: Region) -> Placed | None:
        kept = self._kept.get(region)
        return kept if kept is not None and kept.segment.equals(kept.offset, region) else None

    def _keep_within(self, most: int) -> None:
        """Let go what was used longest ago."""
        left, stays = most, set()
        for segment in self._segments()[:_MOST_SEGMENTS]:
            left -= segment.size
            if left < 0:
                break
            stays.add(id(segment))
        self._kept = {region: kept for region, kept in self._kept.items() if id(kept.segment) in stays}

    # -------------------------------------------------------------- when memory gets short
    def _watch_memory(self) -> None:
        if self._kept and self._watch is None:
            self._wake.clear()
            watch = threading.Thread(target=self._look, name="nblaunch-memory", daemon=True)
            try:
                watch.start()
            except RuntimeError:  # no more threads: nobody would see that memory gets short
                self._kept.clear()
            else:
                self._watch = watch

    def _look(self) -> None:
        """Look at the free memory for as long as something is kept."""
        while True:
            self._wake.wait(_LOOK_EVERY)
            with self._lock:
                self._wake.clear()
                with contextlib.suppress(ArgumentError, OSError):  # the next launch says so
                    if self._kept:  # else it is not asked how much is free: that opens files
                        self._keep_within(budget(self.size))
                if not self._kept:
                    self._watch = None
                    return


def budget(kept: int) -> int:
    """Bytes that may be kept: ``$NBLAUNCH_KEEP_BYTES``, else a tenth of what would be free without them.

    Args:
        kept: How many are now.

    Raises:
        ArgumentError: The variable is no number.
        OSError: This process may not open the file that tells of free memory.
    """
    chosen = os.environ.get("NBLAUNCH_KEEP_BYTES")
    if not chosen:
        return (free_memory() + kept) // _SHARE
    if not chosen.isdecimal():
        raise ArgumentError(f"NBLAUNCH_KEEP_BYTES={chosen!r}: must be a number of bytes; 0 keeps nothing")
    return int(chosen)


snapshots = Snapshots()
os.register_at_fork(after_in_child=snapshots.__init__)  # type: ignore[misc]  # it has no such thread: begin anew
