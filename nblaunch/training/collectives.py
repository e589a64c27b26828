"""Nests of tensors over all ranks: gathered, reduced, sent.

What the ranks bring is compared before it is combined: where it does not fit, every rank raises and none waits.
Without other ranks each function gives the same types, and no collective runs.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nblaunch.errors import ArgumentError
from nblaunch.training.agreement import agree, exchange_bytes, is_inexact
from nblaunch.training.nests import children, is_container, map_nest
from nblaunch.training.world import collective_device, ensure_group, exchange, world
from nblaunch.transfer import pickling


# ------------------------------------------------------------------ gather
def gather(nest: Any, *, is_padding: bool = False) -> Any:
    """See `Accelerator.gather`. A rank with `is_padding` contributes no rows."""
    flat = {path: _rows(leaf, is_padding) for path, leaf in _flat(nest)}
    if not world().is_shared:
        _check_own(flat)
        return _rebuilt(nest, flat)
    return _gather(nest, flat, _exchanged(_surveyed(flat, _columns)))


def gather_for_metrics(nest: Any, *, is_padding: bool, as_objects: bool) -> Any:
    """See `Accelerator.gather_for_metrics`. Where one rank brings objects, such as an empty list, all send objects."""
    flat = {path: _rows(leaf, is_padding) for path, leaf in _flat(nest)}
    parts = flat.values()
    own = None
    if not as_objects and any(isinstance(leaf, Tensor) for leaf in parts):
        own = None if any(not isinstance(leaf, (Tensor, type(None))) for leaf in parts) else _surveyed(flat, _columns)
    by_rank = _exchanged(own) if world().is_shared else [own]
    if any(parts is None for parts in by_rank):
        return _gather_objects(nest, is_padding)
    return _gather(nest, flat, by_rank) if world().is_shared else gather(nest, is_padding=is_padding)


def _gather(nest: Any, flat: dict[str, Any], by_rank: list[Any]) -> Any:
    _compare("gather", by_rank)
    tensors = {path: flat[path] for path in sorted(flat) if flat[path] is not None}
    gathered = _gathered(tensors, [{path: part[path].shape for path in tensors} for part in by_rank])
    return _rebuilt(nest, gathered)


def _columns(tensor: Tensor) -> list[int]:
    return list(tensor.shape[1:])


def _rows(leaf: Any, is_padding: bool) -> Any:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return leaf
    rows = leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach()
    return rows[:0] if is_padding else rows


def _gathered(tensors: dict[str, Tensor], shapes: list[dict[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """All of them in one collective: their bytes one after the other, filled up to the longest rank's."""
    sizes = [
        {path: math.prod(shape[path]) * tensors[path].element_size() for path in tensors} for shape in shapes
    ]  # sizes in bytes, by rank
    longest = max(sum(size.values()) for size in sizes)
    if longest == 0:  # not one row anywhere
        return {path: torch.cat([own.new_empty(shape[path]) for shape in shapes]) for path, own in tensors.items()}
    device = _common_device(list(tensors.values()))
    buffer = torch.zeros(longest, dtype=torch.uint8, device=device)
    own = torch.cat([_as_bytes(tensor).to(device) for tensor in tensors.values()])
    buffer[: len(own)] = own
    received = [torch.empty_like(buffer) for _ in sizes]
    dist.all_gather(received, buffer)
    parts: dict[str, list[Tensor]] = {path: [] for path in tensors}
    for data, size, shape in zip(received, sizes, shapes, strict=True):
        cut = torch.split(data, [*size.values(), longest - sum(size.values())])[:-1]
        for path, piece in zip(tensors, cut, strict=True):
            parts[path].append(piece.clone().view(tensors[path].dtype).reshape(shape[path]))
    return {path: torch.cat(pieces).to(tensors[path].device) for path, pieces in parts.items()}


def _common_device(tensors: Sequence[Tensor]) -> torch.device:
    """Where all of them are if the group can send from there, else where it can."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) == 1:
        device = devices.pop()
        if f"{device.type}:" in dist.get_backend_config():
            return device
    return collective_device()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _gather_objects(value: Any, is_padding: bool) -> list[Any]:
    """Everybody's value by rank, or where they are lists or tuples their elements in one list; but for padding."""
    kept = [one for one, is_repeat in exchange((value, is_padding)) if not is_repeat]
    if kept and all(isinstance(one, (list, tuple)) for one in kept):
        return [element for one in kept for element in one]
    return kept


# ------------------------------------------------------------------ reduce
def reduce(nest: Any, reduction: str) -> Any:
    """See `Accelerator.reduce`."""
    if reduction not in ("sum", "mean", "max", "none"):
        raise ArgumentError(f'reduction={reduction!r}: must be "sum", "mean", "max" or "none"')
    if reduction == "none":
        return nest
    flat = dict(_flat(nest))
    if world().is_shared:
        _compare("reduce", _exchanged(_surveyed(flat, lambda tensor: list(tensor.shape))))
    else:
        _check_own(flat)
    tensors = {path: flat[path] for path in sorted(flat) if flat[path] is not None}
    for path, tensor in tensors.items():
        if reduction == "max" and tensor.is_complex():
            raise ArgumentError(f"reduction='max': {path} is complex, and complex numbers have no order")
    return _rebuilt(nest, {path: _over_ranks(tensor, reduction) for path, tensor in tensors.items()})


