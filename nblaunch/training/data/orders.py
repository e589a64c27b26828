"""What a DataLoader reads its map-style dataset by: which sampler, and how its order is cut for the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from nblaunch.training.data.batches import Share, deal, deal_batches, rounds
from nblaunch.training.seeding import derived_seed, seeded
from nblaunch.training.world import World


@dataclass(frozen=True, slots=True)
class Source:
    """A loader's sampler, and what it yields."""

    sampler: Any
    yields: Literal["samples", "batches", "own part"]
    """An own part is already this rank's, whatever it consists of."""
    batch_size: int = 1
    drop_last: bool = False
    takes_lists: bool = True
    """Whether the loader asks its dataset for lists of indices; without automatic batching it asks for one."""

    @property
    def is_own_part(self) -> bool:
        """Whether the sampler shards already."""
        return self.yields == "own part"

    @property
    def is_sized(self) -> bool:
        """Whether the sampler has a length; one without may have no end."""
        return length_of(self.sampler) is not None

    def shares(self, place: World, begin: int = 0) -> Iterator[Share]:
        """This rank's batches of indices, as the sampler comes to them; `begin` is that of `deal`."""
        if self.yields == "own part":
            return (Share(part) for part in self.sampler)
        if self.yields == "batches":
            dealt = deal_batches(self.sampler, place.size, drop_last=self.drop_last, begin=begin)
            return (shares[place.rank] for shares in dealt)
        dealt = deal(self.sampler, self.batch_size, place.size, drop_last=self.drop_last, begin=begin)
        own = (shares[place.rank] for shares in dealt)
        return own if self.takes_lists else (share._replace(items=share.items[0]) for share in own)

    def planned(self, place: World, seed: int, epoch: int, begin: int = 0) -> list[Share]:
        """All of this rank's batches of one epoch, the same for the same seed whatever any generator's state."""
        with seeded(derived_seed(seed, epoch), *generators_of(self.sampler)):
            return list(self.shares(place, begin))

    def rounds(self, ranks: int) -> int:
        """How many batches every rank gets."""
        if self.yields == "own part":
            return len(self.sampler)
        return rounds(len(self.sampler), self.batch_size, ranks, drop_last=self.drop_last)

    def total(self, ranks: int) -> int | None:
        """How many samples all ranks get together, each counted once."""
        if self.yields == "own part":
            return None if self.drop_last else _total_of(self.sampler)
        if self.yields == "batches" or not self.is_sized:
            return None  # only the sampler knows, batch for batch
        size = len(self.sampler)
        return size - size % (self.batch_size * ranks) if self.drop_last else size


def source_of(loader: DataLoader[Any]) -> Source:
    """What a loader of a map-style dataset reads by."""
    outer: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    takes_lists = loader.batch_sampler is not None or isinstance(outer, BatchSampler)
    if any(shards(sampler) for sampler in samplers_of(loader)):
        drops = isinstance(outer, BatchSampler) and outer.drop_last  # what each rank's last batch lacks
        return Source(outer, "own part", drop_last=drops, takes_lists=takes_lists)
    if type(outer) is BatchSampler:  # a subclass may make its batches in any way
        return Source(outer.sampler, "samples", outer.batch_size, outer.drop_last)
    if takes_lists:
        return Source(outer, "batches", drop_last=bool(getattr(outer, "drop_last", False)))
    return Source(outer, "samples", takes_lists=False)


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """A loader's samplers, the outermost first."""
    outer: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return [sampler for sampler in (outer, _inner(outer)) if sampler is not None]


def shards(sampler: Any) -> bool:
    """Whether a sampler gives one rank's part already: torch's DistributedSampler, ours, and others built like them."""
    replicas = getattr(sampler, "num_replicas", None)
    return isinstance(replicas, int) and replicas > 1 and hasattr(sampler, "rank")


def generators_of(sampler: Any) -> list[torch.Generator]:
    """The generators that a sampler was given to draw from."""
    given = (getattr(one, "generator", None) for one in (sampler, _inner(sampler)))
    return [generator for generator in given if isinstance(generator, torch.Generator)]


def with_epoch(loader: DataLoader[Any]) -> Iterable[Callable[[int], Any]]:
    """The methods ``set_epoch`` of a loader's samplers and dataset."""
    return [thing.set_epoch for thing in (*samplers_of(loader), loader.dataset) if hasattr(thing, "set_epoch")]


def epochs_of(loader: DataLoader[Any]) -> list[int]:
    """The epochs that a loader's samplers say they are at."""
    said = (getattr(sampler, "epoch", None) for sampler in samplers_of(loader) if hasattr(sampler, "set_epoch"))
    return [epoch for epoch in said if isinstance(epoch, int)]


def _total_of(sampler: Any) -> int | None:
    """What a sampler that shards gives all ranks, each sample counted once: ours say it, torch's may repeat some."""
    for one in (sampler, _inner(sampler)):
        if type(one) is DistributedSampler:
            return min(one.total_size, len(one.dataset))  # type: ignore[arg-type]  # it asked for the length itself
        with contextlib.suppress(TypeError):  # of a sampler without a length
            if isinstance(total := getattr(one, "total", None), int):
                return total
    return None


def _inner(sampler: Any) -> Any:
    return getattr(sampler, "sampler", None)


def length_of(thing: Any) -> int | None:
    """How long a sampler or loader says that it is; None where it does not know."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):  # what Python says, and what samplers raise whose length is unknown
        return None
