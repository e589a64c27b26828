"""Saved states of a user's own loop: what they hold, and how they are written, checked and read.

Rank 0 writes a file for each object; where ranks divide models, it gathers their states first.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import shutil
import socket
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nblaunch.errors import ArgumentError, warn
from nblaunch.machine.processes import alive
from nblaunch.training import checkpoint
from nblaunch.training.checkpoint import flush
from nblaunch.training.collectives import exchange_results
from nblaunch.training.gradients import GradientState, SteppedOptimizer, SteppedScheduler
from nblaunch.training.loader import position_of, restore_position
from nblaunch.training.parallelism import (
    check_weights,
    drop_unshared_gradients,
    full_state,
    has_sharded_parameters,
    is_sharded,
    load_full_state,
    unwrapped,
)
from nblaunch.training.pytree import parameters_of, tree_leaves
from nblaunch.training.seeding import random_states, resume_random_states
from nblaunch.training.topology import world

T = TypeVar("T")
MANIFEST = "manifest.json"
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]+)\.(?P<pid>\d+)\.(?P<kind>old|partial)")


# ------------------------------------------------------------------ the folder
@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes a complete folder; in its file ``manifest.json``, which is written last."""

    kinds: dict[str, list[str]]
    """The type's name of each object that was saved, by ``"model"``, ``"optimizer"``, ``"scheduler"``, ``"object"``."""
    sizes: dict[str, int]
    """The bytes of each file, by its path in the folder."""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        name = f"input_dir={str(folder)!r}"
        if not folder.is_dir():
            raise ArgumentError(f"{name}: there is no such folder")
        path = folder / MANIFEST
        if not path.is_file():
            raise ArgumentError(f"{name}: it has no {MANIFEST}, so save_state did not write it, or not to its end")
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"{name}: its {MANIFEST} is damaged: load another folder") from error

    def check_files(self, folder: Path) -> None:
        for file, size in self.sizes.items():
            path = folder / file
            there = path.stat().st_size if path.is_file() else None
            if there != size:
                state = "missing" if there is None else f"damaged: it has {there} bytes instead of {size}"
                raise ArgumentError(f"input_dir={str(folder)!r}: its file {file} is {state}. Load another folder")


def _begin(target: Path) -> Path:
    """Make the folder to write into, beside the target, and remove those of writers that were killed.

    An earlier saved state in the target will be replaced; other files there stay.
    """
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"output_dir={str(target)!r}: it is a file: give a folder")
    if target.is_dir() and Path.cwd().is_relative_to(target.resolve()):
        raise ArgumentError(f"output_dir={str(target)!r}: it is the current folder: give a folder of its own")
    if target.is_dir() and (others := sorted(os.listdir(target))):
        try:
            Manifest.read(target)  # another program's is damaged
        except ArgumentError:
            raise ArgumentError(
                f"output_dir={str(target)!r}: save_state replaces the folder, and did not write what is in it "
                f"({', '.join(others[:3])}): give a folder of its own, such as {str(target / 'state')!r}"
            ) from None
    target.parent.mkdir(parents=True, exist_ok=True)
    _repair(target)
    for path, writer in _unfinished(target.parent):
        if writer["kind"] == "partial" and _has_ended(writer):
            shutil.rmtree(path, ignore_errors=True)  # another process may remove it too
    scratch = _beside(target, "partial")
    scratch.mkdir()
    if target.is_dir():
        shutil.copymode(target, scratch)
    return scratch


def _complete(scratch: Path, target: Path, kinds: dict[str, list[str]]) -> None:
    """Write the manifest, flush everything to the disk, and move the folder to its place."""
    sizes = {path.name: path.stat().st_size for path in sorted(scratch.iterdir())}
    (scratch / MANIFEST).write_text(json.dumps(asdict(Manifest(kinds, sizes)), indent=1))
    for path in (*scratch.iterdir(), scratch):
        flush(path)
    try:
        if target.exists():
            target.rename(_beside(target, "old"))
        scratch.rename(target)
    finally:  # after an interrupt too
        _repair(target)
    flush(target.parent)


