"""The indices that a DataLoader reads from its map-style dataset: its sampler, and the partition of its order."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from nblaunch.errors import ArgumentError
from nblaunch.training.data.batch_partition import (
    Division,
    Share,
    partition_batches,
    partition_samples,
    round_count,
    with_last,
)
from nblaunch.training.seeding import Seeded, derived_seed, seeded
from nblaunch.training.topology import World, data_world


@dataclass(frozen=True, slots=True)
class IndexSource:
    """A loader's sampler, and what it yields."""

    sampler: Any
    yields: Literal["samples", "batches", "own part"]
    """``"own part"``: the sampler shards, and yields this rank's indices or batches."""
    batch_size: int = 1
    drop_last: bool = False
    takes_lists: bool = True
    """Whether the loader asks its dataset for lists of indices; without automatic batching it asks for one."""

    @property
    def is_own_part(self) -> bool:
        """Return True if the sampler shards."""
        return self.yields == "own part"

    @property
    def is_sized(self) -> bool:
        """Return True if the sampler has a length; one without may be infinite."""
        return length_of(self.sampler) is not None

    def shares(self, place: World, begin: int = 0) -> Iterator[Share]:
        """Yield this rank's batches of indices, lazily; `begin` as for `partition_samples`."""
        if self.yields == "own part":
            return (Share(part) for part in self.sampler)
        if self.yields == "batches":
            rounds = partition_batches(self.sampler, place.size, drop_last=self.drop_last, begin=begin)
            return (shares[place.rank] for shares in rounds)
        rounds = partition_samples(self.sampler, self.batch_size, place.size, drop_last=self.drop_last, begin=begin)
        own = (shares[place.rank] for shares in rounds)
        return own if self.takes_lists else (share._replace(items=share.items[0], of_all=0) for share in own)

    def planned(self, place: World, seed: int, epoch: int, begin: int = 0) -> list[Share]:
        """Return all of this rank's batches of one epoch, a function of the seed and not of any generator's state."""
        with seeded(derived_seed(seed, epoch), *generators_of(self.sampler)):
            return list(self.shares(place, begin))

    def rounds(self, ranks: int) -> int:
        """Return the number of batches of every rank."""
        if self.yields == "own part":
            return len(self.sampler)
        return round_count(len(self.sampler), self.batch_size, ranks, drop_last=self.drop_last)

    def obstacle(self, before: Division, now: Division, samples: int) -> str:
        """Return why a pass cannot be continued under another division, after `samples`; empty if it can."""
        if self.is_own_part or not samples:  # samples are counted in all other cases
            return "its sampler divides the data among the ranks itself"
        if self.yields == "batches" and before.batch_size != now.batch_size:
            return "its batch sampler makes the batches itself"
        return ""

    def total(self, ranks: int) -> int | None:
        """Return how many samples all ranks get together, each counted once; None if unknown."""
        if self.yields == "own part":
            return None if self.drop_last else _total_of(self.sampler)
        if self.yields == "batches" or not self.is_sized:
            return None  # known only batch by batch
        size = len(self.sampler)
        return size - size % (self.batch_size * ranks) if self.drop_last else size


def source_of(loader: DataLoader[Any]) -> IndexSource:
    """Return the source of a loader of a map-style dataset."""
    outer: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    takes_lists = loader.batch_sampler is not None or isinstance(outer, BatchSampler)
    if any(shards(sampler) for sampler in samplers_of(loader)):
        drops = isinstance(outer, BatchSampler) and outer.drop_last  # unknown how many each rank drops
        return IndexSource(outer, "own part", drop_last=drops, takes_lists=takes_lists)
    if type(outer) is BatchSampler:  # a subclass may build its batches in any way
        return IndexSource(outer.sampler, "samples", outer.batch_size, outer.drop_last)
    if takes_lists:
        return IndexSource(outer, "batches", drop_last=bool(getattr(outer, "drop_last", False)))
    return IndexSource(outer, "samples", takes_lists=False)


# ------------------------------------------------------------------ samplers
def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return a loader's samplers, outermost first."""
    outer: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return [sampler for sampler in (outer, _inner(outer)) if sampler is not None]


def shards(sampler: Any) -> bool:
    """Return True if a sampler yields one rank's part, as torch's DistributedSampler and ours do."""
    replicas = getattr(sampler, "num_replicas", None)
    return isinstance(replicas, int) and replicas > 1 and hasattr(sampler, "rank")


