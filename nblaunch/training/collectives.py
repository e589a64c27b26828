"""Collectives over pytrees and dicts of numbers: gather, reduce, broadcast, barrier.

The ranks compare what they pass before they combine it: on a mismatch every rank raises and none hangs. Without other
ranks each function returns the same types and runs no collective.
"""

from __future__ import annotations

import ctypes
import functools
import math
import numbers
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nblaunch.errors import ArgumentError
from nblaunch.machine.arguments import one_of, whole_number
from nblaunch.training.pytree import children, is_container, tree_map
from nblaunch.training.topology import collective_device, data_world, ensure_group, world
from nblaunch.transfer import pickling

T = TypeVar("T")
_FIRST_MESSAGE_BYTES = 1024
"""Size of each rank's first message: enough for some 25 numbers with their names."""


def exchange(value: T) -> list[T]:
    """Return every rank's value, by rank: any object that pickles. One collective if all are short, else two."""
    if not world().is_shared:
        return [value]
    ensure_group()
    data, limit = pickle.dumps(value, protocol=5), _FIRST_MESSAGE_BYTES - 8
    messages = _all_gather_padded(len(data).to_bytes(8, "little") + data[:limit], _FIRST_MESSAGE_BYTES)
    longest = max(int.from_bytes(message[:8], "little") for message in messages)
    by_rank = _all_gather_padded(data, longest) if longest > limit else [message[8:] for message in messages]
    return [pickle.loads(padded) for padded in by_rank]  # which ignores the padding


def exchange_results(action: Callable[[], T]) -> list[T]:
    """Return every rank's result of `action`, by rank. A collective; `action` must call none.

    If `action` raises on one rank, every rank raises: that one its own error, the others one that names the rank.
    """
    result: T | None = None
    error: Exception | None = None
    described = None
    try:
        result = action()
    except Exception as raised:  # noqa: BLE001  # whatever it is, the other ranks must not wait
        error = raised
        kind = next((kind for kind in (ArgumentError, OSError) if isinstance(error, kind)), RuntimeError)  # known there
        described = kind, str(error) if type(error) is kind else f"{type(error).__name__}: {error}"
    by_rank = exchange((result, described))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(by_rank):
        if failure is not None:
            kind, text = failure
            raise kind(f"rank {rank}: {text}")
    return [other for other, _ in by_rank]  # type: ignore[misc]  # no rank raised


def _all_gather_padded(data: bytes, size: int) -> list[bytes]:
    buffer = bytearray(size)
    buffer[: len(data)] = data
    own = torch.frombuffer(buffer, dtype=torch.uint8).to(collective_device())
    received = [torch.empty_like(own) for _ in range(world().size)]
    dist.all_gather(received, own)
    return [tensor_to_bytes(message) for message in received]


