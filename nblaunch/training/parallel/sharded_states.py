"""States of models that the ranks divide: whole on rank 0, or in parts on disk, for any later number of ranks."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nblaunch.errors import ArgumentError
from nblaunch.training.accelerator.gradient_accumulation import SteppedOptimizer
from nblaunch.training.accelerator.preparation import unwrapped
from nblaunch.training.exchange import exchange
from nblaunch.training.parallel.sharded_models import has_sharded_parameters, is_sharded, part_like
from nblaunch.training.pytree import parameters_of, to_device, tree_leaves, tree_map
from nblaunch.training.topology import ensure_group, has_group, world

Optimizers = Optimizer | Sequence[Optimizer]
_GROUPS = "groups"
"""The key of the optimizers' hyperparameters."""
_SHOWN = 3
"""Weights that a message names."""
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
                whole[id(leaf)] = _compact(full.cpu()) if world().rank == 0 else None
    if world().rank != 0:
        return tree_map(lambda leaf: whole.get(id(leaf), leaf), tree)
    return to_device(tree_map(lambda leaf: whole.get(id(leaf), leaf), tree), "cpu")


def load_full_state(part: Any, state: Mapping[str, Any]) -> None:
    """Load a whole ``state_dict()`` into a module, optimizer, or anything else that has a state.

    Where ranks divide it each rank loads its part of the tensors; it is no collective.
    """
    part.load_state_dict(parts_of(part, state))


