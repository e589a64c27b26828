"""The training toolkit: from the plain loop to a Trainer, with every sample counted once.

It works the same in a launch, under torchrun or srun, and in a single process; nothing here needs a notebook.
`nblaunch.training.peers` shows the trainers of transformers and lightning in the panel.
"""

from nblaunch.training.accelerator import Accelerator
from nblaunch.training.evaluation import evaluate
from nblaunch.training.loader import Prefetcher, ShardedLoader, shard, skip_first_batches
from nblaunch.training.metrics import Accuracy, FromTorchmetrics, Mean, Metric
from nblaunch.training.parallelism import Parallelism
from nblaunch.training.samplers import ClassBalancedBatchSampler, DistributedWeightedSampler, ExactDistributedSampler
from nblaunch.training.seeding import seed_everything, seed_worker
from nblaunch.training.train_config import TrainConfig
from nblaunch.training.trainer import Trainer

__all__ = [
    "Accelerator",
    "Accuracy",
    "ClassBalancedBatchSampler",
    "DistributedWeightedSampler",
    "ExactDistributedSampler",
    "FromTorchmetrics",
    "Mean",
    "Metric",
    "Parallelism",
    "Prefetcher",
    "ShardedLoader",
    "TrainConfig",
    "Trainer",
    "evaluate",
    "seed_everything",
    "seed_worker",
    "shard",
    "skip_first_batches",
]