def check_same(name: str, by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise on every rank unless all ranks passed `name` the same keys, each with the same description of its value."""
    if all(kinds == by_rank[0] for kinds in by_rank):
        return
    complaints = []
    for key in sorted(set().union(*by_rank)):
        kinds = [kinds.get(key, "missing") for kinds in by_rank]
        if len(set(kinds)) > 1:
            ranks = {kind: [str(rank) for rank, other in enumerate(kinds) if other == kind] for kind in kinds}
            complaints.append(f"{key} is " + ", ".join(f"{kind} on rank {' and '.join(ranks[kind])}" for kind in ranks))
    raise ArgumentError(f"{name}: the ranks passed different values: {'; '.join(complaints)}")


def tensor_to_bytes(tensor: Tensor) -> bytes:
    own = tensor.cpu().contiguous().resolve_conj().resolve_neg()
    return ctypes.string_at(own.data_ptr(), own.numel() * own.element_size()) if own.numel() else b""


def tensor_from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


_NO_BATCH: Any = object()
_OPERATIONS = ("mean", "sum", "max", "min")
_NUMBER_TYPES = (float, int, bool)
"""Widest first: the widest type on any rank is the type of the result."""
_MAX_INT_BITS = 63


# ------------------------------------------------------------------ gather
def gather(tree: Any, *, is_padding: bool = False) -> Any:
    """See `Accelerator.gather`. A rank with `is_padding` contributes no rows."""
    flat = {path: _rows(leaf, is_padding) for path, leaf in _flatten(tree)}
    by_rank = exchange({path: _describe(leaf, free=1) for path, leaf in flat.items()})
    _check_parts("gather", by_rank)
    tensors = {path: flat[path] for path in sorted(flat) if flat[path] is not None}
    return _unflatten(
        tree, _gather_tensors(tensors, [{path: part[path].shape for path in tensors} for part in by_rank])
    )


def _rows(leaf: Any, is_padding: bool) -> Any:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return leaf
    rows = leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach()
    return rows[:0] if is_padding else rows


def _gather_tensors(tensors: dict[str, Tensor], shapes: list[dict[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Gather all tensors in one collective: their bytes concatenated, padded to the longest rank's."""
    if len(shapes) == 1:
        return tensors
    sizes = [
        {path: math.prod(shape[path]) * tensors[path].element_size() for path in tensors} for shape in shapes
    ]  # bytes, by rank
    longest = max(sum(size.values()) for size in sizes)
    if longest == 0:  # no rank has a row
        return {path: torch.cat([own.new_empty(shape[path]) for shape in shapes]) for path, own in tensors.items()}
    device = _common_device(list(tensors.values()))
    buffer = torch.zeros(longest, dtype=torch.uint8, device=device)
    own = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8).to(device) for tensor in tensors.values()])
    buffer[: len(own)] = own
    received = [torch.empty_like(buffer) for _ in sizes]
    dist.all_gather(received, buffer)
    pieces: dict[str, list[Tensor]] = {path: [] for path in tensors}
    for data, size, shape in zip(received, sizes, shapes, strict=True):
        cut = torch.split(data, [*size.values(), longest - sum(size.values())])[:-1]
        for path, piece in zip(tensors, cut, strict=True):
            pieces[path].append(piece.clone().view(tensors[path].dtype).reshape(shape[path]))
    return {path: torch.cat(parts).to(tensors[path].device) for path, parts in pieces.items()}


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _common_device(tensors: Sequence[Tensor]) -> torch.device:
    """Return the tensors' own device if they share one and the group can send from it, else one where it can."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) == 1:
        device = devices.pop()
        if f"{device.type}:" in dist.get_backend_config():
            return device
    return collective_device()


# ------------------------------------------------------------------ reduce
def reduce(tree: Any, reduction: str, copies: int = 1) -> Any:
    """See `Accelerator.reduce`. Of each `copies` ranks the first counts."""
    one_of("reduction", reduction, ("sum", "mean", "max"))
    flat = dict(_flatten(tree))
    _check_parts("reduce", exchange({path: _describe(leaf) for path, leaf in flat.items()}))
    tensors = {path: flat[path] for path in sorted(flat) if flat[path] is not None}
    for path, tensor in tensors.items():
        if reduction == "max" and tensor.is_complex():
            raise ArgumentError(f"reduction='max': {path} is complex, and complex numbers are not ordered")
    return _unflatten(tree, {path: _reduce_tensor(tensor, reduction, copies) for path, tensor in tensors.items()})


def _reduce_tensor(tensor: Tensor, reduction: str, copies: int) -> Tensor:
    dtype, is_exact = tensor.dtype, not _is_inexact(tensor.dtype)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.int64 if is_exact else dtype
    device = _common_device([tensor]) if world().is_shared else tensor.device
    total = tensor.detach().to(device=device, dtype=wide, copy=True).contiguous()
    if world().is_shared:
        if world().rank % copies and reduction != "max":
            total.zero_()
        op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
        dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, op)
    if reduction == "mean":
        total = (total.double() if is_exact else total) / data_world(copies).size
    keeps_dtype = not is_exact or reduction == "max" or (reduction == "sum" and dtype != torch.bool)
    return total.to(tensor.device, dtype if keeps_dtype else total.dtype)


# ------------------------------------------------------------------ reduce a dict
def all_reduce_dict(values: Mapping[Any, Any], op: str, device: torch.device, copies: int = 1) -> dict[Any, Any]:
    """Reduce `values` over all ranks, of each `copies` the first; see `Accelerator.all_reduce_dict`.

    One collective while they are small. Numbers travel as Python numbers; each rank reduces them all itself, in the
    same order and types, to the same bits.
    """
    name = str(op).lower()
    op = one_of("op", {"avg": "mean"}.get(name, name if name in _OPERATIONS else op), _OPERATIONS)
    by_rank = exchange({key: _pack(value) for key, value in values.items()})
    parts = [{repr(key): part for key, part in own.items()} for own in by_rank]
    _check_parts("all_reduce_dict", parts, "use a float, an int64, a bool or a tensor")
    return {key: _reduce_parts([part[key] for part in by_rank[::copies]], op, key, device) for key in values}


def _pack(value: Any) -> _Part:
    if not isinstance(value, (Tensor, numbers.Number)) and getattr(value, "size", 0) == 1:
        value = value.item()  # a NumPy bool
    if isinstance(value, Tensor):
        part = _describe(value)
        return part if part.is_wrong else part._replace(content=tensor_to_bytes(value.detach()), dtype=value.dtype)
    if isinstance(value, bool):
        return _Part("a number", content=value)
    if isinstance(value, numbers.Integral):
        number = int(value)
        bits = max(number, ~number).bit_length()
        return _Part("a number", content=number) if bits <= _MAX_INT_BITS else _Part(f"an int of {bits} bits", True)
    if isinstance(value, numbers.Real):
        return _Part("a number", content=float(value))
    return _Part(f"{value!r:.60} of type {type(value).__name__}", True)


def _reduce_parts(parts: Sequence[_Part], op: str, key: Any, device: torch.device) -> Any:
    if (dtype := parts[0].dtype) is not None:
        if dtype.is_complex and op in ("max", "min"):
            raise ArgumentError(f"op={op!r}: {key!r} is complex, and complex numbers are not ordered")
        return _reduce_in_order([tensor_from_bytes(part.content, dtype, part.shape) for part in parts], op).to(device)
    widest = next(kind for kind in _NUMBER_TYPES if any(type(part.content) is kind for part in parts))
    values = [widest(part.content) for part in parts]
    if op in ("sum", "mean"):
        total = sum(values)
        return total if op == "sum" else total / len(values)
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values) if op == "max" else min(values)


def _reduce_in_order(tensors: Sequence[Tensor], op: str) -> Tensor:
    dtype = tensors[0].dtype
    if op in ("max", "min"):
        return functools.reduce(torch.maximum if op == "max" else torch.minimum, tensors)
    widest = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    result = torch.zeros(tensors[0].shape, dtype=widest)
    for tensor in tensors:
        result += tensor
    if op == "mean":
        result = result / len(tensors) if _is_inexact(dtype) else result.double() / len(tensors)
    return result if dtype == torch.bool or (op == "mean" and not _is_inexact(dtype)) else result.to(dtype)


# ------------------------------------------------------------------ broadcast
class _CudaTensor:
    """A tensor from the sender's GPU, sent through the CPU. The receiver puts it on its own device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def broadcast(value: Any, src: Any, device: torch.device) -> Any:
    place = world()
    src = whole_number("src", src, least=0, most=place.size - 1)
    if not place.is_shared:
        return value
    ensure_group()
    message: list[Any] = [_serialize(value) if place.rank == src else None]
    dist.broadcast_object_list(message, src, device=collective_device())
    data, error = message[0]
    if error:
        raise ArgumentError(f"broadcast: rank {src}'s value could not be sent: {error}")
    if place.rank == src:
        return value
    return tree_map(lambda leaf: leaf.tensor.to(device) if isinstance(leaf, _CudaTensor) else leaf, pickle.loads(data))


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's tensors into those of the other ranks, one at a time; as bytes, so that any dtype works."""
    for tensor in tensors:
        data = tensor.detach().reshape(-1).contiguous().view(torch.uint8).to(collective_device(), copy=True)
        dist.broadcast(data, src=0)
        if world().rank != 0:
            with torch.no_grad():
                tensor.copy_(data.to(tensor.device).view(tensor.dtype).view(tensor.shape))


