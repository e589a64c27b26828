"""How one stream of samples, or of batches, is dealt out to ranks: exactly once, and in equally many batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Share(NamedTuple):
    """One rank's batch of one round."""

    items: list[Any]
    is_padding: bool = False
    """It repeats what another rank has, so that this rank has a batch at all."""
    end: int = 0
    """How many of the stream's items all ranks have got with this round; 0 where that is not counted."""


def deal(
    items: Iterable[Any], batch_size: int, ranks: int, *, drop_last: bool = False, begin: int = 0
) -> Iterator[list[Share]]:
    """Rounds of one batch for each rank, from one stream of samples.

    A round is the next `batch_size` × `ranks` samples, of which each rank takes a contiguous part, so that what is
    gathered by rank is in order again. The last round divides what is left; if that is less than one for each rank,
    the round before gives it some. Only where it cannot (batches of one, or fewer samples than ranks) a sample is
    repeated.

    Args:
        items: Samples or their indices; read one round ahead.
        batch_size: Samples in one rank's batch.
        ranks: How many ranks there are.
        drop_last: Leave the last round out unless it is whole.
        begin: Where in the stream to begin: the ``end`` of a round that was dealt out before, to any number of ranks.
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
            yield _shares(before, ranks, begin)
        before = chunk
    if before:
        yield _shares(before, ranks, begin + len(before))


def deal_batches(
    batches: Iterable[Any], ranks: int, *, drop_last: bool = False, begin: int = 0
) -> Iterator[list[Share]]:
    """Rounds of one batch for each rank, from one stream of ready batches of indices.

    Batches stay whole, but for a last round with fewer batches than ranks: the longest of them are halved until there
    is one for each rank. Only where they cannot be, a sample is repeated.

    Args:
        batches: What a batch sampler yields.
        ranks: How many ranks there are.
        drop_last: Leave the last round out unless it is whole.
        begin: As for `deal`, counted in batches.
    """
    for chunk in _chunks((list(batch) for batch in islice(batches, begin, None)), ranks):
        begin += len(chunk)
        if len(chunk) == ranks:
            yield [Share(batch, end=begin) for batch in chunk]
        elif not drop_last:
            yield _padded(_halved(chunk, ranks), chunk[0][:1], ranks, begin)


def rounds(samples: int, batch_size: int, ranks: int, *, drop_last: bool = False) -> int:
    """How many rounds `deal` makes of so many samples."""
    whole, rest = divmod(samples, batch_size * ranks)
    return whole + (rest > 0 and not drop_last)


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last; reads one ahead."""
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


def _shares(chunk: list[Any], ranks: int, end: int) -> list[Share]:
    size, larger = divmod(len(chunk), ranks)
    bounds = [rank * size + min(rank, larger) for rank in range(ranks + 1)]
    parts = [chunk[begin:end] for begin, end in pairwise(bounds)]
    return _padded([part for part in parts if part], chunk[:1], ranks, end)


def _padded(parts: list[list[Any]], repeated: list[Any], ranks: int, end: int) -> list[Share]:
    padding = [Share(list(repeated), True, end) for _ in range(ranks - len(parts))]
    return [Share(part, end=end) for part in parts] + padding


def _halved(batches: list[list[Any]], ranks: int) -> list[list[Any]]:
    parts = list(batches)
    while len(parts) < ranks:
        longest = max(range(len(parts)), key=lambda place: len(parts[place]))
        part = parts[longest]
        if len(part) < 2:
            break
        parts[longest : longest + 1] = [part[: (len(part) + 1) // 2], part[(len(part) + 1) // 2 :]]
    return parts
