"""The training toolkit: from the plain loop to a Trainer, with every sample counted once.

In a launch, under torchrun or srun and in one process it works the same; nothing here needs a notebook. For other
people's trainers, `nblaunch.training.peers` has what shows them in the panel.
"""

from __future__ import annotations

from nblaunch.training.accelerator import Accelerator
from nblaunch.training.config import TrainConfig
from nblaunch.training.data import (
    ClassBalancedBatchSampler,
    DistributedBatchSamplerWrapper,
    DistributedSamplerWrapper,
    DistributedWeightedSampler,
    ExactDistributedSampler,
    Prefetcher,
    Preprocessed,
    ShardedLoader,
    WorkersTiming,
    preprocess,
    shard,
    time_workers,
)
from nblaunch.training.metrics import Accuracy, FromTorchmetrics, Mean, Metric, evaluate
from nblaunch.training.seeding import seed_everything, seed_worker
from nblaunch.training.trainer import Trainer

__all__ = [
    "Accelerator",
    "Accuracy",
    "ClassBalancedBatchSampler",
    "DistributedBatchSamplerWrapper",
    "DistributedSamplerWrapper",
    "DistributedWeightedSampler",
    "ExactDistributedSampler",
    "FromTorchmetrics",
    "Mean",
    "Metric",
    "Prefetcher",
    "Preprocessed",
    "ShardedLoader",
    "TrainConfig",
    "Trainer",
    "WorkersTiming",
    "evaluate",
    "preprocess",
    "seed_everything",
    "seed_worker",
    "shard",
    "time_workers",
]
