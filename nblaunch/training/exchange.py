"""Exchange of objects and bytes between all ranks, and the error for ranks whose keys or kinds of values differ."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nblaunch.errors import ArgumentError
from nblaunch.training.topology import collective_device, ensure_group, world

T = TypeVar("T")
_FIRST_MESSAGE_BYTES = 1024
"""Size of each rank's first message: enough for some 25 numbers with their names."""


def exchange(value: T) -> list[T]:
    """Return every rank's value, by rank. A collective; `value` may be any object that pickles.

    Calls ``torch.distributed.all_gather_object``. Without other ranks it returns ``[value]``.
    """
    if not world().is_shared:
        return [value]
    ensure_group()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def exchange_results(action: Callable[[], T]) -> list[T]:
    """Return every rank's result of `action`, by rank. A collective; `action` must call none.

    Raises:
        Exception: On every rank, if `action` raises on one: there its own error, elsewhere one that names the rank.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:  # noqa: BLE001  # whatever it is, the other ranks must not wait
        error = raised
    by_rank = exchange((result, None if error is None else _described(error)))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(by_rank):
        if failure is not None:
            kind, text = failure
            raise kind(f"rank {rank}: {text}")
    return [other for other, _ in by_rank]  # type: ignore[misc]  # no rank raised


def _described(error: Exception) -> tuple[type[Exception], str]:
    """Return a type that every rank knows, with the error's message."""
    kind = next((kind for kind in (ArgumentError, OSError) if isinstance(error, kind)), RuntimeError)
    return kind, str(error) if type(error) is kind else f"{type(error).__name__}: {error}"


def exchange_bytes(data: bytes) -> list[bytes]:
    """Return every rank's bytes, by rank: one collective if all are short, else two."""
    ensure_group()
    limit = _FIRST_MESSAGE_BYTES - 8
    received = _all_gather_padded(len(data).to_bytes(8, "little") + data[:limit], _FIRST_MESSAGE_BYTES)
    lengths = [int.from_bytes(message[:8], "little") for message in received]
    if max(lengths) <= limit:
        return [message[8 : 8 + length] for message, length in zip(received, lengths, strict=True)]
    messages = _all_gather_padded(data, max(lengths))
    return [message[:length] for message, length in zip(messages, lengths, strict=True)]


def _all_gather_padded(data: bytes, size: int) -> list[bytes]:
    own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(collective_device())
    received = [torch.empty_like(own) for _ in range(world().size)]
    dist.all_gather(received, own)
    return [tensor_to_bytes(message) for message in received]


def check_same(name: str, by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise on every rank unless all ranks passed the same keys and kinds.

    Args:
        name: The function to name in the message.
        by_rank: For each rank its keys, each with a description of its value.

    Raises:
        ArgumentError: The ranks differ; the message says which rank lacks or has what.
    """
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
    """Return the content of a dense tensor. Works without NumPy, which torch does not require."""
    own = tensor.cpu().contiguous().resolve_conj().resolve_neg()
    return ctypes.string_at(own.data_ptr(), own.numel() * own.element_size()) if own.numel() else b""


def tensor_from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Rebuild on the CPU the tensor that `tensor_to_bytes` serialized."""
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def is_inexact(dtype: torch.dtype) -> bool:
    """Return True for floating-point and complex types."""
    return dtype.is_floating_point or dtype.is_complex
