"""What a Trainer is told: `TrainConfig`, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from nblaunch.errors import ArgumentError
from nblaunch.training.data.orders import length_of
from nblaunch.training.settings import Settings

SCHEDULES = ("linear", "cosine")
_AT_LEAST = {
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


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Attributes:
        nprocs: Ranks. Default: one per visible GPU, without GPUs 2.
        epochs: Passes over the training data, in all: a resumed run does what is left of them.
        batch_size: Samples of one batch on one rank, where `Trainer.fit` is given a dataset.
        accumulation: Batches whose gradients make one optimizer step.
        clip: The largest norm of all gradients together. Default: no limit.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        schedule: Of the learning rate: ``"linear"`` or ``"cosine"`` down to zero after `warmup` steps, or a function
            ``(optimizer, steps) -> LRScheduler``, stepped after each of so many optimizer steps. Default: constant.
        warmup: Optimizer steps in which the learning rate of a named schedule rises from zero.
        extend_schedule: What becomes of a named schedule where a run goes on with more `epochs` than it was begun with.
            ``"stretch"``: the learning rate is that of a run of so many epochs from the start, so it jumps there.
            ``"restart"``: the schedule begins again, with its warm-up, and takes the steps that are left. Default: as
            ``"stretch"``, with a warning that names both learning rates.
        checkpoint_dir: Where checkpoints go. Default: none are written.
        checkpoint_every: Optimizer steps between two checkpoints, besides the one after each epoch.
        keep: How many of the latest checkpoints stay.
        resume: True: go on from the latest checkpoint in the folder. False: train anew, and replace what is there.
        seed: Of the order of samples and everything random in the ranks.
        log_every: Optimizer steps between two reports of the loss.
        early_stop: End after so many epochs in which `monitor` did not improve. Default: never.
        monitor: The figure of an epoch that `early_stop` watches. Default: ``valid_loss``, without validation ``loss``.
        higher_is_better: Whether `monitor` improves by rising.
        num_workers: Of the DataLoaders that `Trainer.fit` makes of datasets.
        compute_setup: ``"auto"``, ``"cpu"`` or ``"gpu"``.

    Raises:
        ArgumentError: A value that cannot be; the message names it.
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
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            optional = type(self).__dataclass_fields__[name].default is None
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(f"{name}={value!r}: use a whole number of at least {least}")
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
        if self.extend_schedule not in (None, "stretch", "restart"):
            raise ArgumentError(f'extend_schedule={self.extend_schedule!r}: use "stretch", "restart" or None')
        self._check_folder()
        Settings(self.nprocs, self.compute_setup, mixed_precision=self.mixed_precision, seed=self.seed)

    def _check_folder(self) -> None:
        folder: object = self.checkpoint_dir
        if folder is None:
            if self.checkpoint_every is not None:
                raise ArgumentError(f"checkpoint_every={self.checkpoint_every} needs a folder: give checkpoint_dir")
        elif not isinstance(folder, (str, Path)) or (Path(folder).exists() and not Path(folder).is_dir()):
            raise ArgumentError(f"checkpoint_dir={folder!r}: give the path of a folder, which need not be there yet")

    def course(self) -> dict[str, Any]:
        """The settings that steer a run from step to step: in a run that is gone on with, they are the same."""
        schedule = getattr(self.schedule, "__qualname__", None) or (self.schedule and str(self.schedule))
        steering = ("accumulation", "clip", "mixed_precision", "warmup", "seed")
        return {"schedule": schedule, **{name: getattr(self, name) for name in steering}}

    def check_monitor(self, figures: Iterable[str]) -> None:
        """Refuse to monitor what is none of an epoch's figures."""
        if self.monitor is not None and self.monitor not in figures:
            raise ArgumentError(f"monitor={self.monitor!r}: the figures of an epoch are {', '.join(figures)}")

    def make_schedule(self, optimizer: Optimizer, steps: int, begin: int = 0) -> LRScheduler | None:
        """The learning rate's schedule over so many optimizer steps; None for a constant one.

        Args:
            optimizer: Whose.
            steps: Of the whole run.
            begin: The step that a named schedule begins with.
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


def check_data(train: Any) -> None:
    """Refuse what has no samples, or nobody knows how many.

    Raises:
        ArgumentError: As said.
    """
    if not length_of(train):
        raise ArgumentError(f"train={train!r:.80}: give a dataset or DataLoader with a length of at least 1")
