"""`LoaderNames`: attributes that loops written for accelerate read on a prepared loader."""

from __future__ import annotations

from typing import Any

from nblaunch.training.topology import World, world


class LoaderNames:
    """What loaders have under accelerate's names."""

    dataset: Any
    batch_size: int | None
    batch_sampler: Any
    drop_last: bool
    is_last: bool
    own_samples: int = 0
    all_samples: int = 0

    @property
    def place(self) -> World:
        """This process's position among those that get different samples."""
        return world()

    @property
    def sample_weight(self) -> float:
        """Factor for the mean loss of the latest batch, so that every sample of all ranks' batches counts the same.

        DistributedDataParallel averages the ranks' gradients, and batches of different sizes need the weight. It is 1
        for equal sizes, and where the other ranks' sizes are unknown.
        """
        return self.own_samples * self.place.size / self.all_samples if self.all_samples else 1.0

    @property
    def total_batch_size(self) -> int:
        """Samples in the batches of all ranks together, except the last ones; 0 if that is unknown."""
        size = getattr(self.batch_sampler, "batch_size", None) if self.batch_size is None else self.batch_size
        return size * self.place.size if isinstance(size, int) else 0

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.dataset)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the latest batch is the last of its pass."""
        return self.is_last

    @property
    def remainder(self) -> int:
        """Samples in the last batches of all ranks together; 0 if they are whole, -1 if that is unknown."""
        size = self.total_batch_size
        if not size or self.drop_last or not hasattr(self.dataset, "__len__"):
            return -1
        return len(self.dataset) % size
