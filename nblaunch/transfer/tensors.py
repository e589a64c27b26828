"""Pickling of torch storages and NumPy arrays: each memory once, as an out-of-band buffer that needs no copy.

torch's own pickling copies a storage into the stream for every tensor that uses it. Here a storage is pickled once, so
views and tied weights stay tied. All else of a tensor (sparse, quantized, subclasses, hooks) is left to torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import sys
from typing import Any

from nblaunch.machine.segments import check_memory, memory_at
from nblaunch.wire import RANK

MIN_BUFFER_BYTES = 16 << 10
"""Smaller buffers stay in the pickle, as storages that torch allocates: it cannot resize memory that is not its own."""
MIN_SLICED_BYTES = 1 << 20
"""Of a storage of this size or more, only what tensors refer to is sent."""


class BufferSink:
    """Takes a pickle and the memory that leaves it. This one discards both."""

    is_here = True
    """All receivers are on this machine."""

    def write(self, data: Any, /) -> object:
        """Take the next bytes of the pickle."""

    def take(self, buffer: pickle.PickleBuffer, /) -> object:
        """Take a buffer; return True to leave it in the pickle."""

    def keep_storage(self, storage: Any) -> None:
        """Keep a storage alive until it is copied."""

    def keep_until_received(self, owner: object) -> None:
        """Keep the owner of named shared memory alive until the receiver has attached it."""

    def add_descriptor(self, fd: int, owner: object) -> pickle.PickleBuffer:
        """Return a buffer that the receiver gets as a descriptor; keep its owner alive until then."""
        return pickle.PickleBuffer(b"")


def reduce(obj: Any, buffers: BufferSink | None) -> tuple[Any, ...] | None:
    """Return the reduction of a storage, tensor or array whose memory is sent out of band, else None."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kind = type(obj)
    if torch is not None and hasattr(torch, "UntypedStorage"):  # another thread may be importing it
        if kind is torch.Tensor and buffers is not None:
            return _reduce_tensor(obj, buffers)
        if kind is torch.UntypedStorage:
            return _reduce_storage(obj, buffers)
        if kind is torch.TypedStorage:
            return typed_storage, (obj._untyped_storage, obj.dtype)
        if kind.__name__ == "DTensor" and issubclass(kind, torch.Tensor):
            raise TypeError(
                "this DTensor holds only one rank's shard: on every rank, call its full_tensor(), or for a module "
                "nblaunch.training.parallelism.full_state(model)"
            )
        if obj is getattr(torch._utils, "_rebuild_tensor_v3", torch):
            return tensor_v3_rebuilder, ()
    if buffers is not None and numpy is not None and issubclass(kind, getattr(numpy, "ndarray", ())):
        if issubclass(kind, numpy.memmap) and kind.__reduce__ is numpy.ndarray.__reduce__:
            copied = numpy.asarray(obj)
            return (buffers.is_here and _reduce_map(obj)) or _reduce_array(copied) or copied.__reduce_ex__(5)
        if kind is numpy.ndarray:
            return _reduce_array(obj)
    return None


def needs_unwrapping(obj: Any) -> bool:
    """Return True for a rank's DistributedDataParallel: its receiver may have no process group, and gets the module."""
    torch = sys.modules.get("torch")
    if torch is None or RANK not in os.environ or not hasattr(torch.nn, "parallel"):
        return False
    return issubclass(type(obj), torch.nn.parallel.DistributedDataParallel)


def unwrapped(module: Any) -> Any:
    return module


# ------------------------------------------------------------------ storages
def _reduce_storage(storage: Any, buffers: BufferSink | None) -> tuple[Any, ...] | None:
    if storage.device.type == "cuda":
        return storage_on_own_device, (storage.cpu(),)
    if storage.device.type != "cpu":
        return None
    size = storage.nbytes()
    if buffers is not None and size and storage.is_shared():
        shared = _reduce_shared(storage, buffers)
        if shared is not None:
            return shared
    if buffers is not None and size:
        buffers.keep_storage(storage)
    return storage_of, (pickle.PickleBuffer(memory_at(storage.data_ptr(), size)),)


def _reduce_shared(storage: Any, buffers: BufferSink) -> tuple[Any, ...] | None:
    """Reduce a storage that the user shares, so that it stays shared; return None for other shared memory."""
    from torch.multiprocessing import get_sharing_strategy

    if get_sharing_strategy() == "file_descriptor":
        fd, size = storage._share_fd_cpu_()
        if fd < 0 or not _is_users(fd):
            return None
        return shared_storage, (buffers.add_descriptor(fd, storage), size)
    if RANK in os.environ or storage.filename is not None:
        return None  # a rank would unlink the name, as its last user; or the user chose the file
    buffers.keep_until_received(storage)
    return named_shared_storage, storage._share_filename_cpu_()


_IMPORTING_PID = os.getpid()
"""In a rank that was forked off the notebook, the notebook's pid."""
_received: set[tuple[int, int]] = set()
"""Shared memory received from the notebook or its ranks: device and inode."""


def _is_users(fd: int) -> bool:
    """Return True if shared memory was created by this process, the notebook or a rank.

    Other shared memory holds batches of DataLoader workers: those are copied, as they may outnumber the descriptors.
    """
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return True  # no /proc
    return any(f"/torch_{pid}_" in target for pid in (_IMPORTING_PID, os.getpid())) or _identity(fd) in _received


