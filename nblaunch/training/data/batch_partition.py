"""Partition of one stream of samples, or of batches, among ranks: exactly once, in equally many batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Share(NamedTuple):
    """One rank's batch of one round."""

    items: list[Any]
    is_padding: bool = False
    """Whether it repeats another rank's sample, because this rank would have no batch."""
    end: int = 0
    """Number of the stream's items in all rounds up to this one; 0 if not counted."""
    of_all: int = 0
    """Samples that all ranks have in this round, each counted once; 0 if unknown."""


class Division(NamedTuple):
    """What a position in the data depends on; the field names are keys of a loader's state."""

    world_size: int
    """Ranks that get different samples."""
    batch_size: int
    """Of the loader or its own batch sampler; 0 without one."""
    num_workers: int
    """Of a stream; 0 for a map-style dataset, whose order is the same for any number."""

    def __str__(self) -> str:
        workers = f", num_workers={self.num_workers}" if self.num_workers else ""
        return f"world_size={self.world_size}, batch_size={self.batch_size or None}{workers}"


def partition_samples(
    items: Iterable[Any], batch_size: int, ranks: int, *, drop_last: bool = False, begin: int = 0
) -> Iterator[list[Share]]:
    """Yield rounds of one batch for each rank, from one stream of samples.

    A round is the next `batch_size` × `ranks` samples. Each rank takes a contiguous part, so what is gathered by rank
    is in order again. The last round divides the rest; if that is less than one sample per rank, the round before
    gives it some. Only if that is impossible (batches of one, or fewer samples than ranks) a sample is repeated.

    Args:
        items: Samples or their indices; read one round ahead.
        batch_size: Samples in one rank's batch.
        ranks: Number of ranks.
        drop_last: Leave the last round out unless it is whole.
        begin: Where in the stream to begin: the ``end`` of an earlier round, for any number of ranks.
    """
    before: list[Any] = []
    for chunk in _chunks(islice(items, begin, None), batch_size * ranks):
        if len(chunk) < batch_size * ranks and drop_last:
            break
        if len(chunk) < ranks and len(before) >= 2 * ranks:
            both = before + chunk
            before, chunk = both[:-ranks], both[-ranks:]
        if before:
            begin += len(before)
            yield _divide(before, ranks, begin)
        before = chunk
    if before:
        yield _divide(before, ranks, begin + len(before))


def partition_batches(
    batches: Iterable[Any], ranks: int, *, drop_last: bool = False, begin: int = 0
) -> Iterator[list[Share]]:
    """Yield rounds of one batch for each rank, from one stream of complete batches of indices.

    Batches stay whole, except in a last round with fewer batches than ranks: its longest batches are halved until
    there is one for each rank. Only if they cannot be, a sample is repeated.

    Args:
        batches: What a batch sampler yields.
        ranks: Number of ranks.
        drop_last: Leave the last round out unless it is whole.
        begin: As for `partition_samples`, counted in batches.
    """
    for chunk in _chunks((list(batch) for batch in islice(batches, begin, None)), ranks):
        begin += len(chunk)
        if len(chunk) == ranks:
            yield _pad(chunk, [], ranks, begin)
        elif not drop_last:
            yield _pad(_halve(chunk, ranks), chunk[0][:1], ranks, begin)


def round_count(samples: int, batch_size: int, ranks: int, *, drop_last: bool = False) -> int:
    """Return how many rounds `partition_samples` makes of a number of samples."""
    whole, rest = divmod(samples, batch_size * ranks)
    return whole + (rest > 0 and not drop_last)


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item, and whether it is the last; reads one item ahead."""
    iterator = iter(items)
    for ahead in iterator:
        item = ahead
        for ahead in iterator:
            yield item, False
            item = ahead
        yield item, True


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _divide(chunk: list[Any], ranks: int, end: int) -> list[Share]:
    size, larger = divmod(len(chunk), ranks)
    bounds = [rank * size + min(rank, larger) for rank in range(ranks + 1)]
    parts = [chunk[begin:end] for begin, end in pairwise(bounds)]
    return _pad([part for part in parts if part], chunk[:1], ranks, end)


def _pad(parts: list[list[Any]], repeated: list[Any], ranks: int, end: int) -> list[Share]:
    of_all = sum(map(len, parts))
    padding = [Share(list(repeated), True, end, of_all) for _ in range(ranks - len(parts))]
    return [Share(part, end=end, of_all=of_all) for part in parts] + padding


def _halve(batches: list[list[Any]], ranks: int) -> list[list[Any]]:
    parts = list(batches)
    while len(parts) < ranks:
        longest = max(range(len(parts)), key=lambda place: len(parts[place]))
        part = parts[longest]
        if len(part) < 2:
            break
        parts[longest : longest + 1] = [part[: (len(part) + 1) // 2], part[(len(part) + 1) // 2 :]]
    return parts
