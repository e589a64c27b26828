"""Bytes between all ranks, and what to say where the ranks do not bring the same."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nblaunch.errors import ArgumentError
from nblaunch.training.world import collective_device, ensure_group, world

_ROOM = 1024
"""Bytes that each rank sends at first: as much as some 25 figures with their names need."""


def agree(name: str, by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise on every rank, with who lacks or has what, unless all brought the same."""
    if all(kinds == by_rank[0] for kinds in by_rank):
        return
    complaints = []
    for key in sorted(set().union(*by_rank)):
        kinds = [kinds.get(key, "missing") for kinds in by_rank]
        if len(set(kinds)) > 1:
            ranks = {kind: [str(rank) for rank, one in enumerate(kinds) if one == kind] for kind in kinds}
            complaints.append(f"{key} is " + ", ".join(f"{kind} on rank {' and '.join(ranks[kind])}" for kind in ranks))
    raise ArgumentError(f"{name}: the ranks do not bring the same: {'; '.join(complaints)}")


def exchange_bytes(data: bytes) -> list[bytes]:
    """Everybody's bytes, by rank: in one collective as long as all are short, else in two."""
    ensure_group()
    received = _all_gathered(len(data).to_bytes(8, "little") + data[: _ROOM - 8], _ROOM)
    lengths = [int.from_bytes(one[:8], "little") for one in received]
    if max(lengths) <= _ROOM - 8:
        return [one[8 : 8 + length] for one, length in zip(received, lengths, strict=True)]
    return [one[:length] for one, length in zip(_all_gathered(data, max(lengths)), lengths, strict=True)]


def _all_gathered(data: bytes, room: int) -> list[bytes]:
    device = collective_device()
    own = torch.frombuffer(bytearray(data.ljust(room, b"\0")), dtype=torch.uint8).to(device)
    received = [torch.empty_like(own) for _ in range(world().size)]
    dist.all_gather(received, own)
    return [bytes_of(one) for one in received]


def bytes_of(tensor: Tensor) -> bytes:
    """A dense tensor's content; without NumPy, which torch does not need."""
    own = tensor.cpu().contiguous().resolve_conj().resolve_neg()
    return ctypes.string_at(own.data_ptr(), own.numel() * own.element_size()) if own.numel() else b""


def tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """What `bytes_of` took apart, on the CPU."""
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether it holds floating-point or complex numbers."""
    return dtype.is_floating_point or dtype.is_complex
