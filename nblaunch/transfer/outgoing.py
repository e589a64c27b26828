"""What a pickler produces on its way into a parcel: the stream in parts, and the memory and descriptors beside it."""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nblaunch.machine import segments
from nblaunch.machine.memory_maps import FileMaps
from nblaunch.machine.segments import Region
from nblaunch.transfer import tensors
from nblaunch.transfer.tensors import MIN_BUFFER_BYTES
from nblaunch.wire import rank_variables

_MIN_VIEWED_BYTES = 1 << 20
"""A ``bytes`` or ``bytearray`` of this size or more is not copied on its way into the blob."""
_MAX_SPREAD = 2
"""A strided array is sent as its span if that is at most this many times the size of its elements."""
_MAX_SMALL_BYTES = 1 << 20
"""Once a pickle holds as much in buffers below `MIN_BUFFER_BYTES`, further ones leave it: of a list of many, each
receiver would have its own copy."""
_MIN_OF_MANY_BYTES = 512
"""The smallest of those; what a receiver needs to find one takes 200 bytes."""
_MAX_COMPARED = 10_000
"""Pairs of views that are compared for shared elements; with more pairs, every view is sent as its span."""


class Strided(NamedTuple):
    """An array or tensor, and the memory that it spans."""

    array: Any
    """Its elements, as NumPy accepts them."""
    span: Region
    unit: int
    """Bytes of an element, for a tensor, which is received with a storage; 0 for an array."""

    is_of_file: bool = False
    """Receivers map the span from the user's file, so it is never copied."""

    @property
    def is_dense(self) -> bool:
        return self.is_of_file or self.span.size <= _MAX_SPREAD * int(self.array.nbytes)

    @property
    def size(self) -> int:
        """Bytes to send if it is sent alone."""
        return self.span.size if self.is_dense else int(self.array.nbytes)

    def copy_to(self, place: Region) -> None:
        """Copy the span, or the elements alone."""
        if self.is_dense:
            place.view()[:] = self.span.view()
        else:
            tensors.copy_elements(self.array, place.view())


class _StandIn(bytearray):
    """A buffer that stands for a descriptor or a strided array."""

    meant: int | Strided = -1


