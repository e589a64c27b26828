"""Segments: large regions of memory, copied once into anonymous files that other processes map.

A segment is written once and sealed. Each process maps it privately: all share its pages until one of them writes, and
a write stays in the process that made it. Its file is a memfd; where the system has none, or a container's seccomp
filter refuses them, it is an unlinked file in the folder of temporary files.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from nblaunch.machine.limits import free_memory

_ALIGNMENT = 64
"""Bytes. A region's address in a segment and its address in memory are equal modulo this."""
_SEGMENT_BYTES = 4 << 20
"""Regions share segments of up to this size: a receiver that keeps one region keeps its whole segment."""
_SEGMENT_SHARE = 16
"""A segment may always have 1/16 of what is sent: descriptors are scarce."""
_CHUNK_BYTES = 64 << 20
_MIN_CHECKED_BYTES = 64 << 20
"""Below this size, free memory is not checked."""
_SEAL_TIMEOUT_S = 30.0
"""For Linux to be done with the pages of a file that is to be sealed, which no one has mapped for writing."""
_SEAL_RETRY_INTERVAL_S = 0.01
_RESERVE_BYTES = 256 << 20
"""Memory to leave free for other processes."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Few pages of a mapping are written to, so the whole must not count as committed memory."""
_MAP_FAILED = ctypes.c_void_p(-1).value


# ------------------------------------------------------------------ anonymous files
class Draft:
    """A file that is being written. End with `seal` or `close`."""

    def __init__(self, fd: int, reader: int | None = None) -> None:
        self.fd, self._reader = fd, reader
        """Opened while the file had a name: /proc, which could open it again, may be missing."""

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        view = memoryview(data).cast("B")
        try:
            while view:  # Python handles signals between chunks
                written = os.pwrite(self.fd, view[:_CHUNK_BYTES], offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            if error.errno == errno.ENOSPC and self._reader is not None:
                folder = tempfile.gettempdir()
                error.strerror = f"{error.strerror} in {folder}: free space there, or set TMPDIR to another directory"
            raise

    def seal(self) -> int:
        """Return a descriptor that nothing can be written through. Root could still reopen a file on disk."""
        if self._reader is None:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            deadline = time.monotonic() + _SEAL_TIMEOUT_S
            while True:
                try:
                    fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
                    return self.fd
                except OSError as error:  # EBUSY: Linux moves pages of the file, and has waited for less than a second
                    if error.errno != errno.EBUSY or time.monotonic() > deadline:
                        raise
                    time.sleep(_SEAL_RETRY_INTERVAL_S)
        os.close(self.fd)
        return self._reader

    def close(self) -> None:
        os.close(self.fd)
        if self._reader is not None:
            os.close(self._reader)


def create_file() -> Draft:
    """Open an anonymous file for writing."""
    try:
        return Draft(os.memfd_create("nblaunch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except AttributeError:
        pass  # macOS
    except OSError as error:  # EPERM by seccomp, ENOSYS, EACCES by a sysctl
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
    fd, path = tempfile.mkstemp(prefix="nblaunch-")
    try:
        reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        os.close(fd)
        raise
    finally:
        os.unlink(path)
    os.fchmod(fd, 0o400)  # or another process could open it for writing through /proc
    return Draft(fd, reader)


def sealed(pieces: Iterable[tuple[bytes | bytearray | memoryview, int]]) -> int:
    """Return a descriptor of an anonymous, sealed file with these pieces, each at its offset."""
    draft = create_file()
    try:
        for data, offset in pieces:
            draft.write(data, offset)
        return draft.seal()
    except BaseException:
        draft.close()
        raise


def is_sealed(fd: int) -> bool:
    """Return True if nothing can be written through a descriptor: false for memory that users share."""
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        return True
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)
    except (AttributeError, OSError):  # macOS; no memory file
        return False


def unsealed(data: bytes) -> int:
    """Return a descriptor of an anonymous file with this content, which may be written."""
    draft = create_file()
    draft.write(data, 0)
    if draft._reader is not None:
        os.close(draft._reader)
    return draft.fd


# ------------------------------------------------------------------ segments
class Region(NamedTuple):
    address: int
    size: int

    @property
    def end(self) -> int:
        return self.address + self.size

    def view(self) -> memoryview:
        return memory_at(self.address, self.size)


def memory_at(address: int, size: int) -> memoryview:
    """Return a writable view of the bytes at `address`; the memory's owner must outlive the view."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B", (size,)) if size else memoryview(b"")


class Segment:
    """A written segment; it owns its descriptor."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self._mapped: memoryview | None = None
        self.close = weakref.finalize(self, os.close, fd)

    def equals(self, offset: int, region: Region) -> bool:
        """Return True if the segment holds, at `offset`, what the region holds now."""
        if self._mapped is None:
            self._mapped = map_segment(self.fd, self.size)
        here = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._mapped)) + offset
        for start in range(0, region.size, _CHUNK_BYTES):  # Python handles signals between chunks
            if _libc.memcmp(here + start, region.address + start, min(_CHUNK_BYTES, region.size - start)):
                return False
        return True


