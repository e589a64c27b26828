"""What an Accelerator logs to besides the panel: TensorBoard, Weights & Biases, and the user's own trackers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nblaunch.errors import ArgumentError

_INTERFACE = ("name", "store_init_configuration", "log", "finish")
"""What a user's tracker must have, as accelerate's ``GeneralTracker`` has."""


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
            available = [own for own in TRACKERS if _is_installed(own) and (own != "tensorboard" or logging_dir)]
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
    if name not in TRACKERS:
        raise ArgumentError(
            f"log_with={name!r}: must be {', '.join(map(repr, TRACKERS))}, 'all', or an object with "
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
            found |= {name: value.detach()} if value.numel() == 1 and not value.is_complex() else {}
        elif not isinstance(value, (str, bytes)):
            try:
                found[name] = float(value.item() if getattr(value, "size", 0) == 1 else value)  # NumPy's arrays
            except (TypeError, ValueError, OverflowError):
                continue  # a list, None, an image: for the trackers
    return found


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
                self.tracker.add_text(str(name), value, global_step=step, **options)
            elif isinstance(value, Mapping):
                self.tracker.add_scalars(str(name), numbers_in(value), global_step=step, **options)
            elif number := numbers_in({name: value}):
                self.tracker.add_scalar(str(name), float(number[str(name)]), global_step=step, **options)
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


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
