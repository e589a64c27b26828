"""`all_reduce_dict`: a dict of figures over all ranks, in a single collective as long as it is small.

Numbers travel as Python's own, and each rank reduces all of them in the same order and types.
"""

from __future__ import annotations

import math
import numbers
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nblaunch.errors import ArgumentError
from nblaunch.training.agreement import agree, bytes_of, exchange_bytes, is_inexact, tensor_of
from nblaunch.training.world import world

_OPERATIONS = ("mean", "sum", "max", "min")
_NUMBERS = (float, int, bool)
"""The widest first: what a figure is on one rank it is on all."""
_MOST_BITS = 63
"""Of an int, which int64 holds beside its sign."""


class _Entry(NamedTuple):
    """A figure as it travels."""

    kind: str
    """``a number``, or a tensor's dtype and shape: what must be the same on all ranks."""
    content: Any
    """The number, or the tensor's bytes."""
    dtype: str = ""
    shape: tuple[int, ...] = ()


def all_reduce_dict(figures: Mapping[Any, Any], op: str, device: torch.device) -> dict[Any, Any]:
    """See `Accelerator.all_reduce_dict`."""
    if op not in _OPERATIONS:
        raise ArgumentError(f"op={op!r}: must be one of {', '.join(_OPERATIONS)}")
    entries = {key: _packed(value) for key, value in figures.items()}
    if not world().is_shared:
        by_rank = [entries]
    else:
        by_rank = [pickle.loads(data) for data in exchange_bytes(pickle.dumps(entries, protocol=5))]
    wrong = [(rank, key, e.kind) for rank, part in enumerate(by_rank) for key, e in part.items() if e.content is None]
    if wrong:
        rank, key, kind = wrong[0]
        raise ArgumentError(
            f"all_reduce_dict: {key!r} on rank {rank} is {kind}: give a float, an int64, a bool or a tensor"
        )
    agree("all_reduce_dict", [{repr(key): entry.kind for key, entry in part.items()} for part in by_rank])
    return {key: _reduced([part[key] for part in by_rank], op, key, device) for key in figures}


def _packed(value: Any) -> _Entry:
    if not isinstance(value, (Tensor, numbers.Number)) and getattr(value, "size", 0) == 1:
        value = value.item()  # NumPy's bool
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return _Entry(f"a tensor of layout {value.layout}", None)
        name, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        return _Entry(f"a {name} tensor of shape {list(shape)}", bytes_of(value.detach()), name, shape)
    if isinstance(value, bool):
        return _Entry("a number", value)
    if isinstance(value, numbers.Integral):
        number = int(value)
        bits = max(number, ~number).bit_length()
        return _Entry("a number", number) if bits <= _MOST_BITS else _Entry(f"an int of {bits} bits", None)
    if isinstance(value, numbers.Real):
        return _Entry("a number", float(value))
    return _Entry(f"{value!r:.60} of type {type(value).__name__}", None)


def _reduced(entries: Sequence[_Entry], op: str, key: Any, device: torch.device) -> Any:
    if entries[0].dtype:
        dtype = getattr(torch, entries[0].dtype)
        if dtype.is_complex and op in ("max", "min"):
            raise ArgumentError(f"op={op!r}: {key!r} is complex, and complex numbers have no order")
        tensors = [tensor_of(entry.content, dtype, entry.shape) for entry in entries]
        return _reduced_tensors(tensors, op).to(device)
    widest = next(kind for kind in _NUMBERS if any(type(entry.content) is kind for entry in entries))
    values = [widest(entry.content) for entry in entries]
    if op in ("sum", "mean"):
        total = sum(values)
        return total if op == "sum" else total / len(values)
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values) if op == "max" else min(values)


def _reduced_tensors(tensors: Sequence[Tensor], op: str) -> Tensor:
    """In the order of ranks and in the widest type, so that every rank has the same bits."""
    dtype = tensors[0].dtype
    if op in ("max", "min"):
        result = tensors[0]
        for tensor in tensors[1:]:
            result = torch.maximum(result, tensor) if op == "max" else torch.minimum(result, tensor)
        return result
    result = torch.zeros(tensors[0].shape, dtype=_widest(dtype))
    for tensor in tensors:
        result += tensor
    if op == "mean":
        result = result / len(tensors) if is_inexact(dtype) else result.double() / len(tensors)
    return result if dtype == torch.bool or (op == "mean" and not is_inexact(dtype)) else result.to(dtype)


def _widest(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64
