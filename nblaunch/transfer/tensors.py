"""How the memory of tensors and arrays leaves a pickle, and comes back: as buffers, which need no copy.

torch's own pickling copies each storage into the stream, once for every tensor that uses it. Here a storage is pickled
once, whoever uses it, so that views and tied weights stay tied, and as a buffer where the pickle's receiver takes
buffers. All else of a tensor (sparse, quantized, subclasses, hooks) is reduced by torch's own way.
"""

from __future__ import annotations

import copyreg
import ctypes
import os
import pickle
import sys
from typing import Any, NamedTuple, Protocol

from nblaunch.machine.segments import memory_at

LEAST = 16 << 10
"""Bytes from which on a buffer stands outside the pickle; torch cannot resize a storage in memory that it did not
allocate itself, so smaller ones are copied into storages of torch's own."""
LEAST_CUT = 1 << 20
"""Bytes of a storage from which on only that is sent of it which tensors see."""
_MOST_WORK = 10_000
"""Steps in which it must be clear that two arrays have no element in common."""


class Window(NamedTuple):
    """The part of a storage that a tensor sees, as it arrives."""

    storage: Any
    offset: int
    """In bytes, a multiple of an element's."""
    size: int


class Buffers(Protocol):
    """Takes what leaves a pickle."""

    def hold(self, owner: object) -> None:
        """Keep a storage alive whose memory is given as a buffer; it must still have that when it is copied."""

    def lend(self, owner: object) -> None:
        """Keep the owner of memory that has a name alive until it has arrived."""

    def spread(self, array: Any, address: int, size: int, unit: int = 0) -> pickle.PickleBuffer:
        """A buffer of what an array spans, if that is little more than its elements or sent anyway; else of those.

        Args:
            array: The array, or whatever numpy takes for one.
            address: Where it begins.
            size: How many bytes it spans.
            unit: Bytes of an element of a tensor, for which a `Window` arrives instead of the buffer.
        """

    def descriptor(self, fd: int, owner: object) -> pickle.PickleBuffer:
        """A buffer that stands for a descriptor, and arrives as one; its owner must be kept until then."""

    def came_from_gpu(self, size: int) -> None:
        """Note that so many bytes had to be copied from a GPU."""


def reduce(obj: Any, buffers: Buffers | None) -> tuple[Any, ...] | None:
    """How to pickle a torch storage, or an array that numpy would copy; None for all else.

    Args:
        obj: What is to be pickled.
        buffers: Takes what leaves the pickle; None for a pickle that holds everything.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kind = type(obj)
    if torch is not None and hasattr(torch, "UntypedStorage"):  # it may still be half imported, by another thread
        if kind is torch.Tensor and buffers is not None:
            return _reduce_tensor(obj, buffers)
        if kind is torch.UntypedStorage:
            return _reduce_storage(obj, buffers)
        if kind is torch.TypedStorage:
            return typed, (obj._untyped_storage, obj.dtype)
        if obj is getattr(torch._utils, "_rebuild_tensor_v3", torch):
            return rebuilds_new_dtypes, ()
    if buffers is not None and numpy is not None and issubclass(kind, getattr(numpy, "ndarray", ())):
        return _reduce_array(obj, buffers) if kind is numpy.ndarray else _reduce_kind(obj, numpy.ndarray)
    return None


# ------------------------------------------------------------------ storages
def _reduce_storage(storage: Any, buffers: Buffers | None) -> tuple[Any, ...] | None:
    if storage.device.type == "cuda":
        if buffers is not None:
            buffers.came_from_gpu(storage.nbytes())
        return on_own_device, (storage.cpu(),)
    if storage.device.type != "cpu":
        return None
    size = storage.nbytes()
    if buffers is not None and size and storage.is_shared():
        shared = _reduce_shared(storage, buffers)
        if shared is not None:
            return shared
    memory = memory_at(storage.data_ptr(), size) if size else memoryview(b"")
    if buffers is None or size < LEAST:
        return of_bytes, (memory.tobytes(),)
    buffers.hold(storage)
    return of_window, (buffers.spread(memory, storage.data_ptr(), size, 1),)


def _reduce_shared(storage: Any, buffers: Buffers) -> tuple[Any, ...] | None:
    """What the user has put in shared memory stays shared; None for all else that torch calls so."""
    from torch.multiprocessing import get_sharing_strategy

    if get_sharing_strategy() == "file_descriptor":
        fd, size = storage._share_fd_cpu_()
        return (attached, (buffers.descriptor(fd, storage), size)) if fd >= 0 and _is_users(fd) else None
    if "NBLAUNCH_RANK" in os.environ or storage.filename is not None:
        return None  # the name would go with its last user, which is this rank; or it is a file of the user's
    buffers.lend(storage)
    return attached_by_name, storage._share_filename_cpu_()


_HERE = os.getpid()
"""Of a rank that is forked off the notebook, this is the notebook's."""
_came: set[tuple[int, int]] = set()
"""The shared memory that has come from the notebook or its ranks, by device and inode."""


