"""Parcels: objects on their way to another process, as a pickle and, beside it, memory that receivers map.

A parcel is a list of descriptors. The first is a blob with the pickle, then come segments with large buffers, then
shared memory that users created themselves. A receiver maps the segments privately. So the machine holds one copy of
the data besides the sender's own, for any number of receivers, and each may write to what it received.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nblaunch.errors import ArgumentError, PayloadError, text_of
from nblaunch.machine import segments
from nblaunch.machine.limits import free_memory
from nblaunch.machine.own_code import users_part
from nblaunch.machine.segments import NoRoomError, Placed, Region, Segment
from nblaunch.transfer import pickling
from nblaunch.transfer.definitions import LostReferenceError
from nblaunch.transfer.tensors import MIN_BUFFER_BYTES, MIN_SLICED_BYTES, BufferSink
from nblaunch.wire.channel import write_blob

_MIN_VIEWED_BYTES = 1 << 20
"""A ``bytes`` or ``bytearray`` of this size or more is not copied on its way into the blob."""
_MAX_SMALL_BYTES = 1 << 20
"""Once a pickle holds as much in buffers below `MIN_BUFFER_BYTES`, further ones leave it: of a list of many, each
receiver would have its own copy."""
_MIN_OF_MANY_BYTES = 512
"""The smallest of those; what a receiver needs to find one takes 200 bytes."""
_BUDGET_SHARE = 10
"""The cache may take 1/10 of the memory that would be free without it."""
_MIN_CACHED_BYTES = 64 << 10
"""Smaller segments are not cached."""
_MAX_SEGMENTS = 64
"""Each holds a descriptor."""


class _Place(NamedTuple):
    segment: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the receiver of a parcel must know before it reads the pickle."""

    segments: int
    buffers: tuple[_Place | int, ...]
    """For each buffer its place, or the index of a shared descriptor."""
    parts: tuple[str, ...]
    """The names of the objects that the pickle holds before the last, one after the other."""


class _StandIn(bytearray):
    number = -1


class Outgoing(BufferSink):
    """A pickle, and the memory and descriptors that leave it."""

    def __init__(self, is_here: bool = True) -> None:
        self.is_here = is_here
        self.stream: list[bytes | memoryview] = []
        self.buffers: list[Region | int] = []
        """Memory, or the index of a descriptor."""
        self.descriptors: list[int] = []
        self.lent: list[object] = []
        """Owners of shared memory and descriptors, to be kept alive until the receiver has them."""
        self.sizes: dict[str, int] = {}
        """Bytes by the name of a part."""
        self._owners: list[object] = []
        self._storages: list[Any] = []
        self._counted: list[Region] = []
        self._uncounted: list[Region] = []
        self._small_bytes = self._uncounted_bytes = 0

    # -------------------------------------------------------------- called by the pickler
    def write(self, data: Any, /) -> None:
        self._uncounted_bytes += len(data)
        is_large = len(data) >= _MIN_VIEWED_BYTES
        self.stream.append(memoryview(data) if is_large else bytes(data))  # a bytearray with a view cannot be resized

    def take(self, buffer: pickle.PickleBuffer, /) -> bool:
        raw = buffer.raw()
        if isinstance(raw.obj, _StandIn):
            self.buffers.append(raw.obj.number)
            return False
        region = region_of(raw)
        if self._is_small(region, raw.obj):
            self._small_bytes += region.size
            return True
        self._owners.append(buffer)
        self.buffers.append(region)
        self._uncounted.append(region)
        return False

    def _is_small(self, region: Region, owner: object) -> bool:
        """Return True for memory that stays in the pickle. Parts of a large whole do not: others may overlap them."""
        if region.size >= (MIN_BUFFER_BYTES if self._small_bytes < _MAX_SMALL_BYTES else _MIN_OF_MANY_BYTES):
            return False
        storage = self._storages[-1] if self._storages else None
        last = Region(0, 0) if storage is None else Region(storage.data_ptr(), storage.nbytes())
        whole = last.size if last.address <= region.address < last.end else 0
        return max(whole, getattr(getattr(owner, "base", None), "nbytes", 0)) < MIN_SLICED_BYTES or not region.size

    def keep_storage(self, storage: Any) -> None:
        self._storages.append(storage)

    def keep_until_received(self, owner: object) -> None:
        self.lent.append(owner)

    def add_descriptor(self, fd: int, owner: object) -> pickle.PickleBuffer:
        stand_in = _StandIn(1)
        stand_in.number = len(self.descriptors)
        self.descriptors.append(fd)
        self.lent.append(owner)
        return pickle.PickleBuffer(stand_in)

    # -------------------------------------------------------------- called by `pack`
    def count(self, name: str) -> None:
        """Add to the size of a part what was pickled since the last call; memory that parts share counts once."""
        if self._uncounted:  # merging is slow, and most of many parts have no region
            before = sum(region.size for region in self._counted)
            self._counted = segments.merged([*self._counted, *self._uncounted])
            self._uncounted_bytes += sum(region.size for region in self._counted) - before
        self.sizes[name] = self.sizes.get(name, 0) + self._uncounted_bytes
        self._uncounted, self._uncounted_bytes = [], 0


