"""`Trainer`: the common training loop over N ranks, from a notebook, with exact resume.

`fit` launches the ranks; `_train` and what it calls run in each of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from nblaunch.errors import ArgumentError, warn
from nblaunch.ranks.report import progress, report
from nblaunch.training import checkpoint
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.data.index_source import length_of
from nblaunch.training.data.sharded_loader import ShardedLoader
from nblaunch.training.data.sharding import shard
from nblaunch.training.distribute import is_rank
from nblaunch.training.evaluation import OutputMetric, evaluate, forward, named, split
from nblaunch.training.exchange import exchange
from nblaunch.training.metrics import Mean, Metric
from nblaunch.training.pytree import batch_size_of
from nblaunch.training.seeding import seed_everything
from nblaunch.training.topology import world
from nblaunch.training.train_config import TrainConfig

Results = dict[str, float]
Data = DataLoader[Any] | Dataset[Any]
HOOKS = ("on_fit_begin", "on_epoch_begin", "on_step_end", "on_epoch_end", "on_fit_end")
"""The methods of a callback."""


class Trainer:
    """Trains a module over several ranks.

    Args:
        model: The module. After `fit` it holds the trained weights, in the notebook too.
        optimizer: Over the model's parameters; its state comes back too.
        config: The settings. Default: ``TrainConfig()``.
        loss_fn: ``(output, target) -> loss``, a mean over the batch. Required unless `compute_loss` is overridden.
        metrics: By name, computed over the validation data: ``{"accuracy": Accuracy()}``. Default: none.
        callbacks: Objects with any of the methods ``on_fit_begin(trainer)``, ``on_epoch_begin(trainer)``,
            ``on_step_end(trainer, loss)``, ``on_epoch_end(trainer, results)`` and ``on_fit_end(trainer)``. They run in
            every rank. Setting ``trainer.should_stop`` on any rank ends training with the epoch.

    For callbacks: `epoch`, `step` (optimizer steps done), `history` and `accelerator`, current during training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: TrainConfig | None = None,
        *,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[object] = (),
    ) -> None:
        if config is not None and not isinstance(config, TrainConfig):
            raise ArgumentError(f"config={config!r}: use a TrainConfig")
        if loss_fn is None and type(self).compute_loss is Trainer.compute_loss:
            raise ArgumentError("loss_fn=None: give a loss function, or override compute_loss(self, model, batch)")
        own = {id(parameter) for parameter in model.parameters()}
        if not any(id(parameter) in own for parameter in _parameters_of(optimizer)):
            raise ArgumentError("optimizer: it has none of the model's parameters: make it of model.parameters()")
        self.model = model
        self.optimizer = optimizer
        self.config = config or TrainConfig()
        self.loss_fn = loss_fn
        self.metrics = named(metrics) if metrics else {}
        self.callbacks = _checked_callbacks(callbacks)
        self.should_stop = False
        self.accelerator = Accelerator(
            self.config.nprocs,
            self.config.compute_setup,
            mixed_precision=self.config.mixed_precision,
            gradient_accumulation_steps=self.config.accumulation,
            schedule_steps="optimizer",
        )
        self._progress, self._mean_loss = checkpoint.TrainingProgress(), Mean()
        folder = self.config.checkpoint_dir
        self._folder = None if folder is None else checkpoint.CheckpointFolder(folder, self.config.keep)

    @property
    def epoch(self) -> int:
        """The epoch in training, from 0."""
        return self._progress.epoch

    @property
    def step(self) -> int:
        """Optimizer steps done, over all epochs."""
        return self._progress.step

    @property
    def history(self) -> list[Results]:
        """The results of each finished epoch."""
        return self._progress.history

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Any, ...]:
        """Return the loss of a batch, a mean over its samples. Override it freely.

        Metrics need more: return ``(loss, output)``, or ``(loss, output, target)`` for batches of another form than
        the default: ``(inputs, target)``, or a dict with the target under ``labels``, ``label`` or ``target``.
        """
        assert self.loss_fn is not None
        output, target = forward(model, batch)
        return self.loss_fn(output, target), output, target

    def fit(self, train: Data, valid: Data | None = None) -> list[Results]:
        """Train, and return the history.

        In a notebook this launches ``config.nprocs`` ranks, even a single one; in a rank, or under torchrun or srun, it
        trains as one of the ranks.
        With a ``checkpoint_dir`` an unfinished run resumes: after a stop or a failure, call `fit` again with the same
        arguments, and it takes the same steps as an uninterrupted run (on the CPU bit for bit; random generators of
        the dataset's own are not resumed).

        Args:
            train: A dataset, shuffled in batches of ``config.batch_size`` per rank; or a DataLoader, used as it is. It
                must have a length.
            valid: The same for validation after each epoch, in order. Every sample counts once. Default: none.

        Returns:
            For each epoch ``{"epoch", "step", "loss", "seconds"}``, with `valid` also ``"valid_loss"`` and
            ``"valid_<metric>"``; `step` counts the optimizer steps so far.

        Raises:
            ArgumentError: ``config.monitor`` is not among an epoch's results, or the latest checkpoint is of another
                run.
            Exception: A rank's exception, as from `notebook_launcher`.
        """
        if not length_of(train):
            raise ArgumentError(f"train={train!r:.80}: give a dataset or DataLoader with a length of at least 1")
        if not any(hasattr(callback, "on_epoch_end") for callback in self.callbacks):  # which may add results
            of_valid = [] if valid is None else ["valid_loss", *(f"valid_{name}" for name in self.metrics)]
            self.config.check_monitor(["step", "loss", "seconds", *of_valid])
        if is_rank():
            return self._train(train, valid)
        history: list[Results] = self.accelerator.distribute(self.fit)(train, valid)[0]
        steps = int(history[-1]["step"]) if history else 0
        self._progress = checkpoint.TrainingProgress(epoch=len(history), step=steps, history=history)
        return history

    # ------------------------------------------------------------------ in each rank
    def _train(self, train: Data, valid: Data | None) -> list[Results]:
        seed_everything(self.config.seed)
        torch.manual_seed(self.config.seed + world().rank)  # dropout differs between ranks, the order of data does not
        self._progress, self.should_stop = checkpoint.TrainingProgress(), False
        self._mean_loss.reset()
        model, self._optimizer, loader = self.accelerator.prepare(self.model, self.optimizer, self._loader(train, True))
        self._progress.schedule_end = math.ceil(len(loader) / self.config.accumulation) * self.config.epochs
        self._make_scheduler()
        self._resume(model, loader)
        self._call("on_fit_begin")
        while not self._is_done():
            self._train_epoch(model, loader)
            self._end_epoch(loader, self._validate(model, valid))
        self._call("on_fit_end")
        return self.history

    def _make_scheduler(self) -> None:
        begin, end = self._progress.schedule_begin, self._progress.schedule_end
        self._scheduler = self.accelerator.prepare(self.config.make_scheduler(self.optimizer, end, begin))

    def _loader(self, data: Data, shuffle: bool) -> DataLoader[Any]:
        config = self.config
        if not isinstance(data, DataLoader):
            data = DataLoader(data, config.batch_size, shuffle=shuffle, num_workers=config.num_workers)
        loader = shard(data, seed=None if isinstance(data, ShardedLoader) else config.seed)
        loader.load_state_dict({"epoch": 0, "batches": 0, "seed": loader.seed})  # the user may have iterated it before
        return loader

    def _train_epoch(self, model: nn.Module, loader: Any) -> None:
        self._epoch_begin = time.monotonic() - self._progress.seconds
        self._call("on_epoch_begin")
        model.train()
        pending: list[tuple[Tensor, int]] = []
        for batch in progress(loader, desc=f"epoch {self.epoch + 1}/{self.config.epochs}"):
            with self.accelerator.accumulate(model):
                loss = self._train_batch(model, batch)
            pending.append((loss.detach(), batch_size_of(batch) or 1))
            if self.accelerator.sync_gradients:
                self._progress.step += 1
                self._call("on_step_end", loss.detach())
                if self.step % self.config.log_every == 0:
                    report(step=self.step, loss=float(loss.detach()), lr=self.optimizer.param_groups[0]["lr"])
                    self._add_losses(pending)
                self._write_step_checkpoint(loader, pending)
        self._add_losses(pending)

    def _train_batch(self, model: nn.Module, batch: Any) -> Tensor:
        loss, *_ = self._compute(model, batch)
        self.accelerator.backward(loss)
        if self.config.clip is not None:  # of those that are zeroed below: others would accumulate in the norm
            self.accelerator.clip_grad_norm_(_parameters_of(self.optimizer), self.config.clip)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad()
        return loss

    def _compute(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any, Any]:
        """Return (loss, output, target), with None for what `compute_loss` leaves out."""
        computed = self.compute_loss(model, batch)
        loss, output, target = (*computed, None, None)[:3] if isinstance(computed, tuple) else (computed, None, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ArgumentError(
                f"compute_loss returned {loss!r:.80}: return a tensor with one element, or (loss, output)"
            )
        return loss, output, target

    def _validate(self, model: nn.Module, valid: Data | None) -> Results:
        if valid is None:
            return {}

        def step(model: nn.Module, batch: Any) -> tuple[tuple[Tensor, Any], Any]:
            loss, output, target = self._compute(model, batch)
            return (loss, output), split(batch)[1] if self.metrics and target is None else target

        return evaluate(
            model,
            self._loader(valid, shuffle=False),
            step=step,
            loss_fn=lambda computed, target: computed[0],
            metrics={name: OutputMetric(metric) for name, metric in self.metrics.items()},
            prefix="valid_",
            at=self.step,
        )

    # ------------------------------------------------------------------ results
    def _add_losses(self, pending: list[tuple[Tensor, int]]) -> None:
        """Add the pending losses to the mean; rarely, because reading one waits for the GPU."""
        for loss, size in pending:
            self._mean_loss.update(loss, size)
        pending.clear()

    def _end_epoch(self, loader: Any, validation: Results) -> None:
        results = {"epoch": float(self.epoch), "step": float(self.step), "loss": self._mean_loss.compute()} | validation
        self._mean_loss.reset()
        results["seconds"] = time.monotonic() - self._epoch_begin
        if self.accelerator.is_main_process:
            report(step=self.step, epoch_loss=results["loss"])
        self.history.append(results)
        self._call("on_epoch_end", results)
        results.update(checkpoint.as_numbers(results))
        self._progress.epoch, self._progress.seconds = self.epoch + 1, 0.0
        self._progress.ended = any(exchange(self._stops_early(results) or self.should_stop))
        self._write_checkpoint(loader)

    def _stops_early(self, results: Results) -> bool:
        """Return True if early stopping ends training with this epoch."""
        config = self.config
        if config.early_stop is None:
            return False
        name = config.monitor or ("valid_loss" if "valid_loss" in results else "loss")
        config.check_monitor(results)
        self._progress.monitor(-results[name] if config.higher_is_better else results[name])
        return self._progress.stale >= config.early_stop

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, hook, None)
            if method is not None:
                method(self, *args)

    # ------------------------------------------------------------------ checkpoints
    def _write_step_checkpoint(self, loader: Any, pending: list[tuple[Tensor, int]]) -> None:
        every = self.config.checkpoint_every
        if every is not None and self.step % every == 0 and not loader.is_last:  # the end of the epoch writes its own
            self._add_losses(pending)
            self._progress.seconds = time.monotonic() - self._epoch_begin
            self._write_checkpoint(loader)

    def _write_checkpoint(self, loader: Any) -> None:
        """Save on the main process what every rank needs to resume here. All ranks call it."""
        if self._folder is None:
            return
        own = {
            "random": checkpoint.random_states(),
            "loader": loader.state_dict(),
            "loss": self._mean_loss.state_dict(),
        }
        ranks = exchange(own)
        if self.accelerator.is_main_process:
            parts = {name: part.state_dict() for name, part in self._parts().items()}
            state = {"setup": self._setup(loader), "progress": asdict(self._progress), "parts": parts, "ranks": ranks}
            self._folder.write(state, self.step)
        self.accelerator.wait_for_everyone()

    def _parts(self) -> dict[str, Any]:
        """Return the objects that have a state."""
        scaler = self.accelerator.scaler
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self._scheduler, "scaler": scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def _setup(self, loader: Any) -> dict[str, Any]:
        """Return what must be the same to resume a run: it determines the samples of each step."""
        return {
            "nprocs": world().size,
            "batch_size": loader.batch_size,
            **self.config.fixed_on_resume(),
            "samples": loader.total,
            "batches": len(loader),
            "parts": sorted(self._parts()),
        }

    def _resume(self, model: nn.Module, loader: Any) -> None:
        """Resume from the latest checkpoint, if there is one and the config says so."""
        if self._folder is None:
            return
        path = exchange(self._folder.begin(self.config.resume) if self.accelerator.is_main_process else None)[0]
        if path is None:
            return
        state = checkpoint.read(path)
        checkpoint.check_setup(path, state["setup"], self._setup(loader))
        steps = self._progress.schedule_end
        self._progress = checkpoint.TrainingProgress(**state.get("progress") or state["standing"])  # the key of 0.1.0
        if self._is_done() and self.accelerator.is_main_process:
            how = "ended early, with" if self._progress.ended else "give more epochs: it has"
            warn(
                f"nothing is left to train from {path}: {how} {self.epoch} of {self.config.epochs} epochs. Use "
                "resume=False to train from the start, or another checkpoint_dir"
            )
        self._regroup_gradients(model, loader)
        before, self._progress.schedule_end = self._progress.schedule_end, steps
        is_extended = isinstance(self.config.schedule, str) and 0 < before < steps
        if is_extended and self.config.extend_schedule == "restart":
            self._progress.schedule_begin = self.step
        if self._progress.schedule_begin:
            self._make_scheduler()
        for name, part in self._parts().items():
            part.load_state_dict(state["parts"][name])
        own = state["ranks"][world().rank]
        loader.load_state_dict(own["loader"])
        self._mean_loss.load_state_dict(own["loss"])
        checkpoint.restore_random_states(own["random"])
        if is_extended:
            self._extend_schedule(path)

    def _extend_schedule(self, path: Path) -> None:
        """Set the learning rates of the longer schedule; warn if they jump and the user has not chosen."""
        scheduler: Any = self._scheduler
        groups = self.optimizer.param_groups
        before = groups[0]["lr"]
        for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = rate * factor(scheduler.last_epoch)
        now = groups[0]["lr"]
        if self.config.extend_schedule is None and now != before and self.accelerator.is_main_process:
            warn(
                f"{path} was written by a run of fewer epochs, whose {self.config.schedule} schedule had reached a "
                f"learning rate of {before:.3g}; over {self.config.epochs} epochs it jumps to {now:.3g}. Choose "
                'extend_schedule="stretch" if that is intended, or "restart" to begin the schedule again for the rest'
            )

    def _regroup_gradients(self, model: nn.Module, loader: Any) -> None:
        """Run one backward pass and discard it: in its first one DistributedDataParallel regroups the gradients.

        With three ranks and more the grouping changes the order of summation, and the original run had regrouped.
        """
        if isinstance(model, DistributedDataParallel) and self.step and not self._is_done():
            loss, *_ = self._compute(model.train(), next(iter(loader)))
            loss.backward()
            model.zero_grad()

    def _is_done(self) -> bool:
        return self._progress.ended or self.epoch >= self.config.epochs


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _checked_callbacks(callbacks: Iterable[object]) -> list[object]:
    """Return the callbacks as a list.

    Raises:
        ArgumentError: A callback is a class, or has none of the methods, and would never be called.
    """
    if not isinstance(callbacks, Iterable):
        raise ArgumentError(f"callbacks={callbacks!r:.80}: give a list of objects")
    given = list(callbacks)
    for callback in given:
        if isinstance(callback, type):
            raise ArgumentError(f"callbacks: {callback.__name__} is a class: give an instance, {callback.__name__}()")
        if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
            raise ArgumentError(f"callbacks: {callback!r:.80} has none of the methods {', '.join(HOOKS)}")
    return given