def _serialize(value: Any) -> tuple[bytes, str]:
    """Return the value's bytes, or the error text, which every rank must receive."""
    packed = tree_map(lambda leaf: _CudaTensor(leaf.detach().cpu()) if getattr(leaf, "is_cuda", False) else leaf, value)
    try:
        return pickling.dump(packed), ""
    except Exception as error:  # noqa: BLE001  # whatever a user's __reduce__ raises
        return b"", f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------ passes
def in_step(batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield batches until every rank has run out. A collective for each batch.

    For modules whose forward is a collective. A rank without batches repeats its last one, or another rank's.
    """
    iterator, latest = iter(batches), _NO_BATCH
    while True:
        batch = next(iterator, _NO_BATCH)
        latest = latest if batch is _NO_BATCH else batch
        states = exchange((batch is not _NO_BATCH, latest is not _NO_BATCH))
        if not any(has_batch for has_batch, _ in states):
            return
        if not all(has_any for _, has_any in states):
            source = next(rank for rank, (has_batch, _) in enumerate(states) if has_batch)
            sent = broadcast(batch, source, collective_device())
            latest = sent if latest is _NO_BATCH else latest
        yield latest, batch is _NO_BATCH


# ------------------------------------------------------------------ barrier
def barrier() -> None:
    if world().is_shared:
        ensure_group()
        device = collective_device()
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


# ------------------------------------------------------------------ what each rank passes
class _Part(NamedTuple):
    kind: str
    is_wrong: bool = False
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    content: Any = None
    """A number, or a tensor's bytes, if it travels along."""


def _check_parts(name: str, by_rank: Sequence[dict[str, _Part]], advice: str = "make it a tensor") -> None:
    for rank, parts in enumerate(by_rank):
        for path, part in parts.items():
            if part.is_wrong:
                raise ArgumentError(f"{name}: {path} on rank {rank} is {part.kind}: {advice}")
    check_same(name, [{path: part.kind for path, part in parts.items()} for parts in by_rank])


def _describe(leaf: Any, free: int = 0) -> _Part:
    """Describe what all ranks must pass alike; the sizes of the first `free` dimensions may differ."""
    if leaf is None:
        return _Part("None")
    if not isinstance(leaf, Tensor):
        return _Part(f"a {type(leaf).__name__}", True)
    if leaf.layout != torch.strided:
        return _Part(f"a tensor of layout {leaf.layout}", True)
    shape = ", ".join(["*"] * free + [str(size) for size in leaf.shape[free:]])
    return _Part(f"a {str(leaf.dtype).removeprefix('torch.')} tensor of shape [{shape}]", shape=tuple(leaf.shape))


def _flatten(tree: Any, path: str = "value") -> Iterator[tuple[str, Any]]:
    if not is_container(tree):
        yield path, tree
        return
    for key, part in children(tree):
        yield from _flatten(part, f"{path}[{key!r}]")


def _unflatten(tree: Any, results: dict[str, Any]) -> Any:
    paths = iter([path for path, _ in _flatten(tree)])
    return tree_map(lambda leaf: results.get(next(paths), leaf), tree)
