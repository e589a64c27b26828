"""`Trackers`: an Accelerator's values, in the notebook's panel and in experiment trackers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nblaunch.errors import ArgumentError
from nblaunch.ranks.report import report
from nblaunch.training import plugin_settings
from nblaunch.training.rank_roles import RankRoles
from nblaunch.training.topology import leave_group

_INTERFACE = ("name", "store_init_configuration", "log", "finish")
"""What a tracker of the user's must have, as accelerate's ``GeneralTracker`` has."""


class Trackers(RankRoles):
    """The part of an `Accelerator` that logs values and profiles."""

    @property
    def trackers(self) -> list[Any]:
        """The trackers that `init_trackers` started on this rank."""
        return self._trackers

    @property
    def log_with(self) -> list[Any]:
        """The trackers that were requested: names, and objects of the user's."""
        return requested(self._log_with, self.logging_dir)

    @property
    def project_dir(self) -> Any:
        """The folder of the run, or None."""
        own = getattr(self.project_config, "project_dir", None)
        return self._project_dir if own is None else own

    @property
    def logging_dir(self) -> Any:
        """The folder of the trackers' files: the project's unless the configuration names another one, or None."""
        own = getattr(self.project_config, "logging_dir", None)
        return self.project_dir if own is None else own

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Start the trackers of ``log_with`` on the main process. The panel needs no start.

        Args:
            project_name: The name of the run: TensorBoard's folder in ``logging_dir``, wandb's project.
            config: Hyperparameters to store. Default: none.
            init_kwargs: By a tracker's name, more arguments for ``SummaryWriter`` or ``wandb.init``.

        Raises:
            ArgumentError: A tracker's library is not installed, or it needs a ``project_dir``.
        """
        for tracker in self.log_with:
            own = tracker
            if isinstance(tracker, str):
                own = _TRACKERS[tracker](project_name, self.logging_dir, dict((init_kwargs or {}).get(tracker, {})))
            if not self._is_here(own):
                continue
            if hasattr(own, "start"):
                own.start()
            self._trackers.append(own)
            if config is not None:
                own.store_init_configuration(dict(config))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker of this name; with `unwrap` what it writes to, such as TensorBoard's ``SummaryWriter``.

        On ranks without trackers: an object that ignores every call.

        Raises:
            ArgumentError: There are trackers, and none has this name.
        """
        for tracker in self._trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not self.is_main_process:
            return _Ignoring()
        names = [tracker.name for tracker in self._trackers]
        raise ArgumentError(f"name={name!r}: the trackers are {names}: give log_with and call init_trackers")

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Show this rank's values in the notebook, and write the main process's to the trackers.

        Args:
            values: By name, numbers and one-element tensors. The panel leaves other values out, and joins the names of
                nested mappings by ``/``; trackers get all.
            step: The training step, in any unit.
            log_kwargs: By a tracker's name, more arguments for its ``log``.
        """
        report(step, **numbers_in(values))
        for tracker in self._trackers:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """Finish the trackers, and end the process group if this package has made it, as under torchrun."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            tracker.finish()
        leave_group()

    @contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[torch.profiler.profile]:
        """A context that profiles, with torch's profiler as its value.

        Args:
            profile_handler: The settings, as accelerate's ``ProfileKwargs`` or a mapping. Default: those of
                ``kwargs_handlers``, else torch's. With ``output_trace_dir``, each rank's trace is written there as
                ``profile_<rank>.json``, and the end is a collective.
        """
        handler = profile_handler or self._handlers.profile or {}
        with plugin_settings.make_profile(handler) as profiler:
            yield profiler
        folder = handler.get("output_trace_dir") if isinstance(handler, Mapping) else handler.output_trace_dir
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(Path(folder) / f"profile_{self.rank}.json"))
            self.wait_for_everyone()

    def _is_here(self, tracker: Any) -> bool:
        return self.is_main_process or not getattr(tracker, "main_process_only", True)


