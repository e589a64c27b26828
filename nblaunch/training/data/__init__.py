"""Data for ranks: every sample exactly once, an order of its own for each epoch, and passes that can be resumed."""

from nblaunch.training.data.prefetch import Prefetcher
from nblaunch.training.data.samplers import (
    ClassBalancedBatchSampler,
    DistributedWeightedSampler,
    ExactDistributedSampler,
)
from nblaunch.training.data.sharded_loader import ShardedLoader, shard, skip_first_batches

__all__ = [
    "ClassBalancedBatchSampler",
    "DistributedWeightedSampler",
    "ExactDistributedSampler",
    "Prefetcher",
    "ShardedLoader",
    "shard",
    "skip_first_batches",
]
