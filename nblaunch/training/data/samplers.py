"""Samplers of indices that give each rank its part, exactly: nothing is padded and nothing dropped."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence, Sized
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import Sampler, dataloader

from nblaunch.errors import ArgumentError
from nblaunch.training.data.epochs import Progress, checked
from nblaunch.training.seeding import checked_seed, default_seed, derived_generator
from nblaunch.training.world import World, world

T = TypeVar("T")
_READER: Any = getattr(dataloader, "_MultiProcessingDataLoaderIter", ())
"""What iterates a loader with workers; a torch that calls it otherwise only makes a look count as a pass."""
_STEP = 2**16
"""Indices that are turned into Python's numbers at a time: a list of all would need ten times the tensor's memory."""


class RankSampler(Sampler[T], Generic[T]):
    """What the samplers here have in common: a place among the ranks, an epoch, and passes that can be resumed.

    What is drawn follows from (seed, epoch) alone and is the same for all ranks; each takes its part of it. A pass
    that was taken to its end advances `epoch`, so that the next has an order of its own; a look at the first index does
    not, and `set_epoch` wins. A DataLoader with workers reads its sampler ahead: a pass counts once all that the
    workers were asked for has been given out (so a look does not, unless there is but one batch), while `state_dict`
    tells what they were asked for. `nblaunch.training.data.shard` goes by what was consumed, so with it a pass also
    counts whose last batch was taken by somebody who asks for no more, such as ``zip(range(n), loader)``.

    Args:
        num_replicas: How many ranks share the data. Default: as many as there are when it is iterated.
        rank: Which of them this is. Default: this process's.
        seed: 0 to 2**32 - 1. Default: that of `seed_everything`, else 0.

    Raises:
        ArgumentError: A number that is out of its range.
    """

    def __init__(self, num_replicas: int | None = None, rank: int | None = None, seed: int | None = None) -> None:
        self._replicas = None if num_replicas is None else checked(num_replicas, "num_replicas", 1)
        self._rank = None if rank is None else checked(rank, "rank")
        self._seed = checked_seed(seed)
        self._progress = Progress()
        self._unsettled: tuple[Sized, int] | None = None
        if rank is not None and num_replicas is not None:
            self._place()

    @property
    def num_replicas(self) -> int:
        """How many ranks share the data."""
        return world().size if self._replicas is None else self._replicas

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return world().rank if self._rank is None else self._rank

    @property
    def seed(self) -> int:
        """What is drawn from, beside the epoch."""
        return default_seed() if self._seed is None else self._seed

    @property
    def epoch(self) -> int:
        """The epoch that the next pass is, or that the present one is of."""
        self._settle()
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Be at the beginning of an epoch. To be told of the present one changes nothing.

        Raises:
            ArgumentError: `epoch` is no whole number of at least 0.
        """
        self._settle()
        self._progress.move_to(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where the pass stands: ``seed``, ``epoch``, and ``position``, which counts what this rank was given."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self._progress.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken: passes of its epoch give the rest alone."""
        self._seed = checked_seed(state["seed"])
        self._progress.resume(state["epoch"], state["position"])
        self._unsettled = None

    def _place(self) -> World:
        rank, replicas = self.rank, self.num_replicas
        if rank >= replicas:
            raise ArgumentError(f"rank={rank}, num_replicas={replicas}: rank must be below num_replicas")
        return World(rank, rank, replicas)

    def _part_of(self, count: int) -> int:
        """How many of so many things this rank takes, if it takes every `num_replicas`-th."""
        place = self._place()
        return (count - place.rank + place.size - 1) // place.size

    def _passed(self, items: Sequence[T]) -> Iterator[T]:
        """One pass over this rank's part."""
        self._settle()
        self._unsettled = None  # what has not been taken by now was broken off
        start, epoch = self._progress.begin(), self.epoch
        for place, item in enumerate(items[start:], start + 1):
            self._progress.done = place
            yield item
        if (asked := _asked_of_workers()) is None:
            self._progress.complete(epoch)
        else:
            self._unsettled = asked, epoch

    def _settle(self) -> None:
        """Complete the pass that was read ahead, once its loader has given everything out."""
        if self._unsettled is not None and not self._unsettled[0]:
            self._progress.complete(self._unsettled[1])
            self._unsettled = None

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this process."""
        self._settle()
        return {**vars(self), "_unsettled": None, "_progress": copy.copy(self._progress)}


def _asked_of_workers() -> Sized | None:
    """What the loader with workers that reads here, if one does, has asked of them and not given out: it changes."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        reader = frame.f_locals.get("self")
        if isinstance(reader, _READER):
            return getattr(reader, "_task_info", None)  # each pass has a dict of its own, which outlives the reader
    return None


class _IndexSampler(RankSampler[int]):
    """Draws a tensor of indices for all ranks; each takes every `num_replicas`-th."""

    total: int
    """How many indices all ranks get together in a pass."""

    def __len__(self) -> int:
        return self._part_of(self.total)

    def __iter__(self) -> Iterator[int]:
        place = self._place()
        drawn = self._drawn(derived_generator(self.seed, self.epoch))
        return self._passed(_Indices(drawn[place.rank :: place.size]))

    def _drawn(self, generator: torch.Generator) -> torch.Tensor:
        raise NotImplementedError


class _Indices(Sequence[int]):
    """A tensor of indices, read as Python's numbers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __len__(self) -> int:
        return len(self._tensor)

    def __getitem__(self, place: Any) -> Any:
        return _Indices(self._tensor[place]) if isinstance(place, slice) else int(self._tensor[place])

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, len(self._tensor), _STEP):
            yield from self._tensor[begin : begin + _STEP].tolist()


class ExactDistributedSampler(_IndexSampler):
    """Each index on exactly one rank: no padding, as torch's ``DistributedSampler`` does it, and no drop.

    Ranks differ by one index at most; one that gets none yields nothing. So a metric over all ranks is exact. As the
    numbers of *batches* may differ too, train with ``shard(loader)`` instead, where DDP would hang.

    Args:
        dataset_or_length: The dataset, or how many samples it has.
        shuffle: Whether each epoch has a random order of its own.
        num_replicas: As in `RankSampler`, like `rank` and `seed`.

    Raises:
        ArgumentError: A number that is out of its range.
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        *,
        shuffle: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(num_replicas, rank, seed)
        size = len(dataset_or_length) if isinstance(dataset_or_length, Sized) else dataset_or_length
        self.total = checked(size, "dataset_or_length")
        self.shuffle = shuffle

    def _drawn(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randperm(self.total, generator=generator) if self.shuffle else torch.arange(self.total)


class DistributedWeightedSampler(_IndexSampler):
    """Indices drawn with probabilities in proportion to weights, dealt out to the ranks.

    Drawn once for all ranks, in float64 and for any number of weights (``torch.multinomial``, and with it torch's
    ``WeightedRandomSampler``, ends at 2**24), then every `num_replicas`-th goes to one rank. With replacement by
    inverting the cumulated weights; without by the smallest keys E/weight, E exponential, which is to draw one after
    another from what is left (Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir").

    Args:
        weights: One for each sample, 1-D: a tensor, array or sequence of finite numbers of at least 0, not all 0.
            They need not add up to 1. An index of weight 0 is never drawn.
        num_samples: Draws in a pass, over all ranks. Default: as many as there are weights.
        replacement: Whether an index may come more than once in a pass.
        num_replicas: As in `RankSampler`, like `rank` and `seed`.

    Raises:
        ArgumentError: Weights or a number that cannot be; without replacement more draws than positive weights.
    """

    def __init__(
        self,
        weights: Any,
        num_samples: int | None = None,
        *,
        replacement: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(num_replicas, rank, seed)
        self.weights = _checked_weights(weights)
        self.total = len(self.weights) if num_samples is None else checked(num_samples, "num_samples")
        self.replacement = replacement
        positive = int((self.weights > 0).sum())
        if not replacement and self.total > positive:
            raise ArgumentError(
                f"num_samples={self.total}, replacement=False: only {positive} weights are positive: "
                f"use num_samples={positive} or fewer, or replacement=True"
            )

    def _drawn(self, generator: torch.Generator) -> torch.Tensor:
        if self.replacement:
            heights = (self.weights / self.weights.max()).cumsum(0)  # scaled, as the sum of large weights is infinite
            drawn = torch.rand(self.total, dtype=torch.float64, generator=generator) * heights[-1]
            # Rounding may reach the sum itself, and beyond it there is no index. `right` steps over weights of 0.
            drawn.clamp_(max=float(torch.nextafter(heights[-1], torch.zeros((), dtype=torch.float64))))
            return torch.searchsorted(heights, drawn, right=True)
        draws = torch.empty_like(self.weights).exponential_(generator=generator)
        keys = draws.log() - self.weights.log()  # by logarithms, as the quotient overflows for the smallest weights
        return keys.topk(self.total, largest=False, sorted=True).indices


def _checked_weights(given: Any) -> torch.Tensor:
    try:
        weights = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"weights={given!r:.80}: must be numbers, one for each sample ({error})") from error
    if weights.ndim != 1 or not len(weights):
        raise ArgumentError(f"weights has the shape {tuple(weights.shape)}: must be 1-D with at least one weight")
    wrong = ~(weights.isfinite() & (weights >= 0))
    if wrong.any():
        place = int(wrong.to(torch.uint8).argmax())
        raise ArgumentError(f"weights[{place}]={weights[place].item()}: must be finite and at least 0")
    if not weights.any():
        raise ArgumentError(f"weights: all {len(weights)} are 0, and nothing can be drawn: give one a positive weight")
    return weights
