"""Checkpoint files: atomic writes, retention, training progress, and the random states for an exact resume."""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from nblaunch.errors import ArgumentError, warn
from nblaunch.training.pytree import tree_map
from nblaunch.wire import launch_files

_NAME = re.compile(r"step-(\d+)\.pt")


@dataclass
class TrainingProgress:
    epoch: int = 0
    step: int = 0
    """Optimizer steps done."""
    best: float = math.inf
    """The lowest monitored value; negated if higher is better."""
    best_step: int = 0
    """The optimizer step of `best`; 0 if there is none yet."""
    best_epoch: int = 0
    monitored: str = ""
    """Which result `best` is."""
    stale: int = 0
    """Judgements since the best: validations, or epochs if no validation has the monitored value."""
    ended: bool = False
    schedule_end: int = 0
    """The optimizer step at which the schedule ends; 0 if that is unknown."""
    seconds: float = 0.0
    """Time that the current epoch took before it was interrupted."""
    due: str = ""
    """What an interrupted run had left undone after its last step: the end of the ``"step"``, ``"epoch"`` or ``"run"``.

    That is validation and what follows it. Empty: nothing.
    """
    history: list[dict[str, float]] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)

    def monitor(self, value: float) -> bool:
        """Record a monitored value, and return True if it is the best. Lower is better; NaN is never better."""
        is_best = value < self.best
        if is_best:
            self.best, self.best_step, self.best_epoch, self.stale = value, self.step, self.epoch, 0
        else:
            self.stale += 1
        return is_best


def compare_rates(path: Path, state: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Warn that a resumed run keeps its learning rates, if the user's new optimizer has others."""
    own, wrote = (
        [float(group.get("initial_lr", group["lr"])) for group in groups]
        for groups in (optimizer.param_groups, state["optimizer"][0]["param_groups"])
    )
    if wrote != own and not optimizer.state:
        made, kept = (rates[0] if len(rates) == 1 else rates for rates in (own, wrote))
        warn(
            f"the optimizer was made with lr={made}, but the run that continues from {path} keeps its own, {kept}. Use "
            "resume=False to train from the start, or another checkpoint_dir"
        )


def as_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Convert the results of callbacks and metrics, such as NumPy's, to floats."""
    numbers = {}
    for name, value in results.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"results[{name!r}]={value!r:.80}: an epoch's results must be numbers") from error
    return numbers


def write(state: Mapping[str, Any], path: Path) -> None:
    """Write a file atomically: a failed write leaves the previous file and no temporary one."""
    with replaced(path) as scratch:
        save(state, scratch)


def save(state: Any, path: Path) -> None:
    """Call ``torch.save``."""
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
    scratch = path.with_name(f".{path.name}.partial")
    scratch.unlink(missing_ok=True)  # of a write that was killed
    try:
        yield scratch
        with open(scratch, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
        folder = os.open(path.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some file systems cannot
            os.fsync(folder)
        os.close(folder)
    finally:
        scratch.unlink(missing_ok=True)


def read(path: Path, *, mmap: bool = False, weights_only: bool = True) -> dict[str, Any]:
    """Read what `write` saved, to the CPU. With `weights_only` loading executes no code."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except FileNotFoundError:
        raise ArgumentError(
            f"{path} is not on {socket.gethostname()}: checkpoint_dir must be a folder that every node and the "
            "notebook share"
        ) from None
    except Exception as error:
        if found := _refused(error):
            raise ArgumentError(
                f"{path} holds {found}, which runs code when it is loaded. If you trust the folder, use "
                "load_state(..., weights_only=False)"
            ) from error
        raise RuntimeError(
            f"{path} is damaged: remove it to resume from the checkpoint before, if there is one, or use "
            "resume=False to train from the start"
        ) from error
    return state


def code_in(state: Any) -> str:
    """Return what in a state runs code when it is loaded, or cannot be saved; empty if there is no such thing."""
    file = io.BytesIO()
    try:
        torch.save(tree_map(lambda leaf: None if isinstance(leaf, torch.Tensor) else leaf, state), file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:  # noqa: BLE001  # pickle's, or of a user's __reduce__
        return _refused(error) or f"{type(error).__name__}: {error!s:.300}"
    return ""


def _refused(error: Exception) -> str:
    match = re.search(r"Unsupported (?:global|class)\W+(?:GLOBAL )?([\w.]+)", str(error))
    return "" if match is None else match[1]


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def find(folder: Path) -> list[Path]:
    """Return a folder's checkpoints, the latest step last; empty if the folder does not exist."""
    return sorted((path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name)), key=step_of)


class Loaded(NamedTuple):
    path: Path
    step: int
    is_continued: bool
    """False: it gave its weights to a new run."""


class CheckpointFolder:
    """The checkpoints of one training run: the latest ones, and the best."""

    def __init__(self, path: str | os.PathLike[str], keep: int) -> None:
        self.path, self.keep = Path(path), keep
        self.own: list[Path] = []
        """The latest checkpoints of this run, the last one last."""
        self._replaces_best = False
        self._claim: int | None = None
        """A descriptor of the folder, which is locked while a run writes there."""

    @property
    def best(self) -> Path:
        return self.path / "best.pt"

    def begin(self, resume: bool, until: float = math.inf) -> Path | None:
        """Return the checkpoint to resume from, if any; then the existing checkpoints are this run's own.

        Makes the folder, claims it until `close`, and removes temporary files of writes that were killed.
        """
        self.close()
        self._claim_folder()
        for pattern in (".step-*.pt.*", ".best.pt.*"):
            for scratch in self.path.glob(pattern):
                scratch.unlink()
        self.own = [path for path in find(self.path) if step_of(path) <= until] if resume else []
        self._replaces_best = not resume
        return self.own[-1] if self.own else None

    def _claim_folder(self) -> None:
        name = f"checkpoint_dir={str(self.path)!r}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
            claim = os.open(self.path, os.O_RDONLY)  # a lock file, as `launch_files.acquire_lock` has, would stay
        except OSError as error:
            raise ArgumentError(f"{name}: no file can be written there ({error}). Give another folder") from error
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._claim = claim
        except OSError as error:
            os.close(claim)
            if isinstance(error, BlockingIOError):  # others: a file system without locks
                raise ArgumentError(
                    f"{name}: another run is writing its checkpoints there: wait for its end, or give another folder"
                ) from None

    def close(self) -> None:
        """Let other runs write to the folder."""
        claim, self._claim = self._claim, None
        if claim is not None:
            with contextlib.suppress(OSError):  # best effort: must never hide the end of training
                launch_files.release_lock(claim)

    def write(self, state: Mapping[str, Any], step: int, *, is_latest: bool = True, is_best: bool = False) -> None:
        """Write a checkpoint; then remove surplus ones and those of other runs."""
        if self._replaces_best and not is_best:
            self.best.unlink(missing_ok=True)
        self._replaces_best = False
        if is_best:  # first: the latest one names its step
            write(state, self.best)
        if is_latest:
            path = self.path / f"step-{step}.pt"
            with replaced(path) as scratch:
                with contextlib.suppress(OSError):  # a file system without links
                    if is_best:
                        os.link(self.best, scratch)
                if not scratch.exists():
                    save(state, scratch)
            self.own = [*(other for other in self.own if other != path), path][-self.keep :]
            for old in find(self.path):
                if old not in self.own:
                    old.unlink()