class Parcel:
    """A packed object: the descriptors to send, which `close` closes, and the bytes of its parts, by name.

    Under "" `sizes` has the bytes of all else. `copied` counts the bytes that were copied for this parcel.
    """

    def __init__(self, blob: int, placed: Sequence[Segment], outgoing: Outgoing, copied: int) -> None:
        self.sizes, self.copied = outgoing.sizes, copied
        self.fds = (blob, *(segment.fd for segment in placed), *outgoing.descriptors)
        self.close = weakref.finalize(self, _close, blob, [*placed, *outgoing.lent])


def _close(blob: int, held: list[object]) -> None:
    held.clear()  # a segment closes its descriptor unless the cache holds it too
    os.close(blob)


class _BufferInfo(ctypes.Structure):
    _fields_ = [
        *(("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t)),
        *(("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int)),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "internal")),
    ]


def region_of(data: object) -> Region:
    """Return the memory of a contiguous object; the object must outlive the region."""
    info = _BufferInfo()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(info), 0)
    region = Region(info.buf or 0, info.len)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(info))
    return region


# ------------------------------------------------------------------ the cache of sent data
class SentDataCache:
    """The segments that the last launches sent: sending the same data again takes a comparison, not a copy.

    Segments are immutable: changed data goes into a new one. With each launch the cache shrinks to its budget, a share
    of the free memory. Launches that wait or run share a segment, whatever the budget. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._known: dict[Region, tuple[weakref.ref[Segment], int]] = {}
        """Where each region was put last: the segment, which perhaps only launches still hold, and the offset."""
        self._kept: list[Segment] = []
        """Most recently used first."""

    def place(self, regions: Sequence[Region]) -> list[Placed]:
        """Put regions into segments, cached ones where their content is the same."""
        budget(0)  # report a bad setting before copying
        with self._lock:
            placed = {region: known for region in regions if (known := self.same(region)) is not None}
            new = [region for region in regions if region not in placed]
            for region in new:
                self._known.pop(region, None)
            if segments.fits(sum(region.size for region in new)):
                stay = {segment() for segment, _ in self._known.values()}  # without those whose data has changed
            else:
                stay = {each.segment for each in placed.values()}
            self._kept = [segment for segment in self._kept if segment in stay]
            placed.update(zip(new, segments.write(new), strict=True))
            used = {id(each.segment): each.segment for each in placed.values()}
            self._known = {region: known for region, known in self._known.items() if known[0]() is not None}
            self._known.update((region, (weakref.ref(at.segment), at.offset)) for region, at in placed.items())
            keep = [each for each in used.values() if each.size >= _MIN_CACHED_BYTES]
            self._kept = keep + [segment for segment in self._kept if id(segment) not in used]
            self._evict(budget(self.size))
            return [placed[region] for region in regions]

    def same(self, region: Region) -> Placed | None:
        """Return the copy of a region that the cache or a launch holds, if its content is the same."""
        with self._lock:
            reference, offset = self._known.get(region, (None, 0))
            segment = None if reference is None else reference()
            return None if segment is None or not segment.equals(offset, region) else Placed(segment, offset, False)

    @property
    def size(self) -> int:
        with self._lock:
            return sum(segment.size for segment in self._kept)

    def free(self) -> int:
        """Empty the cache and return its size in bytes. Running launches keep their data."""
        with self._lock:
            size = self.size
            self._kept.clear()
            return size

    def _evict(self, most: int) -> None:
        sizes = itertools.accumulate(segment.size for segment in self._kept[:_MAX_SEGMENTS])
        self._kept = self._kept[: sum(size <= most for size in sizes)]


def budget(kept: int) -> int:
    """Return the bytes that may be cached: ``$NBLAUNCH_KEEP_BYTES``, else 1/10 of the memory free without the cache."""
    chosen = os.environ.get("NBLAUNCH_KEEP_BYTES")
    if not chosen:
        return (free_memory() + kept) // _BUDGET_SHARE
    if not chosen.isdecimal():
        raise ArgumentError(f"NBLAUNCH_KEEP_BYTES={chosen!r}: must be a number of bytes; 0 disables the cache")
    return int(chosen)


sent_data_cache = SentDataCache()
os.register_at_fork(after_in_child=sent_data_cache.__init__)  # type: ignore[misc]  # its lock may be held


# ------------------------------------------------------------------ packing
def pack(
    build: Callable[[pickling.Found], Any],
    parts: Mapping[str, Any] | None = None,
    home: pickling.Home | None = None,
    *,
    is_cached: bool = False,
    is_here: bool = True,
) -> Parcel:
    """Pack the object that `build` returns: called with the definitions that the pickler finds in `parts`.

    The sizes of `parts` are measured, also for NoRoomError, and the receiver's errors name them. A cached parcel sends
    again what the cache of sent data holds.
    """
    outgoing = Outgoing(is_here)
    try:
        pickler = pickling.Pickler(outgoing, outgoing, home)
        for name, value in (parts or {}).items():
            pickler.dump(value)  # later occurrences are references to this one
            outgoing.count(name)
        pickler.dump(build(pickler.found))
        outgoing.count("")
        return _assemble(outgoing, tuple(parts or ()), is_cached)
    except NoRoomError as error:
        error.sizes = outgoing.sizes
        raise


def _assemble(outgoing: Outgoing, parts: tuple[str, ...], is_cached: bool) -> Parcel:
    """Put the out-of-band memory into segments, and the rest into a blob."""
    # Buffers that overlap here must overlap in the receiver too.
    whole = segments.merged([each for each in outgoing.buffers if isinstance(each, Region)])
    place = sent_data_cache.place if is_cached else segments.write
    placed = place(whole)
    used = list({id(each.segment): each.segment for each in placed}.values())
    numbers = {id(segment): number for number, segment in enumerate(used)}

    def place_of(buffer: Region) -> _Place:
        at = bisect.bisect_right(whole, buffer.address, key=lambda region: region.address) - 1
        offset = placed[at].offset + buffer.address - whole[at].address
        return _Place(numbers[id(placed[at].segment)], offset, buffer.size)

    buffers = tuple(each if isinstance(each, int) else place_of(each) for each in outgoing.buffers)
    layout = _Layout(len(used), buffers, parts)
    segments.check_memory(sum(map(len, outgoing.stream)))
    blob = write_blob(pickle.dumps(layout, protocol=5), *outgoing.stream)
    return Parcel(blob, used, outgoing, sum(region.size for region, at in zip(whole, placed, strict=True) if at.is_new))


# ------------------------------------------------------------------ unpacking
def unpack(fds: Sequence[int]) -> Any:
    """Rebuild a packed object from its descriptors, and close them."""
    try:
        with mmap.mmap(fds[0], 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as stream:
            return _rebuilt(stream, fds)
    finally:
        for fd in fds:
            os.close(fd)


def _rebuilt(stream: mmap.mmap, fds: Sequence[int]) -> Any:
    layout: _Layout = pickle.load(stream)
    last = 1 + layout.segments
    mapped = [segments.map_segment(fd, os.fstat(fd).st_size) for fd in fds[1:last]]

    def received(place: _Place | int) -> Any:
        if isinstance(place, int):
            return fds[last + place]
        return mapped[place.segment][place.offset : place.offset + place.size]

    buffers: Any = map(received, layout.buffers)
    unpickler: Any = pickle.Unpickler(stream, buffers=buffers)
    for name in layout.parts:
        try:
            unpickler.load()
        except (LostReferenceError, OSError, MemoryError):
            raise  # not for the content of this part
        except Exception as error:  # noqa: BLE001  # user code
            why = f"{type(error).__name__}: {text_of(error)}".rstrip(": ")
            cause = error.with_traceback(users_part(error.__traceback__) or error.__traceback__)
            raise PayloadError(f"`{name}` could not be rebuilt in the rank: {why}") from cause
    return unpickler.load()
