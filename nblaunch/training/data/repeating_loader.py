"""`RepeatingLoader`: a DataLoader divided as accelerate divides it, with its order and its repeated samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, cycle, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, RandomSampler

from nblaunch.training.collectives import broadcast, share_generators
from nblaunch.training.data.batch_partition import Share, with_last
from nblaunch.training.data.index_source import BatchNote, IndexPass, source_of
from nblaunch.training.data.sharded_loader import ShardedLoader
from nblaunch.training.plugin_settings import LoaderSettings
from nblaunch.training.topology import World, world

T_co = TypeVar("T_co", covariant=True)


class RepeatingLoader(ShardedLoader[T_co]):
    """A map-style DataLoader in accelerate's order: for ``Accelerator(semantics="accelerate")``.

    The order is drawn from torch's generators as a plain DataLoader draws it; rank 0's counts. Each rank takes whole
    batches. Where the last are short and there are other ranks, the first samples come again, and `remainder` says how
    many are no repetition. Loading seeds nothing, and reads one batch ahead, as accelerate's loaders do.

    Args:
        loader: The loader. If its sampler has no generator, it gets one, seeded from torch's global generator.
        settings: ``use_seedable_sampler`` and ``data_seed`` are used.
        rng_types: The generators whose states every pass takes from rank 0.
        move: As for `shard`.
    """

    def __init__(
        self, loader: DataLoader[T_co], settings: LoaderSettings, rng_types: Iterable[str], move: Any = None
    ) -> None:
        super().__init__(loader, move=move)
        self._rng_types = tuple(rng_types)
        outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        sampler: Any = getattr(outer, "sampler", None)
        self._drawn_by: torch.Generator | None = None
        self._initial_seed: int | None = None
        if settings.use_seedable_sampler and isinstance(sampler, RandomSampler):
            given = settings.data_seed
            self._initial_seed = torch.random.initial_seed() if given is None else given
            sampler.generator = sampler.generator or torch.Generator()
            self._drawn_by = sampler.generator
        elif world().is_shared and hasattr(sampler, "generator"):
            if sampler.generator is None:
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
                sampler.generator = torch.Generator().manual_seed(seed)
            self._drawn_by = sampler.generator if "generator" in self._rng_types else None

    def _iterate_indices(self, start: int) -> Iterator[tuple[Any, BatchNote]]:
        share_generators(kind for kind in self._rng_types if kind != "generator")
        if self._initial_seed is not None and self._drawn_by is not None:
            self._drawn_by.manual_seed(self._initial_seed + self.epoch)
        elif self._drawn_by is not None:
            self._drawn_by.set_state(broadcast(self._drawn_by.get_state(), 0, torch.device("cpu")))
        shares = islice(self._shares(self.place), start, None)
        current = IndexPass(shares, count(), loads_here=self.num_workers == 0, seeds_batches=False)
        self._indices.current = current
        for content, _ in with_last(DataLoader.__iter__(self)):
            yield content, current.notes.popleft()

    def _shares(self, place: World) -> Iterator[Share]:
        source = source_of(self)
        if source.is_own_part or not place.is_shared:
            return source.shares(place)
        rounds = _repeating(source.sampler, source.batch_size * place.size, drop_last=source.drop_last)
        size = source.batch_size
        own = (chunk[place.rank * size :][:size] for chunk in rounds)
        return (Share(part if source.yields == "samples" and source.takes_lists else part[0]) for part in own)


def _repeating(items: Iterable[Any], size: int, *, drop_last: bool) -> Iterator[list[Any]]:
    """Yield chunks of `size` items; the last one is filled with the first items, again and again if they are few."""
    first: list[Any] = []
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        first = first or chunk
        if len(chunk) == size:
            yield chunk
        elif not drop_last:
            yield [*chunk, *islice(cycle(first), size - len(chunk))]
