"""This process's memory mappings on Linux, and which of its memory other processes can map from the same files."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nblaunch.machine.processes import open_files
from nblaunch.machine.segments import Placed, Region, Segment, map_segment

_MIN_FILE_BYTES = 1 << 20
"""Smaller regions are not looked up in files, unless they are known to be mapped: reading all mappings takes 3 ms, and
what receivers get must not depend on what else is sent."""
_MAX_FILES = 16
"""Each holds a descriptor. Files that may be written to are not limited: a copy would lose the writes."""
_NO_FILES = ("/memfd:", "/dev/shm/nblaunch-", "/dev/shm/torch_", "/dev/zero")
"""How the names of mappings begin that no user has opened: segments, torch's shared memory, anonymous memory."""
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

    @property
    def is_writable(self) -> bool:
        return "w" in self.mode

    def goes_on_from(self, before: Mapped) -> bool:
        """Return True if both map one part of a file: ``madvise`` on some of its pages splits a mapping."""
        distance = self.start - before.start
        is_alike = (self.mode, self.file) == (before.mode, before.file)
        return is_alike and self.start == before.end and self.offset == before.offset + distance


def mappings() -> Iterator[Mapped]:
    """Yield the mappings of this process by address.

    Raises:
        OSError: There is no /proc.
    """
    with open("/proc/self/maps", "rb") as maps:  # the name of a file may hold any bytes
        for line in maps:
            span, mode, offset, device, inode, *name = os.fsdecode(line).split(maxsplit=5)
            start, end = (int(part, 16) for part in span.split("-"))
            path = "".join(name).removesuffix("\n").replace("\\012", "\n")
            yield Mapped(start, end, mode, int(offset, 16), (device, int(inode)), path)


