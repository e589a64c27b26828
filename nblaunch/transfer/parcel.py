"""What users define and hold, on its way to another process: a pickle, and beside it memory that nobody copies again.

A parcel is a list of descriptors. The first is of the pickle; segments with what is large follow, and then the shared
memory that users themselves have made. The receiver maps the segments privately: one copy of the data is on the
machine, besides the sender's own, whatever the number of receivers, and each may write to what it got.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
import mmap
import os
import pickle
import struct
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nblaunch.machine import segments
from nblaunch.machine.segments import NoRoomError, Placed, Region, Segment
from nblaunch.transfer import pickling, tensors
from nblaunch.transfer.tensors import LEAST
from nblaunch.wire.channel import write_blob

_LEAST_OF_STREAM = 1 << 20
"""Bytes from which on a ``bytes`` or ``bytearray`` stands beside the pickle."""
_MOST_SPREAD = 2
"""A strided array is sent as the memory that it spans, if that is at most so many times its own size."""
_MOST_COMPARED = 10_000
"""Pairs of views that are searched for elements in common; where there are more, all are sent with what they span."""
_LENGTH = struct.Struct("!Q")


class Store(Protocol):
    """Puts memory into segments."""

    def place(self, regions: Sequence[Region], passing: Collection[Region]) -> Sequence[Placed]:
        """Put these regions, which are in order and do not overlap, into segments.

        Args:
            regions: What to put there.
            passing: Those of them that were made for this parcel, and will be gone when the next is packed.
        """


class Fresh:
    """A store that keeps nothing.

    Args:
        folder: Where to put a file if memory is short.
        give_up: See `nblaunch.machine.segments.write`.
    """

    def __init__(self, folder: Path, give_up: Callable[[Region], bool] | None = None) -> None:
        self._folder, self._give_up = folder, give_up

    def place(self, regions: Sequence[Region], passing: Collection[Region]) -> Sequence[Placed]:
        placed = dict(segments.write(regions, self._folder, self._give_up))
        return [placed[region] for region in regions]


class Place(NamedTuple):
    """Where something stands among the segments of a parcel."""

    segment: int
    offset: int
    size: int


class Part(NamedTuple):
    """Where a part of a storage stands."""

    storage: Place
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the receiver must know before it reads the pickle."""

    segments: int
    buffers: tuple[Place | Part | int, ...]
    """For each buffer its place, or the number of a descriptor."""
    stream: tuple[Place | int, ...]
    """The parts of the pickle: how many bytes stand here, or a place."""
    loads: int
    """How many objects are pickled, one after the other."""


class Parcel:
    """Something packed.

    Attributes:
        fds: The descriptors to send. `close` closes them.
        sizes: The bytes of each part that was named, and under "" those of all else.
        copied: Bytes that had to be copied for it.
        from_gpu: Bytes that came from a GPU.
    """

    def __init__(self, blob: int, placed: Sequence[Segment], outgoing: _Outgoing, copied: int) -> None:
        self.sizes, self.from_gpu, self.copied = outgoing.sizes, outgoing.from_gpu, copied
        self.fds = (blob, *(segment.fd for segment in placed), *outgoing.descriptors)
        self.close = weakref.finalize(self, _close, blob, [*placed, *outgoing.lent])


def _close(blob: int, held: list[object]) -> None:
    held.clear()  # a store may keep them
    os.close(blob)


# ------------------------------------------------------------------ packing
def pack(build: Callable[[pickling.Found], Any], store: Store, parts: Mapping[str, Any] | None = None) -> Parcel:
    """Pack what `build` returns; it gets the notes that the pickler takes while it works.

    Args:
        build: See `nblaunch.transfer.pickling.dump`.
        store: Puts what is large into segments.
        parts: Of it, those whose sizes are to be told, by name. Default: none.

    Raises:
        Exception: Whatever pickling raises; `nblaunch.transfer.pickling.explain` then says why.
        NoRoomError: There is no room for it; its ``sizes`` are those of the parts.
    """
    outgoing = _Outgoing()
    try:
        pickler = pickling.Pickler(outgoing, outgoing)
        for name, value in (parts or {}).items():
            pickler.dump(value)  # where it comes again, it is a reference to this
            outgoing.count(name)
        pickler.dump(build(pickler.found))
        outgoing.count("")
        return outgoing.finish(store, loads=len(parts or {}) + 1)
    except BaseException as error:
        if isinstance(error, NoRoomError):
            error.sizes = outgoing.sizes
        raise


