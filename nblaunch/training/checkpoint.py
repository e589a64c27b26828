"""Saved states of a user's own loop, and checkpoints of a Trainer's run: what they hold, their files, and loading.

A state is one file, which rank 0 writes; where ranks divide models, it gathers their states first.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import gc
import glob
import io
import math
import os
import re
import socket
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nblaunch.errors import ArgumentError, warn
from nblaunch.machine import processes
from nblaunch.training.collectives import exchange_results
from nblaunch.training.gradients import GradientState, SteppedOptimizer, SteppedScheduler
from nblaunch.training.loader import ShardedLoader, length_of
from nblaunch.training.parallelism import (
    drop_unshared_gradients,
    full_state,
    is_divided,
    load_full_state,
    unwrapped,
)
from nblaunch.training.pytree import tree_leaves, tree_map
from nblaunch.training.seeding import random_states, resume_random_states
from nblaunch.training.topology import world
from nblaunch.wire import launch_files

T = TypeVar("T")
STATE_FILE = "state.pt"


# ------------------------------------------------------------------ progress
@dataclass
class TrainingProgress:
    epoch: int = 0
    step: int = 0
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
    own, wrote = (
        [float(group.get("initial_lr", group["lr"])) for group in groups]
        for groups in (optimizer.param_groups, state["optimizer"][0]["param_groups"])
    )
    if wrote != own and not optimizer.state:
        made, kept = (rates[0] if len(rates) == 1 else rates for rates in (own, wrote))
        warn(
            f"the optimizer has lr={made}, but the run resumed from {path} keeps lr={kept}: use resume=False to train "
            "from the start, or another checkpoint_dir"
        )


def as_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in results.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"results[{name!r}]={value!r:.80}: an epoch's results must be numbers") from error
    return numbers


# ------------------------------------------------------------------ files
def write(state: Any, path: Path) -> None:
    """Write a file atomically: a failed write leaves the previous file and no temporary one."""
    with replaced(path) as scratch:
        save(state, scratch)


def save(state: Any, path: Path) -> None:
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
    of_host = f".{path.name}.{socket.gethostname()}"
    for left in path.parent.glob(f"{glob.escape(of_host)}.[0-9]*.partial"):  # of a write that was killed
        if not processes.alive(int(left.suffixes[-2][1:])):
            left.unlink(missing_ok=True)
    scratch = path.with_name(f"{of_host}.{os.getpid()}.partial")  # another launch may write the same file
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


def read(
    path: Path,
    *,
    mmap: bool = False,
    weights_only: bool = True,
    if_code: str = "Keep only numbers, strings and tensors in the states of the optimizer, schedule and callbacks",
    if_damaged: str = "delete it to resume from the previous checkpoint, or use resume=False to train from the start",
) -> dict[str, Any]:
    """Read what `write` saved, to the CPU. With `weights_only` loading executes no code.

    The default advice is for the checkpoints of a Trainer.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except FileNotFoundError:
        raise ArgumentError(
            f"{path} is not on {socket.gethostname()}: checkpoint_dir must be a folder that the notebook and all nodes "
            "share"
        ) from None
    except Exception as error:
        if found := _refused(error):
            raise ArgumentError(f"{path} holds {found}, which runs code when loaded. {if_code}") from error
        raise RuntimeError(f"{path} is damaged: {if_damaged}") from error
    return state


def _plain(leaf: Any) -> Any:
    """Return a NumPy number, such as an lr from ``logspace``, as Python's: NumPy's would be code when it is loaded."""
    numpy: Any = sys.modules.get("numpy")
    return leaf.item() if numpy is not None and isinstance(leaf, numpy.generic) else leaf


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
    return int(path.stem.removeprefix("step-"))


