"""Checkpoint files: atomic writes, retention, training progress, and the random states for an exact resume."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nblaunch.errors import ArgumentError
from nblaunch.training.seeding import derived_seed, seed_generators

_NAME = re.compile(r"step-(\d+)\.pt")


@dataclass
class TrainingProgress:
    """The progress of a training run; in a checkpoint, besides the states of its parts."""

    epoch: int = 0
    step: int = 0
    """Optimizer steps done."""
    best: float = math.inf
    """The lowest monitored value; negated if higher is better."""
    stale: int = 0
    """Epochs since the best."""
    ended: bool = False
    schedule_begin: int = 0
    """The optimizer step at which the schedule began."""
    schedule_end: int = 0
    """The optimizer step at which it ends; 0 in checkpoints of earlier versions."""
    seconds: float = 0.0
    """Time that the current epoch took before it was interrupted."""
    history: list[dict[str, float]] = field(default_factory=list)

    def monitor(self, value: float) -> None:
        """Record an epoch's monitored value. Lower is better; NaN is never better."""
        if value < self.best:
            self.best, self.stale = value, 0
        else:
            self.stale += 1


def as_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Convert the results of callbacks and metrics, such as NumPy's, to floats.

    Raises:
        ArgumentError: A result is not a number.
    """
    numbers = {}
    for name, value in results.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"results[{name!r}]={value!r:.80}: an epoch's results must be numbers") from error
    return numbers


def check_setup(path: Path, wrote: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse to resume from another run's checkpoint.

    Raises:
        ArgumentError: A value differs; the message names it, with the fix.
    """
    for name, value in own.items():
        if wrote[name] != value:
            raise ArgumentError(
                f"{path} was written with {name}={wrote[name]}, and this run has {name}={value}: use the same, "
                "another checkpoint_dir, or resume=False to train from the start"
            )


def write(state: Mapping[str, Any], path: Path) -> None:
    """Write a file atomically: a failed write leaves the previous file and no temporary one.

    Args:
        state: What ``torch.load(..., weights_only=True)`` reads: tensors, numbers, strings, and pytrees of them.
        path: The file; its folder is made if it is missing.
    """
    with replaced(path) as scratch:
        save(state, scratch)


def save(state: Any, path: Path) -> None:
    """Call ``torch.save``.

    Raises:
        OSError: The file cannot be written; the message names it.
    """
    try:
        torch.save(state, path)
    except RuntimeError as error:
        if "inline_container" not in str(error):  # torch's own writer, which hides the reason
            raise
        raise OSError(f"{path} could not be written: is the disk full? ({error})") from error


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to, and move that file to `path` on success. Without success it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
        with open(scratch, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
        _sync_folder(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush the folder, so that the new name survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # unsupported by some file systems
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any]:
    """Read what `write` saved, to the CPU. Loading executes no code.

    Raises:
        RuntimeError: The file is damaged.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RuntimeError(
            f"{path} is damaged: remove it to resume from the checkpoint before, if there is one, or use "
            "resume=False to train from the start"
        ) from error
    return state


def path_of(folder: Path, step: int) -> Path:
    """Return the path of an optimizer step's checkpoint."""
    return folder / f"step-{step}.pt"


def find(folder: Path) -> list[Path]:
    """Return a folder's checkpoints, the latest step last; empty if the folder does not exist."""
    steps = {int(match[1]): path for path in folder.glob("step-*.pt") if (match := _NAME.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps)]


class CheckpointFolder:
    """The latest checkpoints of one training run.

    Args:
        path: The folder; made with the first checkpoint.
        keep: Number of checkpoints to keep.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int) -> None:
        self.path, self.keep = Path(path), keep
        self.own: list[Path] = []
        """The checkpoints of this run, the latest last."""

    def begin(self, resume: bool) -> Path | None:
        """Return the checkpoint to resume from, if any; then the existing checkpoints are this run's own.

        Removes temporary files of writes that were killed.
        """
        for scratch in self.path.glob(".step-*.pt.*"):
            scratch.unlink()
        self.own = find(self.path) if resume else []
        return self.own[-1] if self.own else None

    def write(self, state: Mapping[str, Any], step: int) -> None:
        """Write a checkpoint; then remove surplus ones and those of other runs."""
        path = path_of(self.path, step)
        write(state, path)
        self.own = [*(other for other in self.own if other != path), path][-self.keep :]
        for old in find(self.path):
            if old not in self.own:
                old.unlink()


def random_states() -> dict[str, Any]:
    """Return the states of this rank's generators: torch's, its GPU's, Python's, and NumPy's if it is loaded."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states that `random_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


def seed_from_random_states(states: Mapping[str, Any], rank: int) -> None:
    """Seed this rank's generators from another rank's states, for a rank that did not exist when they were saved."""
    data = bytes(states["torch"].tolist())
    digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
    seed_generators(derived_seed(digest, rank))