class _StandIn(bytearray):
    """A buffer that stands for something else, which is in place of it among the buffers."""

    meant: int | _Spread = -1


class _Spread(NamedTuple):
    """An array or tensor, and the memory that it spans."""

    array: Any
    """Its elements, as numpy takes them."""
    span: Region
    unit: int
    """Bytes of an element of a tensor, which is to have a storage; 0 for an array."""

    @property
    def is_dense(self) -> bool:
        return self.span.size <= _MOST_SPREAD * int(self.array.nbytes)

    @property
    def size(self) -> int:
        """Bytes of what to send of it alone."""
        return self.span.size if self.is_dense else int(self.array.nbytes)

    def copy_to(self, place: Region) -> None:
        if self.is_dense:
            place.view()[:] = self.span.view()
        else:
            tensors.copy_elements(self.array, place.view())


@dataclass(slots=True)
class _Outgoing:
    """The pickle in parts, and what has left it."""

    stream: list[bytes | Region] = field(default_factory=list)
    buffers: list[Region | int | _Spread] = field(default_factory=list)
    """Memory, the number of a descriptor, or an array of which either its span or its elements are sent."""
    descriptors: list[int] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    from_gpu: int = 0
    held: list[object] = field(default_factory=list)
    """Who owns the regions."""
    storages: list[tuple[Any, Region]] = field(default_factory=list)
    """torch's, whose memory may go while they stay."""
    lent: list[object] = field(default_factory=list)
    """And what the receiver finds by its name or descriptor."""
    counted: list[Region] = field(default_factory=list)
    """The memory that is sent, as far as its size was told."""
    counted_bytes: int = 0
    uncounted: list[Region] = field(default_factory=list)
    uncounted_bytes: int = 0
    """Of what is sent besides."""

    # -------------------------------------------------------------- from the pickler
    def write(self, data: bytes) -> None:
        self.uncounted_bytes += len(data)
        if len(data) < _LEAST_OF_STREAM:
            self.stream.append(bytes(data))
        else:
            view = memoryview(data)  # while there is one, a bytearray cannot be resized
            self.held.append(view)
            self.stream.append(_region_of(view))

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if isinstance(raw.obj, _StandIn):
            self.buffers.append(raw.obj.meant)
        elif raw.nbytes < LEAST:
            return True
        else:
            region = _region_of(raw)
            self.held.append(buffer)
            self.buffers.append(region)
            self.uncounted.append(region)
        return False

    def hold(self, owner: Any) -> None:
        self.storages.append((owner, _memory_of(owner)))

    def lend(self, owner: object) -> None:
        self.lent.append(owner)

    def descriptor(self, fd: int, owner: object) -> pickle.PickleBuffer:
        self.descriptors.append(fd)
        self.lent.append(owner)
        return self._stand_in(len(self.descriptors) - 1)

    def spread(self, array: Any, address: int, size: int, unit: int = 0) -> pickle.PickleBuffer:
        self.held.append(array)
        spread = _Spread(array, Region(address, size), unit)
        if spread.is_dense:
            self.uncounted.append(spread.span)
        else:
            self.uncounted_bytes += spread.size
        return self._stand_in(spread)

    def _stand_in(self, meant: int | _Spread) -> pickle.PickleBuffer:
        stand_in = _StandIn(1)
        stand_in.meant = meant
        return pickle.PickleBuffer(stand_in)

    def came_from_gpu(self, size: int) -> None:
        self.from_gpu += size

    # -------------------------------------------------------------- from `pack`
    def count(self, name: str) -> None:
        """What has come since the last call belongs to this part."""
        before = self.counted_bytes
        if self.uncounted:  # there may be many regions, and many parts with none
            self.counted = segments.merged([*self.counted, *self.uncounted])
            self.counted_bytes = sum(region.size for region in self.counted)
        self.sizes[name] = self.sizes.get(name, 0) + self.counted_bytes - before + self.uncounted_bytes
        self.uncounted, self.uncounted_bytes = [], 0

    def finish(self, store: Store, loads: int) -> Parcel:
        self._check_storages()
        buffers, alone = self._buffers()
        regions = [part for part in (*buffers, *self.stream) if isinstance(part, Region)]
        whole = segments.merged(regions)
        placed = store.place(whole, alone)
        used = list({id(each.segment): each.segment for each in placed}.values())
        places = dict(_places(regions, whole, placed, used))
        layout = _Layout(
            len(used),
            tuple(
                _placed(places[part], made) if isinstance(part, Region) else part
                for part, made in zip(buffers, self.buffers, strict=True)
            ),
            tuple(places[part][0] if isinstance(part, Region) else len(part) for part in self.stream),
            loads,
        )
        head = pickle.dumps(layout, protocol=5)
        blob = write_blob(_LENGTH.pack(len(head)), head, *(part for part in self.stream if isinstance(part, bytes)))
        copied = sum(region.size for region, each in zip(whole, placed, strict=True) if each.is_new)
        return Parcel(blob, used, self, copied)

    def _check_storages(self) -> None:
        for storage, memory in self.storages:
            if _memory_of(storage) != memory:
                raise BufferError(
                    f"a tensor of {segments.in_words(memory.size)} was resized or freed while it was being packed, "
                    "by another object's __reduce__ or __getstate__ or by another thread"
                )

    def _buffers(self) -> tuple[list[Region | int], set[Region]]:
        """Memory and numbers; and where elements stand of whose arrays nothing else is sent."""
        spreads = {number: part for number, part in enumerate(self.buffers) if isinstance(part, _Spread)}
        large = [part.span for part in spreads.values() if part.is_dense and part.span.size >= LEAST]
        sent = segments.merged([*large, *(part for part in self.buffers if isinstance(part, Region))])
        apart = {number: part for number, part in spreads.items() if not _is_within(part.span, sent)}
        tied = _tied(apart, sent)
        alone = {number: part for number, part in apart.items() if number not in tied}
        places = self._room_for([part.size for part in alone.values()])
        found: list[Region | int] = [part.span if isinstance(part, _Spread) else part for part in self.buffers]
        for (number, part), place in zip(alone.items(), places, strict=True):
            part.copy_to(place)
            found[number] = place
        return found, set(places)

    def _room_for(self, sizes: Sequence[int]) -> list[Region]:
        """New memory, in one piece, as there may be many; no page of it is there before it is written to."""
        *starts, end = itertools.accumulate((_aligned(size) for size in sizes), initial=0)
        if not end:
            return []
        segments.check_memory(end)
        room = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.held.append(room)
        address = _region_of(room).address
        return [Region(address + start, size) for start, size in zip(starts, sizes, strict=True)]


