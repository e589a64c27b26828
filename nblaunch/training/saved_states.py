"""Saved states of a user's own loop: what they hold, and how they are written, checked and read.

Rank 0 writes a file for each object; where ranks divide models, it gathers their states first.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import shutil
import socket
import weakref
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
    parts_of,
    unwrapped,
)
from nblaunch.training.pytree import parameters_of, tree_leaves, tree_map
from nblaunch.training.seeding import random_states, restore_random_states, seed_from_random_states
from nblaunch.training.topology import data_world, world

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]+)\.(?P<pid>\d+)\.(?P<kind>new|old|partial)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes a complete folder; in its file ``manifest.json``, which is written last."""

    kinds: dict[str, list[str]]
    """The type's name of each object that was saved, by ``"model"``, ``"optimizer"``, ``"scheduler"``, ``"object"``."""
    sizes: dict[str, int]
    """The bytes of each file, by its path in the folder."""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder.

        Raises:
            ArgumentError: The folder is missing, is not a saved state, or its manifest is damaged.
        """
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

    def check_files(self, folder: Path, part: int, parts: int) -> None:
        """Check that the files are there, with their sizes and, for a part of them, the checksums that torch writes.

        Args:
            folder: The saved state.
            part: Which of the parts to check, from 0: each rank has one.
            parts: Their number.

        Raises:
            ArgumentError: A file is not; the message names it.
        """
        for file, size in self.sizes.items():
            path = folder / file
            there = path.stat().st_size if path.is_file() else None
            if there is None:
                state = "missing"
            elif there != size:
                state = f"damaged: it has {there} bytes instead of {size}"
            elif path.parent == folder and path.suffix == ".pt" and not _is_intact(path, part, parts):
                state = "damaged: its content differs from what was written"
            else:
                continue
            raise ArgumentError(f"input_dir={str(folder)!r}: its file {file} is {state}. Load another folder")


def _is_intact(path: Path, part: int, parts: int) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            for tensor in archive.infolist()[part::parts]:
                with archive.open(tensor) as content:
                    while content.read(_CHUNK_BYTES):  # compares the checksum at the end
                        pass
        return True
    except (zipfile.BadZipFile, EOFError, NotImplementedError):  # the table of contents itself is damaged
        return False


class StateFolder:
    """A folder that is written beside its final place, and moved there once it is complete.

    All methods are for the process that writes: rank 0.

    Attributes:
        target: The final place.
        scratch: The folder to write into.
    """

    def __init__(self, target: Path) -> None:
        self.target, self.scratch = target, _beside(target, "partial")

    @classmethod
    def begin(cls, target: Path) -> StateFolder:
        """Make the folder to write into, and remove those of writers that were killed.

        Args:
            target: The final place. An earlier saved state there is replaced; other files in it stay.

        Raises:
            ArgumentError: The target is a file, or a folder with files that no saved state accounts for.
        """
        if target.exists() and not target.is_dir():
            raise ArgumentError(f"output_dir={str(target)!r}: it is a file: give a folder")
        if target.is_dir() and Path.cwd().is_relative_to(target.resolve()):
            raise ArgumentError(f"output_dir={str(target)!r}: it is the current folder: give a folder of its own")
        if target.is_dir() and (others := sorted(os.listdir(target))) and not is_state(target):
            raise ArgumentError(
                f"output_dir={str(target)!r}: save_state replaces the folder, and did not write what is in it "
                f"({', '.join(others[:3])}): give a folder of its own, such as {str(target / 'state')!r}"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        repair(target)
        for path, writer in _unfinished(target.parent):
            if writer["kind"] == "partial" and _has_ended(writer):
                shutil.rmtree(path, ignore_errors=True)  # another process may remove it too
        begun = cls(target)
        begun.scratch.mkdir()
        if target.is_dir():
            shutil.copymode(target, begun.scratch)
        return begun

    def complete(self, kinds: dict[str, list[str]]) -> None:
        """Write the manifest, flush everything to the disk, and move the folder to its place."""
        files = sorted(path for path in self.scratch.rglob("*") if path.is_file())
        sizes = {path.relative_to(self.scratch).as_posix(): path.stat().st_size for path in files}
        manifest = Manifest(kinds, sizes)
        (self.scratch / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
        for path in (*files, self.scratch / MANIFEST, *_folders(self.scratch)):
            flush(path)
        if not self.target.exists():
            self.scratch.rename(self.target)
        else:
            ready, before = _beside(self.target, "new"), _beside(self.target, "old")
            try:
                self.scratch.rename(ready)
                if not _exchange(ready, self.target):
                    self.target.rename(before)
                    ready.rename(self.target)
            finally:  # after an interrupt too
                repair(self.target)
        flush(self.target.parent)

    def discard(self) -> None:
        """Remove what was written, if it was not completed."""
        shutil.rmtree(self.scratch, ignore_errors=True)


def is_state(folder: Path) -> bool:
    """Return True for a complete saved state, and not for a folder with another program's ``manifest.json``."""
    try:
        Manifest.read(folder)
    except ArgumentError:
        return False
    return True