def _identity(file: int | str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def typed_storage(storage: Any, dtype: Any) -> Any:
    """Return a TypedStorage, which torch's rebuild functions expect."""
    import torch

    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def tensor_v3_rebuilder() -> Any:
    """Return `rebuild_tensor_v3`, in place of torch's function for dtypes such as float8 and uint16."""
    return rebuild_tensor_v3


def rebuild_tensor_v3(storage: Any, *rest: Any) -> Any:
    """Call torch's ``_rebuild_tensor_v3``, which expects a typed storage, as `torch.load` makes it."""
    import torch

    return torch._utils._rebuild_tensor_v3(typed_storage(storage, torch.uint8), *rest)


def storage_of(buffer: bytes | bytearray | memoryview) -> Any:
    """Return a storage in the memory of a buffer; what the pickle itself held goes to memory of torch's own."""
    import torch

    if isinstance(buffer, memoryview):
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    storage = torch.UntypedStorage(len(buffer))
    ctypes.memmove(storage.data_ptr(), bytes(buffer), len(buffer))
    return storage


def shared_storage(fd: int, size: int) -> Any:
    import torch

    _received.add(_identity(fd))
    kind: Any = torch.UntypedStorage  # torch's stubs lack the next method
    return kind._new_shared_fd_cpu(fd, size)


def named_shared_storage(*handle: Any) -> Any:
    import torch

    kind: Any = torch.UntypedStorage  # torch's stubs lack the next method
    return kind._new_shared_filename_cpu(*handle)


def storage_on_own_device(storage: Any) -> Any:
    """Move a storage that was on a GPU: in a rank to the rank's GPU; the notebook leaves it on the CPU."""
    import torch

    return storage.cuda() if RANK in os.environ and torch.cuda.is_available() else storage


# ------------------------------------------------------------------ tensors
def _reduce_tensor(tensor: Any, buffers: BufferSink) -> tuple[Any, ...] | None:
    """Reduce a CPU tensor that may refer to little of its storage; return None where torch's own reduction is right."""
    import torch

    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    storage = tensor.untyped_storage()
    if storage.nbytes() < MIN_SLICED_BYTES or storage.is_shared():
        return None
    reduced: tuple[Any, ...] = tensor.__reduce_ex__(5)
    rebuild, arguments, *rest = reduced
    if rebuild is not torch._utils._rebuild_tensor_v2:
        return reduced
    _, offset, shape, strides, *settings = arguments
    if not tensor.numel():
        return rebuild, (typed_storage(torch.UntypedStorage(0), tensor.dtype), 0, shape, strides, *settings), *rest
    buffers.keep_storage(storage)
    unit = tensor.element_size()
    span = (sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1) * unit
    memory = pickle.PickleBuffer(memory_at(storage.data_ptr() + offset * unit, span))
    return tensor_of_span, (memory, tensor.dtype, shape, strides, *settings), *rest


def tensor_of_span(memory: Any, dtype: Any, *layout: Any) -> Any:
    """Rebuild a tensor in the memory that it spans."""
    import torch

    return torch._utils._rebuild_tensor_v2(typed_storage(storage_of(memory), dtype), 0, *layout)


# ------------------------------------------------------------------ arrays
def _reduce_array(array: Any) -> tuple[Any, ...] | None:
    """Reduce an array, unless NumPy's own reduction is right: it copies some, and loses byte order and writability."""
    if array.dtype.hasobject or not array.nbytes:
        return None
    is_plain = array.flags.writeable and array.dtype.isnative and array.dtype.kind not in "mMV"
    if is_plain and (array.flags.c_contiguous or array.flags.f_contiguous):
        return None
    is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    whole = array.T if is_fortran else array
    if not whole.flags.c_contiguous:
        check_memory(int(array.nbytes))
        whole = sys.modules["numpy"].ascontiguousarray(array)
    memory = pickle.PickleBuffer(whole.reshape(-1).view("u1"))
    return array_of, (memory, array.dtype, array.shape, "F" if is_fortran else "C", array.flags.writeable)


def array_of(memory: Any, dtype: Any, shape: Any, order: Any, writeable: bool) -> Any:
    import numpy

    array = numpy.ndarray(shape, dtype, memory, order=order)
    array.flags.writeable = writeable
    return array


def _reduce_map(array: Any) -> tuple[Any, ...] | None:
    """Reduce a map of a file by the file's name; None for a copy of one, or a view that cannot be mapped by itself."""
    if array.filename is None or array.mode == "c" or not (array.nbytes and os.path.isfile(array.filename)):
        return None
    file = sys.modules["numpy"].frombuffer(array._mmap, "u1")  # from a multiple of this granularity on
    begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    offset = begin + array.__array_interface__["data"][0] - file.__array_interface__["data"][0]
    steps = (max(0, (size - 1) * stride) for size, stride in zip(array.shape, array.strides, strict=True))
    end = offset + sum(steps) + array.itemsize
    if (size := os.path.getsize(array.filename)) < end:  # reading it would end the process by SIGBUS
        raise ValueError(f"{array.filename} was truncated to {size} bytes, but the map needs {end}: map it again")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        return None
    mode = "r+" if array.flags.writeable else "r"  # w+ would empty the file
    order = "C" if array.flags.c_contiguous else "F"
    filename = str(array.filename)
    return mapped, (type(array), filename, _identity(filename), array.dtype, mode, offset, array.shape, order)


def mapped(kind: Any, filename: str, identity: Any, dtype: Any, mode: Any, offset: int, shape: Any, order: Any) -> Any:
    import numpy

    if _identity(filename) != identity:
        raise ValueError(f"{filename} was replaced since it was sent: map it again")
    if os.path.getsize(filename) < offset + dtype.itemsize * int(numpy.prod(shape, dtype=numpy.int64)):
        raise ValueError(f"{filename} was truncated since it was sent: map it again")
    return numpy.memmap(filename, dtype, mode, offset, shape, order).view(kind)
