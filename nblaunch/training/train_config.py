"""`TrainConfig`: the settings of a Trainer, checked on construction; and each rank's loader of its data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nblaunch.errors import ArgumentError
from nblaunch.machine.arguments import named_arguments, whole_number
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.distribute import check_gpu, is_elsewhere
from nblaunch.training.loader import ShardedLoader, agreed_seed, generators_of, length_of, samplers_of, shard, shards
from nblaunch.training.parallelism import Parallelism
from nblaunch.training.seeding import checked_seed

SCHEDULES = ("constant", "linear", "cosine")
_LEAST = {
    "nprocs": 1,
    "epochs": 0,
    "max_steps": 1,
    "validate_every": 1,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_workers": 0,
    "warmup": 0,
    "checkpoint_every": 1,
    "save_total_limit": 1,
    "log_every": 1,
    "early_stop": 1,
}
_OWN_OPTIONS = ("function", "args", "kwargs", "num_processes", "device", "backend", "mixed_precision", "block")
"""The arguments of a launch that a Trainer sets itself."""


@named_arguments
@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run.

    Attributes:
        nprocs: Number of ranks. With 1, `Trainer.fit` trains in the notebook's own process. Default: one per visible
            GPU, or 2 without GPUs.
        epochs: Total passes over the training data, including those before a resume. Default: 1; with `max_steps`, as
            many as needed.
        max_steps: Total optimizer steps; training may end within an epoch. Default: no limit.
        batch_size: Samples per batch and rank, if `Trainer.fit` is given a dataset.
        gradient_accumulation_steps: Batches per optimizer step.
        max_grad_norm: Maximum gradient norm; larger gradients are clipped. Default: no clipping.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        schedule: Learning-rate schedule after `warmup` steps: ``"constant"`` (default), or ``"linear"`` or ``"cosine"``
            down to zero. Or a function ``(optimizer, steps) -> LRScheduler`` of the total number of optimizer steps;
            the result is stepped after each.
        warmup: Optimizer steps of linear warmup from zero, for a named schedule. A run that resumes with more `epochs`
            follows the schedule over all of them; a warning names both learning rates.
        checkpoint_dir: Folder for the checkpoints of one run at a time. Default: no checkpoints.
        checkpoint_every: Optimizer steps between checkpoints. They are also written after each epoch and at a stop.
        save_total_limit: Number of latest checkpoints to keep, in addition to the best one.
        resume: True: resume from the latest checkpoint in the folder. The number of ranks may change, if all together
            have as many samples in each step as before. False: train from the start and replace the checkpoints.
        seed: Seed of the sample order and of all random numbers in the ranks. A DataLoader with its own generator takes
            its order from that generator's seed.
        log_every: Optimizer steps between reports of the loss, the learning rate and the samples per second.
        validate_every: Optimizer steps between validations; one more runs at the end. Default: after each epoch.
        early_stop: Stop after this many validations without an improvement of `monitor` (epochs, if `monitor` is not a
            result of validation). Default: never.
        monitor: The result that decides which step is best. Default: ``valid_loss``; without validation, ``loss``.
        higher_is_better: Whether a higher `monitor` is an improvement.
        restore_best: Whether to load the best step's weights at the end of training. Needs a `checkpoint_dir`.
        num_workers: Workers of the DataLoaders created for datasets.
        compute_setup: ``"auto"``, ``"cpu"`` or ``"gpu"``. ``"gpu"`` raises if no GPU is visible.
        backend: ``"gloo"`` or ``"nccl"``. Default: chosen by device.
        dtype: Dtype of the model and of batches during training. Default: unchanged.
        log_setup: See `Accelerator`.
        ddp_kwargs: Additional arguments for ``DistributedDataParallel``, such as ``{"find_unused_parameters": True}``.
        parallelism: A `Parallelism` to shard the model instead of replicating it. Each checkpoint is still one file,
            which any number of ranks and the notebook can load. For a checkpoint, and at the end of `Trainer.fit`, rank
            0 gathers the model and the optimizer state in CPU memory. Adam needs three times the parameters' size.
        launch: Additional arguments for `notebook_launcher`, such as ``{"engine": "slurm --time=60", "num_nodes": 2}``.
            `nprocs` is then the number of ranks per node, and the notebook and all nodes must share `checkpoint_dir`.
            With any option but ``view``, a single rank is launched too.

    Raises:
        ArgumentError: A value is wrong; the message names it.
    """

    nprocs: int | None = None
    epochs: int | None = None
    batch_size: int = 32
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    mixed_precision: str = "no"
    schedule: str | Callable[[Optimizer, int], LRScheduler] | None = None
    warmup: int = 0
    checkpoint_dir: str | Path | None = None
    checkpoint_every: int | None = None
    save_total_limit: int = 2
    resume: bool = True
    seed: int = 0
    log_every: int = 10
    early_stop: int | None = None
    monitor: str | None = None
    higher_is_better: bool = False
    num_workers: int = 0
    compute_setup: str = "auto"
    max_steps: int | None = None
    validate_every: int | None = None
    restore_best: bool = False
    backend: str | None = None
    dtype: torch.dtype | None = None
    log_setup: str = "cpu"
    ddp_kwargs: Mapping[str, Any] | None = None
    parallelism: Parallelism | None = None
    launch: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            is_optional = type(self).__dataclass_fields__[name].default is None
            if value is not None or not is_optional:
                object.__setattr__(self, name, whole_number(name, value, least=least))
        if self.epochs is None and self.max_steps is None:
            object.__setattr__(self, "epochs", 1)
        for name in ("resume", "higher_is_better", "restore_best"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name}={getattr(self, name)!r}: use True or False")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ArgumentError(f"max_grad_norm={self.max_grad_norm!r}: must be above 0, or None for no clipping")
        if self.schedule is not None and not callable(self.schedule) and self.schedule not in SCHEDULES:
            raise ArgumentError(
                f"schedule={self.schedule!r}: use one of {', '.join(SCHEDULES)}, or a function (optimizer, steps)"
            )
        if self.warmup and self.schedule not in SCHEDULES:
            raise ArgumentError(f"warmup={self.warmup} needs a schedule: use one of {', '.join(SCHEDULES)}")
        self._check_folder()
        checked_seed(self.seed)
        self._check_arguments_of_others()
        self.make_accelerator()
        if not is_elsewhere(self.launch_options):
            check_gpu(self.compute_setup)

    def _check_folder(self) -> None:
        folder: object = self.checkpoint_dir
        if folder is None:
            for name in ("checkpoint_every", "restore_best"):
                if getattr(self, name):
                    raise ArgumentError(f"{name}={getattr(self, name)} needs a checkpoint_dir")
        elif not isinstance(folder, (str, Path)) or (Path(folder).exists() and not Path(folder).is_dir()):
            raise ArgumentError(f"checkpoint_dir={folder!r}: must be the path of a folder, existing or not")

    def _check_arguments_of_others(self) -> None:
        for name, function in (("ddp_kwargs", "DistributedDataParallel"), ("launch", "notebook_launcher")):
            given: object = getattr(self, name)
            if given is not None and not isinstance(given, Mapping):
                raise ArgumentError(f"{name}={given!r:.80}: must be a dict of arguments for {function}")
        for name in self.launch_options:
            if name in _OWN_OPTIONS:
                own = ": set nprocs, compute_setup, backend or mixed_precision in TrainConfig"
                raise ArgumentError(
                    f"launch={dict(self.launch_options)!r:.80}: the Trainer sets {name} itself"
                    f"{own if name in _OWN_OPTIONS[3:7] else ''}"
                )

    @property
    def launch_options(self) -> Mapping[str, Any]:
        """Return `launch`, empty if it was not given."""
        return self.launch or {}

    @property
    def keeps_best(self) -> bool:
        """Return True if the best checkpoint is kept."""
        return self.checkpoint_dir is not None and bool(self.monitor or self.early_stop or self.restore_best)

    def count_steps(self, batches: int | None) -> int | None:
        """Return the optimizer steps of a run with this number of batches per epoch; None if they are unknown."""
        ends = [] if self.max_steps is None else [self.max_steps]
        if batches is not None and self.epochs is not None:
            ends.append(math.ceil(batches / self.gradient_accumulation_steps) * self.epochs)
        return min(ends) if ends else None

    def make_accelerator(self) -> Accelerator:
        """Return an Accelerator for one run with these settings."""
        names = inspect.signature(Accelerator).parameters.keys() - {"seed"}  # the loaders' own, see `loader_of`
        return Accelerator(**{name: getattr(self, name) for name in names})

    def fixed_on_resume(self) -> dict[str, Any]:
        """Return the settings that determine each step; a resumed run must have the same."""
        schedule = getattr(self.schedule, "__qualname__", None) or (self.schedule and str(self.schedule))
        names = ("gradient_accumulation_steps", "max_grad_norm", "mixed_precision", "warmup", "seed")
        return {"schedule": schedule, **{name: getattr(self, name) for name in names}}

    def check_monitor(self, results: Iterable[str]) -> None:
        """Raise ArgumentError if `monitor` is not among the results."""
        if self.monitor is not None and self.monitor not in results:
            raise ArgumentError(f"monitor={self.monitor!r}: the results of training are {', '.join(results)}")

    def make_scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """Return the learning-rate scheduler over all `steps` of a run; None for a constant rate."""
        if self.schedule is None:
            return None
        if callable(self.schedule):
            made: object = self.schedule(optimizer, steps)
            if isinstance(made, ReduceLROnPlateau):
                raise ArgumentError(
                    "schedule: a ReduceLROnPlateau needs a result of validation: step it in a callback's "
                    "on_validation_end(trainer, results)"
                )
            if not isinstance(made, LRScheduler):  # its state would not be in the checkpoints
                raise ArgumentError(f"schedule: the function returned {made!r:.80}: it must return an LRScheduler")
            return made
        return LambdaLR(optimizer, lambda step: self._factor(step, steps))

    def _factor(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return step / self.warmup
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, steps - self.warmup))
        return 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


