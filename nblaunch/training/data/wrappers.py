"""Any sampler, or any batch sampler, dealt out to the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nblaunch.training.data.orders import Source, generators_of
from nblaunch.training.data.samplers import RankSampler
from nblaunch.training.seeding import derived_seed, seeded


class _Wrapper(RankSampler[Any]):
    """Runs what it wraps once an epoch, on every rank alike, and gives this rank's part."""

    def __init__(self, wrapped: Iterable[Any], num_replicas: int | None, rank: int | None, seed: int | None) -> None:
        super().__init__(num_replicas, rank, seed)
        self._wrapped: Any = wrapped
        self._run: tuple[tuple[Any, ...], list[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        key = (self._place(), self.seed, self.epoch)
        if self._run is None or self._run[0] != key:  # again for the same epoch, and a sampler with a state moves on
            if hasattr(self._wrapped, "set_epoch"):
                self._wrapped.set_epoch(self.epoch)
            self._run = key, self._part()
        return self._passed(self._run[1])

    def _part(self) -> list[Any]:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_run": None}


class DistributedSamplerWrapper(_Wrapper):
    """Any sampler of indices, of which each rank takes every `num_replicas`-th: each index once, no padding.

    The sampler runs on every rank under seeded random generators (Python's, NumPy's, torch's and its own
    ``generator``), which are left as they were, so that all ranks know the same order. Ranks differ by one index at
    most.

    Args:
        sampler: Yields indices, and comes to an end.
        num_replicas: As in `RankSampler`, like `rank` and `seed`.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(sampler, num_replicas, rank, seed)
        self.sampler = sampler

    @property
    def total(self) -> int:
        """How many indices all ranks get together in a pass."""
        return len(self._wrapped)

    def __len__(self) -> int:
        return self._part_of(self.total)

    def _part(self) -> list[Any]:
        place = self._place()
        order = Source(self._wrapped, "own part").planned(place, self.seed, self.epoch)
        return [share.items for share in order[place.rank :: place.size]]


class DistributedBatchSamplerWrapper(_Wrapper):
    """Any sampler of batches, dealt out to the ranks: batch j goes to rank j % `num_replicas`.

    It runs as in `DistributedSamplerWrapper`. A last round with fewer batches than ranks is, with ``even=True``,
    divided further: the longest batches are halved until every rank has one. So all ranks have as many batches and
    each index still comes once; only where there are fewer indices left than ranks, one is repeated. With
    ``even=False`` batches stay whole and each comes once, but some ranks have a batch more, with which DDP would hang.

    Args:
        batch_sampler: Yields lists of indices, and comes to an end.
        even: Whether every rank gets as many batches.
        num_replicas: As in `RankSampler`, like `rank` and `seed`.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        *,
        even: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_sampler, num_replicas, rank, seed)
        self.batch_sampler = batch_sampler
        self.even = even

    def __len__(self) -> int:
        batches = len(self._wrapped)
        return -(-batches // self._place().size) if self.even else self._part_of(batches)

    def _part(self) -> list[Any]:
        place = self._place()
        if self.even:
            return [s.items for s in Source(self._wrapped, "batches").planned(place, self.seed, self.epoch)]
        with seeded(derived_seed(self.seed, self.epoch), *generators_of(self._wrapped)):
            return list(self._wrapped)[place.rank :: place.size]
