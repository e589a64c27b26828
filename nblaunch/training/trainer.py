"""`Trainer`: the training loop that most people write, over N ranks, from a notebook, exact when it is resumed.

`fit` launches the ranks; from `_train` on everything runs in each of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
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
from nblaunch.training import callbacks as callbacks_
from nblaunch.training import checkpoint
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.config import TrainConfig, check_data
from nblaunch.training.data.loader import ShardedLoader
from nblaunch.training.data.sharding import shard
from nblaunch.training.distribute import is_rank
from nblaunch.training.metrics import Mean, Metric, OfOutput, evaluate, forward, named, split
from nblaunch.training.nests import samples_in
from nblaunch.training.seeding import seed_everything
from nblaunch.training.world import exchange, world

Figures = dict[str, float]
Data = DataLoader[Any] | Dataset[Any]


class Trainer:
    """Trains a module over several ranks.

    Args:
        model: What to train. After `fit` it holds the trained weights, in the notebook too.
        optimizer: Over the model's parameters; its state comes back too.
        config: How. Default: ``TrainConfig()``.
        loss_fn: ``(output, target) -> loss``, a mean over the batch. Needed unless `compute_loss` is overridden.
        metrics: By name, computed over the validation data: ``{"accuracy": Accuracy()}``. Default: none.
        callbacks: Objects with any of the methods ``on_fit_begin(trainer)``, ``on_epoch_begin(trainer)``,
            ``on_step_end(trainer, loss)``, ``on_epoch_end(trainer, figures)`` and ``on_fit_end(trainer)``. They run in
            every rank. Setting ``trainer.should_stop`` on any rank ends training with the epoch.

    While it trains, `epoch`, `step` (optimizer steps done), `history` and `accelerator` tell a callback where it is.
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
        trained = {id(parameter) for parameter in model.parameters()}
        if not any(id(parameter) in trained for parameter in _parameters(optimizer)):
            raise ArgumentError("optimizer: it has none of the model's parameters: make it of model.parameters()")
        self.model = model
        self.optimizer = optimizer
        self.config = config or TrainConfig()
        self.loss_fn = loss_fn
        self.metrics = named(metrics) if metrics else {}
        self.callbacks = callbacks_.checked(callbacks)
        self.should_stop = False
        self.accelerator = Accelerator(
            self.config.nprocs,
            self.config.compute_setup,
            mixed_precision=self.config.mixed_precision,
            gradient_accumulation_steps=self.config.accumulation,
            schedule_steps="optimizer",
        )
        self._standing, self._running = checkpoint.Standing(), Mean()
        folder = self.config.checkpoint_dir
        self._folder = None if folder is None else checkpoint.Folder(folder, self.config.keep)

    @property
    def epoch(self) -> int:
        """The epoch that is being trained, from 0."""
        return self._standing.epoch

    @property
    def step(self) -> int:
        """Optimizer steps done, over all epochs."""
        return self._standing.step

    @property
    def history(self) -> list[Figures]:
        """The figures of each finished epoch."""
        return self._standing.history

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Any, ...]:
        """The loss of a batch, a mean over its samples. Override it freely.

        Metrics need more: ``(loss, output)``, or ``(loss, output, target)`` of a batch that is not as they know it.
        Here a batch is ``(inputs, target)``, or a dict with the target under ``labels``, ``label`` or ``target``.
        """
        assert self.loss_fn is not None
        output, target = forward(model, batch)
        return self.loss_fn(output, target), output, target

    def fit(self, train: Data, valid: Data | None = None) -> list[Figures]:
        """Train, and give back the history.

        In a notebook this launches ``config.nprocs`` ranks, even if it is one; in a rank, or under torchrun or
        srun, it trains as one of them.
        With a ``checkpoint_dir`` an unfinished run is continued: after a stop or a failure, call it again with the
        same arguments, and it takes the very steps that the run would have taken (on the CPU to the last bit; what a
        dataset draws from a random generator of its own is not resumed).

        Args:
            train: A dataset, shuffled in batches of ``config.batch_size`` a rank; or a DataLoader, used as it is. It
                must have a length.
            valid: The same for validation after each epoch, in order. Every sample counts once. Default: none.

        Returns:
            For each epoch ``{"epoch", "step", "loss", "seconds"}``, with `valid` ``"valid_loss"`` and
            ``"valid_<metric>"`` too; `step` counts the optimizer steps so far.

        Raises:
            ArgumentError: ``config.monitor`` is none of an epoch's figures, or the latest checkpoint is of another run.
            Exception: What a rank raised, as `notebook_launcher` has it.
        """
        self._check(train, valid)
        if is_rank():
            return self._train(train, valid)
        history: list[Figures] = self.accelerator.distribute(self.fit)(train, valid)[0]
        steps = int(history[-1]["step"]) if history else 0
        self._standing = checkpoint.Standing(epoch=len(history), step=steps, history=history)
        return history

    # ------------------------------------------------------------------ in each rank
    def _train(self, train: Data, valid: Data | None) -> list[Figures]:
        seed_everything(self.config.seed)
        torch.manual_seed(self.config.seed + world().rank)  # dropout differs between ranks; the order of data does not
        self._standing, self.should_stop = checkpoint.Standing(), False
        self._running.reset()
        model, self._optimizer, loader = self.accelerator.prepare(self.model, self.optimizer, self._loader(train, True))
        self._standing.schedule_end = math.ceil(len(loader) / self.config.accumulation) * self.config.epochs
        self._make_schedule()
        self._resume(model, loader)
        self._call("on_fit_begin")
        while not self._is_done():
            self._train_epoch(model, loader)
            self._end_epoch(model, loader, valid)
        self._call("on_fit_end")
        return self.history

    def _make_schedule(self) -> None:
        standing = self._standing
        schedule = self.config.make_schedule(self.optimizer, standing.schedule_end, standing.schedule_begin)
        self._schedule = self.accelerator.prepare(schedule)

    def _loader(self, data: Data, shuffle: bool) -> DataLoader[Any]:
        config = self.config
        if not isinstance(data, DataLoader):
            data = DataLoader(data, config.batch_size, shuffle=shuffle, num_workers=config.num_workers)
        loader = shard(data, seed=None if isinstance(data, ShardedLoader) else config.seed)
        loader.load_state_dict({"epoch": 0, "batches": 0, "seed": loader.seed})  # the user's may have been used before
        return loader

    def _train_epoch(self, model: nn.Module, loader: Any) -> None:
        self._begun = time.monotonic() - self._standing.seconds
        self._call("on_epoch_begin")
        model.train()
        waiting: list[tuple[Tensor, int]] = []
        for batch in progress(loader, desc=f"epoch {self.epoch + 1}/{self.config.epochs}"):
            with self.accelerator.accumulate(model):
                loss = self._step(model, batch)
            waiting.append((loss.detach(), samples_in(batch) or 1))
            if self.accelerator.sync_gradients:
                self._standing.step += 1
                self._call("on_step_end", loss.detach())
                self._log(waiting)
                self._checkpoint_in_epoch(loader, waiting)
        self._settle(waiting)

    def _step(self, model: nn.Module, batch: Any) -> Tensor:
        loss, *_ = self._computed(model, batch)
        self.accelerator.backward(loss)
        if self.config.clip is not None:  # of what is zeroed below: others' gradients would pile up in the norm
            self.accelerator.clip_grad_norm_(_parameters(self.optimizer), self.config.clip)
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        self._optimizer.zero_grad()
        return loss

    def _computed(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any, Any]:
        """(loss, output, target), with None for what `compute_loss` leaves out."""
        computed = self.compute_loss(model, batch)
        loss, output, target = (*computed, None, None)[:3] if isinstance(computed, tuple) else (computed, None, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ArgumentError(f"compute_loss gave {loss!r:.80}: give a tensor of one number, or (loss, output)")
        return loss, output, target

    def _assessed(self, model: nn.Module, batch: Any) -> tuple[tuple[Tensor, Any], Any]:
        loss, output, target = self._computed(model, batch)
        return (loss, output), split(batch)[1] if self.metrics and target is None else target

    # ------------------------------------------------------------------ figures
    def _log(self, waiting: list[tuple[Tensor, int]]) -> None:
        if self.step % self.config.log_every == 0:
            loss = float(waiting[-1][0])
            report(step=self.step, loss=loss, lr=self.optimizer.param_groups[0]["lr"])
            self._settle(waiting)

    def _settle(self, waiting: list[tuple[Tensor, int]]) -> None:
        """Count the losses since the last time: rarely, because reading one waits for the GPU."""
        for loss, size in waiting:
            self._running.update(loss, size)
        waiting.clear()

    def _end_epoch(self, model: nn.Module, loader: Any, valid: Data | None) -> None:
        figures = {"epoch": float(self.epoch), "step": float(self.step), "loss": self._running.compute()}
        figures |= self._validate(model, valid)
        self._running.reset()
        figures["seconds"] = time.monotonic() - self._begun
        if self.accelerator.is_main_process:
            report(step=self.step, epoch_loss=figures["loss"])
        self.history.append(figures)
        self._call("on_epoch_end", figures)
        figures.update(checkpoint.as_numbers(figures))
        standing = self._standing
        standing.epoch, standing.seconds = self.epoch + 1, 0.0
        standing.ended = any(exchange(self._is_over(figures) or self.should_stop))
        self._checkpoint(loader)

    def _validate(self, model: nn.Module, valid: Data | None) -> Figures:
        if valid is None:
            return {}
        return evaluate(
            model,
            self._loader(valid, shuffle=False),
            step=self._assessed,
            loss_fn=lambda computed, target: computed[0],
            metrics={name: OfOutput(metric) for name, metric in self.metrics.items()},
            prefix="valid_",
            at=self.step,
        )

    def _is_over(self, figures: Figures) -> bool:
        """Whether early stopping ends training with this epoch."""
        config = self.config
        if config.early_stop is None:
            return False
        name = config.monitor or ("valid_loss" if "valid_loss" in figures else "loss")
        config.check_monitor(figures)
        self._standing.note(-figures[name] if config.higher_is_better else figures[name])
        return self._standing.stale >= config.early_stop

    def _check(self, train: Any, valid: Data | None) -> None:
        """Refuse what cannot be trained on, and a figure that no epoch can have."""
        check_data(train)
        valid_ones = [] if valid is None else ["valid_loss", *(f"valid_{name}" for name in self.metrics)]
        if not any(hasattr(each, "on_epoch_end") for each in self.callbacks):  # which may add figures
            self.config.check_monitor(["step", "loss", "seconds", *valid_ones])

    def _call(self, hook: str, *args: Any) -> None:
        callbacks_.call(self.callbacks, hook, self, *args)

    # ------------------------------------------------------------------ checkpoints
    def _checkpoint_in_epoch(self, loader: Any, waiting: list[tuple[Tensor, int]]) -> None:
        every = self.config.checkpoint_every
        if every is not None and self.step % every == 0 and not loader.is_last:  # the last is the epoch's own
            self._settle(waiting)
            self._standing.seconds = time.monotonic() - self._begun
            self._checkpoint(loader)

    def _checkpoint(self, loader: Any) -> None:
        """Save on the main process what every rank needs to go on from here. All ranks call it."""
        if self._folder is None:
            return
        own = {"random": checkpoint.random_states(), "loader": loader.state_dict(), "loss": self._running.state_dict()}
        ranks = exchange(own)
        if self.accelerator.is_main_process:
            parts = {name: part.state_dict() for name, part in self._parts().items()}
            state = {"setup": self._setup(loader), "standing": asdict(self._standing), "parts": parts, "ranks": ranks}
            self._folder.write(state, self.step)
        self.accelerator.wait_for_everyone()

    def _parts(self) -> dict[str, Any]:
        """What has a state of its own."""
        scaler = self.accelerator.scaler
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self._schedule, "scaler": scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def _setup(self, loader: Any) -> dict[str, Any]:
        """What must be alike for one run to go on where another was: it says which samples make a step."""
        return {
            "nprocs": world().size,
            "batch_size": loader.batch_size,
            **self.config.course(),
            "samples": loader.total,
            "batches": len(loader),
            "parts": sorted(self._parts()),
        }

    def _resume(self, model: nn.Module, loader: Any) -> None:
        """Go on from the latest checkpoint, if there is one and the config says so."""
        if self._folder is None:
            return
        latest = self._folder.begin(self.config.resume) if self.accelerator.is_main_process else None
        path = exchange(latest)[0]
        if path is None:
            return
        state = checkpoint.read(path)
        checkpoint.check_setup(path, state["setup"], self._setup(loader))
        steps = self._standing.schedule_end
        self._standing = checkpoint.Standing(**state["standing"])
        if self._is_done() and self.accelerator.is_main_process:
            how = "ended early, with" if self._standing.ended else "give more epochs: it has"
            warn(
                f"nothing is left to train from {path}: {how} {self.epoch} of {self.config.epochs} epochs. Use "
                "resume=False to train anew, or another checkpoint_dir"
            )
        self._rehearse(model, loader)
        before, self._standing.schedule_end = self._standing.schedule_end, steps
        is_extended = isinstance(self.config.schedule, str) and 0 < before < steps
        if is_extended and self.config.extend_schedule == "restart":
            self._standing.schedule_begin = self.step
        if self._standing.schedule_begin:
            self._make_schedule()
        self._restore(state, loader)
        if is_extended:
            self._extend_schedule(path)

    def _extend_schedule(self, path: Path) -> None:
        """Have the learning rates that the schedule gives now, in place of those of the shorter one; say so."""
        schedule: Any = self._schedule
        groups = self.optimizer.param_groups
        before = groups[0]["lr"]
        for group, rate, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = rate * factor(schedule.last_epoch)
        now = groups[0]["lr"]
        if self.config.extend_schedule is None and now != before and self.accelerator.is_main_process:
            warn(
                f"{path} was written by a run of fewer epochs, whose {self.config.schedule} schedule had come to a "
                f"learning rate of {before:.3g}; over {self.config.epochs} epochs it jumps to {now:.3g}. Choose "
                'extend_schedule="stretch" if that is meant, or "restart" to begin the schedule again for what is left'
            )

    def _rehearse(self, model: nn.Module, loader: Any) -> None:
        """Take a step of which nothing stays: with its first, DistributedDataParallel regroups the gradients.

        Regrouped, three ranks and more add them up in another order, and the run that is gone on with had done it.
        """
        if isinstance(model, DistributedDataParallel) and self.step and not self._is_done():
            loss, *_ = self._computed(model.train(), next(iter(loader)))
            loss.backward()
            model.zero_grad()

    def _restore(self, state: Mapping[str, Any], loader: Any) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state["parts"][name])
        own = state["ranks"][world().rank]
        loader.load_state_dict(own["loader"])
        self._running.load_state_dict(own["loss"])
        checkpoint.restore_random_states(own["random"])

    def _is_done(self) -> bool:
        return self._standing.ended or self.epoch >= self.config.epochs


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