def _aligned(size: int) -> int:
    return -(-size // segments.ALIGNED) * segments.ALIGNED


def _memory_of(storage: Any) -> Region:
    return Region(storage.data_ptr(), storage.nbytes())


def _is_within(span: Region, sent: Sequence[Region]) -> bool:
    at = bisect.bisect_right(sent, span.address, key=lambda region: region.address) - 1
    return at >= 0 and span.end <= sent[at].end


def _tied(apart: Mapping[int, _Spread], sent: Sequence[Region]) -> set[int]:
    """Those of the arrays, by number, that have an element in common with another one or with what is sent anyway."""
    whole: list[tuple[Region, Any, int]] = [(region, region.view(), -1) for region in sent]
    whole += ((part.span, part.array, number) for number, part in apart.items())
    whole.sort(key=lambda each: each[0])
    found = {-1}
    compared = 0
    for at, (span, array, number) in enumerate(whole):
        for following in range(at + 1, len(whole)):
            other_span, other, other_number = whole[following]
            if other_span.address >= span.end:
                break
            compared += 1
            if compared > _MOST_COMPARED:
                return set(apart)
            if (number not in found or other_number not in found) and tensors.may_share(array, other):
                found |= {number, other_number}
    return found


def _placed(places: tuple[Place, Place], made: object) -> Place | Part:
    """Where a region stands; of a tensor, in which storage: tensors that share memory are to share that."""
    place, whole = places
    if not isinstance(made, _Spread) or not made.unit:
        return place
    offset = place.offset - whole.offset
    askew = offset % made.unit  # torch counts offsets in elements
    return Part(Place(whole.segment, whole.offset + askew, whole.size - askew), offset - askew, place.size)


def _places(
    regions: Iterable[Region], whole: Sequence[Region], placed: Sequence[Placed], used: Sequence[Segment]
) -> Iterator[tuple[Region, tuple[Place, Place]]]:
    """Where each region stands, and where the one stands that was placed and that it is a part of."""
    numbers = {id(segment): number for number, segment in enumerate(used)}
    starts = [region.address for region in whole]
    for region in regions:
        at = bisect.bisect_right(starts, region.address) - 1
        number, offset = numbers[id(placed[at].segment)], placed[at].offset
        place = Place(number, offset + region.address - starts[at], region.size)
        yield region, (place, Place(number, offset, whole[at].size))


class _BufferInfo(ctypes.Structure):
    """Python's ``Py_buffer``."""

    _fields_ = [
        *(("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t)),
        *(("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int)),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "internal")),
    ]


def _region_of(data: object) -> Region:
    """Where the bytes of a contiguous object are; its owner must outlive this."""
    info = _BufferInfo()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(info), 0)
    region = Region(info.buf or 0, info.len)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(info))
    return region


# ------------------------------------------------------------------ unpacking
def unpack(fds: Sequence[int]) -> Any:
    """Rebuild what `pack` was given. The descriptors are closed.

    Raises:
        Exception: Whatever user code raises that is run by it.
    """
    try:
        blob = _mapped(fds[0])
        start = _LENGTH.size + _LENGTH.unpack_from(blob)[0]
        layout: _Layout = pickle.loads(blob[_LENGTH.size : start])
        last = 1 + layout.segments
        mapped = [_mapped(fd) for fd in fds[1:last]]

        def at(place: Place) -> memoryview:
            return mapped[place.segment][place.offset : place.offset + place.size]

        def parts() -> Iterator[memoryview]:
            end = start
            for part in layout.stream:
                if isinstance(part, Place):
                    yield at(part)
                else:
                    end += part
                    yield blob[end - part : end]

        @functools.cache
        def storage_at(place: Place) -> Any:
            return tensors.of_buffer(at(place))

        def arrived(part: Place | Part | int) -> Any:
            if isinstance(part, Part):
                return tensors.Window(storage_at(part.storage), part.offset, part.size)
            return at(part) if isinstance(part, Place) else fds[last + part]

        buffers: Any = map(arrived, layout.buffers)
        unpickler = pickle.Unpickler(_Stream(parts()), buffers=buffers)
        for _ in range(layout.loads):
            value = unpickler.load()
        return value
    finally:
        for fd in fds:
            os.close(fd)


def _mapped(fd: int) -> memoryview:
    return segments.map_private(fd, os.fstat(fd).st_size)


class _Stream:
    """Parts of a pickle as one file."""

    def __init__(self, parts: Iterator[memoryview]) -> None:
        self._parts = parts
        self._part = memoryview(b"")

    def read(self, size: int) -> bytes:
        data = bytearray(size)
        del data[self.readinto(memoryview(data)) :]
        return bytes(data)

    def readinto(self, into: Any) -> int:
        room, done = memoryview(into).cast("B"), 0
        while done < len(room) and self._fill():
            taken = min(len(self._part), len(room) - done)
            room[done : done + taken] = self._part[:taken]
            self._part = self._part[taken:]
            done += taken
        return done

    def readline(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n") and (byte := self.read(1)):
            line += byte
        return bytes(line)

    def _fill(self) -> bool:
        """Have something to read; False at the end."""
        while not self._part:
            part = next(self._parts, None)
            if part is None:
                return False
            self._part = part
        return True
