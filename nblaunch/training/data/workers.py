"""How many workers a loader needs, measured: one pass with each number, on the machine and the data it is for."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from nblaunch.errors import ArgumentError
from nblaunch.ranks.report import progress
from nblaunch.training.data.epochs import checked
from nblaunch.training.data.orders import generators_of
from nblaunch.training.data.samplers import RankSampler
from nblaunch.training.nests import samples_in
from nblaunch.training.seeding import default_seed, seeded
from nblaunch.training.world import exchange

Loader = TypeVar("Loader", bound="DataLoader[Any]")


@dataclass(frozen=True, slots=True)
class WorkersTiming:
    """A loader with one number of workers, as `time_workers` found it; the same on every rank."""

    num_workers: int
    """Of each rank."""
    samples: int
    """That all ranks together took while time was measured; a padding batch's is not counted."""
    seconds: float
    """That the slowest rank took for its own."""

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together; 0.0 where the pass was over before the measurement began."""
        return self.samples / self.seconds if self.samples else 0.0


def time_workers(
    loader: DataLoader[Any],
    candidates: Sequence[int] = (0, 1, 2, 4),
    *,
    step: Callable[[Any], object] | None = None,
    batches: int | None = None,
    warm_up: int = 2,
) -> dict[int, WorkersTiming]:
    """How fast a loader gives its batches with each number of workers: the highest rate is the best of them.

    Each candidate reads a copy of the loader, with every other argument kept, for one pass in the same order. The
    loader itself stays where it was, its epoch and the CPU's random generators too. The copy ends its workers after the
    pass, and torch does not warn of too many: how many are too many is what you ask. A collective: where there are
    other ranks, all of them call it, begin each measurement together, and get the same figures.

    Args:
        loader: Any DataLoader, sharded or not; what is measured is what this rank takes of it.
        candidates: Numbers of workers of each rank, each at least 0 (the rank itself loads).
        step: Called on each batch, such as a training step: only beside it does one see whether loading keeps up.
            Default: batches are taken and dropped, so it is loading alone that is measured.
        batches: How many are measured at most. Workers read ahead ``prefetch_factor`` batches each (2, if not
            given): measure many more than that. Default: the rest of the pass.
        warm_up: Batches before these that are not measured: until they have come, workers start. Default 2.

    Returns:
        The figures by number of workers, in the order of `candidates`.

    Raises:
        ArgumentError: `loader` is no DataLoader, there are no candidates, or a number is none of these.
    """
    given: object = loader
    if not isinstance(given, DataLoader):
        raise ArgumentError(f"loader={loader!r:.80}: give a DataLoader, such as DataLoader(dataset, batch_size=32)")
    listed: object = candidates
    if not isinstance(listed, Sequence) or not listed:
        raise ArgumentError(f"candidates={candidates!r}: give at least one number of workers, such as (0, 2)")
    numbers = [checked(number, "candidates") for number in candidates]
    checked(warm_up, "warm_up")
    most = None if batches is None else checked(batches, "batches", 1)
    return {n: _timed(_with_workers(loader, n), step, most, warm_up) for n in progress(numbers, desc="workers")}


def _with_workers(loader: Loader, number: int) -> Loader:
    """A copy that shares the dataset; torch's constructor would need to know every argument."""
    one = copy.copy(loader)
    vars(one).update(num_workers=number, persistent_workers=False, _iterator=None)
    vars(one).update(sampler=_apart(loader.sampler), batch_sampler=_apart(loader.batch_sampler))
    if number == 0:
        vars(one).update(prefetch_factor=None, timeout=0)  # torch allows neither without workers
    elif loader.prefetch_factor is None:
        vars(one).update(prefetch_factor=2)  # torch's default
    return one


def _apart(sampler: Any) -> Any:
    """A sampler that a whole pass advances, as a copy that has its own place."""
    if isinstance(sampler, RankSampler):
        return copy.copy(sampler)
    if isinstance(getattr(sampler, "sampler", None), RankSampler):
        sampler = copy.copy(sampler)
        sampler.sampler = copy.copy(sampler.sampler)
    return sampler


def _timed(
    loader: DataLoader[Any], step: Callable[[Any], object] | None, most: int | None, warm_up: int
) -> WorkersTiming:
    gc.collect()  # or forked workers would end the iterator of the pass before, which is not theirs, and complain
    generators = (*generators_of(loader), *generators_of(loader.batch_sampler))
    with seeded(default_seed(), *generators), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        passing = _taken(loader, step)
        for _ in islice(passing, warm_up):
            pass
        exchange(None)  # all begin together
        begin = _now()
        samples = sum(islice(passing, most))
        seconds = _now() - begin
    everybodys = exchange((samples, seconds))
    return WorkersTiming(
        loader.num_workers, sum(samples for samples, _ in everybodys), max(seconds for _, seconds in everybodys)
    )


def _taken(loader: DataLoader[Any], step: Callable[[Any], object] | None) -> Iterator[int]:
    """Takes batches; of each, how many samples it has."""
    for batch in loader:
        if step is not None:
            step(batch)
        yield 0 if getattr(loader, "is_padding", False) else _samples_in(batch, loader)


def _samples_in(batch: Any, loader: DataLoader[Any]) -> int:
    if loader.batch_size is None and loader.batch_sampler is None:
        return 1  # without automatic batching an item is a sample
    samples = samples_in(batch)
    if samples is not None:
        return samples
    return len(batch) if hasattr(batch, "__len__") else 1


def _now() -> float:
    """Seconds, once the GPU has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
