"""`TrainConfig`: the settings of a Trainer, checked on construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from nblaunch.errors import ArgumentError
from nblaunch.machine.argument_checks import one_of, whole_number
from nblaunch.training.accelerator_settings import AcceleratorSettings

SCHEDULES = ("linear", "cosine")
_LEAST = {
    "nprocs": 1,
    "epochs": 0,
    "batch_size": 1,
    "accumulation": 1,
    "num_workers": 0,
    "warmup": 0,
    "checkpoint_every": 1,
    "keep": 1,
    "log_every": 1,
    "early_stop": 1,
}
"""The whole-number settings, each with its minimum."""


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run.

    Attributes:
        nprocs: Number of ranks. Default: one per visible GPU; 2 without GPUs.
        epochs: Passes over the training data in all: a resumed run does the rest of them.
        batch_size: Samples per batch and rank, if `Trainer.fit` is given a dataset.
        accumulation: Batches whose gradients make one optimizer step.
        clip: Maximum norm of all gradients together. Default: no limit.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        schedule: Learning-rate schedule: ``"linear"`` or ``"cosine"`` down to zero after `warmup` steps, or a function
            ``(optimizer, steps) -> LRScheduler``, stepped after each of that many optimizer steps. Default: constant.
        warmup: Optimizer steps in which the learning rate of a named schedule rises from zero.
        extend_schedule: How a named schedule continues if a run resumes with more `epochs` than it began with.
            ``"stretch"``: the learning rate jumps to that of a run that had all `epochs` from the start.
            ``"restart"``: the schedule begins again, with its warm-up, over the remaining steps. Default: as
            ``"stretch"``, with a warning that names both learning rates.
        checkpoint_dir: Folder for checkpoints. Default: none are written.
        checkpoint_every: Optimizer steps between checkpoints, besides the one after each epoch.
        keep: Number of latest checkpoints to keep.
        resume: True: resume from the latest checkpoint in the folder. False: train from the start, and replace the
            checkpoints there.
        seed: Seed of the order of samples and all random numbers in the ranks.
        log_every: Optimizer steps between two reports of the loss.
        early_stop: Stop after this many epochs without an improvement of `monitor`. Default: never.
        monitor: The result of an epoch that `early_stop` watches. Default: ``valid_loss``, without validation ``loss``.
        higher_is_better: Whether a higher `monitor` is an improvement.
        num_workers: Workers of the DataLoaders that `Trainer.fit` makes of datasets.
        compute_setup: ``"auto"``, ``"cpu"`` or ``"gpu"``.

    Raises:
        ArgumentError: A value is wrong; the message names it.
    """

    nprocs: int | None = None
    epochs: int = 1
    batch_size: int = 32
    accumulation: int = 1
    clip: float | None = None
    mixed_precision: str = "no"
    schedule: str | Callable[[Optimizer, int], LRScheduler] | None = None
    warmup: int = 0
    extend_schedule: str | None = None
    checkpoint_dir: str | Path | None = None
    checkpoint_every: int | None = None
    keep: int = 2
    resume: bool = True
    seed: int = 0
    log_every: int = 10
    early_stop: int | None = None
    monitor: str | None = None
    higher_is_better: bool = False
    num_workers: int = 0
    compute_setup: str = "auto"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            is_optional = type(self).__dataclass_fields__[name].default is None
            if value is not None or not is_optional:
                object.__setattr__(self, name, whole_number(name, value, least=least))
        for name in ("resume", "higher_is_better"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name}={getattr(self, name)!r}: use True or False")
        if self.clip is not None and not self.clip > 0:
            raise ArgumentError(f"clip={self.clip!r}: use a norm above 0, or None for no limit")
        if self.schedule is not None and not callable(self.schedule) and self.schedule not in SCHEDULES:
            raise ArgumentError(
                f"schedule={self.schedule!r}: use one of {', '.join(SCHEDULES)}, or a function (optimizer, steps)"
            )
        if self.warmup and self.schedule not in SCHEDULES:
            raise ArgumentError(f"warmup={self.warmup} needs a schedule: use one of {', '.join(SCHEDULES)}")
        if self.extend_schedule is not None:
            one_of("extend_schedule", self.extend_schedule, ("stretch", "restart"))
        self._check_folder()
        AcceleratorSettings(self.nprocs, self.compute_setup, mixed_precision=self.mixed_precision, seed=self.seed)

    def _check_folder(self) -> None:
        folder: object = self.checkpoint_dir
        if folder is None:
            if self.checkpoint_every is not None:
                raise ArgumentError(f"checkpoint_every={self.checkpoint_every} needs a folder: give checkpoint_dir")
        elif not isinstance(folder, (str, Path)) or (Path(folder).exists() and not Path(folder).is_dir()):
            raise ArgumentError(f"checkpoint_dir={folder!r}: give the path of a folder, which need not exist yet")

    def fixed_on_resume(self) -> dict[str, Any]:
        """Return the settings that determine each step; a resumed run must have the same."""
        schedule = getattr(self.schedule, "__qualname__", None) or (self.schedule and str(self.schedule))
        names = ("accumulation", "clip", "mixed_precision", "warmup", "seed")
        return {"schedule": schedule, **{name: getattr(self, name) for name in names}}

    def check_monitor(self, results: Iterable[str]) -> None:
        """Raise ArgumentError if `monitor` is not among an epoch's results."""
        if self.monitor is not None and self.monitor not in results:
            raise ArgumentError(f"monitor={self.monitor!r}: the results of an epoch are {', '.join(results)}")

    def make_scheduler(self, optimizer: Optimizer, steps: int, begin: int = 0) -> LRScheduler | None:
        """Return the learning-rate scheduler; None for a constant rate.

        Args:
            optimizer: The optimizer to schedule.
            steps: Optimizer steps of the whole run.
            begin: The step at which a named schedule begins.
        """
        if self.schedule is None:
            return None
        if callable(self.schedule):
            return self.schedule(optimizer, steps)
        return LambdaLR(optimizer, lambda step: self._factor(max(0, step - begin), steps - begin))

    def _factor(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return step / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, steps - self.warmup))
        return 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
