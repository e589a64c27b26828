"""States of models that the ranks divide: whole on rank 0, or in parts on disk, for any later number of ranks."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nblaunch.errors import ArgumentError
from nblaunch.training.exchange import exchange
from nblaunch.training.gradient_accumulation import SteppedOptimizer
from nblaunch.training.preparation import unwrapped
from nblaunch.training.pytree import to_device, tree_leaves, tree_map
from nblaunch.training.sharded_models import is_sharded
from nblaunch.training.topology import ensure_group, has_group, world

Optimizers = Optimizer | Sequence[Optimizer]
_GROUPS = "groups"
"""The key of the optimizers' hyperparameters."""
_FLAT = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""DCP need not flatten a state that is flat; it would take the hyperparameters apart."""


# ------------------------------------------------------------------ whole
def full_state(part: Any) -> dict[str, Any]:
    """Return the whole ``state_dict()`` of a module or optimizer, on the CPU of rank 0. A collective.

    Args:
        part: A module or optimizer; its parameters may be divided or whole. An optimizer's state has the form of
            ``Optimizer.state_dict``, with numbers for parameters, so it loads into an optimizer that is not divided.

    Returns:
        On other ranks an empty dict. Tensors that are whole may share the memory of the part's own.
    """
    own = unwrapped(part) if isinstance(part, nn.Module) else part
    state: dict[str, Any] = gathered(own.state_dict())
    return state if world().rank == 0 else {}


def gathered(tree: Any) -> Any:
    """Return a pytree with each divided tensor whole, on the CPU; on other ranks than 0 with None for it. A collective.

    Tensors that are one object stay one.
    """
    whole: dict[int, Any] = {}
    with _without_advice():
        for leaf in tree_leaves(tree):
            if is_sharded(leaf) and id(leaf) not in whole:
                full = leaf.detach().full_tensor()
                whole[id(leaf)] = full.cpu() if world().rank == 0 else None
    if world().rank != 0:
        return tree_map(lambda leaf: whole.get(id(leaf), leaf), tree)
    return to_device(tree_map(lambda leaf: whole.get(id(leaf), leaf), tree), "cpu")


@contextmanager
def _without_advice() -> Iterator[None]:
    """Leave out torch's advice on how to gather a tensor that is divided along two dimensions of a mesh."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# ------------------------------------------------------------------ in parts
def sharded_state(model: nn.Module, optimizers: Optimizers = ()) -> dict[str, Any]:
    """Return this rank's part of a training state, flat and by names of parameters, as DCP saves it.

    Raises:
        ArgumentError: An optimizer has a parameter that is not the model's.
    """
    module = unwrapped(model)
    state: dict[str, Any] = {f"model.{name}": value for name, value in module.state_dict().items()}
    groups = []
    for number, optimizer in enumerate(_as_list(optimizers)):
        names = _names(module, optimizer)
        for parameter, own in optimizer.state.items():
            state |= {f"optimizer.{number}.{names[parameter]}.{key}": value for key, value in own.items()}
        groups.append(
            [
                {**group, "params": [names[parameter] for parameter in group["params"]]}
                for group in optimizer.param_groups
            ]
        )
    state[_GROUPS] = groups
    return state


def save_sharded_state(folder: str | os.PathLike[str], model: nn.Module, optimizers: Optimizers = ()) -> None:
    """Write a training state with torch.distributed.checkpoint: each rank writes its part. A collective.

    Tensors that every rank has whole, such as buffers, are rank 0's.

    Args:
        folder: A new or empty folder, the same for all ranks. It is complete once this has returned on every rank.
        model: The module, divided or whole.
        optimizers: Of its parameters.

    Raises:
        ArgumentError: The folder holds a state already, or an optimizer has a parameter that is not the model's.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    if any(exchange((Path(folder) / ".metadata").exists())):
        raise ArgumentError(f"folder={os.fspath(folder)!r}: holds a state already: give a new folder")
    with _alone_or_together() as options:
        dcp.save(
            sharded_state(model, optimizers),
            storage_writer=FileSystemWriter(folder),
            planner=DefaultSavePlanner(**_FLAT, dedup_save_to_lowest_rank=True),
            **options,
        )


def load_sharded_state(folder: str | os.PathLike[str], model: nn.Module, optimizers: Optimizers = ()) -> None:
    """Load what `save_sharded_state` wrote, into a model that any number of ranks divide in any way. A collective.

    Raises:
        ArgumentError: The folder holds no such state, or that of other modules or optimizers.
    """
    from torch.distributed.checkpoint import FileSystemReader

    ensure_group()
    module, own = unwrapped(model), _as_list(optimizers)
    reader = FileSystemReader(folder)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except OSError as error:
        raise ArgumentError(f"folder={os.fspath(folder)!r}: holds no complete state: {error}") from None
    state: dict[str, Any] = {f"model.{name}": value for name, value in module.state_dict().items()}
    _compare(folder, state, {key: entry for key, entry in saved.items() if key.startswith("model.")})
    first: dict[str, Any] = {_GROUPS: []}
    _load(first, reader)
    groups = first[_GROUPS]
    _compare_groups(folder, groups, module, own)
    for number, optimizer in enumerate(own):
        state |= _empty_state(saved, f"optimizer.{number}.", module, optimizer)
    _load(state, reader)
    module.load_state_dict(
        {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    )
    for number, optimizer in enumerate(own):
        _set_state(optimizer, groups[number], f"optimizer.{number}.", state, _names(module, optimizer))


def _load(state: dict[str, Any], reader: Any) -> None:
    """Load in place, into each rank's parts of tensors."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import DefaultLoadPlanner

    with _alone_or_together() as options:
        dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(**_FLAT), **options)


