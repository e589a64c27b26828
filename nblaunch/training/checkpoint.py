"""Checkpoints on disk: written whole or not at all, found again, and the random states that make a resume exact."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nblaunch.errors import ArgumentError

_NAME = re.compile(r"step-(\d+)\.pt")


@dataclass
class Standing:
    """How far a training is: what a checkpoint holds besides the states of its parts."""

    epoch: int = 0
    step: int = 0
    """Optimizer steps done."""
    best: float = math.inf
    stale: int = 0
    """Epochs since the best."""
    ended: bool = False
    schedule_begin: int = 0
    """The optimizer step that the schedule began with."""
    schedule_end: int = 0
    """The one that it ends with; 0 in a checkpoint of an earlier version, which does not say."""
    seconds: float = 0.0
    """That the present epoch has taken before it was broken off."""
    history: list[dict[str, float]] = field(default_factory=list)

    def note(self, value: float) -> None:
        """Take an epoch's figure, of which a lower one is better, and NaN is never."""
        if value < self.best:
            self.best, self.stale = value, 0
        else:
            self.stale += 1


def as_numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """Figures that callbacks and metrics gave, such as NumPy's, as a checkpoint can hold them.

    Raises:
        ArgumentError: One is no number.
    """
    numbers = {}
    for name, value in figures.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"figures[{name!r}]={value!r:.80}: the figures of an epoch are numbers") from error
    return numbers


def check_setup(path: Path, wrote: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse to go on from another run's checkpoint.

    Raises:
        ArgumentError: One of the values differs; the message names it, with the fix.
    """
    for name, value in own.items():
        if wrote[name] != value:
            raise ArgumentError(
                f"{path} was written with {name}={wrote[name]}, and this run has {name}={value}: use the same, "
                "another checkpoint_dir, or resume=False to train anew"
            )


def write(state: Mapping[str, Any], path: Path) -> None:
    """Save so that a reader finds the whole file or none, and a write that is cut short leaves nothing.

    Args:
        state: What ``torch.load(..., weights_only=True)`` reads: tensors, numbers, strings, and nests of them.
        path: Where; its folder is made where it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(scratch, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
        _sync_folder(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Have the new name, too, outlast a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems that cannot: there the name is as safe as it gets
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any]:
    """What `write` saved, on the CPU. Nothing in the file is executed.

    Raises:
        RuntimeError: The file was damaged since.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RuntimeError(
            f"{path} is damaged: remove it, and training goes on from the checkpoint before, if there is one; or use "
            "resume=False to train anew"
        ) from error
    return state


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of an optimizer step belongs."""
    return folder / f"step-{step}.pt"


def found(folder: Path) -> list[Path]:
    """A folder's checkpoints, the latest step last; empty where there is no such folder."""
    steps = {int(match[1]): path for path in folder.glob("step-*.pt") if (match := _NAME.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps)]


class Folder:
    """The checkpoints of one training: the latest few.

    Args:
        path: Where they are; made when the first is written.
        keep: How many stay.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int) -> None:
        self.path, self.keep = Path(path), keep
        self.own: list[Path] = []
        """Those of this training, the latest last."""

    def begin(self, resume: bool) -> Path | None:
        """The checkpoint to go on from, if there is one: then what is there is this training's own.

        What a write left that was killed in the middle is removed.
        """
        for scratch in self.path.glob(".step-*.pt.*"):
            scratch.unlink()
        self.own = found(self.path) if resume else []
        return self.own[-1] if self.own else None

    def write(self, state: Mapping[str, Any], step: int) -> None:
        """Add a checkpoint; then those go that are too many, and those of another training."""
        path = path_of(self.path, step)
        write(state, path)
        self.own = [*(one for one in self.own if one != path), path][-self.keep :]
        for old in found(self.path):
            if old not in self.own:
                old.unlink()


def random_states() -> dict[str, Any]:
    """Where this rank's generators stand: torch's, its GPU's, Python's, and NumPy's where it is loaded."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Put the generators where `random_states` found them."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
