"""Immutable files that another machine has sent, in this machine's memory: the parcels of tasks and results."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nblaunch.machine import segments
from nblaunch.machine.segments import Draft
from nblaunch.wire.link_messages import BlobPart, Part

PART_BYTES = 1 << 18
"""Of a blob in one message. ZeroMQ takes a connection that brings no whole message for 4 s for dead."""


@dataclass(slots=True)
class _Arriving:
    draft: Draft
    offsets: set[int] = field(default_factory=set)
    """Of the parts that have arrived: one may come twice, if two launches send the same data."""
    received: int = 0


class BlobStore:
    """See the module. Used from one thread."""

    def __init__(self) -> None:
        self._arriving: dict[str, _Arriving] = {}
        self._complete: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._complete

    def add(self, part: BlobPart, data: Part) -> bool:
        """Add a part; return True if its blob is complete."""
        if part.key in self._complete:
            return False
        if part.key not in self._arriving:
            self._arriving[part.key] = _Arriving(segments.create_file(part.size))
        blob = self._arriving[part.key]
        if part.offset in blob.offsets:
            return False
        written = os.pwrite(blob.draft.fd, data, part.offset)
        if written < len(data):
            raise OSError(errno.ENOSPC, "there is no room for what the notebook sends")
        blob.offsets.add(part.offset)
        blob.received += written
        if blob.received < part.size:
            return False
        del self._arriving[part.key]
        self._complete[part.key] = blob.draft.seal()
        return True

    def descriptor(self, key: str) -> int:
        """Return the descriptor of a complete blob, which stays the store's."""
        return self._complete[key]

    def take(self, key: str) -> int:
        """Return the descriptor of a complete blob, which the caller closes."""
        return self._complete.pop(key)

    def drop(self, keys: Sequence[str]) -> None:
        """Forget these blobs."""
        for key in keys:
            if key in self._complete:
                os.close(self._complete.pop(key))
            if key in self._arriving:
                self._arriving.pop(key).draft.close()

    def drop_of(self, prefix: str) -> None:
        """Forget the blobs whose keys begin so."""
        self.drop([key for key in (*self._complete, *self._arriving) if key.startswith(prefix)])

    def close(self) -> None:
        """Forget all."""
        self.drop([*self._complete, *self._arriving])


def parts_of(fd: int, key: str, size: int) -> Iterator[tuple[BlobPart, Sequence[Part]]]:
    """Yield the parts of a file, read one at a time."""
    for offset in range(0, size, PART_BYTES) or (0,):
        yield BlobPart(key, offset, size), [os.pread(fd, min(PART_BYTES, size - offset), offset)]
