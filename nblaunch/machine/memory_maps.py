"""What this process has mapped, as Linux tells it, and which of its memory others can map from files themselves."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nblaunch.machine.segments import Placed, Region, Segment, map_private

_LEAST = 16 << 20
"""Bytes of a region from which on it is asked whether a file holds it."""
_MOST_FILES = 16
"""Each takes a descriptor."""
_PAGE = mmap.PAGESIZE


class Mapped(NamedTuple):
    """A line of ``/proc/self/maps``."""

    start: int
    end: int
    mode: str
    """Such as ``r--s``: what is allowed, and ``p`` if what is written stays in this process."""
    offset: int
    """Where it begins in the file."""
    file: tuple[str, int]
    """Device and inode; the inode is 0 where no file backs it."""
    name: str

    @property
    def is_shared(self) -> bool:
        return self.mode.endswith("s")


def mappings() -> Iterator[Mapped]:
    """The mappings of this process, in the order of addresses.

    Raises:
        OSError: The system does not tell.
    """
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, mode, offset, device, inode, *name = line.split(maxsplit=5)
            start, end = (int(part, 16) for part in span.split("-"))
            yield Mapped(start, end, mode, int(offset, 16), (device, int(inode)), "".join(name).rstrip("\n"))


def from_files(regions: Sequence[Region]) -> dict[Region, Placed]:
    """Return where a file holds what is in memory, for those regions that this process can only read.

    Each lies in one shared mapping of a regular file that is still there under its name, and that no mapping of this
    process can write to. Others may still write to the file, or truncate it: whoever maps a region from it sees that,
    as this process does. What is mapped privately is left out, as its user expects it to be a copy.
    """
    large = sorted((region for region in regions if region.size >= _LEAST), key=lambda region: -region.size)
    try:
        mapped = list(mappings()) if large else []
    except OSError:
        return {}
    written = {each.file for each in mapped if each.is_shared and "w" in each.mode}
    files: dict[tuple[str, int], Segment | None] = {}
    found = {}
    for region in large:
        its = next((each for each in mapped if each.start <= region.address and region.end <= each.end), None)
        if its is None or not its.file[1] or its.file in written or not its.is_shared:
            continue
        if its.file not in files and len(files) < _MOST_FILES:
            files[its.file] = _opened(its)
        segment, offset = files.get(its.file), its.offset + region.address - its.start
        if segment is not None and offset + region.size <= segment.size:
            found[region] = Placed(segment, offset, is_new=False)
    return found


def _opened(mapped: Mapped) -> Segment | None:
    """The file that was mapped; None if there is another or none under its name now."""
    try:
        if not stat.S_ISREG(os.stat(mapped.name).st_mode):
            return None  # opening a device may do something
        fd = os.open(mapped.name, os.O_RDONLY | os.O_CLOEXEC)
        segment = Segment(fd, os.fstat(fd).st_size, in_memory=False)
        probe = map_private(fd, _PAGE)  # of some file systems stat tells another device than the mappings do
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(probe))
        return segment if any(each.start == address and each.file == mapped.file for each in mappings()) else None
    except OSError:
        return None