@dataclass(slots=True)
class Outgoing:
    """Takes a pickle and the memory that leaves it; implements `tensors.BufferSink`."""

    files: FileMaps
    stream: list[bytes | memoryview] = field(default_factory=list)
    buffers: list[Region | int | Strided] = field(default_factory=list)
    """Memory, the index of a descriptor, or an array that is sent as its span or as its elements."""
    descriptors: list[int] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes by the name of a part."""
    from_gpu: int = 0
    lent: list[object] = field(default_factory=list)
    """Owners of shared memory and descriptors, to be kept alive until the receiver has them."""
    _owners: list[object] = field(default_factory=list)
    """Keep the regions alive."""
    _storages: list[tuple[Any, Region]] = field(default_factory=list)
    """torch storages, which may lose their memory while they are alive."""
    _counted: list[Region] = field(default_factory=list)
    _counted_bytes: int = 0
    _small_bytes: int = 0
    _uncounted: list[Region] = field(default_factory=list)
    _uncounted_bytes: int = 0
    """Bytes outside regions that no part has been charged with."""

    # -------------------------------------------------------------- called by the pickler
    @property
    def is_here(self) -> bool:
        return self.files.is_here

    @property
    def takes_gradients(self) -> bool:
        return rank_variables.RANK not in os.environ

    def write(self, data: bytes) -> None:
        self._uncounted_bytes += len(data)
        is_large = len(data) >= _MIN_VIEWED_BYTES
        self.stream.append(memoryview(data) if is_large else bytes(data))  # a bytearray with a view cannot be resized

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if isinstance(raw.obj, _StandIn):
            self.buffers.append(raw.obj.meant)
        elif self.is_small(raw.nbytes):
            return True
        else:
            region = region_of(raw)
            self._owners.append(buffer)
            self.buffers.append(region)
            self._uncounted.append(region)
        return False

    def is_small(self, size: int) -> bool:
        if size >= MIN_BUFFER_BYTES or (self._small_bytes >= _MAX_SMALL_BYTES and size >= _MIN_OF_MANY_BYTES):
            return False
        self._small_bytes += size
        return True

    def keep_storage(self, storage: Any) -> None:
        self._storages.append((storage, _memory_of(storage)))

    def keep_until_received(self, owner: object) -> None:
        self.lent.append(owner)

    def add_descriptor(self, fd: int, owner: object) -> pickle.PickleBuffer:
        self.descriptors.append(fd)
        self.lent.append(owner)
        return _stand_in(len(self.descriptors) - 1)

    def add_strided(self, array: Any, span: Region, unit: int = 0, is_mapped: bool = False) -> pickle.PickleBuffer:
        self._owners.append(array)
        strided = Strided(array, span, unit, bool(self.files.identity_of(span, is_mapped)))
        if strided.is_dense:
            self._uncounted.append(strided.span)
        else:
            self._uncounted_bytes += strided.size
        return _stand_in(strided)

    def count_from_gpu(self, size: int) -> None:
        self.from_gpu += size

    # -------------------------------------------------------------- called by `parcel.pack`
    def count(self, name: str) -> None:
        """Add to the size of a part what was pickled since the last call; memory that parts share counts once."""
        before = self._counted_bytes
        if self._uncounted:  # merging is slow, and most of many parts have no region
            self._counted = segments.merged([*self._counted, *self._uncounted])
            self._counted_bytes = sum(region.size for region in self._counted)
        self.sizes[name] = self.sizes.get(name, 0) + self._counted_bytes - before + self._uncounted_bytes
        self._uncounted, self._uncounted_bytes = [], 0

    def check_storages(self) -> None:
        """Check that every storage still has its memory.

        Raises:
            BufferError: One was resized or freed.
        """
        for storage, memory in self._storages:
            if _memory_of(storage) != memory:
                raise BufferError(
                    f"a tensor of {segments.in_words(memory.size)} was resized or freed while it was being packed, "
                    "by another object's __reduce__ or __getstate__ or by another thread"
                )

    def resolve_buffers(self) -> tuple[list[Region | int], set[Region]]:
        """Decide which strided arrays are sent as their elements, and copy those.

        Returns:
            Each buffer's memory or descriptor index, and the copies among them.
        """
        strided = {number: part for number, part in enumerate(self.buffers) if isinstance(part, Strided)}
        large = [
            part.span
            for part in strided.values()
            if part.is_of_file or (part.is_dense and part.span.size >= _MIN_OF_MANY_BYTES)
        ]
        sent = segments.merged([*large, *(part for part in self.buffers if isinstance(part, Region))])
        apart = {number: part for number, part in strided.items() if not _is_within(part.span, sent)}
        tied = _tied(apart, sent)
        alone = {number: part for number, part in apart.items() if number not in tied}
        copies = self._allocate([part.size for part in alone.values()])
        resolved: list[Region | int] = [part.span if isinstance(part, Strided) else part for part in self.buffers]
        for (number, part), copy in zip(alone.items(), copies, strict=True):
            part.copy_to(copy)
            resolved[number] = copy
        return resolved, set(copies)

    def _allocate(self, sizes: Sequence[int]) -> list[Region]:
        """Allocate regions in one mapping, whose pages exist only once they are written to."""
        aligned = (-(-size // segments.ALIGNMENT) * segments.ALIGNMENT for size in sizes)
        *starts, end = itertools.accumulate(aligned, initial=0)
        if not end:
            return []
        segments.check_memory(end)
        mapping = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._owners.append(mapping)
        address = region_of(mapping).address
        return [Region(address + start, size) for start, size in zip(starts, sizes, strict=True)]


def _stand_in(meant: int | Strided) -> pickle.PickleBuffer:
    stand_in = _StandIn(1)
    stand_in.meant = meant
    return pickle.PickleBuffer(stand_in)


def _memory_of(storage: Any) -> Region:
    return Region(storage.data_ptr(), storage.nbytes())


def _is_within(span: Region, sent: Sequence[Region]) -> bool:
    at = bisect.bisect_right(sent, span.address, key=lambda region: region.address) - 1
    return at >= 0 and span.end <= sent[at].end


def _tied(apart: Mapping[int, Strided], sent: Sequence[Region]) -> set[int]:
    """Return the numbers of the arrays that share an element with another array, or with memory that is sent anyway."""
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
            if compared > _MAX_COMPARED:
                return set(apart)
            if (number not in found or other_number not in found) and tensors.may_share(array, other):
                found |= {number, other_number}
    return found


class _BufferInfo(ctypes.Structure):
    """CPython's ``Py_buffer``."""

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
