"""Large pieces of memory on their way to other processes: copied once, and mapped by all who get them.

A segment is anonymous memory (a memfd), or a file without a name where there is none or memory is short. It is written
once and sealed; each process maps it privately, so pages are shared until one of them writes, and nobody sees that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from nblaunch.machine.limits import free_memory

ALIGNED = 64
"""Bytes: where a piece stands in a segment differs from where it stood in memory by a multiple of this."""
_ALONE = 16 << 20
"""Bytes from which on a piece has a segment of its own."""
_PACKED = 64 << 20
"""Bytes that smaller ones share."""
_SMALL = 1 << 20
"""Bytes below which a piece stands among such pieces alone: whoever keeps one keeps its segment, and no more."""
_FEW = 4 << 20
"""Bytes that those share."""
_MOST = 24
"""A part in so many of what is sent shares a segment, where that is more: descriptors are few. So of 1 GB in small
tensors one that is kept holds 42 MB; with the 4 MiB of smaller results it would be 250 descriptors."""
_WHOLE_PAGES = 256 << 10
"""Bytes from which on a piece stands on pages as it did in memory, so that one page may take another's place."""
_AT_ONCE = 64 << 20
_WORTH_A_LOOK = 64 << 20
"""Bytes from which on it is asked whether there is room."""
_RESERVE = 256 << 20
"""Bytes that are left to others."""
_PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Few of the pages will be written to: they are not to count as memory that is promised."""
_FAILED = ctypes.c_void_p(-1).value


class Region(NamedTuple):
    """A piece of this process's memory."""

    address: int
    size: int

    @property
    def end(self) -> int:
        return self.address + self.size

    def view(self) -> memoryview:
        """Its bytes; whoever owns them must outlive this."""
        return memory_at(self.address, self.size)


def memory_at(address: int, size: int) -> memoryview:
    """The bytes there, writable; whoever owns them must outlive this."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B", (size,))


class Segment:
    """A written segment; its descriptor is closed with it.

    Attributes:
        fd: The descriptor; for reading, where the system has no seals.
        size: In bytes.
        in_memory: Whether it is memory, not a file on disk.
    """

    def __init__(self, fd: int, size: int, in_memory: bool) -> None:
        self.fd, self.size, self.in_memory = fd, size, in_memory
        self._mapped: memoryview | None = None
        self.close = weakref.finalize(self, os.close, fd)

    def equals(self, offset: int, region: Region) -> bool:
        """Whether it holds at `offset` what is in memory now."""
        if self._mapped is None:
            self._mapped = map_private(self.fd, self.size)
        here = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._mapped)) + offset
        for start in range(0, region.size, _AT_ONCE):  # in parts, between which an interrupt is heard
            if _libc.memcmp(here + start, region.address + start, min(_AT_ONCE, region.size - start)):
                return False
        return True


class Placed(NamedTuple):
    """Where a region was put."""

    segment: Segment
    offset: int
    is_new: bool
    """It was copied there now."""


class NoRoomError(OSError):
    """There is no room for so much, neither in memory nor on disk.

    Attributes:
        sizes: What was to be put there: bytes by name.
    """

    sizes: Mapping[str, int] = MappingProxyType({})


# ------------------------------------------------------------------ which go together
def merged(regions: Sequence[Region]) -> list[Region]:
    """The memory that regions cover: those that overlap as one, so that what is shared here is shared there."""
    whole: list[Region] = []
    for region in sorted(regions):
        if whole and region.address < whole[-1].end:
            whole[-1] = Region(whole[-1].address, max(whole[-1].end, region.end) - whole[-1].address)
        else:
            whole.append(region)
    return whole


def grouped(regions: Sequence[Region]) -> Iterator[list[Region]]:
    """Regions by the segment that they are to share: a large one has its own, small ones stand among themselves."""
    share = sum(region.size for region in regions) // _MOST
    yield from _filled([region for region in regions if region.size < _SMALL], _SMALL, max(_FEW, share))
    rest = [region for region in regions if region.size >= _SMALL]
    yield from _filled(rest, max(_ALONE, share), max(_PACKED, share))


def _filled(regions: Iterable[Region], alone: int, most: int) -> Iterator[list[Region]]:
    """Groups of so many bytes at most, and each region of `alone` bytes or more by itself."""
    group: list[Region] = []
    size = 0
    for region in regions:
        if region.size >= alone:
            yield [region]
            continue
        if group and size + region.size > most:
            yield group
            group, size = [], 0
        group.append(region)
        size += region.size
    if group:
        yield group


# ------------------------------------------------------------------ writing
def write(
    regions: Sequence[Region], folder: Path, give_up: Callable[[Region], bool] | None = None
) -> Iterator[tuple[Region, Placed]]:
    """Copy regions that do not overlap into new segments.

    Args:
        regions: What to copy.
        folder: Where to put a file if memory is short.
        give_up: Of each region, whether this process may hand its own pages over, so that they are not there twice:
            it then holds the segment's, privately. Default: none.

    Returns:
        Where each stands.

    Raises:
        NoRoomError: There is no room.
    """

    def is_given_up(region: Region) -> bool:
        return give_up is not None and region.size >= _WHOLE_PAGES and give_up(region)  # smaller ones lie askew

    more = sum(region.size for region in regions if not is_given_up(region))
    where = _room(more, sum(region.size for region in regions), folder)
    for group in grouped(regions):
        segment, offsets = _write(group, where, is_given_up)
        for region, offset in zip(group, offsets, strict=True):
            yield region, Placed(segment, offset, True)


def fits(regions: Sequence[Region]) -> bool:
    """Whether there is memory for these."""
    return _short_of(sum(region.size for region in regions)) is None


def check_memory(size: int) -> None:
    """See that there is memory for so much.

    Raises:
        NoRoomError: There is not.
    """
    memory = _short_of(size)
    if memory is not None:
        raise NoRoomError(errno.ENOMEM, f"there is no room for {in_words(size)}: {in_words(memory)} of memory are free")


def _short_of(size: int) -> int | None:
    """The bytes of memory that are free, where so many more are too many; else None."""
    if size < _WORTH_A_LOOK:
        return None
    memory = free_memory()
    return None if size <= memory - max(_RESERVE, memory // 20) else memory


def _room(more: int, size: int, folder: Path) -> Path | None:
    """Where there is room: None for memory, which takes so much more, else the folder, for all of it."""
    memory = _short_of(more)
    if memory is None:
        return None
    disk = 0 if _is_memory(folder) else shutil.disk_usage(folder).free
    if size <= disk - _RESERVE:
        return folder
    where = f"{in_words(memory)} of memory are free, and {in_words(disk)} of disk in {folder}"
    raise NoRoomError(errno.ENOMEM, f"there is no room for {in_words(size)}: {where}")


def _is_memory(folder: Path) -> bool:
    """Whether a folder's files are in memory."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return False
    return any(mount[2] == number and "tmpfs" in mount[mount.index("-") + 1] for mount in mounts)


