"""`ClassBalancedBatchSampler`: batches with equally many samples of each class."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Literal

import torch

from nblaunch.errors import ArgumentError
from nblaunch.machine.argument_checks import one_of, whole_number
from nblaunch.training.data.samplers import RankSampler
from nblaunch.training.seeding import derived_generator


class ClassBalancedBatchSampler(RankSampler[list[int]]):
    """Batches of indices with equally many of each class, on every rank: ``DataLoader(data, batch_sampler=this)``.

    Batches, and ranks, share no sample until a class is exhausted. All ranks get equally many batches. When a class
    is exhausted:

    * ``short="repeat"`` (default): the pass lasts until the largest class is exhausted. Smaller classes begin again,
      reshuffled, so their samples come several times (oversampling). The largest class may repeat samples too, to fill
      its last batches.
    * ``short="stop"``: the pass ends before the smallest class would repeat a sample. No sample comes twice, and larger
      classes are not exhausted. Another epoch takes other samples of them.

    Args:
        labels: The class of each sample: a tensor, array or sequence of hashable objects, or of tensors of one number.
        batch_size: Samples in one rank's batch; a multiple of the number of classes.
        shuffle: Whether each epoch has an order of its own. Otherwise samples come in the dataset's order, and a batch
            is ordered by class.
        short: What to do when a class is exhausted, as above.
        num_replicas: As in `RankSampler`, like `rank` and `seed`.

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
                f"batch_size={batch_size}: must be a multiple of the {classes} classes in labels, so that each has "
                f"equally many samples in every batch: use {' or '.join(map(str, near))}"
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
        if self._begin and self._loaded_for != place.size:
            raise ArgumentError(
                f"the sampler's state was taken with num_replicas={self._loaded_for}, and this is {place.size}: "
                "balanced batches depend on it, so samples would be lost or repeated. Resume with as many ranks, or "
                f"begin the next epoch: set_epoch({self.epoch + 1})"
            )
        shape = (len(self), place.size, self._per_class())
        columns = [self._draw(members, shape, generator) for members in self._members]
        batches = torch.cat(columns, dim=2)  # (batches, ranks, batch_size)
        if self.shuffle:
            places = torch.rand(batches.shape, generator=generator).argsort(dim=2)
            batches = batches.gather(2, places)
        return self._iterate(batches[self._begin // place.size :, place.rank].tolist())

    def _per_class(self) -> int:
        return self.batch_size // len(self._members)

    def _draw(self, members: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Draw samples of one class for all ranks' batches: all in some order, then all again in another."""
        count = torch.Size(shape).numel()
        runs = [
            members[torch.randperm(len(members), generator=generator)] if self.shuffle else members
            for _ in range(-(-count // len(members)))
        ]
        return torch.cat(runs)[:count].reshape(shape)


def _members_by_class(labels: Iterable[Any]) -> list[torch.Tensor]:
    """Return each class's indices, in the order in which the classes first appear."""
    members: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels.tolist() if hasattr(labels, "tolist") else labels):
        members.setdefault(_class_of(label, index), []).append(index)
    return [torch.tensor(indices) for indices in members.values()]


def _class_of(label: Any, index: int) -> Hashable:
    if not isinstance(label, torch.Tensor):
        return label  # type: ignore[no-any-return]  # the dict refuses what is not hashable
    if label.numel() != 1:
        raise ArgumentError(f"labels[{index}] has the shape {tuple(label.shape)}: must be one class, such as an index")
    return label.item()  # tensors hash by identity