class FileMaps:
    """The files that this process has mapped, and what of them a parcel's receivers can map too. For one parcel.

    Receivers on this machine map the same file: what one process writes to a writable mapping, all see, and the file
    keeps. A file that has lost its name is found by a descriptor that this process holds, as NumPy's maps do. Private
    mappings are copied, as they may differ from the file.

    Other machines receive files by their content. There only mappings that no one here can write to are found.

    Args:
        is_here: Whether all receivers are on this machine.
    """

    def __init__(self, is_here: bool = True) -> None:
        self.is_here = is_here
        self._mapped: list[Mapped] | None = None
        self._largest: int | None = None
        self._known: set[Region] = set()
        """Those that were found in files."""
        self._files: dict[tuple[tuple[str, int], bool], Segment | None] = {}

    def identity_of(self, region: Region, is_mapped: bool = False) -> str:
        """Return what identifies the part of a file that receivers map in place of a region; empty: they get a copy.

        Args:
            region: The region.
            is_mapped: Whether it is known to be part of some mapping. Else only large regions are looked up.

        Raises:
            ValueError: The file was truncated, so that reading the region would end the process.
        """
        if not self.is_here or not (is_mapped or self._may_be_of_file(region)):
            return ""
        its = self._find(region)
        if its is None or self._segment(its, region) is None:
            return ""
        self._known.add(region)
        return f"{its.file} {its.is_writable} {its.offset + region.address - its.start} {region.size}"

    def placed(self, regions: Sequence[Region]) -> dict[Region, Placed]:
        """Return the regions that receivers can map from a file, and where in the file.

        Args:
            regions: The regions of the whole parcel; overlapping ones are merged.

        Raises:
            ValueError: See `identity_of`.
        """
        is_old = self._mapped is not None
        found = self._located(regions)
        if found and is_old:  # pickling runs the user's code and takes time: files may have been unmapped meanwhile
            self._mapped = None
            found = self._located(regions)
        return found

    def _located(self, regions: Sequence[Region]) -> dict[Region, Placed]:
        known = sorted(self._known)
        found = {}
        for region in sorted(regions, key=lambda region: -region.size):
            at = bisect.bisect_left(known, Region(region.address, 0))
            is_known = at < len(known) and known[at].address < region.end
            if is_known or self._may_be_of_file(region):
                its = self._find(region)
                segment = None if its is None else self._segment(its, region)
                if its is not None and segment is not None:
                    found[region] = Placed(segment, its.offset + region.address - its.start, is_new=False)
        return found

    def _may_be_of_file(self, region: Region) -> bool:
        """Return True if a region is large, and may be of a file: who maps one holds it open, as NumPy does."""
        if region.size < _MIN_FILE_BYTES:
            return False
        if self._largest is None:
            self._largest = _largest_file()
        return region.size <= self._largest

    def _find(self, region: Region) -> Mapped | None:
        """Return the mapping of a file that holds a region and may be shared."""
        if self._mapped is None:
            self._mapped = self._read()
        at = bisect.bisect_right(self._mapped, region.address, key=lambda each: each.start) - 1
        return self._mapped[at] if at >= 0 and region.end <= self._mapped[at].end else None

    def _read(self) -> list[Mapped]:
        try:
            mapped = [each for each in mappings() if each.is_shared and each.file[1]]
        except OSError:
            return []
        written = set() if self.is_here else {each.file for each in mapped if each.is_writable}
        found: list[Mapped] = []
        for each in mapped:
            if each.file in written or each.name.startswith(_NO_FILES):
                continue
            if found and each.goes_on_from(found[-1]):
                found[-1] = found[-1]._replace(end=each.end)
            else:
                found.append(each)
        return found

    def _segment(self, mapped: Mapped, region: Region) -> Segment | None:
        key = mapped.file, mapped.is_writable
        if key not in self._files and (mapped.is_writable or len(self._files) < _MAX_FILES):
            self._files[key] = _opened(mapped)
        segment = self._files.get(key)
        if segment is None:
            return None
        end, size = mapped.offset + region.end - mapped.start, os.fstat(segment.fd).st_size
        if end > -(-size // _PAGE) * _PAGE:
            raise ValueError(f"{mapped.name} was truncated to {size} bytes, and its first {end} are used: map it again")
        return segment if end <= size else None


def _largest_file() -> int:
    """Return the bytes of the largest file that this process has open; 0 if there is none."""
    largest = 0
    with contextlib.suppress(OSError):  # no /proc
        for fd, name in open_files():
            with contextlib.suppress(OSError):  # closed meanwhile
                about = os.fstat(fd)
                if stat.S_ISREG(about.st_mode) and not name.startswith(_NO_FILES):
                    largest = max(largest, about.st_size)
    return largest


def _opened(mapped: Mapped) -> Segment | None:
    """Open the file of a mapping as it is mapped, by its name or a descriptor that is open; None: it is not found."""
    access = os.O_RDWR if mapped.is_writable else os.O_RDONLY
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.stat(mapped.name).st_mode):  # opening a device may have effects
            segment = _if_of(mapped, os.open(mapped.name, access | os.O_CLOEXEC))
            if segment is not None:
                return segment
    for fd, _ in open_files():
        with contextlib.suppress(OSError):  # closed meanwhile
            found = os.fstat(fd)
            allows = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
            if found.st_ino == mapped.file[1] and stat.S_ISREG(found.st_mode) and allows in (access, os.O_RDWR):
                segment = _if_of(mapped, os.dup(fd))
                if segment is not None:
                    return segment
    return None


def _if_of(mapped: Mapped, fd: int) -> Segment | None:
    """Return a descriptor as a segment if its file is that of a mapping; else close it."""
    about = os.fstat(fd)
    segment = Segment(fd, about.st_size, False, "shared" if mapped.is_writable else "read-only")
    if (f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}", about.st_ino) == mapped.file:
        return segment
    probe = map_segment(fd, _PAGE)  # on some file systems stat and mappings report different devices
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(probe))
    return segment if any(each.start == address and each.file == mapped.file for each in mappings()) else None
