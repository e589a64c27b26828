"""Saved states of a user's own loop and of a Trainer's run: what they hold, and how they are checked and loaded.

A state is one file, which rank 0 writes; where ranks divide models, it gathers their states first.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nblaunch.errors import ArgumentError, warn
from nblaunch.training import checkpoint
from nblaunch.training.collectives import exchange_results
from nblaunch.training.gradients import GradientState, SteppedOptimizer, SteppedScheduler
from nblaunch.training.loader import ShardedLoader, length_of
from nblaunch.training.parallelism import (
    check_weights,
    drop_unshared_gradients,
    full_state,
    is_divided,
    load_full_state,
    unwrapped,
)
from nblaunch.training.pytree import tree_leaves
from nblaunch.training.seeding import random_states, resume_random_states
from nblaunch.training.topology import world

T = TypeVar("T")
STATE_FILE = "state.pt"


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
        """Those of `_NEEDED` that were prepared."""
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
        """Refuse a state without what was trained."""
        for kind, name in _NEEDED.items():
            if kind in self._seen and not self.of(kind):
                raise ArgumentError(
                    f"the prepared {name} no longer exist: keep a reference to them until save_state or load_state"
                )

    def of(self, kind: type[T]) -> list[T]:
        return [thing for thing in (reference() for reference in self._references) if isinstance(thing, kind)]


# ------------------------------------------------------------------ states
@dataclass(frozen=True, slots=True)
class SavedStates:
    """Saves and loads what an Accelerator prepared. Its methods are collectives."""

    prepared: PreparedObjects
    registered: list[Any]
    gradients: GradientState
    copies: int

    # ------------------------------------------------------------------ saving
    def save(self, output_dir: str | Path) -> Path:
        """See `Accelerator.save_state`."""
        self.prepared.settle()
        target = Path(output_dir).expanduser().resolve()  # a link to a folder stays
        if any(other != target for other in exchange_results(lambda: target)):
            raise ArgumentError("output_dir: the ranks passed different folders: give the same on every rank")
        state = self.collect()
        exchange_results(lambda: self._write(state, target) if world().rank == 0 else None)
        return target

    def _write(self, state: dict[str, Any], target: Path) -> None:
        if target.exists() and not target.is_dir():
            raise ArgumentError(f"output_dir={str(target)!r}: it is a file: give a folder")
        for kind in ("optimizer", "scheduler", "object"):  # a warning now, not only when the state is needed
            if found := checkpoint.code_in(state[kind]):
                warn(
                    f"save_state: the state of an {kind} holds {found}, which runs code when it is loaded: load_state "
                    "will need weights_only=False. Better keep numbers, strings and tensors in the state"
                )
        checkpoint.write(state, target / STATE_FILE)

    def collect(self) -> dict[str, Any]:
        """Return the state of everything, on rank 0; elsewhere {}."""
        parts = exchange_results(lambda: (self._kinds(), self._own_state()))
        kinds = parts[0][0]
        if any(other != kinds for other, _ in parts):
            raise ArgumentError("save_state: the ranks prepared or registered different objects: use the same on each")
        whole = {id(part): full_state(part) for kind in ("model", "optimizer") for part in self._divided(kind)}
        state: dict[str, Any] = {}

        def add() -> None:
            for kind, things in self._things().items():
                state[kind] = [whole[id(thing)] if id(thing) in whole else thing.state_dict() for thing in things]
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
                f"save_state: {self.gradients.unfinished} of {self.gradients.divisor} batches of an optimizer step are "
                "done, and a state holds no gradients: save when accelerator.sync_gradients is True"
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
        """See `Accelerator.load_state`."""
        self.prepared.settle()
        folder = Path(input_dir).expanduser().resolve()
        source = f"input_dir={str(folder)!r}"
        state: dict[str, Any] = {}

        def read() -> None:
            self.prepared.check_any_left()
            if not (folder / STATE_FILE).is_file():
                there = (
                    f"it has no {STATE_FILE}, which save_state writes" if folder.is_dir() else "there is no such folder"
                )
                raise ArgumentError(f"{source}: {there}")
            mmap = bool(self._divided("model"))  # each rank copies its part only
            state.update(checkpoint.read(folder / STATE_FILE, mmap=mmap, weights_only=weights_only))
            if "kinds" not in state:
                raise ArgumentError(f"{source}: save_state did not write its {STATE_FILE}")

        exchange_results(read)
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
                    f"{source}: it has {_counted(kind, before)}, and this process has {verb} {_counted(kind, names)}: "
                    "load it with the same objects as those it was saved with"
                )
        things = self._things()
        for model, saved in zip(things["model"], state["model"], strict=True):
            check_weights(source, model, model.state_dict(), saved, strict)
        for optimizer, saved in zip(things["optimizer"], state["optimizer"], strict=True):
            groups = [
                [len(group["params"]) for group in each] for each in (saved["param_groups"], optimizer.param_groups)
            ]
            if groups[0] != groups[1]:
                raise ArgumentError(
                    f"{source}: it is the state of another optimizer: its groups have {groups[0]} parameters, and "
                    f"those of this {type(optimizer).__name__} have {groups[1]}"
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
                    f"{position['samples']} samples, and has {samples}"
                )
        if len(loaders) != len(positions):
            _warn_once(
                f"load_state: the state has the positions of {len(positions)} prepared loaders, and there are "
                f"{len(loaders)}: the first ones continue, in the order of their preparation"
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
