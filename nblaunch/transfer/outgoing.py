"""What a pickler produces on its way into a parcel: the stream, and the memory and descriptors beside it."""

from __future__ import annotations

import bisect
import ctypes
import os
import pickle
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nblaunch.machine import segments
from nblaunch.machine.segments import Region
from nblaunch.transfer.tensors import MIN_BUFFER_BYTES, is_sparse
from nblaunch.wire import RANK

_MIN_VIEWED_BYTES = 1 << 20
"""A ``bytes`` or ``bytearray`` of this size or more is not copied on its way into the blob."""
_MAX_SMALL_BYTES = 1 << 20
"""Once a pickle holds as much in buffers below `MIN_BUFFER_BYTES`, further ones leave it: of a list of many, each
receiver would have its own copy."""
_MIN_OF_MANY_BYTES = 512
"""The smallest of those; what a receiver needs to find one takes 200 bytes."""


class View(NamedTuple):
    """Memory of an array, a tensor or another object."""

    span: Region
    unit: int = 0
    """Bytes of an element, for a tensor, which is received with a storage; else 0."""
    sparse: Any = None
    """An array with few elements in its span: if nothing else is sent of the span, a copy of them alone is sent."""


class _StandIn(bytearray):
    """A buffer that stands for a descriptor or a view."""

    meant: int | View = -1


@dataclass(slots=True)
class Outgoing:
    """Takes a pickle and the memory that leaves it; implements `tensors.BufferSink`."""

    is_here: bool = True
    """Whether all receivers are on this machine."""
    stream: list[bytes | memoryview] = field(default_factory=list)
    buffers: list[View | int] = field(default_factory=list)
    """Memory, or the index of a descriptor."""
    descriptors: list[int] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes by the name of a part."""
    from_gpu: int = 0
    lent: list[object] = field(default_factory=list)
    """Owners of shared memory and descriptors, to be kept alive until the receiver has them."""
    _owners: list[object] = field(default_factory=list)
    """Keep the views alive."""
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
    def takes_gradients(self) -> bool:
        return RANK not in os.environ

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
            self._owners.append(buffer)
            self.buffers.append(View(region_of(raw)))
            self._uncounted.append(region_of(raw))
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

    def add_strided(self, array: Any, span: Region, unit: int = 0) -> pickle.PickleBuffer:
        self._owners.append(array)
        if is_sparse(array, span):
            self._uncounted_bytes += int(array.nbytes)
            return _stand_in(View(span, unit, array))
        self._uncounted.append(span)
        return _stand_in(View(span, unit))

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

    def resolve(self) -> tuple[list[Region], list[tuple[int, View] | int]]:
        """Merge views that overlap, as they must overlap in the receiver too, and copy the sparse ones among the rest.

        Returns:
            The memory to send, and for each buffer the number of its region and the view, or its descriptor's index.
        """
        whole = segments.merged([each.span for each in self.buffers if isinstance(each, View)])
        starts = [region.address for region in whole]
        found = [
            each if isinstance(each, int) else (bisect.bisect_right(starts, each.span.address) - 1, each)
            for each in self.buffers
        ]
        users = Counter(each[0] for each in found if isinstance(each, tuple))
        for at, each in enumerate(found):
            if isinstance(each, tuple) and each[1].sparse is not None and users[each[0]] == 1:
                number, view = each
                whole[number] = self._copied(view.sparse)
                found[at] = number, View(whole[number], view.unit)
        return whole, found

    def _copied(self, array: Any) -> Region:
        import numpy

        segments.check_memory(int(array.nbytes))
        copy = numpy.ascontiguousarray(array)
        self._owners.append(copy)
        return Region(copy.ctypes.data, copy.nbytes)


def _stand_in(meant: int | View) -> pickle.PickleBuffer:
    stand_in = _StandIn(1)
    stand_in.meant = meant
    return pickle.PickleBuffer(stand_in)


def _memory_of(storage: Any) -> Region:
    return Region(storage.data_ptr(), storage.nbytes())


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
