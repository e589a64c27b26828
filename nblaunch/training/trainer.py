"""`Trainer`: the training loop that most people write, over N ranks, from a notebook, exact when it is resumed.

`fit` launches the ranks; from `_train` on everything runs in each of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
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
from nblaunch.training.config import TrainConfig
from nblaunch.training.data.sharding import shard
from nblaunch.training.distribute import is_rank
from nblaunch.training.metrics import Mean, Metric, evaluate, forward, split
from nblaunch.training.nests import tensors_in
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
        self.model = model
        self.optimizer = optimizer
        self.config = config or TrainConfig()
        self.loss_fn = loss_fn
        self.metrics = dict(metrics or {})
        self.callbacks = list(callbacks)
        self.should_stop = False
        self.accelerator = Accelerator(
            self.config.nprocs,
            self.config.compute_setup,
            mixed_precision=self.config.mixed_precision,
            gradient_accumulation_steps=self.config.accumulation,
            seed=self.config.seed,
        )
        self._standing = checkpoint.Standing()
        self._running = Mean()
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

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Any]:
        """The loss of a batch, a mean over its samples, with the model's output too, for metrics. Override it freely.

        Here a batch is ``(inputs, target)``, or a dict with the target under ``labels``, ``label`` or ``target``.
        """
        assert self.loss_fn is not None
        output, target = forward(model, batch)
        return self.loss_fn(output, target), output

    def fit(self, train: Data, valid: Data | None = None) -> list[Figures]:
        """Train, and give back the history.

        In a notebook this launches ``config.nprocs`` ranks, even if it is one; in a rank, or under torchrun, it trains
        as one of them.
        With a ``checkpoint_dir`` an unfinished run is continued: after a stop or a failure, call it again with the
        same arguments, and it takes the very steps that the run would have taken (on the CPU to the last bit; with
        DataLoader workers only if what they do does not depend on random states).

        Args:
            train: A dataset, shuffled in batches of ``config.batch_size`` a rank; or a DataLoader, used as it is.
            valid: The same for validation after each epoch, in order. Every sample counts once. Default: none.

        Returns:
            For each epoch ``{"epoch", "loss", "seconds"}``, with `valid` ``"valid_loss"`` and ``"valid_<metric>"`` too.

        Raises:
            ArgumentError: ``config.monitor`` is none of an epoch's figures, or the latest checkpoint is of another run.
            Exception: What a rank raised, as `notebook_launcher` has it.
        """
        self._check_monitor(valid)
        if is_rank():
            return self._train(train, valid)
        history: list[Figures] = self.accelerator.distribute(self.fit)(train, valid)[0]
        self._standing = checkpoint.Standing(history=history)
        return history

    # ------------------------------------------------------------------ in each rank
    def _train(self, train: Data, valid: Data | None) -> list[Figures]:
        seed_everything(self.config.seed)
        torch.manual_seed(self.config.seed + world().rank)  # dropout differs between ranks; the order of data does not
        self._standing, self.should_stop = checkpoint.Standing(), False
        model, self._optimizer, loader = self.accelerator.prepare(self.model, self.optimizer, self._loader(train, True))
        steps = math.ceil(len(loader) / self.config.accumulation)
        schedule = self.config.make_schedule(self.optimizer, steps * self.config.epochs)
        self._schedule = self.accelerator.prepare(schedule)
        self._resume(model, loader)
        self._call("on_fit_begin")
        while not self._is_done():
            self._train_epoch(model, loader)
            self._end_epoch(model, loader, valid)
        self._call("on_fit_end")
        return self.history

    def _loader(self, data: Data, shuffle: bool) -> DataLoader[Any]:
        config = self.config
        if not isinstance(data, DataLoader):
            data = DataLoader(data, config.batch_size, shuffle=shuffle, num_workers=config.num_workers)
        loader = shard(data, seed=config.seed)
        loader.set_epoch(0)  # a sharded loader of the user's may have been used before
        return loader

    def _train_epoch(self, model: nn.Module, loader: Any) -> None:
        self._begun = time.monotonic() - self._standing.seconds
        self._call("on_epoch_begin")
        model.train()
        waiting: list[tuple[Tensor, int]] = []
        for batch in progress(loader, desc=f"epoch {self.epoch + 1}/{self.config.epochs}"):
            with self.accelerator.accumulate(model):
                loss = self._step(model, batch)
            waiting.append((loss.detach(), _size(batch)))
            if self.accelerator.sync_gradients:
                self._standing.step += 1
                self._call("on_step_end", loss.detach())
                self._log(waiting)
                self._checkpoint_in_epoch(loader, waiting)
        self._settle(waiting)

    def _step(self, model: nn.Module, batch: Any) -> Tensor:
        loss, _ = self._loss_and_output(model, batch)
        self.accelerator.backward(loss)
        if self.config.clip is not None:
            self.accelerator.clip_grad_norm_(model.parameters(), self.config.clip)
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        self._optimizer.zero_grad()
        return loss

    def _loss_and_output(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        computed = self.compute_loss(model, batch)
        return computed if isinstance(computed, tuple) else (computed, None)

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
        figures = {"epoch": float(self.epoch), "loss": self._running.compute(), **self._validate(model, valid)}
        self._running.reset()
        figures["seconds"] = time.monotonic() - self._begun
        if self.accelerator.is_main_process:
            report(step=self.step, epoch_loss=figures["loss"])
        self.history.append(figures)
        self._call("on_epoch_end", figures)
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
            step=lambda module, batch: (self._loss_and_output(module, batch), split(batch)[1]),
            loss_fn=lambda computed, target: computed[0],
            metrics={name: _OfOutput(metric) for name, metric in self.metrics.items()},
            prefix="valid_",
            at=self.step,
        )

    def _is_over(self, figures: Figures) -> bool:
        """Whether early stopping ends training with this epoch."""
        config = self.config
        if config.early_stop is None:
            return False
        name = config.monitor or ("valid_loss" if "valid_loss" in figures else "loss")
        if name not in figures:
            raise ArgumentError(f"monitor={name!r}: the figures of an epoch are {', '.join(figures)}")
        self._standing.note(-figures[name] if config.higher_is_better else figures[name])
        return self._standing.stale >= config.early_stop

    def _check_monitor(self, valid: Data | None) -> None:
        """Refuse a name that no epoch can have; those that callbacks add are known after the first."""
        names = ["loss", "seconds"]
        if valid is not None:
            names += ["valid_loss", *(f"valid_{name}" for name in self.metrics)]
        monitor = self.config.monitor
        if monitor not in (None, *names) and not any(hasattr(each, "on_epoch_end") for each in self.callbacks):
            raise ArgumentError(f"monitor={monitor!r}: the figures of an epoch are {', '.join(names)}")

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, hook, None)
            if method is not None:
                method(self, *args)

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
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self._schedule}
        parts["scaler"] = self.accelerator.scaler
        return {name: part for name, part in parts.items() if part is not None}

    def _setup(self, loader: Any) -> dict[str, Any]:
        """What must be alike for one run to go on where another was: it says which samples make a step."""
        return {
            "nprocs": world().size,
            "batch_size": loader.batch_size,
            "accumulation": self.config.accumulation,
            "samples": loader.total,
            "batches": len(loader),
        }

    def _resume(self, model: nn.Module, loader: Any) -> None:
        """Go on from the latest checkpoint, if there is one and the config says so."""
        if self._folder is None:
            return
        if self.accelerator.is_main_process:
            self._folder.sweep()
        path = exchange(self._folder.latest() if self.config.resume else None)[0]  # rank 0 decides
        if path is None:
            return
        state = checkpoint.read(path)
        checkpoint.check_setup(path, state["setup"], self._setup(loader))
        self._standing = checkpoint.Standing(**state["standing"])
        if self._is_done() and self.accelerator.is_main_process:
            warn(
                f"nothing is left to train: {path} has {self.epoch} of {self.config.epochs} epochs. Give more "
                "epochs, another checkpoint_dir, or resume=False to train anew"
            )
        self._rehearse(model, loader)
        self._restore(state, loader)

    def _rehearse(self, model: nn.Module, loader: Any) -> None:
        """Take a step of which nothing stays: with its first, DistributedDataParallel regroups the gradients.

        Regrouped, three ranks and more add them up in another order, and the run that is gone on with had done it.
        """
        if isinstance(model, DistributedDataParallel) and self.step and not self._is_done():
            loss, _ = self._loss_and_output(model.train(), next(iter(loader)))
            loss.backward()
            self.optimizer.zero_grad()

    def _restore(self, state: Mapping[str, Any], loader: Any) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state["parts"][name])
        own = state["ranks"][world().rank]
        loader.load_state_dict(own["loader"])
        self._running.load_state_dict(own["loss"])
        checkpoint.restore_random_states(own["random"])

    def _is_done(self) -> bool:
        return self._standing.ended or self.epoch >= self.config.epochs


class _OfOutput:
    """A metric of what `compute_loss` gave beside the loss."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric

    def update(self, computed: tuple[Tensor, Any], target: Any) -> None:
        if computed[1] is None:
            raise ArgumentError("metrics need the output: let compute_loss return (loss, output)")
        self.metric.update(computed[1], target)

    def compute(self) -> float:
        return self.metric.compute()

    def reset(self) -> None:
        self.metric.reset()


def _size(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 1)
