"""Whole states of models that the ranks divide: gathered on rank 0, and divided again when they are loaded.

The optimizer functions of ``torch.distributed.checkpoint.state_dict`` are not used: they step an optimizer that has no
state yet, so a state that is saved before the first step would begin with Adam's second one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nblaunch.errors import ArgumentError
from nblaunch.training.parallel.sharded_models import has_sharded_parameters, is_sharded, part_like
from nblaunch.training.pytree import parameters_of, to_device, tree_map
from nblaunch.training.topology import world
from nblaunch.training.wrappers import SteppedOptimizer, unwrapped

_SHOWN = 3
"""Weights that a message names."""


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
    """Return a pytree with each divided tensor whole, on the CPU; on ranks other than 0 None for it. A collective."""

    def whole(leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        full = leaf.detach().full_tensor()
        return _compact(full.cpu()) if world().rank == 0 else None

    tree = tree_map(whole, tree)
    return to_device(tree, "cpu") if world().rank == 0 else tree


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


def check_weights(
    source: str, model: nn.Module, own: Mapping[str, Any], saved: Mapping[str, Any], strict: bool
) -> None:
    """Check that saved weights fit a module.

    Args:
        source: What holds the saved weights, for the message.
        model: The module.
        own: Its state.
        saved: By name, the saved tensors.
        strict: Whether the names must be the same.

    Raises:
        ArgumentError: They do not fit; the message names keys and shapes.
    """
    complaints = []
    if strict:
        complaints = [f"{name} is missing" for name in own if name not in saved]
        complaints += [f"{name} is not in the model" for name in saved if name not in own]
    for name in own:
        before, now = saved.get(name), own[name]
        if isinstance(before, Tensor) and isinstance(now, Tensor) and before.shape != now.shape:
            complaints.append(f"{name} has shape {list(before.shape)} there and {list(now.shape)} in the model")
    if complaints:
        rest = f" (and {len(complaints) - _SHOWN} more)" if len(complaints) > _SHOWN else ""
        raise ArgumentError(
            f"{source} is the state of another model than this {type(model).__name__}: "
            f"{'; '.join(complaints[:_SHOWN])}{rest}"
        )