def _over_ranks(tensor: Tensor, reduction: str) -> Tensor:
    dtype, is_exact = tensor.dtype, not is_inexact(tensor.dtype)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.int64 if is_exact else dtype
    total = tensor.detach().to(device=_device_for(tensor), dtype=wide, copy=True).contiguous()
    if world().is_shared:
        op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
        dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, op)
    if reduction == "mean":
        total = total.double() / world().size if is_exact else total / world().size
    is_kept = not is_exact or reduction == "max" or (reduction == "sum" and dtype != torch.bool)
    return total.to(tensor.device, dtype if is_kept else total.dtype)


def _device_for(tensor: Tensor) -> torch.device:
    return _common_device([tensor]) if world().is_shared else tensor.device


# ------------------------------------------------------------------ broadcast
class _FromGpu:
    """A tensor that was on the sender's GPU: it goes to the receiver's own device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def broadcast(value: Any, src: Any, device: torch.device) -> Any:
    """See `Accelerator.broadcast`."""
    place = world()
    if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < place.size:
        raise ArgumentError(f"src={src!r}: must be a rank, from 0 to {place.size - 1}")
    if not place.is_shared:
        return value
    ensure_group()
    box: list[Any] = [_sendable(value) if place.rank == src else None]
    dist.broadcast_object_list(box, src, device=collective_device())
    data, trouble = box[0]
    if trouble:
        raise ArgumentError(f"broadcast: rank {src}'s value cannot be sent: {trouble}")
    if place.rank == src:
        return value
    return map_nest(lambda leaf: leaf.tensor.to(device) if isinstance(leaf, _FromGpu) else leaf, pickling.loads(data))


def _sendable(value: Any) -> tuple[bytes, str]:
    """The value as bytes; or why there are none, which every rank must hear of."""
    packed = map_nest(lambda leaf: _FromGpu(leaf.detach().cpu()) if getattr(leaf, "is_cuda", False) else leaf, value)
    try:
        return pickling.dump(lambda found: packed), ""
    except Exception as error:  # noqa: BLE001  # whatever a user's __reduce__ raises
        return b"", f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------ waiting
def wait() -> None:
    """See `Accelerator.wait_for_everyone`."""
    if world().is_shared:
        ensure_group()
        device = collective_device()
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


# ------------------------------------------------------------------ what a rank brings
class _Part(NamedTuple):
    """What a rank says of one leaf of its nest."""

    kind: str
    shape: tuple[int, ...]
    is_wrong: bool


def _surveyed(flat: dict[str, Any], compared: Callable[[Tensor], list[int]]) -> dict[str, _Part]:
    """What this rank brings, with the sizes that must be the same on all."""
    return {path: _described(leaf, compared) for path, leaf in flat.items()}


def _exchanged(own: dict[str, _Part] | None) -> list[Any]:
    return [pickle.loads(data) for data in exchange_bytes(pickle.dumps(own, protocol=5))]


def _compare(name: str, by_rank: Sequence[dict[str, _Part]]) -> None:
    """Raise on every rank, unless what they bring fits."""
    for rank, parts in enumerate(by_rank):
        for path, part in parts.items():
            if part.is_wrong:
                raise ArgumentError(f"{name}: {path} on rank {rank} is {part.kind}: make it a tensor")
    agree(name, [{path: part.kind for path, part in parts.items()} for parts in by_rank])


def _described(leaf: Any, compared: Callable[[Tensor], list[int]]) -> _Part:
    if leaf is None:
        return _Part("None", (), False)
    if not isinstance(leaf, Tensor):
        return _Part(f"a {type(leaf).__name__}", (), True)
    if leaf.layout != torch.strided:
        return _Part(f"a tensor of layout {leaf.layout}", (), True)
    name = str(leaf.dtype).removeprefix("torch.")
    return _Part(f"a {name} tensor of shape {_shape(compared(leaf), leaf.dim())}", tuple(leaf.shape), False)


def _shape(sizes: list[int], dims: int) -> str:
    return f"[{', '.join(['*'] * (dims - len(sizes)) + [str(size) for size in sizes])}]"


def _check_own(flat: dict[str, Any]) -> None:
    for path, leaf in flat.items():
        part = _described(leaf, lambda tensor: list(tensor.shape))
        if part.is_wrong:
            raise ArgumentError(f"{path} is {part.kind}: make it a tensor")


def _flat(nest: Any, path: str = "value") -> Iterator[tuple[str, Any]]:
    """The leaves with their paths, in the order in which `map_nest` meets them."""
    if not is_container(nest):
        yield path, nest
        return
    for key, part in children(nest):
        yield from _flat(part, f"{path}[{key!r}]")


def _rebuilt(nest: Any, results: dict[str, Any]) -> Any:
    paths = iter([path for path, _ in _flat(nest)])
    return map_nest(lambda leaf: results.get(next(paths), leaf), nest)