def requested(log_with: Any, logging_dir: Any) -> list[Any]:
    """Return the requested trackers, each once.

    Raises:
        ArgumentError: A name is unknown, a library is not installed, a folder is missing, or an object is no tracker.
    """
    given = list(log_with) if isinstance(log_with, (list, tuple)) else [] if log_with is None else [log_with]
    found: list[Any] = []
    for each in given:
        name = getattr(each, "value", each)  # accelerate's LoggerType
        if name == "all":
            available = [own for own in _TRACKERS if _is_installed(own) and (own != "tensorboard" or logging_dir)]
            found += [own for own in available if own not in found]
        elif isinstance(name, str):
            _check(name, logging_dir)
            found += [] if name in found else [name]
        elif missing := [part for part in _INTERFACE if not hasattr(each, part)]:
            raise ArgumentError(f"log_with: {type(each).__name__} is no tracker: it lacks {', '.join(missing)}")
        else:
            found.append(each)
    return found


def _check(name: str, logging_dir: Any) -> None:
    if name not in _TRACKERS:
        raise ArgumentError(
            f"log_with={name!r}: must be {', '.join(map(repr, _TRACKERS))}, 'all', or an object with "
            f"{', '.join(_INTERFACE)}, such as accelerate's own tracker: give that object"
        )
    if not _is_installed(name):
        raise ArgumentError(f"log_with={name!r}: {name} is not installed: pip install {name}")
    if name == "tensorboard" and logging_dir is None:
        raise ArgumentError(
            "log_with='tensorboard' needs a folder: give project_dir=, or logging_dir in project_config"
        )


def _is_installed(name: str) -> bool:
    modules = ("tensorboard", "tensorboardX") if name == "tensorboard" else (name,)
    return any(importlib.util.find_spec(module) is not None for module in modules)


def numbers_in(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return what a panel can show: numbers by name, those of nested mappings under ``outer/inner``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= numbers_in(value, f"{name}/")
        elif isinstance(value, torch.Tensor):
            found |= {name: value} if value.numel() == 1 and not value.is_complex() else {}
        elif not isinstance(value, (str, bytes)):
            try:
                found[name] = float(value)
            except (TypeError, ValueError, OverflowError):
                continue  # a list, None, an image: for the trackers
    return found


class _Ignoring:
    """A tracker of a rank that has none: any attribute is callable and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class TensorBoardTracker:
    """Writes to TensorBoard, by ``torch.utils.tensorboard`` or tensorboardX."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, project_name: str, logging_dir: str | os.PathLike[str], arguments: Mapping[str, Any]) -> None:
        self.folder, self.arguments = Path(logging_dir) / project_name, arguments

    def start(self) -> None:
        has_own = importlib.util.find_spec("tensorboard") is not None
        module: Any = importlib.import_module("torch.utils.tensorboard" if has_own else "tensorboardX")
        self.tracker: Any = module.SummaryWriter(str(self.folder), **self.arguments)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in values.items()}
        self.tracker.add_hparams(plain, metric_dict={})
        self.tracker.flush()

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                self.tracker.add_text(name, value, global_step=step, **options)
            elif isinstance(value, Mapping):
                self.tracker.add_scalars(name, value, global_step=step, **options)
            elif number := numbers_in({name: value}):
                self.tracker.add_scalar(name, float(number[name]), global_step=step, **options)
        self.tracker.flush()

    def finish(self) -> None:
        self.tracker.close()


class WandbTracker:
    """Writes to Weights & Biases: ``tracker`` is the run."""

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, project_name: str, logging_dir: Any, arguments: Mapping[str, Any]) -> None:
        self.project, self.arguments = project_name, arguments

    def start(self) -> None:
        self.tracker: Any = importlib.import_module("wandb").init(project=self.project, **self.arguments)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self.tracker.log(dict(values), step=step, **options)

    def finish(self) -> None:
        self.tracker.finish()


_TRACKERS: dict[str, Any] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
