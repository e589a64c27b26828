"""The training loop of a `Trainer`, as it runs in each rank."""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nblaunch.errors import ArgumentError, warn
from nblaunch.training.accelerator.accelerator import Accelerator
from nblaunch.training.data.index_source import length_of
from nblaunch.training.exchange import exchange
from nblaunch.training.metrics import Mean
from nblaunch.training.parallel.sharded_models import drop_unshared_gradients, has_sharded_parameters
from nblaunch.training.parallel.sharded_states import gathered, load_full_state
from nblaunch.training.seeding import seed_everything
from nblaunch.training.states import checkpoint, gradient_order
from nblaunch.training.topology import world
from nblaunch.training.trainer.callbacks import Callbacks
from nblaunch.training.trainer.fit_display import FitDisplay
from nblaunch.training.trainer.sample_weights import SampleWeights
from nblaunch.training.trainer.train_config import TrainConfig
from nblaunch.training.trainer.trainer_data import Data, loader_of

Results = dict[str, float]


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
    def validate_prepared(self, model: nn.Module, data: Data, at: int | None = None) -> Results: ...
    def validation_names(self) -> list[str]: ...
    def checkpoint_folder(self) -> checkpoint.CheckpointFolder | None: ...
    def restore_best(self) -> Any: ...


class TrainingRun:
    """One `Trainer.fit` in one rank. All ranks make it and run it alike.

    Args:
        trainer: Its model and optimizer are trained; its `progress`, `accelerator` and `should_stop` are set.
        train: The training data.
        valid: The validation data, if any.
    """

    def __init__(self, trainer: Trained, train: Data, valid: Data | None) -> None:
        config = self.config = trainer.config
        seed_everything(config.seed)
        torch.manual_seed(config.seed + world().rank)  # dropout differs between ranks, the order of data does not
        self.trainer, self.valid = trainer, valid
        self._monitor = config.monitor or ("loss" if valid is None else "valid_loss")
        self._monitored = f"{'highest' if config.higher_is_better else 'lowest'} {self._monitor}"
        self.accelerator = trainer.accelerator = config.make_accelerator()
        self.progress = trainer.progress = checkpoint.TrainingProgress(
            monitored=self._monitored, rates=checkpoint.rates_of(trainer.optimizer)
        )
        trainer.should_stop = self._is_stopped = False
        trainer.optimizer.zero_grad()  # an interrupted run in this process may have left gradients
        drop_unshared_gradients(trainer.model)
        loader = loader_of(train, config, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(trainer.model, trainer.optimizer, loader)
        self._mean_loss = Mean()
        self._pending: list[tuple[Tensor, int, int]] = []
        """Losses that are not yet in the mean, with samples and step; reading one waits for the GPU."""
        self._unreported: Tensor | None = None  # the loss of the last step, until it is reported
        self._folder = trainer.checkpoint_folder()
        self._weights = SampleWeights(config.weigh, self.accelerator)
        self._is_best = False
        """Whether this step is the best so far, and not saved as such yet."""
        self._steps = config.count_steps(length_of(self.loader))
        self.progress.schedule_end = self._steps or 0
        self._make_scheduler()
        self._resume()
        self._display = FitDisplay(self._steps, self.progress.step)
        self._restart_clock()

    def run(self) -> None:
        """Train to the end."""
        trainer = self.trainer
        trainer.callbacks.call("on_fit_begin", trainer)
        with closing(self._display):
            while not self._is_done():
                self._train_epoch()
        if self.config.restore_best and self.progress.best_step:
            trainer.restore_best()
        trainer.callbacks.call("on_fit_end", trainer)

    def _make_scheduler(self) -> None:
        begin, end = self.progress.schedule_begin, self.progress.schedule_end
        self._scheduler = self.accelerator.prepare(self.config.make_scheduler(self.trainer.optimizer, end, begin))

    def _is_done(self) -> bool:
        config, progress = self.config, self.progress
        has_epochs = config.epochs is not None and progress.epoch >= config.epochs
        return progress.ended or self._is_stopped or has_epochs or self._has_steps()

    def _has_steps(self) -> bool:
        return self.config.max_steps is not None and self.progress.step >= self.config.max_steps

    # ------------------------------------------------------------------ an epoch
    def _train_epoch(self) -> None:
        """Train until the end of the epoch, or of the run."""
        trainer, progress = self.trainer, self.progress
        if progress.history and progress.history[-1]["epoch"] == progress.epoch:
            progress.history.pop()  # of the part of this epoch that an earlier end of the run has left
        self._epoch_begin = time.monotonic() - progress.seconds
        trainer.callbacks.call("on_epoch_begin", trainer)
        self.model.train()
        of_all = "" if self.config.epochs is None else f"/{self.config.epochs}"
        has_batches = is_broken_off = False
        with closing(self._display.batches(self.loader, f"epoch {progress.epoch + 1}{of_all}")) as batches:
            for batch in batches:
                has_batches = True
                with self.accelerator.accumulate(self.model):
                    loss = self._train_batch(batch)
                if self.accelerator.sync_gradients:
                    self._end_step(loss)
                if self._is_done() and not self.loader.is_last:  # else the pass ends by itself
                    is_broken_off = True
                    break
        if not has_batches:
            raise ArgumentError(
                f"train has no batch in epoch {progress.epoch + 1}: a dataset needs at least one sample, and an "
                "IterableDataset must begin again with each iter()"
            )
        self._end_epoch(is_whole=not is_broken_off)

    def _train_batch(self, batch: Any) -> Tensor:
        loss, *_ = self.trainer.checked_loss(self.model, batch)
        own, of_all = self._weights.begin_batch(self.loader, batch)
        self._samples += of_all
        self._pending.append((loss.detach(), own, self.progress.step + 1))
        self.accelerator.backward(self._weights.weighted(loss))
        if self.accelerator.sync_gradients:
            self._weights.end_step(self.trainer.optimizer)
        if self.config.clip is not None:  # of those that are zeroed below: others would accumulate in the norm
            self.accelerator.clip_grad_norm_(parameters_of(self.trainer.optimizer), self.config.clip)
        self.optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _end_step(self, loss: Tensor) -> None:
        """Report, validate and save, as the step requires; the last step of an epoch or run is left to its end."""
        trainer, config, progress = self.trainer, self.config, self.progress
        progress.step += 1
        trainer.callbacks.call("on_step_end", trainer, loss)
        self._display.step(progress.step)
        self._unreported = loss
        if progress.step % config.log_every == 0 or progress.step == self._display.first_step:
            self._report(loss)
        if self.loader.is_last or self._has_steps():
            return
        if self.valid is not None and config.validate_every is not None and progress.step % config.validate_every == 0:
            self._validate(self.valid)
        is_latest = config.checkpoint_every is not None and progress.step % config.checkpoint_every == 0
        if (is_latest or self._is_best) and not (progress.ended or self._is_stopped):
            self._add_losses()
            progress.seconds = time.monotonic() - self._epoch_begin
            self._write_checkpoint(is_latest)

    def _report(self, loss: Tensor) -> None:
        values = {"loss": float(loss)}
        if self.accelerator.is_main_process:  # the same on every rank
            values["lr"] = self.trainer.optimizer.param_groups[0]["lr"]
            if self._samples and self.progress.step != self._display.first_step:  # the first one also starts workers
                values["samples_per_second"] = self._samples / max(1e-9, time.monotonic() - self._clock)
        self._display.report(self.progress.step, **values)
        self._add_losses()
        self._unreported = None
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._clock, self._samples = time.monotonic(), 0

    def _add_losses(self) -> None:
        for loss, size, step in self._pending:
            self._mean_loss.update(self._display.checked_loss(step, float(loss)), size)
        self._pending.clear()

    def _end_epoch(self, is_whole: bool) -> None:
        """Add the epoch's results to the history, and save.

        Args:
            is_whole: False if the run ends within the epoch, which a later run with more steps continues.
        """
        trainer, config, progress = self.trainer, self.config, self.progress
        self._add_losses()
        results = {"epoch": float(progress.epoch), "step": float(progress.step), "loss": self._mean_loss.compute()}
        validation = {} if self.valid is None else self._validation_at_end(self.valid, is_whole)
        results |= validation
        results["seconds"] = time.monotonic() - self._epoch_begin
        if self.accelerator.is_main_process:
            self._display.report(progress.step, epoch_loss=results["loss"])
        progress.history.append(results)
        trainer.callbacks.call("on_epoch_end", trainer, results)
        results.update(checkpoint.as_numbers(results))
        if self.valid is None or config.validate_every is None or progress.validations:
            config.check_monitor([*results, *(progress.validations[-1] if progress.validations else ())])
        self._judge({name: value for name, value in results.items() if name not in validation})
        progress.seconds = results["seconds"]
        if is_whole:
            progress.epoch, progress.seconds = progress.epoch + 1, 0.0
            self._mean_loss.reset()
        if self._unreported is not None and self._is_done():
            self._report(self._unreported)
        self._write_checkpoint()

    # ------------------------------------------------------------------ validation
    def _validation_at_end(self, valid: Data, is_whole: bool) -> Results:
        """Return the results of validation at the end of an epoch or of the run, if it is due there."""
        config, progress = self.config, self.progress
        if progress.validations and progress.validations[-1]["step"] == progress.step:
            return {name: value for name, value in progress.validations[-1].items() if name not in ("epoch", "step")}
        is_end = not is_whole or self._has_steps() or progress.epoch + 1 == config.epochs
        if is_end or config.validate_every is None or progress.step % config.validate_every == 0:
            return self._validate(valid)
        names = [*progress.validations[-1]][2:] if progress.validations else self.trainer.validation_names()
        return dict.fromkeys(names, math.nan)  # every epoch has the same results

    def _validate(self, valid: Data) -> Results:
        """Return the results of validation, record them, and judge them."""
        trainer, progress = self.trainer, self.progress
        results = trainer.validate_prepared(self.model, valid, at=progress.step)
        self._display.note(progress.step, results)
        trainer.callbacks.call("on_validation_end", trainer, results)
        results = checkpoint.as_numbers(results)
        progress.validations.append({"epoch": float(progress.epoch), "step": float(progress.step), **results})
        self._judge(results)
        self._restart_clock()
        return results

    def _judge(self, results: Results) -> None:
        """Compare a validation or an epoch with the best so far; end training if a rank requires it. A collective.

        Rank 0's value decides: with a callback's results each rank may have another.
        """
        config, progress, name = self.config, self.progress, self._monitor
        by_rank = exchange((self.trainer.should_stop, results.get(name)))
        value = by_rank[0][1]
        is_best = value is not None and progress.monitor(-value if config.higher_is_better else value)
        is_stale = config.early_stop is not None and progress.stale >= config.early_stop
        progress.ended |= is_stale
        self._is_stopped |= any(stops for stops, _ in by_rank)  # this run only: `fit` may continue
        if is_best:
            self._is_best = True
            self._display.mark_best(name, progress.step, results.get(name, math.nan))

    # ------------------------------------------------------------------ checkpoints
    def _write_checkpoint(self, is_latest: bool = True) -> None:
        """Save on the main process what every rank needs to resume here. All ranks call it."""
        is_best, self._is_best = self._is_best and self.config.keeps_best, False
        if self._folder is None or not (is_latest or is_best):
            return
        loader, loss = self.loader.state_dict(), self._mean_loss.state_dict()
        ranks = exchange({"random": checkpoint.random_states(), "loader": loader, "loss": loss})
        if has_sharded_parameters(self.trainer.model):
            parts = {name: gathered(part.state_dict()) for name, part in self._parts().items()}  # a collective
        elif self.accelerator.is_main_process:
            parts = {name: part.state_dict() for name, part in self._parts().items()}
        if self.accelerator.is_main_process:
            state = {
                "setup": self._setup(),
                "progress": asdict(self.progress),
                "parts": parts,
                "ranks": ranks,
                "gradient_order": gradient_order.order_of(self.trainer.model),
            }
            self._folder.write(state, self.progress.step, is_latest=is_latest, is_best=is_best)
        self.accelerator.wait_for_everyone()
        if is_latest:
            self.trainer.loaded = None  # after an interrupt the next run continues this checkpoint
        self._restart_clock()

    def _parts(self) -> dict[str, Any]:
        """Return the objects that have a state."""
        trainer, scaler = self.trainer, self.accelerator.scaler
        parts = {"model": trainer.model, "optimizer": trainer.optimizer, "schedule": self._scheduler, "scaler": scaler}
        return {name: part for name, part in {**parts, "callbacks": trainer.callbacks}.items() if part is not None}

    def _setup(self) -> dict[str, Any]:
        """Return what must be the same to resume a run: it determines the samples of each step."""
        return {
            "nprocs": world().size,
            "batch_size": self.loader.batch_size,
            "optimizer": type(self.trainer.optimizer).__name__,
            "tensor": self.accelerator.copies,
            **self.config.fixed_on_resume(),
            "samples": self.loader.total,
            "batches": length_of(self.loader),
            "parts": sorted(self._parts().keys() - {"callbacks"}),
        }

    def _find_checkpoint(self) -> tuple[Path | None, int]:
        """Return the checkpoint to resume from, and the step of this run's best one, 0 for none. A collective."""
        folder, loaded = self._folder, self.trainer.loaded
        found, best = None, 0
        if folder is not None and self.accelerator.is_main_process:
            resumes, until = self.config.resume, math.inf
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

    def _resume(self) -> None:
        """Resume from the checkpoint that was loaded, else from the latest one if the config says so."""
        path, best = self._find_checkpoint()
        if path is None:
            return
        config, trainer, steps = self.config, self.trainer, self.progress.schedule_end
        state = checkpoint.read(path, mmap=has_sharded_parameters(trainer.model))
        remedy = "another checkpoint_dir or resume=False to train from the start"
        if trainer.loaded is not None:
            remedy = "trainer.load(path, progress=False) to begin a new run with its weights"
        checkpoint.check_setup(path, state["setup"], self._setup(), remedy)
        progress = self.progress = trainer.progress = checkpoint.TrainingProgress.of(state)
        is_kept = not config.keeps_best or 0 < best == progress.best_step  # else the file is another run's, or missing
        if not is_kept or progress.monitored not in ("", self._monitored):
            progress.best, progress.best_step = math.inf, 0
        progress.monitored = self._monitored
        if self.accelerator.is_main_process:
            checkpoint.compare_rates(path, progress.rates, trainer.optimizer)
            if self._is_done():
                self._warn_that_nothing_is_left(path)
        gradient_order.repeat_order(trainer.model, state.get("gradient_order"))
        before, progress.schedule_end = progress.schedule_end, steps
        is_extended = isinstance(config.schedule, str) and 0 < before < steps
        if is_extended and config.extend_schedule == "restart":
            progress.schedule_begin = progress.step
        if progress.schedule_begin:
            self._make_scheduler()
        state["parts"].setdefault("callbacks", {})  # earlier versions saved none
        for name, part in self._parts().items():
            with checkpoint.loading(path, name, remedy):
                load_full_state(part, state["parts"][name])
        own = state["ranks"][world().rank]
        self.loader.load_state_dict(own["loader"])
        self._mean_loss.load_state_dict(own["loss"])
        checkpoint.restore_random_states(own["random"])
        if is_extended:
            self._extend_schedule(path)

    def _warn_that_nothing_is_left(self, path: Path) -> None:
        config, progress = self.config, self.progress
        if progress.ended:
            how = "it ended early"
        elif self._has_steps():
            how = f"give a higher max_steps: it has {progress.step} of {config.max_steps} steps"
        else:
            how = f"give more epochs: it has {progress.epoch} of {config.epochs} epochs"
        warn(
            f"nothing is left to train from {path}: {how}. Use resume=False to train from the start, or another "
            "checkpoint_dir"
        )

    def _extend_schedule(self, path: Path) -> None:
        """Set the learning rates of the longer schedule; warn if they jump and the user has not chosen."""
        scheduler: Any = self._scheduler
        groups = self.trainer.optimizer.param_groups
        before = groups[0]["lr"]
        for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = rate * factor(scheduler.last_epoch)
        now = groups[0]["lr"]
        if self.config.extend_schedule is None and now != before and self.accelerator.is_main_process:
            warn(
                f"{path} was written by a run of fewer steps, whose {self.config.schedule} schedule had reached a "
                f"learning rate of {before:.3g}; over {self.progress.schedule_end} steps it jumps to {now:.3g}. Choose "
                'extend_schedule="stretch" if that is intended, or "restart" to begin the schedule again for the rest'
            )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