def _is_users(fd: int) -> bool:
    """Whether shared memory was made in this process, or has come from one of ours.

    All else is from a DataLoader's workers, which put each batch in shared memory: nobody wants to share those, and
    there may be more of them than descriptors.
    """
    try:
        made = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return True  # the system does not tell
    return any(f"/torch_{pid}_" in made for pid in (_HERE, os.getpid())) or _identity(fd) in _came


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def typed(storage: Any, dtype: Any) -> Any:
    """A storage as a tensor's pickle has it."""
    import torch

    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def rebuilds_new_dtypes() -> Any:
    """What rebuilds tensors of float8, uint16 and the like."""
    return rebuild_new_dtype


def rebuild_new_dtype(storage: Any, *rest: Any) -> Any:
    """Torch's own, which takes such a storage as `torch.load` makes: one that has an untyped storage."""
    import torch

    return torch._utils._rebuild_tensor_v3(typed(storage, torch.uint8), *rest)


def of_bytes(data: bytes) -> Any:
    """A storage of torch's own that holds these bytes."""
    import torch

    storage = torch.UntypedStorage(len(data))
    ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage


def of_buffer(buffer: memoryview) -> Any:
    """A storage in the memory of this buffer."""
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def of_window(window: Window) -> Any:
    """A storage that has arrived, or a part of it as one."""
    storage, offset, size = window
    return storage if size == storage.nbytes() else storage[offset : offset + size]


def attached(fd: int, size: int) -> Any:
    """A storage in shared memory."""
    import torch

    _came.add(_identity(fd))
    make: Any = torch.UntypedStorage  # torch's types leave out what follows
    return make._new_shared_fd_cpu(fd, size)


def attached_by_name(*where: Any) -> Any:
    """A storage in shared memory that has a name."""
    import torch

    make: Any = torch.UntypedStorage
    return make._new_shared_filename_cpu(*where)


def on_own_device(storage: Any) -> Any:
    """What was on a GPU: in a rank on the rank's own, in the notebook on the host."""
    import torch

    return storage.cuda() if "NBLAUNCH_RANK" in os.environ and torch.cuda.is_available() else storage


# ------------------------------------------------------------------ tensors
def _reduce_tensor(tensor: Any, buffers: Buffers) -> tuple[Any, ...] | None:
    """A tensor that may see little of its storage, in plain memory of the host; None where torch's own way is right."""
    import torch

    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    storage = tensor.untyped_storage()
    if storage.nbytes() < LEAST_CUT or storage.is_shared():
        return None
    reduced: tuple[Any, ...] = tensor.__reduce_ex__(5)
    rebuild, arguments, *rest = reduced
    if rebuild is not torch._utils._rebuild_tensor_v2:
        return reduced
    _, offset, shape, strides, *settings = arguments
    if not tensor.numel():
        return rebuild, (typed(torch.UntypedStorage(0), tensor.dtype), 0, shape, strides, *settings), *rest
    buffers.hold(storage)
    unit = tensor.element_size()
    span = (sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1) * unit
    start = storage.data_ptr() + offset * unit
    elements = _elements(start, span, shape, [stride * unit for stride in strides], unit)
    seen = buffers.spread(elements, start, span, unit)
    return of_seen, (seen, tensor.dtype, shape, strides, span, *settings), *rest