def _repair(target: Path) -> None:
    """Finish a replacement of `target` by a writer that has ended, and if it is missing, by one on another machine.

    If `target` is missing, the earlier state takes its place again; else that is removed, and other files that were in
    its folder are kept.
    """
    for before, writer in list(_unfinished(target.parent)):
        if writer["kind"] != "old" or writer["name"] != target.name:
            continue
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if not target.exists() and (_has_ended(writer) or writer["host"] != _host()):
                before.rename(target)
            elif _has_ended(writer):
                own = {MANIFEST}
                with contextlib.suppress(ArgumentError):  # it was an empty folder
                    own |= Manifest.read(before).sizes.keys()
                for path in list(before.iterdir()):
                    if path.name not in own and not (target / path.name).exists():
                        path.rename(target / path.name)
                shutil.rmtree(before)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{_host()}.{os.getpid()}.{kind}")


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def _unfinished(parent: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in parent.glob(".*"):
        if (match := _UNFINISHED.fullmatch(path.name)) is not None:
            yield path, match


def _has_ended(writer: re.Match[str]) -> bool:
    """Return True if a folder's writer is not running; another machine's may be."""
    pid = int(writer["pid"])
    return writer["host"] == _host() and (pid == os.getpid() or not alive(pid))


# ------------------------------------------------------------------ what was prepared
_KINDS = (nn.Module, Optimizer, LRScheduler, DataLoader)
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

    def __reduce__(self) -> Any:
        return PreparedObjects, ()  # nothing is prepared yet in the process that receives it

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
RANKS, SCALER = "ranks.pt", "scaler.pt"
"""In a saved state's folder: what differs between ranks, and the gradient scaler."""


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
        parts = exchange_results(lambda: (target, self._kinds(), self._own_state()))
        if any(other != parts[0][0] for other, *_ in parts):
            raise ArgumentError("output_dir: the ranks passed different folders: give the same on every rank")
        kinds = parts[0][1]
        if any(other != kinds for _, other, _ in parts):
            raise ArgumentError("save_state: the ranks prepared or registered different objects: use the same on each")
        is_writer = world().rank == 0
        scratch = exchange_results(lambda: _begin(target) if is_writer else target)[0]
        try:
            divided = [
                *filter(has_sharded_parameters, self.prepared.of(nn.Module)),
                *filter(_is_divided, self.prepared.of(Optimizer)),
            ]
            whole = {id(part): full_state(part) for part in divided}
            by_rank = [own for *_, own in parts]
            exchange_results(lambda: self._write(scratch, whole, by_rank) if is_writer else None)
            exchange_results(lambda: _complete(scratch, target, kinds) if is_writer else None)
        finally:
            if is_writer:
                shutil.rmtree(scratch, ignore_errors=True)
        return target

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
            "loaders": [
                position_of(loader, self.gradients.continues(loader)) for loader in self.prepared.of(DataLoader)
            ],
        }

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

    def _write(self, folder: Path, whole: dict[int, dict[str, Any]], by_rank: list[dict[str, Any]]) -> None:
        scaler = self.gradients.scaler
        for kind, things in self._things().items():
            for number, thing in enumerate(things):
                path = _path_of(folder, kind, number)
                checkpoint.save(whole[id(thing)] if id(thing) in whole else thing.state_dict(), path)
                if kind != "model":
                    _warn_about_code(path)
        if scaler is not None:
            checkpoint.save(scaler.state_dict(), folder / SCALER)
        checkpoint.save(by_rank, folder / RANKS)

    # ------------------------------------------------------------------ loading
    def load(self, input_dir: str | Path, *, strict: bool, weights_only: bool) -> None:
        """See `Accelerator.load_state`."""
        self.prepared.settle()
        folder = Path(input_dir).expanduser().resolve()
        exchange_results(lambda: _repair(folder) if world().rank == 0 else None)
        manifest = exchange_results(lambda: self._checked_manifest(folder))[world().rank]
        loads: list[Callable[[], Any]] = []
        exchange_results(lambda: loads.extend(self._read(folder, manifest, strict, weights_only)))

        def load_all() -> None:  # what a user's `load_state_dict` returns stays here
            for load in loads:
                load()

        exchange_results(load_all)

    def _checked_manifest(self, folder: Path) -> Manifest:
        """Return the folder's manifest, if it is of the objects that were prepared and registered here."""
        self.prepared.check_any_left()
        manifest = Manifest.read(folder)
        manifest.check_files(folder)
        for kind, names in self._kinds().items():
            before = manifest.kinds[kind]
            compared = kind in ("optimizer", "scheduler")  # the user may have renamed a class of a model
            if len(before) != len(names) or (compared and before != names):
                verb = "registered" if kind == "object" else "prepared"
                raise ArgumentError(
                    f"input_dir={str(folder)!r}: it has {_counted(kind, before)}, and this process has {verb} "
                    f"{_counted(kind, names)}: load it with the same objects as those it was saved with"
                )
        return manifest

    def _read(self, folder: Path, manifest: Manifest, strict: bool, weights_only: bool) -> list[Callable[[], Any]]:
        """Read and check everything. Return the calls that load it, the random states last."""
        things, loads = self._things(), list[Callable[[], Any]]()
        options = {"weights_only": weights_only}
        for number, model in enumerate(things["model"]):
            loads.append(partial(load_full_state, model, _read_model(model, folder, number, strict), strict=strict))
        for number, optimizer in enumerate(things["optimizer"]):
            loads.append(partial(load_full_state, optimizer, _read_optimizer(optimizer, folder, number, options)))
        for kind in ("scheduler", "object"):
            for number, thing in enumerate(things[kind]):
                loads.append(partial(thing.load_state_dict, _read_file(_path_of(folder, kind, number), options)))
        scaler, has_scaler = self.gradients.scaler, SCALER in manifest.sizes
        if scaler is not None and has_scaler:
            loads.append(partial(scaler.load_state_dict, _read_file(folder / SCALER)))
        elif has_scaler or scaler is not None:
            which = "with" if has_scaler else "without"
            _warn_once(f"load_state: {folder} was saved {which} a gradient scaler: use the same mixed_precision")
        return [*loads, partial(self._continue, _read_file(folder / RANKS))]

    def _continue(self, ranks: list[dict[str, Any]]) -> None:
        """Continue where the ranks stood: the loaders' positions, and the random states."""
        own = ranks[world().rank if len(ranks) == world().size else 0]
        loaders, positions = self.prepared.of(DataLoader), own["loaders"]
        for number, (loader, position) in enumerate(zip(loaders, positions, strict=False)):
            restore_position(loader, number, position)
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


