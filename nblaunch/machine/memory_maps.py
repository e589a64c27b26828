"""This process's memory mappings on Linux, and which of its memory other processes can map from the same files."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nblaunch.machine.segments import Placed, Region, Segment, map_private

_MIN_FILE_BYTES = 16 << 20
"""Smaller regions are not looked up in files."""
_MAX_FILES = 16
"""Each holds a descriptor."""
_PAGE = mmap.PAGESIZE


class Mapped(NamedTuple):
    """A line of ``/proc/self/maps``."""

    start: int
    end: int
    mode: str
    """Permissions, then ``s`` for shared or ``p`` for private, such as ``r--s``."""
    offset: int
    """In the file."""
    file: tuple[str, int]
    """Device and inode; the inode is 0 where no file backs it."""
    name: str

    @property
    def is_shared(self) -> bool:
        return self.mode.endswith("s")


def mappings() -> Iterator[Mapped]:
    """Yield the mappings of this process by address.

    Raises:
        OSError: There is no /proc.
    """
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, mode, offset, device, inode, *name = line.split(maxsplit=5)
            start, end = (int(part, 16) for part in span.split("-"))
            yield Mapped(start, end, mode, int(offset, 16), (device, int(inode)), "".join(name).rstrip("\n"))


def from_files(regions: Sequence[Region]) -> dict[Region, Placed]:
    """Return the regions that receivers can map from a file, and where in the file.

    Such a region lies in one shared mapping of a regular file that still has its name, and that no mapping of this
    process can write to. Other processes may still write to the file or truncate it: receivers see that, as this
    process does. Private mappings are left out, as users expect them to be copies.
    """
    large = sorted((region for region in regions if region.size >= _MIN_FILE_BYTES), key=lambda region: -region.size)
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
        if its.file not in files and len(files) < _MAX_FILES:
            files[its.file] = _opened(its)
        segment, offset = files.get(its.file), its.offset + region.address - its.start
        if segment is not None and offset + region.size <= segment.size:
            found[region] = Placed(segment, offset, is_new=False)
    return found


def _opened(mapped: Mapped) -> Segment | None:
    """Open the file of a mapping; return None if its name is gone or belongs to another file."""
    try:
        if not stat.S_ISREG(os.stat(mapped.name).st_mode):
            return None  # opening a device may have effects
        fd = os.open(mapped.name, os.O_RDONLY | os.O_CLOEXEC)
        segment = Segment(fd, os.fstat(fd).st_size, in_memory=False)
        probe = map_private(fd, _PAGE)  # on some file systems stat and mappings report different devices
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(probe))
        return segment if any(each.start == address and each.file == mapped.file for each in mappings()) else None
    except OSError:
        return None