def _elements(start: int, span: int, shape: Any, strides: Any, unit: int) -> Any:
    """A tensor's elements as an array; what it spans where there is no numpy."""
    try:
        import numpy
    except ImportError:
        return memory_at(start, span)
    return numpy.ndarray(shape, f"V{unit}", memory_at(start, span), 0, strides)


def of_seen(window: Window, dtype: Any, shape: Any, strides: Any, span: int, *settings: Any) -> Any:
    """A tensor of what it spanned, or of its elements alone."""
    import torch

    if window.size != span:
        strides = torch.empty(shape, device="meta").stride()
    offset = window.offset // dtype.itemsize
    return torch._utils._rebuild_tensor_v2(typed(window.storage, dtype), offset, shape, strides, *settings)


# ------------------------------------------------------------------ arrays
def _reduce_array(array: Any, buffers: Buffers) -> tuple[Any, ...] | None:
    """An array that numpy would copy into the pickle; None where numpy's own way is right."""
    is_large, is_whole = array.nbytes >= LEAST, array.flags.c_contiguous or array.flags.f_contiguous
    is_view = getattr(array.base, "nbytes", 0) >= LEAST  # what owns the memory may be sent too
    if array.dtype.hasobject or not array.nbytes or (is_whole if is_large else not is_view):
        return None
    start = array.__array_interface__["data"][0]
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    low = start + sum(step for step in steps if step < 0)
    span = start + sum(step for step in steps if step > 0) + array.itemsize - low
    buffer = buffers.spread(array, low, span)
    return strided, (buffer, array.dtype, array.shape, start - low, array.strides, span, array.flags.writeable)


def _reduce_kind(array: Any, plain: Any) -> tuple[Any, ...] | None:
    """An array of a subclass, such as a memmap, which numpy would copy; None for one that has its own way."""
    kind = type(array)
    own = ["__reduce_ex__", "__reduce__", "__setstate__", "__getstate__"]
    if kind.__module__.partition(".")[0] != "numpy":
        own.append("__array_finalize__")  # which is told whether the array is unpickled or a view
    if array.dtype.hasobject or kind in copyreg.dispatch_table:
        return None
    if any(getattr(kind, name, None) is not getattr(plain, name, None) for name in own):
        return None
    return of_kind, (kind, plain.view(array, plain))


def of_kind(kind: Any, array: Any) -> Any:
    """An array as one of a subclass."""
    return array.view(kind)


def strided(buffer: memoryview, dtype: Any, shape: Any, offset: int, strides: Any, span: int, writeable: bool) -> Any:
    """An array in the memory of this buffer, which holds what it spanned, or its elements alone."""
    import numpy

    if len(buffer) == span:
        array = numpy.ndarray(shape, dtype, buffer, offset, strides)
    else:
        array = numpy.ndarray(shape, dtype, buffer)
    array.flags.writeable = writeable
    return array


def copy_elements(array: Any, into: memoryview) -> None:
    """Put an array's elements there, one after the other."""
    import numpy

    numpy.copyto(numpy.ndarray(array.shape, array.dtype, into), array)


def may_share(one: Any, other: Any) -> bool:
    """Whether two arrays, or whatever numpy takes for one, have an element in common; true if that is hard to tell."""
    try:
        import numpy
    except ImportError:
        return True
    bound: Any = _MOST_WORK  # numpy's types know of none and of all
    return numpy.may_share_memory(numpy.asarray(one), numpy.asarray(other), max_work=bound)
