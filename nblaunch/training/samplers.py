"""Samplers that give each rank its part exactly: of all indices, of weighted draws, of batches with equal classes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.utils.data import Sampler

from nblaunch.errors import ArgumentError
from nblaunch.machine.arguments import one_of, whole_number
from nblaunch.training.seeding import checked_seed, default_seed, derived_generator
from nblaunch.training.topology import World, data_world


@dataclass(slots=True)
class EpochProgress:
    epoch: int = 0
    done: int = 0
    """Batches or indices taken in the latest pass."""
    start: int = 0
    """Where passes of this epoch begin: 0, except after `resume`."""
    samples: int = 0
    """Samples that all ranks have taken in that pass; 0 if not counted."""
    start_samples: int = 0
    """Like `start`, in samples of all ranks."""
    once: int | None = None
    """Where the next pass alone begins, instead of `start`."""
    ended: bool = False

    def begin(self) -> int:
        if self.ended:
            self.complete(self.epoch)
        start, self.once = self.start if self.once is None else self.once, None
        self.done, self.samples = start, self.start_samples
        return start

    def complete(self, epoch: int) -> None:
        if self.epoch == epoch:
            self.move_to(epoch + 1)

    def move_to(self, epoch: int) -> None:
        """Move to the beginning of `epoch`. Moving to the current epoch changes nothing."""
        epoch = whole_number("epoch", epoch, least=0)
        self.ended = False
        if epoch != self.epoch:
            self.epoch, self.done, self.start, self.samples, self.start_samples = epoch, 0, 0, 0, 0

    def resume(self, epoch: int, done: int, samples: int = 0) -> None:
        self.epoch = whole_number("epoch", epoch, least=0)
        self.done = self.start = whole_number("position", done, least=0)
        self.samples = self.start_samples = whole_number("samples", samples, least=0)
        self.once, self.ended = None, False


T = TypeVar("T")
_CHUNK_SIZE = 2**16
"""Indices converted to Python ints at a time."""


class RankSampler(Sampler[T], Generic[T]):
    """Base class of the samplers: rank, epoch and resumable passes.

    The order depends on (seed, epoch) alone and is the same on all ranks; each takes its part. A complete pass advances
    `epoch`, so the next pass has its own order; a peek at the first index does not. Your own `set_epoch` wins.

    A plain DataLoader with workers reads its sampler ahead, so the sampler counts requested indices. With
    `nblaunch.training.shard` it counts consumed ones. There a peek never completes a pass, but a loop that stops at the
    last batch does, such as ``zip(range(n), loader)``.

    Args:
        num_replicas: Number of ranks that share the data. Default: the world size at iteration.
        rank: This rank. Default: this process's.
        seed: 0 to 2**32 - 1. Default: that of `seed_everything`, else 0.

    Raises:
        ArgumentError: A number is out of range.
    """

    copies = 1
    """Consecutive ranks that take the same part; a sharded loader sets it."""

    def __init__(self, num_replicas: int | None = None, rank: int | None = None, seed: int | None = None) -> None:
        self._replicas = None if num_replicas is None else whole_number("num_replicas", num_replicas, least=1)
        self._rank = None if rank is None else whole_number("rank", rank, least=0)
        self._seed = checked_seed(seed)
        self._progress = EpochProgress()
        self._loaded_for: int | None = None  # the ranks of the latest loaded state
        if rank is not None and num_replicas is not None:
            self._place()

    @property
    def num_replicas(self) -> int:
        """Number of ranks that share the data."""
        return data_world(self.copies).size if self._replicas is None else self._replicas

    @property
    def rank(self) -> int:
        """This rank."""
        return data_world(self.copies).rank if self._rank is None else self._rank

    @property
    def seed(self) -> int:
        """The seed of the order, together with the epoch."""
        return default_seed() if self._seed is None else self._seed

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or of the next one."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch. Setting the current epoch changes nothing.

        Raises:
            ArgumentError: `epoch` is not an integer of at least 0.
        """
        self._progress.move_to(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position in the pass, the same on all ranks that have yielded equally many indices.

        Returns:
            A dict with ``seed``; ``epoch``; ``position``, the number of indices (or batches) yielded by this rank;
            ``samples``, by all ranks; and ``num_replicas``.
        """
        epoch, now, ranks = self.epoch, self._progress, self.num_replicas
        if now.start and now.done == now.start:
            ranks = self._loaded_for or ranks
        taken = now.start_samples + (now.done - now.start) * ranks
        return {"seed": self.seed, "epoch": epoch, "position": now.done, "samples": taken, "num_replicas": ranks}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from a `state_dict`: passes of its epoch yield only the remaining indices.

        With another number of ranks they are divided again; none is lost or repeated.
        """
        self._seed = checked_seed(state["seed"])
        self._loaded_for = state["num_replicas"]
        self._progress.resume(state["epoch"], state["position"], state["samples"])

    def _place(self) -> World:
        rank, replicas = self.rank, self.num_replicas
        if rank >= replicas:
            raise ArgumentError(f"rank={rank}, num_replicas={replicas}: rank must be below num_replicas")
        return World(rank, rank, replicas)

    def _iterate(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate what this rank takes of the whole order from `start_samples` on, and count the pass."""
        start, epoch = self._progress.begin(), self.epoch
        for place, item in enumerate(items, start + 1):
            self._progress.done = place
            yield item
        self._progress.complete(epoch)


class _IndexSampler(RankSampler[int]):
    """Draws a tensor of indices for all ranks; each takes every `num_replicas`-th."""

    total: int

    def __len__(self) -> int:
        place = self._place()
        return (self.total - place.rank + place.size - 1) // place.size

    def __iter__(self) -> Iterator[int]:
        place = self._place()
        drawn = self._draw(derived_generator(self.seed, self.epoch))
        return self._iterate(_in_chunks(drawn[self._progress.start_samples + place.rank :: place.size]))

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        raise NotImplementedError


def _in_chunks(indices: torch.Tensor) -> Iterator[int]:
    """Yield indices as Python ints. A list of all would need ten times the tensor's memory."""
    for chunk in indices.split(_CHUNK_SIZE):
        yield from chunk.tolist()


class ExactDistributedSampler(_IndexSampler):
    """Yields each index on exactly one rank. Unlike torch's ``DistributedSampler`` it neither pads nor drops any.

    So a metric over all ranks is exact. Ranks differ by at most one index; a rank may get none. The number of *batches*
    may differ too, and DDP would hang: for training use ``shard(loader)``.

    Args:
        dataset_or_length: The dataset, or its number of samples.
        shuffle: Whether to shuffle, in another order for each epoch.
        num_replicas: See `RankSampler`, also for `rank` and `seed`.

    Raises:
        ArgumentError: A number is out of range.
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
        self.total = whole_number("dataset_or_length", size, least=0)
        self.shuffle = shuffle

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randperm(self.total, generator=generator) if self.shuffle else torch.arange(self.total)


class DistributedWeightedSampler(_IndexSampler):
    """Draws indices with probabilities proportional to weights, and divides them among the ranks.

    All ranks draw the same indices in float64, and each takes every `num_replicas`-th. The number of weights is not
    limited (``torch.multinomial``, and so ``WeightedRandomSampler``, takes at most 2**24). With replacement, the
    cumulative weights are inverted. Without, the smallest keys E/weight are taken, E exponential, which is equivalent
    to successive draws (Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir").

    Args:
        weights: One per sample, 1-D: a tensor, array or sequence of finite numbers of at least 0, not all 0.
            They need not add up to 1. An index of weight 0 is never drawn.
        num_samples: Draws in a pass, over all ranks. Default: the number of weights.
        replacement: Whether an index may be drawn more than once in a pass.
        num_replicas: See `RankSampler`, also for `rank` and `seed`.

    Raises:
        ArgumentError: Weights or a number are out of range; or without replacement there are more draws than positive
            weights.
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
        self.total = len(self.weights) if num_samples is None else whole_number("num_samples", num_samples, least=0)
        self.replacement = replacement
        positive = int((self.weights > 0).sum())
        if not replacement and self.total > positive:
            raise ArgumentError(
                f"num_samples={self.total}, replacement=False: only {positive} weights are positive: "
                f"use num_samples={positive} or fewer, or replacement=True"
            )

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        if self.replacement:
            heights = (self.weights / self.weights.max()).cumsum(0)  # scaled: the sum of large weights may overflow
            drawn = torch.rand(self.total, dtype=torch.float64, generator=generator) * heights[-1]
            # Rounding may reach the sum itself, beyond the last index. `right` skips weights of 0.
            drawn.clamp_(max=float(torch.nextafter(heights[-1], torch.zeros((), dtype=torch.float64))))
            return torch.searchsorted(heights, drawn, right=True)
        draws = torch.empty_like(self.weights).exponential_(generator=generator)
        keys = draws.log() - self.weights.log()  # logarithms: the quotient overflows for tiny weights
        return keys.topk(self.total, largest=False, sorted=True).indices


def _checked_weights(given: Any) -> torch.Tensor:
    try:
        weights = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"weights={given!r:.80}: must be numbers, one per sample ({error})") from error
    if weights.ndim != 1 or not len(weights):
        raise ArgumentError(f"weights has shape {tuple(weights.shape)}: must be 1-D and not empty")
    wrong = ~(weights.isfinite() & (weights >= 0))
    if wrong.any():
        place = int(wrong.to(torch.uint8).argmax())
        raise ArgumentError(f"weights[{place}]={weights[place].item()}: must be finite and at least 0")
    if not weights.any():
        raise ArgumentError(f"weights: all {len(weights)} are 0: at least one must be positive")
    return weights


class ClassBalancedBatchSampler(RankSampler[list[int]]):
    """Yields batches with equally many samples of each class, on every rank: ``DataLoader(data, batch_sampler=...)``.

    Batches, and ranks, share no sample until a class is exhausted. All ranks get the same number of batches. When a
    class is exhausted:

    * ``short="repeat"`` (default): the pass lasts until the largest class is exhausted. Smaller classes begin again,
      reshuffled, so their samples are repeated (oversampling). The largest class may also repeat samples, to fill its
      last batches.
    * ``short="stop"``: the pass ends before the smallest class would repeat a sample. No sample is repeated, and only a
      part of the larger classes is used, another one in each epoch.

    Args:
        labels: The class of each sample: a tensor, array or sequence of hashable objects, or of tensors of one number.
        batch_size: Samples in one rank's batch; a multiple of the number of classes.
        shuffle: Whether each epoch has its own order. Otherwise samples keep the dataset's order, and a batch is
            ordered by class.
        short: What to do when a class is exhausted, as above.
        num_replicas: See `RankSampler`, also for `rank` and `seed`.

    Raises:
        ArgumentError: `batch_size` is not a multiple of the number of classes; `short` has another value; a label is
            a tensor of several numbers.
    """

    def __init__(
        self,
        labels: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        short: Literal["repeat", "stop"] = "repeat",
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(num_replicas, rank, seed)
        self.short = one_of("short", short, ("repeat", "stop"))
        self.batch_size, self.shuffle = whole_number("batch_size", batch_size, least=1), shuffle
        self._members = _members_by_class(labels)
        classes, rest = len(self._members), batch_size % max(1, len(self._members))
        if rest:
            near = sorted({max(classes, batch_size - rest), batch_size + classes - rest})
            raise ArgumentError(
                f"batch_size={batch_size}: must be a multiple of the number of classes in labels, {classes}: use "
                f"{' or '.join(map(str, near))}"
            )

    def __len__(self) -> int:
        """Return how many batches every rank gets in a pass."""
        if not self._members:
            return 0
        sizes, per_round = [len(members) for members in self._members], self._per_class() * self._place().size
        return -(-max(sizes) // per_round) if self.short == "repeat" else min(sizes) // per_round

    def __iter__(self) -> Iterator[list[int]]:
        if not len(self):
            return self._iterate([])
        place, generator = self._place(), derived_generator(self.seed, self.epoch)
        if self._progress.start_samples and self._loaded_for != place.size:
            raise ArgumentError(
                f"the sampler's state was saved with num_replicas={self._loaded_for}, but it now has {place.size}: "
                "samples would be lost or repeated. Resume with the same number of ranks, or begin the next epoch: "
                f"set_epoch({self.epoch + 1})"
            )
        shape = (len(self), place.size, self._per_class())
        columns = [self._draw(members, shape, generator) for members in self._members]
        batches = torch.cat(columns, dim=2)  # (batches, ranks, batch_size)
        if self.shuffle:
            places = torch.rand(batches.shape, generator=generator).argsort(dim=2)
            batches = batches.gather(2, places)
        return self._iterate(batches[self._progress.start_samples // place.size :, place.rank].tolist())

    def _per_class(self) -> int:
        return self.batch_size // len(self._members)

    def _draw(self, members: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        count = torch.Size(shape).numel()
        runs = [
            members[torch.randperm(len(members), generator=generator)] if self.shuffle else members
            for _ in range(-(-count // len(members)))
        ]
        return torch.cat(runs)[:count].reshape(shape)


def _members_by_class(labels: Iterable[Any]) -> list[torch.Tensor]:
    members: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels.tolist() if hasattr(labels, "tolist") else labels):
        members.setdefault(_class_of(label, index), []).append(index)
    return [torch.tensor(indices) for indices in members.values()]


def _class_of(label: Any, index: int) -> Hashable:
    if not isinstance(label, torch.Tensor):
        return label  # type: ignore[no-any-return]  # the dict refuses what is not hashable
    if label.numel() != 1:
        raise ArgumentError(f"labels[{index}] has shape {tuple(label.shape)}: must be a single class, such as an index")
    return label.item()  # tensors hash by identity
