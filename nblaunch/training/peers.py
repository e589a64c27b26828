"""The panel for other people's trainers: `PanelCallback` for transformers, `PanelLogger` for lightning.

Neither library is imported before its class is asked for, as in ``from nblaunch.training.peers import PanelCallback``.
"""

from __future__ import annotations

import importlib
import importlib.util
import numbers
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from nblaunch.ranks.report import progress, report
from nblaunch.training.world import world

_OF_THE_MACHINE = ("_runtime", "_per_second", "total_flos")
"""What transformers logs of itself, once: no curve to draw."""
_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
"""The same library under two names; each has base classes of its own."""


def __getattr__(name: str) -> Any:
    """`PanelCallback` and `PanelLogger`, made when they are first asked for.

    Raises:
        ImportError: The library is not installed; the message says how to.
    """
    if name not in _MAKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = _MAKERS[name]()
    made.__module__, made.__qualname__ = __name__, name  # so that it pickles by reference, like any class
    return globals().setdefault(name, made)


def __dir__() -> list[str]:
    return sorted(_MAKERS)


def _panel_callback() -> type[Any]:
    base: Any = _base("transformers", ("transformers",), "TrainerCallback")

    class PanelCallback(base):  # type: ignore[misc]  # its base is known only here
        """Shows a ``transformers.Trainer`` in the notebook: ``Trainer(..., callbacks=[PanelCallback()])``.

        Every number that the trainer logs (``loss``, ``learning_rate``, ``eval_...``) is reported with its step, and
        each rank shows how far it is in training and evaluation. What is logged is as often as ``logging_steps`` says.

        Args:
            all_ranks: Report the numbers of every rank. Default: of rank 0 alone, for transformers averages the loss
                over the ranks and gathers what it evaluates, so that all say the same.

        Outside a launch it does nothing.
        """

        def __init__(self, all_ranks: bool = False) -> None:
            self.all_ranks = all_ranks
            self._training, self._evaluating = _Bar("training"), _Bar("evaluating")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            figures = {name: value for name, value in (logs or {}).items() if not name.endswith(_OF_THE_MACHINE)}
            _tell(figures, state.global_step, self.all_ranks)

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._training.begin(state.max_steps, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._training.reach(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._training.end()

        def on_prediction_step(
            self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
        ) -> None:
            self._evaluating.step(eval_dataloader)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._evaluating.end()

        def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            self._evaluating.end()

    return PanelCallback


def _panel_logger() -> type[Any]:
    base: Any = _base("lightning", _LIGHTNING, "loggers.logger.Logger")

    class PanelLogger(base):  # type: ignore[misc]  # its base is known only here
        """Shows a lightning ``Trainer`` in the notebook: ``Trainer(logger=PanelLogger(), ...)``.

        Every number that is logged (``self.log("loss", loss)``) is reported with its step. It works with
        ``lightning.pytorch`` and with ``pytorch_lightning``: with the one that is imported first.

        Args:
            all_ranks: Report the numbers of every rank. Default: of rank 0 alone, as lightning's own loggers do; its
                numbers are those of its own batches, unless they are logged with ``sync_dist=True``.

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
            _tell(metrics, step, self.all_ranks)

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            """Nothing: the panel shows what changes."""

    return PanelLogger


_MAKERS: dict[str, Callable[[], type[Any]]] = {"PanelCallback": _panel_callback, "PanelLogger": _panel_logger}


class _Bar:
    """`progress` for loops that are somebody else's: told how far they are."""

    def __init__(self, desc: str) -> None:
        self.desc = desc
        self.end()

    def begin(self, total: int | None, done: int = 0) -> None:
        """Show a bar of `total` steps, of which `done` were done before."""
        items = iter(int, 1) if total is None else range(total)  # the first never ends
        self._items: Iterator[int] | None = iter(progress(items, total, self.desc))
        self._done = -1
        self.reach(done)

    def reach(self, done: int) -> None:
        """Show that `done` steps are done."""
        while self._items is not None and self._done < done:
            next(self._items, None)
            self._done += 1

    def step(self, loader: Any) -> None:
        """Show one more batch of a loader, whose first one begins a bar."""
        if self._items is None:
            self.begin(_length(loader))
        self.reach(self._done + 1)

    def end(self) -> None:
        self._items, self._done = None, 0


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None  # of a stream


def _tell(values: Mapping[str, Any], step: int | None, all_ranks: bool) -> None:
    """Report what is a number; lightning and transformers log text and tables too."""
    if all_ranks or world().rank == 0:
        shown = {name: value for name, value in values.items() if name != "step" and _is_number(value)}
        if shown:
            report(step, **shown)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)


def _base(package: str, names: tuple[str, ...], path: str) -> Any:
    """A class of a library: of that of its names which is imported already, else of the first that is installed."""
    installed = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is not None]
    if not installed:
        raise ImportError(f"{package} is not installed: pip install {package}", name=package)
    name = next((name for name in installed if name in sys.modules), installed[0])
    module, _, kind = f"{name}.{path}".rpartition(".")
    return getattr(importlib.import_module(module), kind)
