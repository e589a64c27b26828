"""`time_workers`: the speed of a DataLoader with different numbers of workers."""

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
from nblaunch.machine.argument_checks import whole_number
from nblaunch.ranks.report import progress
from nblaunch.training.data.index_source import generators_of
from nblaunch.training.data.samplers import RankSampler
from nblaunch.training.exchange import exchange
from nblaunch.training.pytree import batch_size_of
from nblaunch.training.seeding import default_seed, seeded

Loader = TypeVar("Loader", bound="DataLoader[Any]")


@dataclass(frozen=True, slots=True)
class WorkersTiming:
    """The speed of a loader with one number of workers; the same on every rank."""

    num_workers: int
    """Per rank."""
    samples: int
    """Samples that all ranks took during the measurement, without padding."""
    seconds: float
    """Time of the slowest rank."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all ranks together; 0.0 if the pass ended before the measurement began."""
        return self.samples / self.seconds if self.samples else 0.0


def time_workers(
    loader: DataLoader[Any],
    candidates: Sequence[int] = (0, 1, 2, 4),
    *,
    step: Callable[[Any], object] | None = None,
    batches: int | None = None,
    warm_up: int = 2,
) -> dict[int, WorkersTiming]:
    """Measure how fast a loader yields its batches with each number of workers.

    Each candidate reads a copy of the loader, with all other arguments kept, for one pass in the same order. The
    loader's position, its epoch and the CPU's random generators do not change. The copy ends its workers after the
    pass, and torch's warning about too many workers is suppressed. A collective: with several ranks, all of them call
    it, begin each measurement together, and get the same results.

    Args:
        loader: Any DataLoader, sharded or not; this rank's part is measured.
        candidates: Numbers of workers per rank, each at least 0 (the rank itself loads).
        step: Called on each batch, such as a training step, to see whether loading keeps up with it. Default: batches
            are dropped, and loading alone is measured.
        batches: Maximum number of batches to measure. Workers read ahead ``prefetch_factor`` batches each (default 2):
            measure many more than that. Default: the rest of the pass.
        warm_up: Batches to skip before the measurement, while workers start. Default 2.

    Returns:
        The results by number of workers, in the order of `candidates`.

    Raises:
        ArgumentError: `loader` is not a DataLoader, there are no candidates, or a number is out of range.
    """
    given: object = loader
    if not isinstance(given, DataLoader):
        raise ArgumentError(f"loader={loader!r:.80}: give a DataLoader, such as DataLoader(dataset, batch_size=32)")
    listed: object = candidates
    if not isinstance(listed, Sequence) or not listed:
        raise ArgumentError(f"candidates={candidates!r}: give at least one number of workers, such as (0, 2)")
    numbers = [whole_number("candidates", number, least=0) for number in candidates]
    whole_number("warm_up", warm_up, least=0)
    most = None if batches is None else whole_number("batches", batches, least=1)
    return {n: _measure(_with_workers(loader, n), step, most, warm_up) for n in progress(numbers, desc="workers")}


def _with_workers(loader: Loader, number: int) -> Loader:
    """Return a copy that shares the dataset, without torch's constructor, whose arguments vary between versions."""
    clone = copy.copy(loader)
    vars(clone).update(num_workers=number, persistent_workers=False, _iterator=None)
    vars(clone).update(sampler=_detached(loader.sampler), batch_sampler=_detached(loader.batch_sampler))
    if number == 0:
        vars(clone).update(prefetch_factor=None, timeout=0)  # torch allows neither without workers
    elif loader.prefetch_factor is None:
        vars(clone).update(prefetch_factor=2)  # torch's default
    return clone


def _detached(sampler: Any) -> Any:
    """Return a copy of one of our samplers, whose position the measured pass may advance."""
    if isinstance(sampler, RankSampler):
        return copy.copy(sampler)
    if isinstance(getattr(sampler, "sampler", None), RankSampler):
        sampler = copy.copy(sampler)
        sampler.sampler = copy.copy(sampler.sampler)
    return sampler


def _measure(
    loader: DataLoader[Any], step: Callable[[Any], object] | None, most: int | None, warm_up: int
) -> WorkersTiming:
    gc.collect()  # else forked workers would collect the previous pass's iterator, and warn
    generators = (*generators_of(loader), *generators_of(loader.batch_sampler))
    with seeded(default_seed(), *generators), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        sizes = _batch_sizes(loader, step)
        for _ in islice(sizes, warm_up):
            pass
        exchange(None)  # all ranks begin together
        begin = _synchronized_time()
        samples = sum(islice(sizes, most))
        seconds = _synchronized_time() - begin
    by_rank = exchange((samples, seconds))
    return WorkersTiming(
        loader.num_workers, sum(samples for samples, _ in by_rank), max(seconds for _, seconds in by_rank)
    )


def _batch_sizes(loader: DataLoader[Any], step: Callable[[Any], object] | None) -> Iterator[int]:
    """Iterate the loader; yield each batch's number of samples."""
    for batch in loader:
        if step is not None:
            step(batch)
        yield 0 if getattr(loader, "is_padding", False) else _samples_of(batch, loader)


def _samples_of(batch: Any, loader: DataLoader[Any]) -> int:
    if loader.batch_size is None and loader.batch_sampler is None:
        return 1  # without automatic batching a batch is one sample
    samples = batch_size_of(batch)
    if samples is not None:
        return samples
    return len(batch) if hasattr(batch, "__len__") else 1


def _synchronized_time() -> float:
    """Return the time in seconds after the GPU has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
