"""The states of modules and optimizers in a folder: how they are written, checked and read.

Every rank calls these functions. Rank 0 writes a file for each object; where ranks divide models, it gathers their
states first.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nblaunch.errors import ArgumentError
from nblaunch.training.accelerator.preparation import unwrapped
from nblaunch.training.parallel.sharded_models import has_sharded_parameters, is_sharded
from nblaunch.training.parallel.sharded_states import check_weights, full_state
from nblaunch.training.pytree import parameters_of, tree_map
from nblaunch.training.states import checkpoint
from nblaunch.training.topology import world

State = dict[str, Any]


def path_of(folder: Path, kind: str, number: int) -> Path:
    """Return ``model.pt``, ``model_1.pt`` ... in a folder."""
    return folder / (f"{kind}_{number}.pt" if number else f"{kind}.pt")


# ------------------------------------------------------------------ modules
def model_state(model: nn.Module) -> State:
    """Return the state of the user's own module, without wrappers."""
    state: State = unwrapped(model).state_dict()
    return state


def whole_state(model: nn.Module) -> State:
    """Return the same whole, where ranks divide it: on rank 0, and elsewhere an empty dict. Then a collective."""
    return full_state(model) if has_sharded_parameters(model) else model_state(model)


def read_model(model: nn.Module, folder: Path, number: int, strict: bool) -> State:
    """Read one module's state, and check that it fits.

    Raises:
        ArgumentError: It does not; the message names keys and shapes.
    """
    path = path_of(folder, "model", number)
    state: State = read_file(path, {"mmap": has_sharded_parameters(model)})  # then each rank copies its part only
    check_weights(f"input_dir={str(folder)!r}: {path.name}", unwrapped(model), model_state(model), state, strict)
    return state


def export(state: State, folder: Path, as_safetensors: bool) -> None:
    """Write the weights alone, under the names that accelerate and transformers read."""
    if as_safetensors and importlib.util.find_spec("safetensors") is None:
        raise ImportError("safetensors is not installed: pip install safetensors, or use safe_serialization=False")
    if world().rank != 0:
        return
    if not as_safetensors:
        checkpoint.write(state, folder / "pytorch_model.bin")
        return
    save_model = importlib.import_module("safetensors.torch").save_model  # it writes shared tensors once
    with checkpoint.replaced(folder / "model.safetensors") as scratch:
        whole: Any = SimpleNamespace(state_dict=lambda: state)  # all that it asks a module for
        scratch.touch()
        mode = scratch.stat().st_mode
        save_model(whole, str(scratch), metadata={"format": "pt"})
        scratch.chmod(mode)  # it makes files that only their owner can read


# ------------------------------------------------------------------ optimizers
def optimizer_state(optimizer: Optimizer) -> State:
    """Return the optimizer's state; where ranks divide it whole, as `whole_state` does."""
    is_divided = any(map(is_sharded, parameters_of(optimizer)))
    return full_state(optimizer) if is_divided else optimizer.state_dict()


def read_optimizer(optimizer: Optimizer, folder: Path, number: int, options: Mapping[str, Any]) -> State:
    """Read one optimizer's state, and check that its parameter groups fit; `options` are for ``torch.load``.

    Raises:
        ArgumentError: They do not.
    """
    path = path_of(folder, "optimizer", number)
    is_divided = any(map(is_sharded, parameters_of(optimizer)))
    state: State = read_file(path, {"mmap": is_divided, **options})
    before = [len(group["params"]) for group in state["param_groups"]]
    now = [len(group["params"]) for group in optimizer.param_groups]
    if before != now:
        raise ArgumentError(
            f"input_dir={str(folder)!r}: {path.name} is the state of another optimizer: its groups have {before} "
            f"parameters, and those of this {type(optimizer).__name__} have {now}"
        )
    return state


# ------------------------------------------------------------------ divided models
def are_divided(models: Sequence[nn.Module]) -> bool:
    """Return True if ranks divide any of these."""
    return any(map(has_sharded_parameters, models))


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
