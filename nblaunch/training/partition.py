"""Partition of one stream of samples, or of batches, among ranks: exactly once, in equally many batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, count, islice, pairwise, repeat
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from nblaunch.training.pytree import tree_map
from nblaunch.training.seeding import derived_seed, seeded
from nblaunch.training.topology import World, ensure_group, world

T = TypeVar("T")


class Share(NamedTuple):
    items: list[Any]
    is_padding: bool = False
    """Whether it repeats another rank's sample, because this rank would have no batch."""
    end: int = 0
    """Number of the stream's items in all rounds up to this one; 0 if not counted."""
    own: int = 0
    """Samples of this rank that no other rank has; 0 if `of_all` is."""
    of_all: int = 0
    """Samples that all ranks have in this round, each counted once; 0 if unknown."""
    is_last: bool = False


class Division(NamedTuple):
    """What a position in the data depends on; the field names are keys of a loader's state."""

    world_size: int
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
    It begins at `begin`, the ``end`` of an earlier round for any number of ranks.
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
    """
    for chunk in _chunks((list(batch) for batch in islice(batches, begin, None)), ranks):
        begin += len(chunk)
        if len(chunk) == ranks:
            yield _pad(chunk, [], ranks, begin)
        elif not drop_last:
            yield _pad(_halve(chunk, ranks), chunk[0][:1], ranks, begin)


def round_count(samples: int, batch_size: int, ranks: int, *, drop_last: bool = False) -> int:
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
    padding = [Share(list(repeated), True, end, 0, of_all) for _ in range(ranks - len(parts))]
    return [Share(part, False, end, len(part), of_all) for part in parts] + padding


def _halve(batches: list[list[Any]], ranks: int) -> list[list[Any]]:
    parts = list(batches)
    while len(parts) < ranks:
        longest = max(range(len(parts)), key=lambda place: len(parts[place]))
        part = parts[longest]
        if len(part) < 2:
            break
        parts[longest : longest + 1] = [part[: (len(part) + 1) // 2], part[(len(part) + 1) // 2 :]]
    return parts


_END: Any = object()


class _Message(NamedTuple):
    """What rank 0 sends, with its pass and round, so that a rank that is out of step can detect it."""

    turn: tuple[int, int]
    share: Share | None


class StreamReader:
    """Reads a loader's stream, if this rank must, and yields this rank's part."""

    def __init__(self, loader: DataLoader[Any], place: World, copies: int, *, dispatch: bool, as_samples: bool) -> None:
        self.copies = copies
        self.place, self.dispatch, self.as_samples = place, dispatch, as_samples
        self._size, self._drop_last = loader.batch_size or 1, loader.drop_last
        self._is_batched = loader.batch_size is not None
        self._plain = _plain_copy(loader, as_samples=as_samples)
        self._passes = 0

    def shares(self, start: int, begin: int, generator: torch.Generator) -> Iterator[Share]:
        """Yield this rank's batches; with `as_samples`, which other ranks require, as uncollated samples.

        They begin after `begin` samples of all ranks; if that is 0, unknown, after `start` batches of this rank.
        """
        if not self.as_samples:
            batches = (Share([batch], end=number * self._size) for number, batch in enumerate(self._read(generator), 1))
            return (
                share._replace(is_last=is_last)
                for share, is_last in islice(with_last(batches), begin // self._size or start, None)
            )
        if self.dispatch and world().is_shared:
            ensure_group()
            self._passes += 1
            turns = zip(repeat(self._passes), count(start))
            return (
                self._send(self._rounds(start, begin, generator), turns) if world().rank == 0 else self._receive(turns)
            )
        return (shares[self.place.rank] for shares in self._rounds(start, begin, generator))

    def _rounds(self, start: int, begin: int, generator: torch.Generator) -> Iterator[list[Share]]:
        samples: Iterable[Any] = self._read(generator)
        if self._is_batched:
            samples = chain.from_iterable(samples)
        parts = partition_samples(samples, self._size, self.place.size, drop_last=self._drop_last, begin=begin)
        if not self._is_batched:  # an item may be a whole batch
            parts = ([share._replace(own=0, of_all=0) for share in shares] for shares in parts)
        for shares, is_last in islice(with_last(parts), 0 if begin else start, None):
            yield [share._replace(is_last=is_last) for share in shares]

    def _read(self, generator: torch.Generator) -> Iterator[Any]:
        """Yield all batches of the stream; without workers, each is loaded under a seed of its own."""
        self._plain.generator = generator
        if self._plain.num_workers:
            yield from self._plain
            return
        seeds = (derived_seed(generator.initial_seed(), number) for number in count())
        with seeded(next(seeds)):
            batches = iter(self._plain)
        for seed in seeds:
            with seeded(seed):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    def _send(self, rounds: Iterator[list[Share]], turns: Iterator[tuple[int, int]]) -> Iterator[Share]:
        is_empty = True
        for shares in rounds:
            turn, is_empty = next(turns), False
            by_rank = [share for share in shares for _ in range(self.copies)]
            _scatter([None, *(_Message(turn, other) for other in by_rank[1:])])
            yield by_rank[0]
        if is_empty:  # the other ranks wait
            _scatter([_Message(next(turns), None)] * world().size)

    def _receive(self, turns: Iterator[tuple[int, int]]) -> Iterator[Share]:
        is_last = False
        while not is_last:
            message, turn = _scatter(None), next(turns)
            if message.turn != turn:
                raise RuntimeError(
                    f"rank {world().rank} expects batch {turn[1]} of pass {turn[0]} of an iterable dataset, but rank 0 "
                    f"sent batch {message.turn[1]} of pass {message.turn[0]}: the ranks took different numbers of "
                    "batches. Take the same number on every rank (next(iter(loader)) counts), or let each rank read "
                    "the dataset: shard(loader, dispatch=False)"
                )
            if message.share is None:
                return
            is_last = message.share.is_last
            yield message.share


def collated(loader: DataLoader[Any], samples: list[Any]) -> Any:
    """Return a rank's samples as the batch that the loader would have made of them."""
    batch = loader.collate_fn(samples if loader.batch_size is not None else samples[0])
    if not (loader.pin_memory and torch.cuda.is_available()):
        return batch
    return tree_map(lambda leaf: leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf, batch)


def _plain_copy(loader: DataLoader[Any], *, as_samples: bool) -> DataLoader[Any]:
    copy: DataLoader[Any] = DataLoader.__new__(DataLoader)  # the constructor's arguments vary between torch versions
    vars(copy).update(vars(loader), _iterator=None)
    if as_samples:
        vars(copy).update(collate_fn=_identity, drop_last=False, pin_memory=False)
    return copy


def _identity(samples: Any) -> Any:
    return samples


def _scatter(messages: list[_Message | None] | None) -> Any:
    received: list[Any] = [None]
    dist.scatter_object_list(received, messages, src=0)
    return received[0]
