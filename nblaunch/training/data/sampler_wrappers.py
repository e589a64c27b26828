"""Wrappers that divide any sampler, or any batch sampler, among the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nblaunch.training.data.index_source import IndexSource, generators_of
from nblaunch.training.data.samplers import RankSampler
from nblaunch.training.seeding import derived_seed, seeded


class _Wrapper(RankSampler[Any]):
    """Runs the wrapped sampler once per epoch, the same on every rank, and yields this rank's part."""

    def __init__(self, wrapped: Iterable[Any], num_replicas: int | None, rank: int | None, seed: int | None) -> None:
        super().__init__(num_replicas, rank, seed)
        self._wrapped: Any = wrapped
        self._run: tuple[tuple[Any, ...], list[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        key = (self._place(), self.seed, self.epoch, self._begin)
        if self._run is None or self._run[0] != key:  # a second run in one epoch would advance a stateful sampler
            if hasattr(self._wrapped, "set_epoch"):
                self._wrapped.set_epoch(self.epoch)
            self._run = key, self._part()
        return self._iterate(self._run[1])

    def _part(self) -> list[Any]:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_run": None}


class DistributedSamplerWrapper(_Wrapper):
    """Any sampler of indices; each rank takes every `num_replicas`-th: each index once, no padding.

    The sampler runs on every rank under seeded random generators (Python's, NumPy's, torch's and its own
    ``generator``), which are then restored, so all ranks know the same order. Ranks differ by at most one index.

    Args:
        sampler: Yields indices, finitely many.
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
        """Number of indices in a pass, over all ranks."""
        return len(self._wrapped)

    def __len__(self) -> int:
        return self._part_of(self.total)

    def _part(self) -> list[Any]:
        place = self._place()
        order = IndexSource(self._wrapped, "own part").planned(place, self.seed, self.epoch)
        return [share.items for share in order[self._begin + place.rank :: place.size]]


class DistributedBatchSamplerWrapper(_Wrapper):
    """Any sampler of batches, divided among the ranks: batch j goes to rank j % `num_replicas`.

    It runs as in `DistributedSamplerWrapper`. With ``even=True`` a last round with fewer batches than ranks is divided
    further: the longest batches are halved until every rank has one. So all ranks have equally many batches and each
    index still comes once; only if fewer indices than ranks are left, one is repeated. With ``even=False`` batches
    stay whole and each comes once, but some ranks have one batch more, and DDP would hang.

    Args:
        batch_sampler: Yields lists of indices, finitely many.
        even: Whether every rank gets equally many batches.
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
            source = IndexSource(self._wrapped, "batches")
            return [share.items for share in source.planned(place, self.seed, self.epoch, self._begin)]
        with seeded(derived_seed(self.seed, self.epoch), *generators_of(self._wrapped)):
            return list(self._wrapped)[self._begin + place.rank :: place.size]