def parts_of(part: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a whole state with each tensor divided as it is in this module or optimizer."""
    if isinstance(part, nn.Module) and has_sharded_parameters(part):
        own = part.state_dict()
        return {name: part_like(value, own.get(name)) for name, value in state.items()}
    parameters = parameters_of(part) if isinstance(part, (Optimizer, SteppedOptimizer)) else []
    if not any(map(is_sharded, parameters)):
        return state
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))  # the optimizer itself compares the groups
    return {
        **state,
        "state": {
            number: {key: _own_part(value, by_number.get(number)) for key, value in own.items()}
            for number, own in state["state"].items()
        },
    }


def _own_part(value: Any, parameter: Any) -> Any:
    """Return this rank's part, never the tensor itself, which may be mapped from a file."""
    part = part_like(value, parameter)
    return part.clone() if part is value and isinstance(value, Tensor) else part


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor in storage of its own: one from uneven parts has their padding, which files would hold too."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def _without_advice() -> Iterator[None]:
    """Suppress torch's advice on how to gather a tensor that is divided along two dimensions of a mesh."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# ------------------------------------------------------------------ in parts
def sharded_state(
    model: nn.Module, optimizers: Optimizers = (), *, without: Collection[nn.Module] = ()
) -> dict[str, Any]:
    """Return this rank's part of a training state, flat and by names of parameters, as DCP saves it.

    Args:
        model: The module.
        optimizers: Of its parameters.
        without: Parts of the module whose weights are left out.

    Raises:
        ArgumentError: An optimizer has a parameter that is not the model's.
    """
    module = unwrapped(model)
    state = {f"model.{name}": value for name, value in _weights(module, without).items()}
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


def _weights(module: nn.Module, without: Collection[nn.Module] = ()) -> dict[str, Any]:
    skipped = _prefixes(module, without)
    return {name: value for name, value in module.state_dict().items() if not name.startswith(skipped)}


def _prefixes(module: nn.Module, parts: Collection[nn.Module]) -> tuple[str, ...]:
    """Return what the names of these parts' parameters begin with."""
    found = [name for name, part in module.named_modules() if any(part is other for other in parts)]
    return tuple(f"{name}." if name else "" for name in found)


def save_sharded_state(folder: str | os.PathLike[str], model: nn.Module, optimizers: Optimizers = ()) -> None:
    """Write a training state with torch.distributed.checkpoint: each rank writes its part. A collective.

    Tensors that every rank has whole, such as buffers, are rank 0's.

    Args:
        folder: A new or empty folder, the same for all ranks. It is complete once this has returned on every rank.
        model: The module, divided or whole.
        optimizers: Of its parameters.

    Raises:
        ArgumentError: The folder holds a state already, or an optimizer has a parameter that is not the model's.
        OSError: On every rank, if one cannot write.
    """
    write_sharded_state(folder, sharded_state(model, optimizers))


def write_sharded_state(folder: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write what `sharded_state` returned on each rank. A collective; an error of one rank is raised on all."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    ensure_group()
    if any(exchange((Path(folder) / ".metadata").exists())):
        raise ArgumentError(f"folder={os.fspath(folder)!r}: holds a state already: give a new folder")
    with _plain_errors(), _without_warnings():
        dcp.save(
            state,
            storage_writer=FileSystemWriter(folder),
            planner=DefaultSavePlanner(**_FLAT, dedup_save_to_lowest_rank=True),
            no_dist=not has_group(),
        )


def load_sharded_state(folder: str | os.PathLike[str], model: nn.Module, optimizers: Optimizers = ()) -> None:
    """Load what `save_sharded_state` wrote, into a model that any number of ranks divide in any way.

    Every rank calls it, and reads its part. Nothing changes before all of that is read.

    Raises:
        ArgumentError: The folder holds no such state, or that of other modules or optimizers.
    """
    ReadState(folder, model, optimizers).apply()


class ReadState:
    """This rank's part of a training state on disk: read and checked, but not loaded before `apply`.

    Args:
        folder: What `save_sharded_state` wrote.
        model: As there, with any number of ranks, divided in any way or whole.
        optimizers: As there.
        without: Parts of the module whose weights stay.
        strict: Whether the names of the weights must be those of the module.

    Raises:
        ArgumentError: The folder holds no such state, or that of other modules or optimizers.
        OSError: It cannot be read.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizers: Optimizers = (),
        *,
        without: Collection[nn.Module] = (),
        strict: bool = True,
    ) -> None:
        from torch.distributed.checkpoint import FileSystemReader

        self._module, self._optimizers = unwrapped(model), _as_list(optimizers)
        self._is_whole = strict and not without
        reader = FileSystemReader(folder)
        try:
            saved = reader.read_metadata().state_dict_metadata
        except OSError as error:
            raise ArgumentError(f"folder={os.fspath(folder)!r}: holds no complete state: {error}") from None
        self._state = self._empty_weights(folder, saved, without, strict)
        first: dict[str, Any] = {_GROUPS: []}
        _read(first, reader)
        self._groups = first[_GROUPS]
        _compare_groups(folder, self._groups, self._module, self._optimizers)
        for number, optimizer in enumerate(self._optimizers):
            self._state |= _empty_state(saved, f"optimizer.{number}.", self._module, optimizer)
        _read(self._state, reader)

    def _empty_weights(
        self, folder: str | os.PathLike[str], saved: Mapping[str, Any], without: Collection[nn.Module], strict: bool
    ) -> dict[str, Any]:
        """Return tensors for the module's weights, divided as these are."""
        own, skipped = _weights(self._module, without), _prefixes(self._module, without)
        there = {key.removeprefix("model."): entry for key, entry in saved.items() if key.startswith("model.")}
        there = {name: entry for name, entry in there.items() if not name.startswith(skipped)}
        check_weights(f"folder={os.fspath(folder)!r}", self._module, own, there, strict)
        return {
            f"model.{name}": torch.empty_like(value) if isinstance(value, Tensor) else value
            for name, value in own.items()
            if name in there
        }

    def apply(self) -> None:
        """Load the state into the module and the optimizers."""
        weights = {key.removeprefix("model."): value for key, value in self._state.items() if key.startswith("model.")}
        self._module.load_state_dict(weights, strict=self._is_whole)
        for number, optimizer in enumerate(self._optimizers):
            for group, saved in zip(optimizer.param_groups, self._groups[number], strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})
            optimizer.state.clear()
            names = _names(self._module, optimizer).items()
            parameters = {f"optimizer.{number}.{name}": parameter for parameter, name in names}
            for key, value in self._state.items():
                owner, _, entry = key.rpartition(".")
                if owner in parameters:
                    optimizer.state[parameters[owner]][entry] = value


def _read(state: dict[str, Any], reader: Any) -> None:
    """Read in place, into this rank's parts of tensors. Each rank reads alone: if one cannot, none waits for it."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import DefaultLoadPlanner

    with _plain_errors(), _without_warnings():
        dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(**_FLAT), no_dist=True)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise an Exception for DCP's error, which is none: the failed rank's own error, with its number."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        kind = OSError if isinstance(cause, OSError) else RuntimeError
        raise kind(f"rank {rank}: {type(cause).__name__}: {cause}") from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress DCP's warnings about reading in a single process, and about its own code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)  # torch 2.8
        yield


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


def check_weights(
    source: str, model: nn.Module, own: Mapping[str, Any], saved: Mapping[str, Any], strict: bool
) -> None:
    """Check that saved weights fit a module.

    Args:
        source: What holds the saved weights, for the message.
        model: The module.
        own: Its state.
        saved: By name, the saved tensors, or what DCP's metadata says of them.
        strict: Whether the names must be the same.

    Raises:
        ArgumentError: They do not fit; the message names keys and shapes.
    """
    complaints = []
    if strict:
        complaints = [f"{name} is missing" for name in own if name not in saved]
        complaints += [f"{name} is not in the model" for name in saved if name not in own]
    for name in own:
        before, now = _shape(saved.get(name)), _shape(own[name])
        if before is not None and now is not None and before != now:
            complaints.append(f"{name} has shape {list(before)} there and {list(now)} in the model")
    if complaints:
        rest = f" (and {len(complaints) - _SHOWN} more)" if len(complaints) > _SHOWN else ""
        raise ArgumentError(
            f"{source} is the state of another model than this {type(model).__name__}: "
            f"{'; '.join(complaints[:_SHOWN])}{rest}"
        )


def _shape(value: Any) -> torch.Size | None:
    """Return the shape of a tensor, or of what DCP's metadata says of one; None for anything else."""
    return value.shape if isinstance(value, Tensor) else getattr(value, "size", None)


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
