"""Saved states of a user's own loop: what they hold, and how they are written, checked and read.

Rank 0 writes a file for each object; where ranks divide models, it gathers their states first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nblaunch.errors import ArgumentError, warn
from nblaunch.training.data.sharded_loader import position_of, restore_position
from nblaunch.training.exchange import exchange_results
from nblaunch.training.parallel.sharded_models import drop_unshared_gradients, has_sharded_parameters, is_sharded
from nblaunch.training.parallel.sharded_states import check_weights, full_state, load_full_state, parts_of
from nblaunch.training.pytree import parameters_of, tree_map
from nblaunch.training.states import checkpoint, state_folder
from nblaunch.training.states.prepared_objects import PreparedObjects
from nblaunch.training.states.state_folder import Manifest, StateFolder
from nblaunch.training.topology import data_world, world
from nblaunch.training.wrappers import GradientState

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
            "random": checkpoint.random_states(),
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
        exchange_results(lambda: state_folder.repair(folder) if world().rank == 0 else None)
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
            checkpoint.restore_random_states(own["random"])
        else:
            checkpoint.seed_from_random_states(own["random"], data_world(self.copies).rank)

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
