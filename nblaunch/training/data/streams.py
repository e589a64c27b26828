"""Iterable datasets: one process reads a stream of samples, and each rank gets its part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, count, islice, repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from nblaunch.training.data.batches import Share, deal, with_last
from nblaunch.training.nests import map_nest
from nblaunch.training.world import World, ensure_group

Note = tuple[Share, bool]
"""A rank's batch, and whether it is the last."""


class _Sent(NamedTuple):
    """What rank 0 sends: for which of its passes and rounds, so that a rank that is elsewhere can tell."""

    turn: tuple[int, int]
    note: Note | None
    """None where there is nothing at all."""


class Reader:
    """Reads a loader's stream, where this rank has to, and gives this rank's parts of it."""

    def __init__(self, loader: DataLoader[Any], place: World, *, dispatch: bool, as_samples: bool) -> None:
        self.place, self.dispatch, self.as_samples = place, dispatch, as_samples
        self._size, self._drop_last = loader.batch_size or 1, loader.drop_last
        self._is_batched = loader.batch_size is not None
        self._plain = _copy_of(loader, as_samples=as_samples)
        self._passes = 0

    def notes(self, start: int, begin: int, generator: torch.Generator) -> Iterator[Note]:
        """This rank's batches; samples come uncollated with `as_samples`, as they must where there are other ranks.

        Args:
            start: Batches that this rank has taken of the pass.
            begin: Samples that all ranks have taken of it; 0 where that is not known, and `start` counts.
            generator: What workers are seeded from.
        """
        if not self.as_samples:
            batches = (Share([batch], end=number * self._size) for number, batch in enumerate(self._read(generator), 1))
            return islice(with_last(batches), begin // self._size or start, None)
        if self.dispatch and self.place.is_shared:
            return self._dispatched(start, begin, generator)
        return ((shares[self.place.rank], is_last) for shares, is_last in self._rounds(start, begin, generator))

    def _dispatched(self, start: int, begin: int, generator: torch.Generator) -> Iterator[Note]:
        ensure_group()
        self._passes += 1
        turns = zip(repeat(self._passes), count(start))
        if self.place.rank == 0:
            return self._sent(self._rounds(start, begin, generator), turns)
        return self._received(turns)

    def _rounds(self, start: int, begin: int, generator: torch.Generator) -> Iterator[tuple[list[Share], bool]]:
        samples: Iterable[Any] = self._read(generator)
        if self._is_batched:
            samples = chain.from_iterable(samples)
        dealt = deal(samples, self._size, self.place.size, drop_last=self._drop_last, begin=begin)
        return islice(with_last(dealt), 0 if begin else start, None)

    def _read(self, generator: torch.Generator) -> Iterator[Any]:
        self._plain.generator = generator
        yield from self._plain

    def _sent(self, rounds: Iterator[tuple[list[Share], bool]], turns: Iterator[tuple[int, int]]) -> Iterator[Note]:
        is_last = False
        for shares, is_last in rounds:
            turn = next(turns)
            own, *others = [(share, is_last) for share in shares]
            _scattered([None, *(_Sent(turn, other) for other in others)])
            yield own
        if not is_last:  # there was nothing, and the others wait
            _scattered([_Sent(next(turns), None)] * self.place.size)

    def _received(self, turns: Iterator[tuple[int, int]]) -> Iterator[Note]:
        is_last = False
        while not is_last and (note := self._checked(_scattered(None), next(turns))) is not None:
            is_last = note[1]
            yield note

    def _checked(self, sent: _Sent, turn: tuple[int, int]) -> Note | None:
        if sent.turn != turn:
            raise RuntimeError(
                f"rank {self.place.rank} is at batch {turn[1]} of its pass {turn[0]} over a stream of which rank 0 "
                f"sent batch {sent.turn[1]} of pass {sent.turn[0]}: some ranks took batches that others did not. "
                "Iterate it on every rank alike, a look at its first batch too, or let each read the stream: "
                "shard(loader, dispatch=False)"
            )
        return sent.note


def collated(loader: DataLoader[Any], samples: list[Any]) -> Any:
    """A rank's samples as the batch that the loader would have made of them."""
    batch = loader.collate_fn(samples if loader.batch_size is not None else samples[0])
    return map_nest(_pinned, batch) if loader.pin_memory and torch.cuda.is_available() else batch


class _Plain(DataLoader[Any]):
    """torch's own loader, which is read whole on purpose."""

    is_sharded = True


def _copy_of(loader: DataLoader[Any], *, as_samples: bool) -> _Plain:
    """The loader as torch would iterate it; or such that it gives what its dataset gives, uncollated."""
    copy = _Plain.__new__(_Plain)  # whose constructor would need to know every version's arguments
    vars(copy).update(vars(loader), _iterator=None)
    if as_samples:
        vars(copy).update(collate_fn=_as_it_is, drop_last=False, pin_memory=False)
    return copy


def _pinned(value: Any) -> Any:
    return value.pin_memory() if hasattr(value, "pin_memory") else value


def _as_it_is(samples: Any) -> Any:
    return samples


def _scattered(sent: list[_Sent | None] | None) -> Any:
    """What rank 0 has for this rank; a collective."""
    received: list[Any] = [None]
    dist.scatter_object_list(received, sent, src=0)
    return received[0]
