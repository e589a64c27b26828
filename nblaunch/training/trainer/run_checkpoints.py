"""The checkpoints of one training run: what they hold, and what a resumed run takes from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from nblaunch.errors import ArgumentError, warn
from nblaunch.training.accelerator.accelerator import Accelerator
from nblaunch.training.data.index_source import length_of
from nblaunch.training.exchange import exchange
from nblaunch.training.metrics import Mean
from nblaunch.training.parallel.sharded_models import has_sharded_parameters
from nblaunch.training.parallel.sharded_states import gathered
from nblaunch.training.states import checkpoint
from nblaunch.training.topology import data_world, world
from nblaunch.training.trainer.callbacks import Callbacks
from nblaunch.training.trainer.train_config import TrainConfig
from nblaunch.training.trainer.trainer_data import Data

Results = dict[str, float]


class Best(NamedTuple):
    """The best step of a training run, by the monitored result."""

    step: int
    """Optimizer steps done."""
    epoch: int
    """From 0."""
    value: float
    path: Path | None
    """Its checkpoint, if one is kept."""


class Trained(Protocol):
    """What a run takes from its `Trainer`, and sets there."""

    model: nn.Module
    optimizer: Optimizer
    config: TrainConfig
    callbacks: Callbacks
    accelerator: Accelerator
    progress: checkpoint.TrainingProgress
    should_stop: bool
    loaded: checkpoint.Loaded | None

    def checked_loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any, Any]: ...
    def validate_prepared(
        self, model: nn.Module, data: Data, at: int | None = None, on_batch: Callable[[], None] | None = None
    ) -> Results: ...
    def validation_names(self) -> list[str]: ...
    def checkpoint_folder(self) -> checkpoint.CheckpointFolder | None: ...
    def restore_best(self) -> Any: ...


class RunCheckpoints:
    """Writes the checkpoints of one run, and finds the one that it continues.

    Args:
        trainer: Its config, progress and parts.
        loader: This rank's loader of the training data.
        mean_loss: Its losses of the epoch.

    Attributes:
        scheduler: The learning-rate scheduler; None for a constant rate.
        is_best: Whether this step is the best so far, and not saved as such yet.
        written: The step of the latest checkpoint, and what was due then.
    """

    def __init__(self, trainer: Trained, loader: Any, mean_loss: Mean) -> None:
        self.trainer, self.loader, self.mean_loss = trainer, loader, mean_loss
        self.folder = trainer.checkpoint_folder()
        self.scheduler: Any = None
        self.is_best = False
        self.written = (0, "")

    def close(self) -> None:
        """Let other runs write to the folder."""
        if self.folder is not None:
            self.folder.close()

    def write(self, is_latest: bool, *, may_fail: bool = False) -> bool:
        """Save on the main process what every rank needs to resume here. All ranks call it.

        Args:
            is_latest: Whether it is the latest checkpoint, or only the best one.
            may_fail: Whether a file that cannot be written is a warning.

        Returns:
            Whether it was written.
        """
        accelerator, progress = self.trainer.accelerator, self.trainer.progress
        is_best, self.is_best = self.is_best and self.trainer.config.keeps_best, False
        if self.folder is None or not (is_latest or is_best):
            return False
        failure, loader, loss = "", self.loader.state_dict(), self.mean_loss.state_dict()
        ranks = exchange({"random": checkpoint.random_states(), "loader": loader, "loss": loss})
        if has_sharded_parameters(self.trainer.model):
            parts = {name: gathered(part.state_dict()) for name, part in self.parts().items()}  # a collective
        elif accelerator.is_main_process:
            parts = {name: part.state_dict() for name, part in self.parts().items()}
        if accelerator.is_main_process:
            state = {
                "setup": self.setup(),
                "progress": asdict(progress),
                "parts": parts,
                "ranks": ranks,
            }
            try:
                self.folder.write(state, progress.step, is_latest=is_latest, is_best=is_best)
            except OSError as error:
                if not may_fail:
                    raise
                failure = str(error)
                warn(f"no checkpoint of step {progress.step} was written: {failure}", each_time=True)
        if exchange(failure)[0]:
            return False
        if is_latest:
            self.trainer.loaded = None  # after an interrupt the next run continues this checkpoint
            self.written = progress.step, progress.due
        return True

    def parts(self) -> dict[str, Any]:
        """Return the objects that have a state."""
        trainer, scaler = self.trainer, self.trainer.accelerator._gradients.scaler
        parts = {"model": trainer.model, "optimizer": trainer.optimizer, "schedule": self.scheduler, "scaler": scaler}
        return {name: part for name, part in {**parts, "callbacks": trainer.callbacks}.items() if part is not None}

    def setup(self) -> dict[str, Any]:
        """Return what must be the same to resume a run: it determines the samples of each step."""
        return {
            "nprocs": world().size,
            "batch_size": self.loader.batch_size,
            "optimizer": type(self.trainer.optimizer).__name__,
            "tensor": self.trainer.accelerator.copies,
            **self.trainer.config.fixed_on_resume(),
            "samples": self.loader.total,
            "batches": length_of(self.loader),
            "parts": sorted(self.parts().keys() - {"callbacks"}),
        }

    def find(self) -> tuple[Path | None, int]:
        """Return the checkpoint to resume from, and the step of this run's best one, 0 for none. A collective."""
        folder, loaded = self.folder, self.trainer.loaded
        found, best = None, 0
        if folder is not None and self.trainer.accelerator.is_main_process:
            resumes, until = self.trainer.config.resume, math.inf
            if loaded is not None and loaded.is_continued:
                resumes, until = loaded.path.parent == folder.path.absolute(), loaded.step
            found = folder.begin(resumes, until)
            if resumes and folder.best.exists():
                best = checkpoint.read_progress(folder.best).best_step
        found, best = exchange((found, best))[0]
        if found is not None and loaded is not None and not loaded.is_continued:
            raise ArgumentError(
                f"checkpoint_dir={str(found.parent)!r} has checkpoints, which would be continued, instead of the "
                f"weights of {loaded.path}: use resume=False to replace them, or another checkpoint_dir"
            )
        return (loaded.path if loaded is not None and loaded.is_continued else found), best