def repair(target: Path) -> None:
    """Finish a replacement of `target` by a writer that has ended, and if it is missing, by one on another machine.

    If `target` is missing, the new state takes its place, else that from before. All other ones are removed.
    """
    for path, writer in sorted(_unfinished(target.parent), key=lambda found: found[1]["kind"]):  # "new" before "old"
        if writer["kind"] == "partial" or writer["name"] != target.name:
            continue
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if not target.exists() and (_has_ended(writer) or writer["host"] != _host()):
                path.rename(target)
            elif _has_ended(writer):
                _retire(path, target)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders' names in one step (Linux, ``renameat2``); return False where that is impossible."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    current, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(current, os.fsencode(one), current, os.fsencode(other), exchange) == 0


def _retire(before: Path, target: Path) -> None:
    """Remove a replaced state, and keep other files that were in its folder."""
    own = {MANIFEST}
    with contextlib.suppress(ArgumentError):  # an empty folder, or a damaged manifest
        own |= {file.split("/")[0] for file in Manifest.read(before).sizes}
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


def _folders(top: Path) -> list[Path]:
    return [top, *(path for path in top.rglob("*") if path.is_dir())]


_KINDS = (nn.Module, Optimizer, LRScheduler, DataLoader)
_NEEDED = {nn.Module: "modules", Optimizer: "optimizers", LRScheduler: "schedulers"}


class PreparedObjects:
    """The prepared objects that still exist, each once, in the order of their preparation.

    A cell that is run again prepares new objects: the earlier ones must not be kept alive, nor be saved.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        self._seen: set[type] = set()
        """Those of `_NEEDED` that were prepared."""
        self._is_settled = True
        """Whether no object can have taken the place of an earlier one since `collect`."""

    def __reduce__(self) -> Any:
        return PreparedObjects, ()  # nothing is prepared yet in the process that receives it

    def add(self, objects: Any) -> None:
        """Note the objects of a pytree. Of a wrapper its inner object, which lives as long as the user has either."""
        before = [kind for kind in _KINDS if self._of(kind)]
        for leaf in tree_leaves(objects):
            if isinstance(leaf, nn.Module):
                self._add(unwrapped(leaf))
            elif isinstance(leaf, (SteppedOptimizer, SteppedScheduler)):
                self._add(leaf.inner)
            elif isinstance(leaf, _KINDS):
                self._add(leaf)
            if isinstance(leaf, tuple(before)):
                self._is_settled = False

    def _add(self, thing: Any) -> None:
        if any(reference() is thing for reference in self._references):
            return
        self._references.append(weakref.ref(thing))
        self._seen |= {kind for kind in _NEEDED if isinstance(thing, kind)}

    def collect(self) -> None:
        """Drop objects that only reference cycles keep alive, if others may have taken their place."""
        if not self._is_settled:
            gc.collect()  # 0.1 s and more in a process with torch
            self._is_settled = True
        self._references = [reference for reference in self._references if reference() is not None]

    def check_any_left(self) -> None:
        """Refuse a state without what was trained.

        Raises:
            ArgumentError: All prepared objects of a kind are gone.
        """
        for kind, name in _NEEDED.items():
            if kind in self._seen and not self._of(kind):
                raise ArgumentError(
                    f"the prepared {name} no longer exist: keep a reference to them until save_state or load_state"
                )

    def _of(self, kind: type) -> list[Any]:
        return [thing for thing in (reference() for reference in self._references) if isinstance(thing, kind)]

    @property
    def models(self) -> list[nn.Module]:
        """The users' own modules."""
        return self._of(nn.Module)

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._of(Optimizer)

    @property
    def schedulers(self) -> list[LRScheduler]:
        return self._of(LRScheduler)

    @property
    def loaders(self) -> list[Any]:
        return self._of(DataLoader)