class Placed(NamedTuple):
    segment: Segment
    offset: int
    is_new: bool
    """The region was copied by this call."""


class NoRoomError(OSError):
    """There is no room for a segment."""

    sizes: Mapping[str, int] = MappingProxyType({})


# ------------------------------------------------------------------ grouping
def merged(regions: Iterable[Region]) -> list[Region]:
    """Merge overlapping regions, so that memory shared here is shared in the receiver too."""
    whole: list[Region] = []
    for region in sorted(regions):
        if whole and region.address < whole[-1].end:
            whole[-1] = Region(whole[-1].address, max(whole[-1].end, region.end) - whole[-1].address)
        else:
            whole.append(region)
    return whole


def grouped(regions: Sequence[Region]) -> list[list[Region]]:
    """Group regions by the segment that they will share; one that is larger than a segment has its own."""
    most = max(_SEGMENT_BYTES, sum(region.size for region in regions) // _SEGMENT_SHARE)
    groups: list[list[Region]] = []
    room = -1
    for region in regions:
        if region.size > room:
            groups.append([])
            room = most
        groups[-1].append(region)
        room -= region.size
    return groups


# ------------------------------------------------------------------ room
def fits(size: int) -> bool:
    if size < _MIN_CHECKED_BYTES:
        return True
    memory = free_memory()
    return size <= memory - max(_RESERVE_BYTES, memory // 20)


def check_memory(size: int) -> None:
    """Raise NoRoomError unless `size` bytes of memory are free."""
    if not fits(size):
        free = in_words(free_memory())
        raise NoRoomError(errno.ENOMEM, f"not enough memory for {in_words(size)}: {free} free")


def in_words(size: float) -> str:
    """Format a number of bytes, such as ``1.2 GB``."""
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


# ------------------------------------------------------------------ writing
def write(regions: Sequence[Region]) -> list[Placed]:
    """Copy regions that do not overlap into new segments; return where each is. NoRoomError: there is no room."""
    check_memory(sum(region.size for region in regions))
    return [placed for group in grouped(regions) for placed in _write_segment(group)]


def _write_segment(regions: Sequence[Region]) -> list[Placed]:
    offsets, size = [], 0
    for region in regions:
        offsets.append(size + (region.address - size) % _ALIGNMENT)
        size = offsets[-1] + region.size
    fd = sealed((region.view(), offset) for region, offset in zip(regions, offsets, strict=True))
    segment = Segment(fd, size)
    return [Placed(segment, offset, True) for offset in offsets]


# ------------------------------------------------------------------ mapping
def map_segment(fd: int, size: int) -> memoryview:
    """Map a segment copy-on-write and return its bytes. The descriptor may be closed at once."""
    # Python's own mmap keeps a descriptor for each mapping, and a notebook may hold thousands of results. So mmap only
    # reserves the addresses and owns them, and the segment is mapped over them.
    reserved = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    here = ctypes.c_ubyte.from_buffer(reserved)
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    address = _libc.mmap(ctypes.addressof(here), size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    del here
    if address == _MAP_FAILED:
        raise OSError(error := ctypes.get_errno(), os.strerror(error))
    return memoryview(reserved)