@contextmanager
def _alone_or_together() -> Iterator[dict[str, bool]]:
    """Yield DCP's arguments for this process, without its warnings: to a process that is alone, and of its own code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)  # torch 2.8
        yield {"no_dist": not has_group()}


def _empty_state(saved: Mapping[str, Any], prefix: str, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return tensors for the saved states of an optimizer's parameters, divided as these are."""
    state: dict[str, Any] = {}
    parameters = {prefix + name: parameter for parameter, name in _names(module, optimizer).items()}
    for key, entry in saved.items():
        parameter = parameters.get(key.rpartition(".")[0])
        if parameter is None:
            continue
        size = getattr(entry, "size", None)
        if size is None:
            state[key] = None  # not a tensor
        elif size == parameter.shape and parameter.dim() > 0:
            state[key] = torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
        else:
            state[key] = torch.zeros(size, dtype=entry.properties.dtype)
    return state


def _set_state(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    prefix: str,
    state: Mapping[str, Any],
    names: Mapping[Tensor, str],
) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    optimizer.state.clear()
    parameters = {prefix + name: parameter for parameter, name in names.items()}
    for key, value in state.items():
        owner, _, entry = key.rpartition(".")
        if owner in parameters:
            optimizer.state[parameters[owner]][entry] = value


def _compare(folder: str | os.PathLike[str], own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing, unknown = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
    if missing or unknown:
        raise ArgumentError(
            f"folder={os.fspath(folder)!r} holds another model: without {_some(missing)}, and with {_some(unknown)}"
        )
    for key, value in own.items():
        size = getattr(saved[key], "size", None)
        if isinstance(value, Tensor) and size != value.shape:
            raise ArgumentError(
                f"folder={os.fspath(folder)!r} holds another model: {key} of shape {list(size or ())}, "
                f"and here it is of shape {list(value.shape)}"
            )


def _compare_groups(
    folder: str | os.PathLike[str], groups: Sequence[Any], module: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    if len(groups) != len(optimizers):
        raise ArgumentError(
            f"optimizers: {len(optimizers)} given, but folder={os.fspath(folder)!r} holds the states of {len(groups)}"
        )
    for number, (saved, optimizer) in enumerate(zip(groups, optimizers, strict=True)):
        names = _names(module, optimizer)
        own = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        if own != [group["params"] for group in saved]:
            raise ArgumentError(
                f"optimizers: the parameter groups of number {number} differ from those in {os.fspath(folder)!r}: "
                "make it of the same parameters, in the same order"
            )


def _some(names: Sequence[str]) -> str:
    return (", ".join(names[:3]) + (" …" if len(names) > 3 else "")) or "nothing"


def _names(module: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """Return the names of an optimizer's parameters, in its order.

    Raises:
        ArgumentError: One is not the module's.
    """
    known = {parameter: name for name, parameter in module.named_parameters()}
    names = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ArgumentError(
                    f"optimizers: the {type(optimizer).__name__} has a parameter of shape {list(parameter.shape)} that "
                    f"the {type(module).__name__} does not have: prepare both together"
                )
            names[parameter] = known[parameter]
    return names


def _as_list(optimizers: Optimizers) -> list[Optimizer]:
    given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    return [optimizer.inner if isinstance(optimizer, SteppedOptimizer) else optimizer for optimizer in given]
