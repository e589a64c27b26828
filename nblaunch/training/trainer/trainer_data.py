"""The data that a Trainer is given, and each rank's loader of it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nblaunch.errors import ArgumentError
from nblaunch.training.accelerator.accelerator import Accelerator
from nblaunch.training.data.index_source import given_generators, length_of, samplers_of, shards
from nblaunch.training.data.sharded_loader import ShardedLoader, agreed_seed, shard
from nblaunch.training.trainer.train_config import TrainConfig

Data = DataLoader[Any] | Dataset[Any]
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def loader_of(data: Data, config: TrainConfig, *, shuffle: bool, accelerator: Accelerator | None = None) -> Any:
    """Return this rank's loader of a dataset or DataLoader, at its beginning.

    Args:
        data: A DataLoader is used as it is.
        config: Has the batch size.
        shuffle: Whether a dataset is shuffled; streams never are.
        accelerator: Moves the batches, and knows which ranks compute on the same ones. Default: they stay where they
            are, and no two ranks do.
    """
    if not isinstance(data, DataLoader):
        shuffle = shuffle and not isinstance(data, IterableDataset)
        data = DataLoader(data, config.batch_size, shuffle=shuffle, num_workers=config.num_workers)
    move = None if accelerator is None else accelerator.prepare_batch
    copies = None if accelerator is None or accelerator.copies == 1 else accelerator.copies
    has_order = isinstance(data, ShardedLoader) or given_generators(data)
    loader = shard(data, seed=agreed_seed(data) if has_order else config.seed, move=move, copies=copies)
    loader.load_state_dict({"epoch": 0, "batches": 0, "seed": loader.seed})  # the user may have iterated it before
    return loader


def check_training_data(train: Data, valid: Data | None, config: TrainConfig) -> None:
    """Refuse data that cannot be trained on with these settings.

    Raises:
        ArgumentError: There is no sample, or a setting needs a length or validation data.
    """
    length = length_of(train)
    if length == 0 or (length is None and not isinstance(train, (DataLoader, IterableDataset))):
        raise ArgumentError(f"train={train!r:.80}: give a dataset or DataLoader with at least one sample")
    if length is None and config.schedule not in (None, "constant") and config.max_steps is None:
        raise ArgumentError(
            f"schedule={config.schedule!r}: train has no length, so the number of steps is unknown: give max_steps"
        )
    if valid is not None and length_of(valid) == 0:
        raise ArgumentError(f"valid={valid!r:.80}: give a dataset or DataLoader with at least one sample, or None")
    if config.validate_every is not None and valid is None:
        raise ArgumentError(f"validate_every={config.validate_every}: give fit the validation data, valid=")


def check_order(data: Data) -> None:
    """Refuse a DataLoader whose outputs would not be in the order of its dataset.

    Raises:
        ArgumentError: It shuffles, or its sampler gives this rank's part.
    """
    for sampler in samplers_of(data) if isinstance(data, DataLoader) else ():
        if isinstance(sampler, _SHUFFLING) or shards(sampler):
            raise ArgumentError(
                f"data: its {type(sampler).__name__} changes the order of the samples, in which the outputs are "
                "returned: give the dataset, or a DataLoader with shuffle=False"
            )