def check_setup(path: Path, wrote: Mapping[str, Any], own: Mapping[str, Any], remedy: str) -> None:
    """Refuse to resume from another run's checkpoint; see `checkpoint.check_setup`.

    Another number of ranks continues if all ranks together have as many samples in each batch as before.
    """
    samples, ranks = _samples_per_batch(wrote), _ranks(own)
    if wrote["nprocs"] != own["nprocs"] and samples is not None:
        if samples == _samples_per_batch(own):
            own = {**own, "nprocs": wrote["nprocs"], "batch_size": wrote["batch_size"]}
        elif samples % ranks == 0 and own["batch_size"] is not None:
            remedy = f"batch_size={samples // ranks}, for as many samples in each step, or {remedy}"
    checkpoint.check_setup(path, wrote, own, remedy)


def _ranks(setup: Mapping[str, Any]) -> int:
    """Return how many ranks have different samples."""
    return int(setup["nprocs"]) // int(setup["tensor"])


def _samples_per_batch(setup: Mapping[str, Any]) -> int | None:
    """Return how many samples all ranks together have in a batch; None if unknown."""
    size = setup["batch_size"]
    return None if size is None else int(size) * _ranks(setup)


def restore_position(ranks: list[dict[str, Any]], loader: Any, mean_loss: Mean, copies: int) -> None:
    """Restore this rank's position in the data, losses and random states.

    Ranks that did not exist get random states derived from rank 0's.

    Args:
        ranks: What each rank has saved.
        loader: The rank's loader of the training data.
        mean_loss: Its losses of the epoch.
        copies: Consecutive ranks that compute on the same samples, as in the run that was saved.
    """
    if len(ranks) == world().size:
        own = ranks[world().rank]
        loader.load_state_dict(own["loader"])
        mean_loss.load_state_dict(own["loss"])
        checkpoint.restore_random_states(own["random"])
        return
    loader.load_state_dict(ranks[0]["loader"])  # it is the same on all ranks
    for saved in ranks if world().rank == 0 else ():
        mean_loss.add_state_dict(saved["loss"])
    groups, part = ranks[::copies], data_world(copies).rank
    if part < len(groups):
        checkpoint.restore_random_states(groups[part]["random"])
    else:
        checkpoint.seed_from_random_states(groups[0]["random"], part)


def warn_that_nothing_is_left(path: Path, config: TrainConfig, progress: checkpoint.TrainingProgress) -> None:
    """Warn about a run that was trained to its end."""
    if progress.ended:
        how = "it ended early"
    elif config.max_steps is not None and progress.step >= config.max_steps:
        how = f"give a higher max_steps: it has {progress.step} of {config.max_steps} steps"
    else:
        how = f"give more epochs: it has {progress.epoch} of {config.epochs} epochs"
    warn(
        f"nothing is left to train from {path}: {how}. Use resume=False to train from the start, or another "
        "checkpoint_dir"
    )


def stretch_schedule(path: Path, scheduler: Any, optimizer: Optimizer, config: TrainConfig, end: int) -> None:
    """Set the learning rates of the longer schedule; rank 0 warns if they jump.

    Args:
        path: The checkpoint.
        scheduler: The longer schedule.
        optimizer: Has the rates.
        config: Names the schedule.
        end: The step at which the schedule ends.
    """
    groups = optimizer.param_groups
    before = groups[0]["lr"]
    for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = rate * factor(scheduler.last_epoch)
    now = groups[0]["lr"]
    if now != before and world().rank == 0:
        warn(
            f"{path} was written by a run of fewer steps, whose {config.schedule} schedule had reached a "
            f"learning rate of {before:.3g}; over {end} steps it jumps to {now:.3g}. For a schedule of its own begin a "
            "new run with these weights: trainer.load(path, progress=False)"
        )


def what_is_next(latest: checkpoint.Loaded | None, trained: Any, config: TrainConfig) -> str:
    """Return what the next `fit` begins with after a stop.

    Args:
        latest: The checkpoint that the next `fit` continues; None if there is none, and with ``resume=False``.
        trained: The progress that the stopped ranks have returned; anything else if they could not.
        config: The settings.
    """
    remedy = "a checkpoint_dir" if config.checkpoint_dir is None else "resume=True"
    has_both = config.checkpoint_dir is not None and config.resume
    if latest is not None:
        return f"the next fit continues after step {latest.step}, from {latest.path}"
    if isinstance(trained, checkpoint.TrainingProgress):
        would = "" if has_both else f"; with {remedy} it would continue this one"
        return (
            f"the model, the optimizer and history have what was trained, up to step {trained.step}. The next fit "
            f"begins a new run with them{would}"
        )
    if has_both:
        return "the ranks were stopped before their first checkpoint, and the next fit begins at step 0"
    return f"what was trained is lost; with {remedy} the next fit would continue this run"
