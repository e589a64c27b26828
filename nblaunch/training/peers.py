"""The panel for other trainers: `PanelCallback` for transformers, `PanelLogger` for lightning.

A library is imported on first access to its class, as in ``from nblaunch.training.peers import PanelCallback``.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import numbers
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nblaunch.ranks.report import Progress, report
from nblaunch.training.loader import length_of
from nblaunch.training.topology import world

_SPEED_SUFFIXES = ("_runtime", "_per_second", "total_flos")
"""Logged once by transformers about its own speed: no curve to draw."""
_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
"""One library under two names, with separate base classes."""


def __getattr__(name: str) -> Any:
    """Define `PanelCallback` or `PanelLogger` on first access.

    Raises:
        ImportError: The library is not installed; the message says how to install it.
    """
    if name not in _KINDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own, *library = _KINDS[name]
    made = type(name, (own, _base(*library)), {"__doc__": own.__doc__, "__module__": __name__})
    return globals().setdefault(name, made)


def __dir__() -> list[str]:
    return sorted(_KINDS)


class _Bars:
    def __init__(self) -> None:
        self._bars: dict[str, Progress] = {}

    def _step(self, name: str, total: int | None) -> None:
        if name not in self._bars:
            self._bars[name] = Progress(total, name)
        self._bars[name].step()

    def _end(self, name: str) -> None:
        if name in self._bars:
            self._bars.pop(name).close()


class _PanelCallback(_Bars):
    """Shows a ``transformers.Trainer`` in the notebook: ``Trainer(..., callbacks=[PanelCallback()])``.

    It reports every number that the trainer logs (``loss``, ``learning_rate``, ``eval_...``), with its step, every
    ``logging_steps``. Each rank shows the progress of its training and evaluation.

    Args:
        all_ranks: Report the numbers of every rank. Default: of rank 0 only, because all ranks log the same:
            transformers averages the loss and gathers evaluation results.

    Outside a launch it does nothing.
    """

    def __init__(self, all_ranks: bool = False) -> None:
        super().__init__()
        self.all_ranks = all_ranks

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        values = {name: value for name, value in (logs or {}).items() if not name.endswith(_SPEED_SUFFIXES)}
        _report_numbers(values, state.global_step, self.all_ranks)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bars["training"] = Progress(state.max_steps, "training", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "training" in self._bars:
            self._bars["training"].reach(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end("training")

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        self._step("evaluating", length_of(eval_dataloader))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end("evaluating")

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self._end("evaluating")


class _PanelLogger:
    """Shows a lightning ``Trainer`` in the notebook: ``Trainer(logger=PanelLogger(), ...)``.

    It reports every number that is logged (``self.log("loss", loss)``), with its step. Each rank shows the progress
    of its training (batches of all epochs), validation, test and prediction. It works with ``lightning.pytorch``
    and ``pytorch_lightning``, whichever is imported first.

    Args:
        all_ranks: Report the numbers of every rank. Default: of rank 0 only, as in lightning's own loggers: they
            describe rank 0's batches, unless they are logged with ``sync_dist=True``.

    Outside a launch it does nothing. It writes no files, so checkpoints go to the Trainer's ``default_root_dir``.
    """

    def __init__(self, all_ranks: bool = False) -> None:
        super().__init__()
        self.all_ranks = all_ranks

    @property
    def name(self) -> str:
        return "nblaunch"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        _report_numbers(metrics, step, self.all_ranks)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the panel shows what changes over time."""

    def log_graph(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Add the progress bars to the model's trainer, which calls this before it begins."""
        bars, callbacks = __getattr__("PanelBars"), model.trainer.callbacks
        if not any(isinstance(callback, bars) for callback in callbacks):
            callbacks.append(bars())


class _PanelBars(_Bars):
    """Shows how far a lightning ``Trainer`` is, on each rank. `PanelLogger` adds it to the trainer."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        batches = trainer.num_training_batches * (math.inf if trainer.max_epochs == -1 else trainer.max_epochs)
        if trainer.max_steps != -1:
            batches = min(batches, trainer.max_steps * trainer.accumulate_grad_batches)
        done = trainer.fit_loop.total_batch_idx + 1
        self._bars["training"] = Progress(_whole(batches), "training", done)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._bars["training"].reach(trainer.fit_loop.total_batch_idx + 1)

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._step("validating", _whole(sum(trainer.num_val_batches)))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._end("validating")

    def on_test_batch_end(self, trainer: Any, *args: Any) -> None:
        self._step("testing", _whole(sum(trainer.num_test_batches)))

    def on_predict_batch_end(self, trainer: Any, *args: Any) -> None:
        self._step("predicting", _whole(sum(trainer.num_predict_batches)))

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        for name in [*self._bars]:
            self._end(name)


_KINDS: dict[str, tuple[Any, ...]] = {
    "PanelBars": (_PanelBars, "lightning", _LIGHTNING, "Callback"),
    "PanelCallback": (_PanelCallback, "transformers", ("transformers",), "TrainerCallback"),
    "PanelLogger": (_PanelLogger, "lightning", _LIGHTNING, "loggers.logger.Logger"),
}


def _whole(count: float) -> int | None:
    return int(count) if math.isfinite(count) else None


def _report_numbers(values: Mapping[str, Any], step: int | None, all_ranks: bool) -> None:
    if not all_ranks and world().rank != 0:
        return
    shown = {
        name: value
        for name, value in values.items()
        if name != "step" and (isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1))
    }
    if shown:
        report(shown, step)


def _base(package: str, names: tuple[str, ...], path: str) -> Any:
    """Return a library's class, from whichever of its names is imported, else from the first that is installed."""
    installed = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is not None]
    if not installed:
        raise ImportError(f"{package} is not installed: pip install {package}", name=package)
    name = next((name for name in installed if name in sys.modules), installed[0])
    module, _, kind = f"{name}.{path}".rpartition(".")
    return getattr(importlib.import_module(module), kind)