def share_parts(loader: DataLoader[Any], copies: int) -> None:
    """Let a loader's samplers give `copies` consecutive ranks the same part.

    Raises:
        ArgumentError: A sampler gives each rank a part of its own.
    """
    for sampler in samplers_of(loader):
        if hasattr(sampler, "copies"):
            sampler.copies = copies
        place = data_world(copies)
        if copies > 1 and shards(sampler) and (sampler.num_replicas, sampler.rank) != (place.size, place.rank):
            raise ArgumentError(
                f"loader: its {type(sampler).__name__} has num_replicas={sampler.num_replicas}, rank={sampler.rank}, "
                f"but {copies} ranks each divide the layers and need the same samples: leave it out, or give "
                f"num_replicas={place.size}, rank={place.rank}"
            )


def generators_of(sampler: Any) -> list[torch.Generator]:
    """Return the random generators that a sampler was given."""
    given = (getattr(each, "generator", None) for each in (sampler, _inner(sampler)))
    return [generator for generator in given if isinstance(generator, torch.Generator)]


def given_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers were given, each once."""
    given = [generator for sampler in samplers_of(loader)[:1] for generator in generators_of(sampler)]
    given += [loader.generator] if isinstance(loader.generator, torch.Generator) else []
    return list({id(generator): generator for generator in given}.values())


def set_epoch_methods(loader: DataLoader[Any]) -> Iterable[Callable[[int], Any]]:
    """Return the ``set_epoch`` methods of a loader's samplers and dataset."""
    return [thing.set_epoch for thing in (*samplers_of(loader), loader.dataset) if hasattr(thing, "set_epoch")]


def epochs_of(loader: DataLoader[Any]) -> list[int]:
    """Return the epochs of a loader's samplers that have ``set_epoch``."""
    epochs = (getattr(sampler, "epoch", None) for sampler in samplers_of(loader) if hasattr(sampler, "set_epoch"))
    return [epoch for epoch in epochs if isinstance(epoch, int)]


def _total_of(sampler: Any) -> int | None:
    """Return how many samples a sharding sampler gives all ranks, each counted once: torch's may repeat some."""
    for each in (sampler, _inner(sampler)):
        if type(each) is DistributedSampler:
            return min(each.total_size, len(each.dataset))  # type: ignore[arg-type]  # it calls len itself
        with contextlib.suppress(TypeError):  # a sampler without a length
            if isinstance(total := getattr(each, "total", None), int):
                return total
    return None


def _inner(sampler: Any) -> Any:
    return getattr(sampler, "sampler", None)


def length_of(thing: Any) -> int | None:
    """Return the length of a sampler or loader; None if it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):  # samplers of unknown length raise the latter
        return None


# ------------------------------------------------------------------ one pass
class BatchNote(NamedTuple):
    """Properties of a batch besides its content."""

    is_padding: bool = False
    is_last: bool = False
    end: int = 0
    """As in `Share`."""
    own: int = 0
    """Samples of this rank that no other rank has; 0 if `of_all` is."""
    of_all: int = 0
    """As in `Share`."""

    @classmethod
    def of(cls, share: Share, is_last: bool) -> BatchNote:
        """Describe a rank's share."""
        own = len(share.items) if share.of_all and not share.is_padding else 0
        return cls(share.is_padding, is_last, share.end, own, share.of_all)


@dataclass(slots=True, eq=False)
class IndexPass:
    """The indices of one pass, as torch's loader reads them, each batch with a seed of its own."""

    shares: Iterable[Share]
    seeds: Iterator[int]
    """One per batch."""
    loads_here: bool
    """Whether this process loads, not workers."""
    notes: deque[BatchNote] = field(default_factory=deque)
    """Of the batches that were requested and not yielded, in order."""
    loading: ExitStack = field(default_factory=ExitStack)
    """Entered while this process loads a batch: the seeded random state."""

    def __iter__(self) -> Iterator[Any]:
        for (share, is_last), seed in zip(with_last(self.shares), self.seeds, strict=False):
            self.notes.append(BatchNote.of(share, is_last))
            if self.loads_here:
                self.loading.enter_context(seeded(seed))
            yield share.items if self.loads_here else Seeded(seed, share.items)


class IndexFeed:
    """Stands in for the user's sampler: torch's loader iterates the pass that is current when it starts."""

    def __init__(self) -> None:
        self.current = IndexPass((), iter(()), loads_here=True)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.current)  # bound now: another pass may begin before this one is read