Data = DataLoader[Any] | Dataset[Any]
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def loader_of(data: Data, config: TrainConfig, *, shuffle: bool, accelerator: Accelerator | None = None) -> Any:
    if not isinstance(data, DataLoader):
        shuffle = shuffle and not isinstance(data, IterableDataset)
        data = DataLoader(data, config.batch_size, shuffle=shuffle, num_workers=config.num_workers)
    move = None if accelerator is None else accelerator.prepare_batch
    copies = None if accelerator is None or accelerator.copies == 1 else accelerator.copies
    has_order = isinstance(data, ShardedLoader) or generators_of(*samplers_of(data), data)
    loader = shard(data, seed=agreed_seed(data) if has_order else config.seed, move=move, copies=copies)
    loader.load_state_dict({"epoch": 0, "batches": 0, "seed": loader.seed})  # the user may have iterated it before
    return loader


def check_training_data(train: Data, valid: Data | None, config: TrainConfig) -> None:
    length = length_of(train)
    if length == 0 or (length is None and not isinstance(train, (DataLoader, IterableDataset))):
        raise ArgumentError(f"train={train!r:.80}: must be a dataset or DataLoader with at least one sample")
    if length is None and config.schedule not in (None, "constant") and config.max_steps is None:
        raise ArgumentError(
            f"schedule={config.schedule!r}: train has no length, so the number of steps is unknown: set max_steps"
        )
    if valid is not None and length_of(valid) == 0:
        raise ArgumentError(f"valid={valid!r:.80}: must be a dataset or DataLoader with at least one sample, or None")
    if config.validate_every is not None and valid is None:
        raise ArgumentError(f"validate_every={config.validate_every} needs validation data: pass valid= to fit")


def check_order(data: Data) -> None:
    """Refuse a DataLoader whose outputs would not be in the order of its dataset."""
    for sampler in samplers_of(data) if isinstance(data, DataLoader) else ():
        if isinstance(sampler, _SHUFFLING) or shards(sampler):
            raise ArgumentError(
                f"data: its {type(sampler).__name__} changes the order of the samples, but outputs are returned in the "
                "order of the dataset: pass the dataset, or a DataLoader with shuffle=False"
            )
