"""Pickling of torch storages and NumPy arrays: each memory once, as an out-of-band buffer that needs no copy.

torch's own pickling copies a storage into the stream for every tensor that uses it. Here a storage is pickled once, so
views and tied weights stay tied. All else of a tensor (sparse, quantized, subclasses, hooks) is left to torch.
"""

from __future__ import annotations

import copyreg
import ctypes
import mmap
import os
import pickle
import sys
import weakref
from typing import Any, NamedTuple, Protocol

from nblaunch.machine.segments import Region, memory_at
from nblaunch.wire import RANK

MIN_BUFFER_BYTES = 16 << 10
"""Smaller buffers stay in the pickle, as storages that torch allocates: it cannot resize memory that is not its own."""
_MIN_SLICED_BYTES = 1 << 20
"""Of a storage of this size or more, only what tensors refer to is sent."""
_ABOUT_MEMMAP = ("filename", "mode", "offset")
_MAX_SPREAD = 2
"""A strided array is sent as its span if that is at most this many times the size of its elements."""


class StorageSlice(NamedTuple):
    """The part of a received storage that one tensor refers to; offset and size in bytes."""

    storage: Any
    offset: int
    """A multiple of an element's size."""
    size: int


class BufferSink(Protocol):
    """Receives the out-of-band memory of a pickle."""

    @property
    def is_here(self) -> bool:
        """Whether all receivers are on this machine."""

    @property
    def takes_gradients(self) -> bool:
        """Whether tensors are sent with their gradients: to ranks they are, but no result is twice its size."""

    def is_small(self, size: int) -> bool:
        """Return True if a buffer of this size is to stay in the pickle."""

    def keep_storage(self, storage: object) -> None:
        """Keep a storage alive, and check that it still has the same memory when the buffer is copied."""

    def keep_until_received(self, owner: object) -> None:
        """Keep the owner of named shared memory alive until the receiver has attached it."""

    def add_strided(self, array: Any, span: Region, unit: int = 0) -> pickle.PickleBuffer:
        """Return a buffer for an array's memory: its span; of a sparse one that shares it with no other, its elements.

        Args:
            array: The array, or anything that NumPy accepts as one.
            span: The memory that it spans.
            unit: Bytes of an element, for a tensor: a `StorageSlice` is received in place of the buffer.
        """

    def add_descriptor(self, fd: int, owner: object) -> pickle.PickleBuffer:
        """Return a buffer that the receiver gets as a descriptor; keep its owner alive until then."""

    def count_from_gpu(self, size: int) -> None:
        """Count bytes that were copied from a GPU."""


class NullSink:
    """Discards a pickle and its buffers."""

    is_here = True
    takes_gradients = False  # new gradients alone are no reason to send a model again

    def write(self, data: Any, /) -> object: ...
    def take(self, buffer: Any, /) -> object: ...
    def keep_storage(self, storage: object) -> None: ...
    def keep_until_received(self, owner: object) -> None: ...
    def count_from_gpu(self, size: int) -> None: ...
    def is_small(self, size: int) -> bool:
        return not size

    def add_descriptor(self, *args: Any, **kwargs: Any) -> pickle.PickleBuffer:
        return pickle.PickleBuffer(b"")

    add_strided = add_descriptor


NULL_SINK = NullSink()


def reduce(obj: Any, buffers: BufferSink | None) -> tuple[Any, ...] | None:
    """Return the reduction of a storage, tensor or array whose memory is sent out of band, else None.

    Args:
        obj: Any object.
        buffers: Takes the memory; None for a pickle that holds everything.
    """
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and hasattr(torch, "Tensor") and isinstance(obj, torch.Tensor)
    if is_tensor and buffers is not None and buffers.takes_gradients and obj.requires_grad and obj.is_leaf:
        gradient = obj.grad
        if gradient is not None:
            make, made_of, *rest = _reduce(obj, buffers) or obj.__reduce_ex__(5)
            return with_gradient, (gradient, make, made_of), *rest
    return _reduce(obj, buffers)


def with_gradient(gradient: Any, make: Any, made_of: tuple[Any, ...]) -> Any:
    """Make a tensor, and give it its gradient."""
    tensor = make(*made_of)
    tensor.grad = gradient
    return tensor


def _reduce(obj: Any, buffers: BufferSink | None) -> tuple[Any, ...] | None:
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
                "the ranks divide this tensor, and this is one rank's part: take the whole, by full_tensor() or for "
                "a module by full_state(model) of nblaunch.training.parallelism, which every rank must call"
            )
        if obj is getattr(torch._utils, "_rebuild_tensor_v3", torch):
            return tensor_v3_rebuilder, ()
    if buffers is not None and numpy is not None and issubclass(kind, getattr(numpy, "ndarray", ())):
        return _reduce_array(obj, buffers) if kind is numpy.ndarray else _reduce_subclass(obj, numpy.ndarray)
    return None