RANKS, SCALER = "ranks.pt", "scaler.pt"
"""In a saved state's folder: what differs between ranks, and the gradient scaler."""


@dataclass(frozen=True, slots=True)
class SavedStates:
    """Saves and loads what an Accelerator prepared. Its methods are collectives.

    Attributes:
        prepared: The prepared objects.
        registered: Other objects with a state.
        gradients: Of the same Accelerator.
        copies: Consecutive ranks that compute on the same samples.
    """

    prepared: PreparedObjects
    registered: list[Any]
    gradients: GradientState
    copies: int

    # ------------------------------------------------------------------ saving
    def save(self, output_dir: str | Path) -> Path:
        """See `Accelerator.save_state`."""
        self.prepared.collect()
        target = Path(output_dir).expanduser().resolve()  # a link to a folder stays
        parts = exchange_results(lambda: (target, self._kinds(), self._own_state()))
        if any(other != parts[0][0] for other, *_ in parts):
            raise ArgumentError("output_dir: the ranks passed different folders: give the same on every rank")
        kinds = parts[0][1]
        if any(other != kinds for _, other, _ in parts):
            raise ArgumentError("save_state: the ranks prepared or registered different objects: use the same on each")
        is_writer = world().rank == 0
        folder = exchange_results(lambda: StateFolder.begin(target) if is_writer else None)[0]
        assert folder is not None
        try:
            whole = self._whole_states()
            by_rank = [own for *_, own in parts]
            exchange_results(lambda: self._write(folder.scratch, whole, by_rank) if is_writer else None)
            exchange_results(lambda: folder.complete(kinds) if is_writer else None)
        finally:
            if is_writer:
                folder.discard()
        return target

    def _own_state(self) -> dict[str, Any]:
        """Return what differs between ranks."""
        self.prepared.check_any_left()
        if self.gradients.unfinished:
            raise ArgumentError(
                f"save_state: {self.gradients.unfinished} of {self.gradients.divisor} batches of an optimizer step are "
                "done, and a state holds no gradients: save when accelerator.sync_gradients is True"
            )
        return {
            "copies": self.copies,
            "random": random_states(),
            "loaders": [position_of(loader, self.gradients.continues(loader)) for loader in self.prepared.loaders],
        }

    def _things(self) -> dict[str, list[Any]]:
        """Return what has a state, by kind."""
        record = self.prepared
        return {
            "model": [*record.models],
            "optimizer": [*record.optimizers],
            "scheduler": [*record.schedulers],
            "object": self.registered,
        }

    def _kinds(self) -> dict[str, list[str]]:
        return {kind: [type(thing).__name__ for thing in things] for kind, things in self._things().items()}

    def _whole_states(self) -> dict[int, dict[str, Any]]:
        """Return by id the states of modules and optimizers that ranks divide: on rank 0 the whole ones."""
        record = self.prepared
        divided = [
            *filter(has_sharded_parameters, record.models),
            *(optimizer for optimizer in record.optimizers if _is_divided(optimizer)),
        ]
        return {id(part): full_state(part) for part in divided}

    def _write(self, folder: Path, whole: dict[int, dict[str, Any]], by_rank: list[dict[str, Any]]) -> None:
        """Write all files; `whole` has the states that ranks had to gather."""
        scaler = self.gradients.scaler
        for kind, things in self._things().items():
            for number, thing in enumerate(things):
                path = _path_of(folder, kind, number)
                _write_file(whole[id(thing)] if id(thing) in whole else thing.state_dict(), path)
                if kind != "model":
                    _warn_about_code(path)
        if scaler is not None:
            _write_file(scaler.state_dict(), folder / SCALER)
        _write_file(by_rank, folder / RANKS)

    # ------------------------------------------------------------------ loading
    def load(self, input_dir: str | Path, *, strict: bool, weights_only: bool) -> None:
        """See `Accelerator.load_state`."""
        self.prepared.collect()
        folder = Path(input_dir).expanduser().resolve()
        exchange_results(lambda: repair(folder) if world().rank == 0 else None)
        manifest = exchange_results(lambda: self._checked_manifest(folder))[world().rank]
        loads: list[Callable[[], Any]] = []
        exchange_results(lambda: loads.extend(self._read(folder, manifest, strict, weights_only)))

        def load_all() -> None:
            for load in loads:
                load()

        exchange_results(load_all)

    def _checked_manifest(self, folder: Path) -> Manifest:
        """Return the folder's manifest, if it is of the objects that were prepared and registered here.

        Raises:
            ArgumentError: It is not.
        """
        self.prepared.check_any_left()
        manifest = Manifest.read(folder)
        manifest.check_files(folder, world().rank, world().size)
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
        record, loads = self.prepared, list[Callable[[], Any]]()
        options = {"weights_only": weights_only}
        for number, model in enumerate(record.models):
            loads.append(partial(_load_model, model, _read_model(model, folder, number, strict), strict))
        for number, optimizer in enumerate(record.optimizers):
            loads.append(partial(load_full_state, optimizer, _read_optimizer(optimizer, folder, number, options)))
        kinds: dict[str, list[Any]] = {"scheduler": [*record.schedulers], "object": self.registered}
        for kind, things in kinds.items():
            for number, thing in enumerate(things):
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
        own, is_known = self._own_of(ranks)
        loaders, positions = self.prepared.loaders, own["loaders"]
        for number, (loader, position) in enumerate(zip(loaders, positions, strict=False)):
            restore_position(loader, number, position)
        if len(loaders) != len(positions):
            _warn_once(
                f"load_state: the state has the positions of {len(positions)} prepared loaders, and there are "
                f"{len(loaders)}: the first ones continue, in the order of their preparation"
            )
        self.gradients.begin_step()
        for model in self.prepared.models:
            drop_unshared_gradients(model)
            for parameter in model.parameters():
                parameter.grad = None
        if is_known:
            restore_random_states(own["random"])
        else:
            seed_from_random_states(own["random"], data_world(self.copies).rank)

    def _own_of(self, ranks: list[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
        """Return what was saved for this rank; rank 0's, and False, if there was no such rank.

        Ranks of one tensor group must draw the same numbers: if the groups have another size now, each is one rank.
        """
        before = ranks[0]["copies"]
        if (len(ranks), before) == (world().size, self.copies):
            return ranks[world().rank], True
        groups, part = ranks[::before], data_world(self.copies).rank
        return (groups[part], True) if part < len(groups) else (groups[0], False)


def _counted(kind: str, names: list[str]) -> str:
    return f"{len(names)} {kind}{'' if len(names) == 1 else 's'}" + (f" ({', '.join(names)})" if names else "")


def _warn_once(message: str) -> None:
    """Warn on the main process only."""
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


def _load_model(model: nn.Module, state: dict[str, Any], strict: bool) -> None:
    model.load_state_dict(parts_of(model, state), strict=strict)


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
    """Return ``model.pt``, ``model_1.pt`` ... in a folder."""
    return folder / (f"{kind}_{number}.pt" if number else f"{kind}.pt")


def _write_file(state: Any, path: Path) -> None:
    """Write one file, with Python's numbers for NumPy's: a file that is read without running code cannot hold those."""
    checkpoint.save(tree_map(_python_number, state), path)


def _python_number(leaf: Any) -> Any:
    is_numpys = type(leaf).__module__ == "numpy" and getattr(leaf, "shape", None) == () and hasattr(leaf, "dtype")
    return leaf.item() if is_numpys else leaf


def _read_file(path: Path, options: dict[str, Any] | None = None) -> Any:
    """Read a file to the CPU. Unless `options` say otherwise, loading executes no code.

    Raises:
        ArgumentError: The file is damaged, or holds objects that run code when they are loaded.
    """
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
    """Return the name of the object that torch refused to load without running code."""
    match = re.search(r"Unsupported (?:global|class)\W+(?:GLOBAL )?([\w.]+)", str(error))
    return "" if match is None else match[1]
