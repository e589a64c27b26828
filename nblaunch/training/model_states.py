"""The states of modules and optimizers in a folder: how they are written, checked and read.

Every rank calls these functions. Here each rank holds the whole state, and rank 0 writes it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nblaunch.errors import ArgumentError
from nblaunch.training import checkpoint
from nblaunch.training.preparation import unwrapped
from nblaunch.training.pytree import tree_map
from nblaunch.training.topology import world

State = dict[str, Any]
_SHOWN = 3
"""Keys that a message names."""


def path_of(folder: Path, kind: str, number: int) -> Path:
    """Return ``model.pt``, ``model_1.pt`` ... in a folder."""
    return folder / (f"{kind}_{number}.pt" if number else f"{kind}.pt")


# ------------------------------------------------------------------ modules
def model_state(model: nn.Module) -> State:
    """Return the state of the user's own module, without wrappers."""
    state: State = unwrapped(model).state_dict()
    return state


def write_model(state: State, folder: Path, number: int) -> None:
    """Write one module's state."""
    if world().rank == 0:
        write_file(state, path_of(folder, "model", number))


def read_model(model: nn.Module, folder: Path, number: int, strict: bool) -> State:
    """Read one module's state, and check that it fits.

    Raises:
        ArgumentError: It does not; the message names keys and shapes.
    """
    path = path_of(folder, "model", number)
    state: State = read_file(path)
    own = model_state(model)
    complaints = []
    if strict:
        complaints = [f"{key} is missing" for key in own if key not in state]
        complaints += [f"{key} is not in the model" for key in state if key not in own]
    for key in own:
        before, now = state.get(key), own[key]
        if isinstance(before, Tensor) and isinstance(now, Tensor) and before.shape != now.shape:
            complaints.append(f"{key} has shape {list(before.shape)} there and {list(now.shape)} in the model")
    if complaints:
        rest = f" (and {len(complaints) - _SHOWN} more)" if len(complaints) > _SHOWN else ""
        raise ArgumentError(
            f"input_dir={str(folder)!r}: {path.name} is the state of another model than this "
            f"{type(unwrapped(model)).__name__}: {'; '.join(complaints[:_SHOWN])}{rest}"
        )
    return state


def load_model(model: nn.Module, state: State, options: Mapping[str, Any]) -> None:
    """Load a state that `read_model` returned; `options` are for ``load_state_dict``."""
    unwrapped(model).load_state_dict(state, **options)


def export(model: nn.Module, folder: Path, as_safetensors: bool) -> None:
    """Write the weights alone, under the names that accelerate and transformers read."""
    if as_safetensors and importlib.util.find_spec("safetensors") is None:
        raise ImportError("safetensors is not installed: pip install safetensors, or use safe_serialization=False")
    if world().rank != 0:
        return
    if not as_safetensors:
        checkpoint.write(model_state(model), folder / "pytorch_model.bin")
        return
    save_model = importlib.import_module("safetensors.torch").save_model  # it writes shared tensors once
    with checkpoint.replaced(folder / "model.safetensors") as scratch:
        scratch.touch()
        mode = scratch.stat().st_mode
        save_model(unwrapped(model), str(scratch), metadata={"format": "pt"})
        scratch.chmod(mode)  # it makes files that only their owner can read


# ------------------------------------------------------------------ optimizers
def write_optimizer(optimizer: Optimizer, folder: Path, number: int) -> None:
    """Write one optimizer's state."""
    if world().rank == 0:
        write_file(optimizer.state_dict(), path_of(folder, "optimizer", number))


def read_optimizer(optimizer: Optimizer, folder: Path, number: int, options: Mapping[str, Any]) -> State:
    """Read one optimizer's state, and check that its parameter groups fit; `options` are for ``torch.load``.

    Raises:
        ArgumentError: They do not.
    """
    path = path_of(folder, "optimizer", number)
    state: State = read_file(path, options)
    before = [len(group["params"]) for group in state["param_groups"]]
    now = [len(group["params"]) for group in optimizer.param_groups]
    if before != now:
        raise ArgumentError(
            f"input_dir={str(folder)!r}: {path.name} is the state of another optimizer: its groups have {before} "
            f"parameters, and those of this {type(optimizer).__name__} have {now}"
        )
    return state


def load_optimizer(optimizer: Optimizer, state: State) -> None:
    """Load a state that `read_optimizer` returned, to the devices of the parameters."""
    optimizer.load_state_dict(state)


# ------------------------------------------------------------------ files
def write_file(state: Any, path: Path) -> None:
    """Write one file, with Python's numbers for NumPy's: a file that is read without running code cannot hold those."""
    checkpoint.save(tree_map(_python_number, state), path)


def _python_number(leaf: Any) -> Any:
    is_numpys = type(leaf).__module__ == "numpy" and getattr(leaf, "shape", None) == () and hasattr(leaf, "dtype")
    return leaf.item() if is_numpys else leaf


def read_file(path: Path, options: Mapping[str, Any] | None = None) -> Any:
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
                'load_state(..., load_kwargs={"weights_only": False})'
            ) from error
        raise ArgumentError(f"{name} cannot be read ({type(error).__name__}). Load another folder") from error


def code_in(path: Path) -> str:
    """Return the name of an object in a file that runs code when it is loaded; empty if there is none."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001  # torch's own, UnpicklingError, or of a class that is missing
        return _refused(error) or type(error).__name__
    return ""


def _refused(error: Exception) -> str:
    """Return the name of the object that torch refused to load without running code."""
    match = re.search(r"Unsupported (?:global|class)\W+(?:GLOBAL )?([\w.]+)", str(error))
    return "" if match is None else match[1]