def needs_unwrapping(obj: Any) -> bool:
    """Return True for a rank's DistributedDataParallel: its receiver may have no process group, and gets the module."""
    torch = sys.modules.get("torch")
    if torch is None or RANK not in os.environ or not hasattr(torch.nn, "parallel"):
        return False
    return issubclass(type(obj), torch.nn.parallel.DistributedDataParallel)


def unwrapped(module: Any) -> Any:
    """Return the module of a DistributedDataParallel."""
    return module


# ------------------------------------------------------------------ storages
def _reduce_storage(storage: Any, buffers: BufferSink | None) -> tuple[Any, ...] | None:
    if storage.device.type == "cuda":
        if buffers is not None:
            buffers.count_from_gpu(storage.nbytes())
        return storage_on_own_device, (storage.cpu(),)
    if storage.device.type != "cpu":
        return None
    size = storage.nbytes()
    if buffers is not None and size and storage.is_shared():
        shared = _reduce_shared(storage, buffers)
        if shared is not None:
            return shared
    memory = memory_at(storage.data_ptr(), size) if size else memoryview(b"")
    if buffers is None or buffers.is_small(size):
        return storage_of_bytes, (memory.tobytes(),)
    buffers.keep_storage(storage)
    return storage_of_slice, (buffers.add_strided(memory, Region(storage.data_ptr(), size), 1),)


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


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
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


def storage_of_bytes(data: bytes) -> Any:
    """Return a storage, allocated by torch, that holds these bytes."""
    import torch

    storage = torch.UntypedStorage(len(data))
    ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage


def storage_of_buffer(buffer: memoryview) -> Any:
    """Return a storage in the memory of a buffer."""
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def storage_of_slice(received: StorageSlice) -> Any:
    """Return a received storage, or a slice of it as a storage."""
    storage, offset, size = received
    return storage if size == storage.nbytes() else storage[offset : offset + size]


def shared_storage(fd: int, size: int) -> Any:
    """Attach a storage in shared memory by its descriptor."""
    import torch

    _received.add(_identity(fd))
    kind: Any = torch.UntypedStorage  # torch's stubs lack the next method
    return kind._new_shared_fd_cpu(fd, size)


def named_shared_storage(*handle: Any) -> Any:
    """Attach a storage in shared memory by its name."""
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
    if storage.nbytes() < _MIN_SLICED_BYTES or storage.is_shared():
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
    start = storage.data_ptr() + offset * unit
    elements = _as_array(start, span, shape, [stride * unit for stride in strides], unit)
    buffer = buffers.add_strided(elements, Region(start, span), unit)
    return tensor_of_slice, (buffer, tensor.dtype, shape, strides, span, *settings), *rest


def _as_array(start: int, span: int, shape: Any, strides: Any, unit: int) -> Any:
    """Return a tensor's elements as an array; without NumPy, its span."""
    try:
        import numpy
    except ImportError:
        return memory_at(start, span)
    return numpy.ndarray(shape, f"V{unit}", memory_at(start, span), 0, strides)


def tensor_of_slice(received: StorageSlice, dtype: Any, shape: Any, strides: Any, span: int, *settings: Any) -> Any:
    """Rebuild a tensor from its span, or from its elements alone."""
    import torch

    if received.size != span:
        strides = torch.empty(shape, device="meta").stride()
    offset = received.offset // dtype.itemsize
    storage = typed_storage(received.storage, dtype)
    return torch._utils._rebuild_tensor_v2(storage, offset, shape, strides, *settings)


# ------------------------------------------------------------------ arrays
def _reduce_array(array: Any, buffers: BufferSink) -> tuple[Any, ...] | None:
    """Reduce an array that NumPy would copy into the pickle; return None where NumPy's own reduction is right."""
    if array.dtype.hasobject or not array.nbytes:
        return None
    is_writable = array.flags.writeable
    is_large, is_whole = array.nbytes >= MIN_BUFFER_BYTES, array.flags.c_contiguous or array.flags.f_contiguous
    has_buffer = array.dtype.kind not in "mMV" or _has_buffer(array)
    is_view = getattr(array.base, "nbytes", 0) >= MIN_BUFFER_BYTES  # its base may be sent too
    file = _file_of(array) if buffers.is_here else None
    if file is None and not (not (is_whole and has_buffer) if is_large else is_view):
        if (is_whole and has_buffer) or (is_writable and (array.dtype.isnative or not has_buffer)):
            return None
        return array_of_copy, (array.copy(), is_writable)  # NumPy's reduction loses the flag and the byte order
    start = array.__array_interface__["data"][0]
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    low = start + sum(step for step in steps if step < 0)
    span = start + sum(step for step in steps if step > 0) + array.itemsize - low
    layout = (array.dtype, array.shape, start - low, array.strides, span, is_writable)
    if file is not None:
        return mapped_array, (*_place_in(file, low, span), *layout)
    return strided_array, (buffers.add_strided(array, Region(low, span)), *layout)


