"""Going through nests of tensors: lists, tuples, named tuples, mappings and dataclasses, in any depth.

A nest comes back in its own types, and as the very same object where nothing in it changed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def samples_in(*nests: Any) -> int | None:
    """How many samples a batch has: the first dimension of the first tensor that has one; None without any."""
    return next((len(tensor) for nest in nests for tensor in tensors_in(nest) if tensor.dim()), None)


def to_device(
    batch: Any, device: torch.device | str, dtype: torch.dtype | None = None, non_blocking: bool = False
) -> Any:
    """The batch with every tensor on `device`.

    Args:
        batch: Any nest. Objects with a method ``to`` are asked to move themselves (to the device, without the
            dtype); everything else, such as strings, numbers and None, stays as it is.
        device: Where to.
        dtype: For floating-point tensors of any shape; complex ones take the complex type that matches it
            (float64: complex128, float32 and bfloat16: complex64). A complex dtype: floats take its real part's
            type. Integers and booleans keep theirs. Default: types stay.
        non_blocking: As ``Tensor.to`` takes it.
    """

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, dtype=dtype_for(value, dtype), non_blocking=non_blocking)
        if isinstance(value, PackedSequence):
            packed: Any = value  # its annotations leave a device out
            return packed.to(device, dtype=dtype_for(packed.data, dtype), non_blocking=non_blocking)
        return value.to(device) if moves_itself(value) else value

    return map_nest(move, batch)


def map_nest(change: Callable[[Any], Any], nest: Any) -> Any:
    """The nest with `change` applied to each leaf: to each thing that is no container.

    Containers are lists, deques, tuples, mappings (dict and its subclasses, UserDict and its) and dataclass instances;
    one with a method ``to`` of its own is a leaf, but for mappings. The nest itself is not altered.
    """
    if not is_container(nest):
        return change(nest)
    before = dict(children(nest))
    after = {key: map_nest(change, value) for key, value in before.items()}
    if all(after[key] is before[key] for key in before):
        return nest
    return _rebuilt(nest, after)


def leaves(nest: Any) -> Iterator[Any]:
    """Each thing in the nest that is no container, in order."""
    if not is_container(nest):
        yield nest
        return
    for _, value in children(nest):
        yield from leaves(value)


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nest, in order; those within a packed sequence too."""
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, PackedSequence):
            yield from (part for part in leaf if part is not None)


def children(container: Any) -> Iterator[tuple[Any, Any]]:
    """A container's parts, each with its key, index or field name."""
    if isinstance(container, Mapping):
        yield from container.items()
    elif isinstance(container, (list, tuple, deque)):
        yield from enumerate(container)
    else:
        fields = dataclasses.fields(container)
        yield from ((f.name, getattr(container, f.name)) for f in fields if hasattr(container, f.name))


def moves_itself(value: Any) -> bool:
    """Whether a thing has a method ``to`` of its own."""
    return not isinstance(value, type) and callable(getattr(value, "to", None))


def is_container(value: Any) -> bool:
    """Whether `map_nest` goes into a thing."""
    if isinstance(value, Mapping):
        return True
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return (is_dataclass or isinstance(value, (list, tuple, deque))) and not moves_itself(value)


def _rebuilt(container: Any, parts: dict[Any, Any]) -> Any:
    """A container of the same type with other parts."""
    if isinstance(container, tuple):
        make = getattr(container, "_make", type(container))  # a named tuple's own way
        return make(list(parts.values()))
    if isinstance(container, Mapping) and not hasattr(container, "__setitem__"):
        maker: Any = type(container)  # a read-only one, such as MappingProxyType
        return maker(parts)
    clone = copy.copy(container)
    for key, value in parts.items():
        if isinstance(container, (Mapping, list, deque)):
            clone[key] = value
        else:
            object.__setattr__(clone, key, value)  # a frozen dataclass has no other way
    return clone


def dtype_for(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """The type that `dtype`, asked for a batch or a module, means for this tensor; None: its own."""
    if dtype is None:
        return None
    if tensor.is_floating_point():
        return dtype.to_real()
    if tensor.is_complex():  # half of complex64's operations are missing for a complex pair of bfloat16
        return torch.complex64 if dtype is torch.bfloat16 else dtype.to_complex()
    return None
