"""Batches with equally many samples of each class."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Literal

import torch

from nblaunch.errors import ArgumentError
from nblaunch.training.data.epochs import checked
from nblaunch.training.data.samplers import RankSampler
from nblaunch.training.seeding import derived_generator


class ClassBalancedBatchSampler(RankSampler[list[int]]):
    """Batches of indices with equally many of each class, on every rank: ``DataLoader(data, batch_sampler=this)``.

    Batches, and ranks, share no sample while a class lasts, and all ranks get as many batches. When a class is short:

    * ``short="repeat"`` (default): the pass lasts until the largest class has been used up. Smaller ones begin again,
      shuffled anew, so that their samples come several times (oversampling); so may the largest in its last batches,
      which are filled up.
    * ``short="stop"``: the pass ends before the smallest class would repeat a sample: none comes twice, and larger
      classes are not used up. Another epoch takes other samples of them.

    Args:
        labels: The class of each sample: a tensor, array or sequence of anything hashable, or of tensors of one number.
        batch_size: Samples in one rank's batch; a multiple of the number of classes.
        shuffle: Whether each epoch has an order of its own. Otherwise samples come in the dataset's order, and a batch
            is class by class.
        short: What to do when a class is short, as above.
        num_replicas: As in `RankSampler`, like `rank` and `seed`.

    Raises:
        ArgumentError: `batch_size` is no multiple of the number of classes; `short` is something else; a label is a
            tensor of several numbers.
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
        if short not in ("repeat", "stop"):
            raise ArgumentError(f'short={short!r}: must be "repeat" or "stop"')
        self.batch_size, self.shuffle, self.short = checked(batch_size, "batch_size", 1), shuffle, short
        self._members = _members_of(labels)
        _check_divisible(batch_size, len(self._members))

    def __len__(self) -> int:
        """How many batches every rank gets in a pass."""
        if not self._members:
            return 0
        sizes, a_round = [len(members) for members in self._members], self._of_each_class() * self._place().size
        return -(-max(sizes) // a_round) if self.short == "repeat" else min(sizes) // a_round

    def __iter__(self) -> Iterator[list[int]]:
        if not len(self):
            return self._passed([])
        place, generator = self._place(), derived_generator(self.seed, self.epoch)
        shape = (len(self), place.size, self._of_each_class())
        columns = [self._drawn(members, shape, generator) for members in self._members]
        batches = torch.cat(columns, dim=2)  # (batches, ranks, batch_size)
        if self.shuffle:
            places = torch.rand(batches.shape, generator=generator).argsort(dim=2)
            batches = batches.gather(2, places)
        return self._passed(batches[:, place.rank].tolist())

    def _of_each_class(self) -> int:
        return self.batch_size // len(self._members)

    def _drawn(self, members: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Samples of one class for all ranks' batches: all of them in some order, then all again in another."""
        count = torch.Size(shape).numel()
        runs = -(-count // len(members))
        return torch.cat([self._ordered(members, generator) for _ in range(runs)])[:count].reshape(shape)

    def _ordered(self, members: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return members[torch.randperm(len(members), generator=generator)] if self.shuffle else members


def _members_of(labels: Iterable[Any]) -> list[torch.Tensor]:
    """Each class's indices, in the order in which the classes first appear."""
    members: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels.tolist() if hasattr(labels, "tolist") else labels):
        members.setdefault(_class_of(label, index), []).append(index)
    return [torch.tensor(indices) for indices in members.values()]


def _class_of(label: Any, index: int) -> Hashable:
    if not isinstance(label, torch.Tensor):
        return label  # type: ignore[no-any-return]  # what is not hashable, the dict refuses
    if label.numel() != 1:
        raise ArgumentError(f"labels[{index}] has the shape {tuple(label.shape)}: must be one class, such as an index")
    return label.item()  # a tensor is equal to itself alone as a key


def _check_divisible(batch_size: int, classes: int) -> None:
    if classes and batch_size % classes:
        near = sorted({max(classes, batch_size - batch_size % classes), batch_size + classes - batch_size % classes})
        raise ArgumentError(
            f"batch_size={batch_size}: must be a multiple of the {classes} classes in labels, so that each has as many "
            f"in every batch: use {' or '.join(map(str, near))}"
        )