def _has_buffer(array: Any) -> bool:
    """Return False for an array that NumPy always copies into the pickle, such as one of dates."""
    try:
        return memoryview(array).nbytes >= 0
    except (ValueError, BufferError):
        return False


def _file_of(array: Any) -> Any:
    """Return the memmap that an array is a view of; None if there is none, its file has lost its name, or it is a copy.

    The mode ``c`` makes a copy.
    """
    numpy = sys.modules["numpy"]
    found: Any = None
    while isinstance(array, (numpy.ndarray, memoryview)):
        found = array if isinstance(array, numpy.memmap) else found
        array = array.obj if isinstance(array, memoryview) else array.base
    is_map = found is not None and isinstance(array, mmap.mmap) and found.mode != "c" and found.filename is not None
    return found if is_map and os.path.isfile(found.filename) else None


def _place_in(file: Any, address: int, size: int) -> tuple[Any, ...]:
    """Return the file's name, mode and identity, and where in it some memory of a memmap is.

    Raises:
        ValueError: The file was truncated, so that reading the memory would end the process.
    """
    offset = file.offset + address - file.__array_interface__["data"][0]
    status = os.stat(file.filename)
    if status.st_size < offset + size:
        raise ValueError(
            f"{file.filename} was truncated to {status.st_size} bytes, and its first {offset + size} are used: map it "
            "again"
        )
    mode = "r" if file.mode == "r" else "r+"  # w+ would empty the file
    return str(file.filename), mode, (status.st_dev, status.st_ino), offset, size


def mapped_array(filename: str, mode: Any, identity: tuple[int, int], start: int, size: int, *layout: Any) -> Any:
    """Map a part of a file as an array.

    Raises:
        ValueError: It is no longer the same file, or shorter.
    """
    import numpy

    status = os.stat(filename)
    if (status.st_dev, status.st_ino) != identity:
        raise ValueError(f"{filename} is another file than the one that was sent: map it again")
    if status.st_size < start + size:
        raise ValueError(f"{filename} is shorter than what is mapped of it")
    mapped: Any = _maps.get((identity, mode))  # views share a mapping: each has a descriptor
    if mapped is None or mapped.size < start + size:
        mapped = _maps[identity, mode] = numpy.memmap(filename, numpy.uint8, mode)
    return strided_array(memoryview(mapped)[start : start + size], *layout)


_maps: weakref.WeakValueDictionary[tuple[tuple[int, int], str], Any] = weakref.WeakValueDictionary()
"""Files that are mapped, by identity and mode."""


def _reduce_subclass(array: Any, plain: Any) -> tuple[Any, ...] | None:
    """Reduce an array of a subclass, such as a memmap, which NumPy would copy; None if it pickles in its own way."""
    kind = type(array)
    own = ["__reduce_ex__", "__reduce__", "__setstate__", "__getstate__"]
    finalizes = next(each for each in kind.__mro__ if "__array_finalize__" in vars(each))
    if finalizes.__module__.partition(".")[0] != "numpy":
        return None  # it can distinguish unpickling from taking a view
    if array.dtype.hasobject or kind in copyreg.dispatch_table:
        return None
    if any(getattr(kind, name, None) is not getattr(plain, name, None) for name in own):
        return None
    is_memmap = issubclass(kind, sys.modules["numpy"].memmap)
    about = {name: getattr(array, name) for name in _ABOUT_MEMMAP} if is_memmap else {}
    return array_of_subclass, (kind, plain.view(array, plain), about)


def array_of_subclass(kind: Any, array: Any, about: dict[str, Any]) -> Any:
    """Return an array as one of a subclass, with these attributes."""
    found = array.view(kind)
    vars(found).update(about)
    return found


def strided_array(
    buffer: memoryview, dtype: Any, shape: Any, offset: int, strides: Any, span: int, writeable: bool
) -> Any:
    """Rebuild an array in a buffer, which holds its span or its elements alone."""
    import numpy

    # The array's base would be the memoryview's, which can be written to.
    memory = numpy.frombuffer(buffer, numpy.uint8) if buffer.readonly else buffer
    if len(buffer) == span:
        array = numpy.ndarray(shape, dtype, memory, offset, strides)
    else:
        array = numpy.ndarray(shape, dtype, memory)
    array.flags.writeable = writeable
    return array


def array_of_copy(array: Any, writeable: bool) -> Any:
    """Return a received array, which is read-only if the sender's is."""
    array.flags.writeable = writeable
    return array


def is_sparse(array: Any, span: Region) -> bool:
    """Return True if few of an array's elements are in the memory that it spans."""
    return span.size > _MAX_SPREAD * int(array.nbytes)