def find(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step-*.pt") if path.stem[5:].isdecimal()), key=step_of)


class Loaded(NamedTuple):
    path: Path
    step: int
    is_continued: bool
    """False: it gave its weights to a new run."""


class CheckpointFolder:
    def __init__(self, path: str | os.PathLike[str], keep: int) -> None:
        self.path, self.keep = Path(path), keep
        self.own: list[Path] = []
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
            raise ArgumentError(f"{name}: the folder is not writable ({error}): use another one") from error
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._claim = claim
        except OSError as error:
            os.close(claim)
            if isinstance(error, BlockingIOError):  # others: a file system without locks
                raise ArgumentError(
                    f"{name}: another run is writing checkpoints there: wait for it to finish, or use another folder"
                ) from None

    def close(self) -> None:
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


# ------------------------------------------------------------------ what was prepared
_KINDS = (nn.Module, Optimizer, LRScheduler, ShardedLoader)
_NEEDED = {nn.Module: "modules", Optimizer: "optimizers", LRScheduler: "schedulers"}


class PreparedObjects:
    """The objects that an Accelerator prepared in this process and that still exist, each once, in their order.

    A cell that is run again prepares new objects: the earlier ones must not be kept alive, nor be saved.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        self._seen: set[type] = set()
        self._may_be_replaced = False
        """Whether a later object can have taken the place of an earlier one since `settle`."""

    def add(self, objects: Any) -> None:
        """Note the objects of a pytree. Of a wrapper its inner object, which lives as long as the user has either."""
        self._may_be_replaced |= bool(self._references)
        for leaf in tree_leaves(objects):
            if isinstance(leaf, (SteppedOptimizer, SteppedScheduler)):
                leaf = leaf.inner
            elif isinstance(leaf, nn.Module):
                leaf = unwrapped(leaf)
            if isinstance(leaf, _KINDS) and all(reference() is not leaf for reference in self._references):
                self._references.append(weakref.ref(leaf))
                self._seen |= {kind for kind in _NEEDED if isinstance(leaf, kind)}

    def settle(self) -> None:
        """Drop what only reference cycles keep alive: a cell that was run again has replaced it."""
        if self._may_be_replaced:
            gc.collect()  # 0.1 s and more in a process with torch
            self._may_be_replaced = False
        self._references = [reference for reference in self._references if reference() is not None]

    def check_any_left(self) -> None:
        for kind, name in _NEEDED.items():
            if kind in self._seen and not self.of(kind):
                raise ArgumentError(
                    f"the prepared {name} were garbage-collected: keep a reference until save_state or load_state"
                )

    def of(self, kind: type[T]) -> list[T]:
        return [thing for thing in (reference() for reference in self._references) if isinstance(thing, kind)]


# ------------------------------------------------------------------ states
@dataclass(frozen=True, slots=True)
class SavedStates:
    prepared: PreparedObjects
    registered: list[Any]
    gradients: GradientState
    copies: int

    # ------------------------------------------------------------------ saving
    def save(self, output_dir: str | Path) -> Path:
        self.prepared.settle()
        target = Path(output_dir).expanduser().resolve()  # a link to a folder stays
        if any(other != target for other in exchange_results(lambda: target)):
            raise ArgumentError("output_dir differs between the ranks: pass the same folder on every rank")
        state = self.collect()
        exchange_results(lambda: self._write(state, target) if world().rank == 0 else None)
        return target

    def _write(self, state: dict[str, Any], target: Path) -> None:
        if target.exists() and not target.is_dir():
            raise ArgumentError(f"output_dir={str(target)!r}: must be a folder, not a file")
        write(state, target / STATE_FILE)

    def collect(self) -> dict[str, Any]:
        """Return the state of everything, on rank 0; elsewhere {}."""
        parts = exchange_results(lambda: (self._kinds(), self._own_state()))
        kinds = parts[0][0]
        if any(other != kinds for other, _ in parts):
            raise ArgumentError("save_state: the ranks prepared or registered different objects: use the same on all")
        whole = {id(part): full_state(part) for kind in ("model", "optimizer") for part in self._divided(kind)}
        state: dict[str, Any] = {}

        def add() -> None:
            for kind, things in self._things().items():
                states = [whole[id(thing)] if id(thing) in whole else thing.state_dict() for thing in things]
                state[kind] = states if kind == "model" else tree_map(_plain, states)
                if kind != "model" and (found := code_in(state[kind])):  # now, not only when the state is needed
                    warn(
                        f"the saved state of the {kind} holds {found}, which runs code when loaded: load_state will "
                        "need weights_only=False, and a Trainer cannot resume from it. Keep only numbers, strings and "
                        "tensors in the state"
                    )
            scaler = self.gradients.scaler
            ranks = [own for _, own in parts]
            state.update(kinds=kinds, scaler=None if scaler is None else scaler.state_dict(), ranks=ranks)

        exchange_results(lambda: add() if world().rank == 0 else None)
        return state

    def _divided(self, kind: str) -> list[Any]:
        return [part for part in self._things()[kind] if is_divided(part)]

    def _own_state(self) -> dict[str, Any]:
        self.prepared.check_any_left()
        if self.gradients.unfinished:
            raise ArgumentError(
                f"save_state: an optimizer step is unfinished ({self.gradients.unfinished} of {self.gradients.divisor} "
                "batches), and gradients are not saved: save when accelerator.sync_gradients is True"
            )
        return {
            "copies": self.copies,
            "random": random_states(),
            "loaders": [self._position(loader) for loader in self.prepared.of(ShardedLoader)],
        }

    def _position(self, loader: ShardedLoader[Any]) -> dict[str, Any]:
        """Return a loader's position; unless its latest pass is to be continued, one that begins it again."""
        state: Any = loader.state_dict()
        if state["batches"] and not self.gradients.continues(loader):
            state = loader.beginning()
        return {"samples": length_of(loader.dataset), "state": state}

    def _things(self) -> dict[str, list[Any]]:
        of = self.prepared.of
        return {
            "model": of(nn.Module),
            "optimizer": of(Optimizer),
            "scheduler": of(LRScheduler),
            "object": self.registered,
        }

    def _kinds(self) -> dict[str, list[str]]:
        return {kind: [type(thing).__name__ for thing in things] for kind, things in self._things().items()}

    # ------------------------------------------------------------------ loading
    def load(self, input_dir: str | Path, *, strict: bool, weights_only: bool) -> None:
        self.prepared.settle()
        folder = Path(input_dir).expanduser().resolve()
        source = f"input_dir={str(folder)!r}"
        state: dict[str, Any] = {}

        def take() -> None:
            self.prepared.check_any_left()
            if not (folder / STATE_FILE).is_file():
                problem = f"the folder has no {STATE_FILE}" if folder.is_dir() else "no such folder"
                raise ArgumentError(f"{source}: {problem}")
            mmap = bool(self._divided("model"))  # each rank copies its part only
            trust = "If you trust the folder, use load_state(..., weights_only=False)"
            advice = {"if_code": trust, "if_damaged": "load a state from another folder"}
            state.update(read(folder / STATE_FILE, mmap=mmap, weights_only=weights_only, **advice))
            if "kinds" not in state:
                raise ArgumentError(f"{source}: its {STATE_FILE} was not written by save_state")

        exchange_results(take)
        self.restore(state, source, strict)

    def restore(self, state: Mapping[str, Any], source: str, strict: bool = True) -> None:
        """Load what `collect` returned, on every rank, after all of it was checked. `source` is for messages."""
        exchange_results(lambda: self._check(state, source, strict))
        exchange_results(lambda: self._restore(state, strict))

    def _check(self, state: Mapping[str, Any], source: str, strict: bool) -> None:
        for kind, names in self._kinds().items():
            before = state["kinds"][kind]
            compared = kind in ("optimizer", "scheduler")  # the user may have renamed a class of a model
            if len(before) != len(names) or (compared and before != names):
                verb = "registered" if kind == "object" else "prepared"
                raise ArgumentError(
                    f"{source}: the state has {_counted(kind, before)}, but this process has {verb} "
                    f"{_counted(kind, names)}: use the objects that were saved"
                )
        things = self._things()
        for model, saved in zip(things["model"], state["model"], strict=True):
            _check_weights(source, model, saved, strict)
        for optimizer, saved in zip(things["optimizer"], state["optimizer"], strict=True):
            groups = [
                [len(group["params"]) for group in each] for each in (saved["param_groups"], optimizer.param_groups)
            ]
            if groups[0] != groups[1]:
                raise ArgumentError(
                    f"{source}: the parameter groups of the saved optimizer have sizes {groups[0]}, those of this "
                    f"{type(optimizer).__name__} have {groups[1]}"
                )

    def _restore(self, state: Mapping[str, Any], strict: bool) -> None:
        for kind, things in self._things().items():
            options = {"strict": strict} if kind == "model" else {}
            for thing, saved in zip(things, state[kind], strict=True):
                load_full_state(thing, copy.deepcopy(saved) if kind == "object" else saved, **options)  # may be mapped
        scaler = self.gradients.scaler
        if scaler is not None and state["scaler"] is not None:
            scaler.load_state_dict(state["scaler"])
        ranks = state["ranks"]
        own = ranks[world().rank if len(ranks) == world().size else 0]
        loaders, positions = self.prepared.of(ShardedLoader), own["loaders"]
        for number, (loader, position) in enumerate(zip(loaders, positions, strict=False)):
            if (samples := length_of(loader.dataset)) == position["samples"]:
                loader.load_state_dict(position["state"])
            else:
                _warn_once(
                    f"load_state: the position of prepared loader {number} is not restored: its dataset had "
                    f"{position['samples']} samples and now has {samples}"
                )
        if len(loaders) != len(positions):
            _warn_once(
                f"load_state: the state has positions of {len(positions)} loaders, but {len(loaders)} are prepared: "
                "positions are restored in the order of preparation"
            )
        self.gradients.begin_step()
        for model in self.prepared.of(nn.Module):
            drop_unshared_gradients(model)
            for parameter in model.parameters():
                parameter.grad = None
        resume_random_states([saved["random"] for saved in ranks], ranks[0]["copies"], self.copies)


def _counted(kind: str, names: list[str]) -> str:
    return f"{len(names)} {kind}{'' if len(names) == 1 else 's'}" + (f" ({', '.join(names)})" if names else "")


def _warn_once(message: str) -> None:
    if world().rank == 0:
        warn(message)


def _check_weights(source: str, model: nn.Module, saved: Mapping[str, Any], strict: bool) -> None:
    own = model.state_dict()
    complaints = [f"missing key {name}" for name in own if strict and name not in saved]
    complaints += [f"unexpected key {name}" for name in saved if strict and name not in own]
    for name in own:
        before, now = saved.get(name), own[name]
        if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor) and before.shape != now.shape:
            complaints.append(f"{name} has shape {list(before.shape)} in the state and {list(now.shape)} in the model")
    if complaints:
        rest = f" (and {len(complaints) - 3} more)" if len(complaints) > 3 else ""
        raise ArgumentError(
            f"{source}: the state does not match this {type(model).__name__}: {'; '.join(complaints[:3])}{rest}"
        )
