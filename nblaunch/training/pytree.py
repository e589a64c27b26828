"""Pytrees of tensors: nested lists, tuples, named tuples, mappings and dataclasses.

A mapped pytree keeps its container types. If no leaf changed, the same object comes back.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def batch_size_of(*trees: Any) -> int | None:
    """Return the length of the first tensor that has a dimension; None without one."""
    return next((len(tensor) for tree in trees for tensor in tensors_in(tree) if tensor.dim()), None)


def parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def to_device(
    batch: Any, device: torch.device | str | None, dtype: torch.dtype | None = None, non_blocking: bool = False
) -> Any:
    """Return the pytree with every tensor on `device`; None keeps each where it is. Other leaves stay as they are.

    Objects with a method ``to`` move themselves. `dtype` is for floating-point tensors; complex ones take the complex
    type that matches it, and with a complex `dtype` floats take its real part's type.
    """

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, dtype=dtype_for(value, dtype), non_blocking=non_blocking)
        if isinstance(value, PackedSequence):
            packed: Any = value  # its annotations leave a device out
            return packed.to(device, dtype=dtype_for(packed.data, dtype), non_blocking=non_blocking)
        return value.to(device) if device is not None and _has_to(value) else value

    return tree_map(move, batch)


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return the pytree with `change` applied to each leaf. The original is not altered.

    Containers are lists, deques, tuples, mappings (dict, UserDict and their subclasses) and dataclass instances.
    Except for mappings, a container with a method ``to`` is a leaf.
    """
    if not is_container(tree):
        return change(tree)
    before = dict(children(tree))
    after = {key: tree_map(change, value) for key, value in before.items()}
    if all(after[key] is before[key] for key in before):
        return tree
    return _rebuilt(tree, after)


def tree_leaves(tree: Any) -> Iterator[Any]:
    if not is_container(tree):
        yield tree
        return
    for _, value in children(tree):
        yield from tree_leaves(value)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a pytree, in order, including those inside packed sequences."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, PackedSequence):
            yield from (part for part in leaf if part is not None)


def children(container: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(container, Mapping):
        yield from container.items()
    elif isinstance(container, (list, tuple, deque)):
        yield from enumerate(container)
    else:
        fields = dataclasses.fields(container)
        yield from ((f.name, getattr(container, f.name)) for f in fields if hasattr(container, f.name))


def is_container(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return (is_dataclass or isinstance(value, (list, tuple, deque))) and not _has_to(value)


def _has_to(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "to", None))


def _rebuilt(container: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(container, tuple):
        make = getattr(container, "_make", type(container))  # named tuples take their items one by one
        return make(list(parts.values()))
    if isinstance(container, Mapping) and not hasattr(container, "__setitem__"):
        maker: Any = type(container)  # a read-only mapping, such as MappingProxyType
        return maker(parts)
    clone = copy.copy(container)
    for key, value in parts.items():
        if isinstance(container, (Mapping, list, deque)):
            clone[key] = value
        else:
            object.__setattr__(clone, key, value)  # works on frozen dataclasses too
    return clone


def dtype_for(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the type that `dtype`, requested for a whole batch or module, means for this tensor; None to keep it."""
    if dtype is None:
        return None
    if tensor.is_floating_point():
        return dtype.to_real()
    if tensor.is_complex():  # torch has no complex bfloat16, and few operations on complex32
        return torch.complex64 if dtype is torch.bfloat16 else dtype.to_complex()
    return None
