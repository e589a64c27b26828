"""The layout of a parcel: what its receiver must know before it reads the pickle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nblaunch.machine.segments import Access


class Place(NamedTuple):
    """A range of bytes in one of a parcel's segments."""

    segment: int
    offset: int
    size: int


class StoragePart(NamedTuple):
    """The part of a storage that a tensor refers to; offset and size in bytes."""

    storage: Place
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a parcel's pickle and buffers are spread over its blob, segments and descriptors."""

    segments: tuple[Access, ...]
    """How the receiver maps each."""
    buffers: tuple[Place | StoragePart | int, ...]
    """For each buffer its place, or the index of a shared descriptor."""
    parts: tuple[str, ...]
    """The names of the objects that the pickle holds before the last, one after the other."""
    may_salvage: bool = False
    """Whether to rebuild what can be rebuilt, if some of it cannot."""