def in_words(size: float) -> str:
    """A number of bytes as people say it: ``1.2 GB``."""
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _write(
    regions: Sequence[Region], folder: Path | None, is_given_up: Callable[[Region], bool]
) -> tuple[Segment, list[int]]:
    offsets, size = _layout(regions)
    fd, in_memory = _create(folder)
    try:
        os.ftruncate(fd, size)
        for region, offset in zip(regions, offsets, strict=True):
            _copy(region, fd, offset, in_memory and is_given_up(region))
        fd = _finish(fd, in_memory)
    except BaseException:
        os.close(fd)
        raise
    return Segment(fd, size, in_memory), offsets


def _layout(regions: Sequence[Region]) -> tuple[list[int], int]:
    """Where each region goes; a large one as far into its page as it is here."""
    offsets, end = [], 0
    for region in regions:
        step = _PAGE if region.size >= _WHOLE_PAGES else ALIGNED
        offset = end + (region.address - end) % step
        offsets.append(offset)
        end = offset + region.size
    return offsets, end


def _create(folder: Path | None) -> tuple[int, bool]:
    """A descriptor to write to, and whether it is memory."""
    if folder is None and hasattr(os, "memfd_create"):
        return os.memfd_create("nblaunch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), True
    fd, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    os.fchmod(fd, 0o400)  # nobody but root can open it for writing by way of /proc
    return fd, False


def _finish(fd: int, in_memory: bool) -> int:
    """The descriptor to hand out: nobody can write through it. Memory is sealed; of a file root could open another."""
    if in_memory:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd
    if not os.path.exists(link := f"/proc/self/fd/{fd}"):
        return fd
    readable = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    os.close(fd)
    return readable


def _copy(region: Region, fd: int, offset: int, give_up: bool) -> None:
    view = region.view()
    for start in range(0, region.size, _AT_ONCE):
        end = min(region.size, start + _AT_ONCE)
        at = start
        while at < end:
            at += os.pwrite(fd, view[at:end], offset + at)
        if give_up:
            _replace(region.address + start, region.address + end, fd, offset + start)


def _replace(start: int, end: int, fd: int, offset: int) -> None:
    """Have whole pages of this process be those of a file that holds the same, copied when they are written to."""
    first, last = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
    offset += first - start
    if first < last and offset % _PAGE == 0:
        with contextlib.suppress(OSError):  # a process may have so many mappings: these pages then stay there twice
            _map(first, last - first, mmap.MAP_PRIVATE | _MAP_FIXED, fd, offset)


# ------------------------------------------------------------------ mapping
def map_private(fd: int, size: int) -> memoryview:
    """The bytes of a segment, writable; what is written stays in this process. The descriptor may be closed at once."""
    # Python's own mmap keeps a descriptor for each mapping, and a notebook may hold thousands of results: so it maps
    # nothing, and the segment takes the place of that.
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    here = ctypes.c_ubyte.from_buffer(room)
    try:
        _map(ctypes.addressof(here), size, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE, fd, 0)
    finally:
        del here
    return memoryview(room)


def _map(address: int, size: int, flags: int, fd: int, offset: int) -> None:
    if _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset) == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
