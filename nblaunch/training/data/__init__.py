"""Data for ranks: every sample exactly once, an order of its own for each epoch, and passes that can be resumed."""

from nblaunch.training.data.class_balanced_sampler import ClassBalancedBatchSampler
from nblaunch.training.data.loader_positions import skip_first_batches
from nblaunch.training.data.prefetch import Prefetcher
from nblaunch.training.data.samplers import DistributedWeightedSampler, ExactDistributedSampler
from nblaunch.training.data.sharded_loader import ShardedLoader
from nblaunch.training.data.sharding import shard

__all__ = [
    "ClassBalancedBatchSampler",
    "DistributedWeightedSampler",
    "ExactDistributedSampler",
    "Prefetcher",
    "ShardedLoader",
    "shard",
    "skip_first_batches",
]
