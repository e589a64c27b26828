"""`all_reduce_dict`: reduction of a dict of numbers and tensors over all ranks, in one collective while it is small.

Numbers travel as Python numbers. Each rank reduces them all itself, in the same order and types, to the same bits.
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
from nblaunch.machine.argument_checks import one_of
from nblaunch.training.exchange import check_same, exchange_bytes, is_inexact, tensor_from_bytes, tensor_to_bytes
from nblaunch.training.topology import world

_OPERATIONS = ("mean", "sum", "max", "min")
_NUMBER_TYPES = (float, int, bool)
"""Widest first: the widest type on any rank is the type of the result."""
_MAX_INT_BITS = 63
"""Of an int64, without its sign."""


class _Entry(NamedTuple):
    """A value as it travels."""

    kind: str
    """``a number``, or a tensor's dtype and shape. Must be the same on all ranks."""
    content: Any
    """The number or the tensor's bytes; None if the value cannot be reduced."""
    dtype: str = ""
    shape: tuple[int, ...] = ()


def all_reduce_dict(values: Mapping[Any, Any], op: str, device: torch.device, copies: int = 1) -> dict[Any, Any]:
    """Reduce `values` over all ranks, of each `copies` the first; see `Accelerator.all_reduce_dict`."""
    name = str(op).lower()
    op = one_of("op", {"avg": "mean"}.get(name, name if name in _OPERATIONS else op), _OPERATIONS)
    entries = {key: _pack(value) for key, value in values.items()}
    if not world().is_shared:
        by_rank = [entries]
    else:
        by_rank = [pickle.loads(data) for data in exchange_bytes(pickle.dumps(entries, protocol=5))]
    for rank, part in enumerate(by_rank):
        for key, entry in part.items():
            if entry.content is None:
                raise ArgumentError(
                    f"all_reduce_dict: {key!r} on rank {rank} is {entry.kind}: "
                    "give a float, an int64, a bool or a tensor"
                )
    check_same("all_reduce_dict", [{repr(key): entry.kind for key, entry in part.items()} for part in by_rank])
    return {key: _reduce([part[key] for part in by_rank[::copies]], op, key, device) for key in values}


def _pack(value: Any) -> _Entry:
    if not isinstance(value, (Tensor, numbers.Number)) and getattr(value, "size", 0) == 1:
        value = value.item()  # a NumPy bool
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return _Entry(f"a tensor of layout {value.layout}", None)
        name, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        return _Entry(f"a {name} tensor of shape {list(shape)}", tensor_to_bytes(value.detach()), name, shape)
    if isinstance(value, bool):
        return _Entry("a number", value)
    if isinstance(value, numbers.Integral):
        number = int(value)
        bits = max(number, ~number).bit_length()
        return _Entry("a number", number) if bits <= _MAX_INT_BITS else _Entry(f"an int of {bits} bits", None)
    if isinstance(value, numbers.Real):
        return _Entry("a number", float(value))
    return _Entry(f"{value!r:.60} of type {type(value).__name__}", None)


def _reduce(entries: Sequence[_Entry], op: str, key: Any, device: torch.device) -> Any:
    if entries[0].dtype:
        dtype = getattr(torch, entries[0].dtype)
        if dtype.is_complex and op in ("max", "min"):
            raise ArgumentError(f"op={op!r}: {key!r} is complex, and complex numbers have no order")
        tensors = [tensor_from_bytes(entry.content, dtype, entry.shape) for entry in entries]
        return _reduce_tensors(tensors, op).to(device)
    widest = next(kind for kind in _NUMBER_TYPES if any(type(entry.content) is kind for entry in entries))
    values = [widest(entry.content) for entry in entries]
    if op in ("sum", "mean"):
        total = sum(values)
        return total if op == "sum" else total / len(values)
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values) if op == "max" else min(values)


def _reduce_tensors(tensors: Sequence[Tensor], op: str) -> Tensor:
    """Reduce in the order of ranks and in the widest type, so that every rank gets the same bits."""
    dtype = tensors[0].dtype
    if op in ("max", "min"):
        result = tensors[0]
        for tensor in tensors[1:]:
            result = torch.maximum(result, tensor) if op == "max" else torch.minimum(result, tensor)
        return result
    widest = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    result = torch.zeros(tensors[0].shape, dtype=widest)
    for tensor in tensors:
        result += tensor
    if op == "mean":
        result = result / len(tensors) if is_inexact(dtype) else result.double() / len(tensors)
    return result if dtype == torch.bool or (op == "mean" and not is_inexact(dtype)) else result.to(dtype)
