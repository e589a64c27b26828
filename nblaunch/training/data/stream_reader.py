"""Iterable datasets: one process reads a stream of samples, and each rank gets its part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, count, islice, repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from nblaunch.training.data.batch_partition import Share, partition_samples, with_last
from nblaunch.training.pytree import tree_map
from nblaunch.training.seeding import derived_seed, seeded
from nblaunch.training.topology import World, ensure_group, world

_END: Any = object()
LastShare = tuple[Share, bool]
"""A rank's batch, and whether it is the last."""


class _Message(NamedTuple):
    """What rank 0 sends, with its pass and round, so that a rank that is out of step can detect it."""

    turn: tuple[int, int]
    share: LastShare | None
    """None if the stream is empty."""


class StreamReader:
    """Reads a loader's stream, if this rank must, and yields this rank's part."""

    def __init__(self, loader: DataLoader[Any], place: World, copies: int, *, dispatch: bool, as_samples: bool) -> None:
        self.copies = copies
        self.place, self.dispatch, self.as_samples = place, dispatch, as_samples
        self._size, self._drop_last = loader.batch_size or 1, loader.drop_last
        self._is_batched = loader.batch_size is not None
        self._plain = _plain_copy(loader, as_samples=as_samples)
        self._passes = 0

    def shares(self, start: int, begin: int, generator: torch.Generator) -> Iterator[LastShare]:
        """Yield this rank's batches; with `as_samples`, which other ranks require, as uncollated samples.

        Args:
            start: Batches that this rank has taken in the pass.
            begin: Samples that all ranks have taken in the pass; 0 if unknown, then `start` counts.
            generator: Seeds the workers, or without workers what loading draws.
        """
        if not self.as_samples:
            batches = (Share([batch], end=number * self._size) for number, batch in enumerate(self._read(generator), 1))
            return islice(with_last(batches), begin // self._size or start, None)
        if self.dispatch and world().is_shared:
            ensure_group()
            self._passes += 1
            turns = zip(repeat(self._passes), count(start))
            return (
                self._send(self._rounds(start, begin, generator), turns) if world().rank == 0 else self._receive(turns)
            )
        return ((shares[self.place.rank], is_last) for shares, is_last in self._rounds(start, begin, generator))

    def _rounds(self, start: int, begin: int, generator: torch.Generator) -> Iterator[tuple[list[Share], bool]]:
        samples: Iterable[Any] = self._read(generator)
        if self._is_batched:
            samples = chain.from_iterable(samples)
        parts = partition_samples(samples, self._size, self.place.size, drop_last=self._drop_last, begin=begin)
        if not self._is_batched:  # an item may be a whole batch
            parts = ([share._replace(of_all=0) for share in shares] for shares in parts)
        return islice(with_last(parts), 0 if begin else start, None)

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

    def _send(
        self, rounds: Iterator[tuple[list[Share], bool]], turns: Iterator[tuple[int, int]]
    ) -> Iterator[LastShare]:
        is_last = False
        for shares, is_last in rounds:
            turn = next(turns)
            by_rank = [(share, is_last) for share in shares for _ in range(self.copies)]
            _scatter([None, *(_Message(turn, other) for other in by_rank[1:])])
            yield by_rank[0]
        if not is_last:  # the stream is empty, and the other ranks wait
            _scatter([_Message(next(turns), None)] * world().size)

    def _receive(self, turns: Iterator[tuple[int, int]]) -> Iterator[LastShare]:
        is_last = False
        while not is_last:
            message, turn = _scatter(None), next(turns)
            if message.turn != turn:
                raise RuntimeError(
                    f"rank {world().rank} is at batch {turn[1]} of its pass {turn[0]} over a stream, and rank 0 "
                    f"sent batch {message.turn[1]} of pass {message.turn[0]}: some ranks took batches that others did "
                    "not. Iterate it equally on every rank, including peeks at its first batch, or let each rank read "
                    "the stream: shard(loader, dispatch=False)"
                )
            if message.share is None:
                return
            is_last = message.share[1]
            yield message.share


def collated(loader: DataLoader[Any], samples: list[Any]) -> Any:
    """Return a rank's samples as the batch that the loader would have made of them."""
    batch = loader.collate_fn(samples if loader.batch_size is not None else samples[0])
    if not (loader.pin_memory and torch.cuda.is_available()):
        return batch
    return tree_map(lambda leaf: leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf, batch)


def _plain_copy(loader: DataLoader[Any], *, as_samples: bool) -> DataLoader[Any]:
    """Return a copy that iterates as torch does; with `as_samples` it yields uncollated samples."""
    copy: DataLoader[Any] = DataLoader.__new__(DataLoader)  # the constructor's arguments vary between torch versions
    vars(copy).update(vars(loader), _iterator=None)
    if as_samples:
        vars(copy).update(collate_fn=_identity, drop_last=False, pin_memory=False)
    return copy


def _identity(samples: Any) -> Any:
    return samples


def _scatter(messages: list[_Message | None] | None) -> Any:
    """Return rank 0's message for this rank. A collective."""
    received: list[Any] = [None]
    dist.scatter_object_list(received, messages, src=0)
    return received[0]