# ------------------------------------------------------------------ modules and optimizers
def _is_divided(optimizer: Optimizer) -> bool:
    return any(map(is_sharded, parameters_of(optimizer)))


def _read_model(model: nn.Module, folder: Path, number: int, strict: bool) -> dict[str, Any]:
    """Read one module's state, and check that it fits; else raise an ArgumentError that names keys and shapes."""
    path = _path_of(folder, "model", number)
    state: dict[str, Any] = _read_file(path, {"mmap": has_sharded_parameters(model)})  # each rank copies its part only
    check_weights(f"input_dir={str(folder)!r}: {path.name}", model, model.state_dict(), state, strict)
    return state


def _read_optimizer(optimizer: Optimizer, folder: Path, number: int, options: dict[str, Any]) -> dict[str, Any]:
    """Read one optimizer's state, and check that its parameter groups fit; else raise an ArgumentError."""
    path = _path_of(folder, "optimizer", number)
    state: dict[str, Any] = _read_file(path, {"mmap": _is_divided(optimizer), **options})
    before = [len(group["params"]) for group in state["param_groups"]]
    now = [len(group["params"]) for group in optimizer.param_groups]
    if before != now:
        raise ArgumentError(
            f"input_dir={str(folder)!r}: {path.name} is the state of another optimizer: its groups have {before} "
            f"parameters, and those of this {type(optimizer).__name__} have {now}"
        )
    return state


# ------------------------------------------------------------------ files
def _path_of(folder: Path, kind: str, number: int) -> Path:
    return folder / (f"{kind}_{number}.pt" if number else f"{kind}.pt")


def _read_file(path: Path, options: dict[str, Any] | None = None) -> Any:
    """Read a file to the CPU. Unless `options` say otherwise, loading executes no code."""
    try:
        return torch.load(path, **{"map_location": "cpu", "weights_only": True, **(options or {})})
    except Exception as error:
        name = f"input_dir={str(path.parent)!r}: its file {path.name}"
        if found := _refused(error):
            raise ArgumentError(
                f"{name} holds {found}, which runs code when it is loaded. If you trust the folder, use "
                "load_state(..., weights_only=False)"
            ) from error
        raise ArgumentError(f"{name} cannot be read ({type(error).__name__}). Load another folder") from error


def _warn_about_code(path: Path) -> None:
    """Warn about a file that `load_state` could not read: now, not only when it is needed."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001  # torch's own, UnpicklingError, or of a class that is missing
        warn(
            f"save_state: {path.name} holds {_refused(error) or type(error).__name__}, which runs code when it is "
            "loaded: load_state will need weights_only=False. Better keep numbers, strings and tensors in the state"
        )


def _refused(error: Exception) -> str:
    match = re.search(r"Unsupported (?:global|class)\W+(?:GLOBAL )?([\w.]+)", str(error))
    return "" if match is None else match[1]
