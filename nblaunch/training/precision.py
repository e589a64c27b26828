"""Mixed precision: the choice of a precision, autocast, and modules whose forward runs in autocast."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from nblaunch.errors import ArgumentError
from nblaunch.training.pytree import tree_map

_TYPES = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}
_VARIABLE = "ACCELERATE_MIXED_PRECISION"
"""Set in the ranks by the launcher's ``mixed_precision=``, and by ``accelerate launch``."""


def precision_of(requested: str | None) -> str:
    """Return ``"no"``, ``"fp16"`` or ``"bf16"``: the requested precision, else the launch's, else ``"no"``.

    Raises:
        ArgumentError: It is none of the three.
    """
    name = requested if requested is not None else os.environ.get(_VARIABLE, "no")
    if name not in _TYPES:
        raise ArgumentError(f'mixed_precision={name!r}: an Accelerator supports "no", "fp16" and "bf16"')
    return name


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return the context in which operations run in `precision`."""
    dtype = _TYPES[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def scaler_for(device: torch.device, precision: str) -> torch.amp.GradScaler | None:
    """Return a gradient scaler for float16; None for the other precisions, which need none."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


def cast_forward(module: nn.Module, device: torch.device, precision: str) -> None:
    """Run the module's forward in autocast, and return its half-precision outputs as float32.

    Patches the instance, in a way that survives pickling and deepcopy. Idempotent; `plain_forward` undoes it.
    """
    if precision == "no" or is_cast(module):
        return
    earlier = vars(module).get("forward")
    module.forward = functools.partial(_cast, module, earlier, device.type, precision)


def plain_forward(module: nn.Module) -> None:
    """Undo `cast_forward`, if it was done."""
    if not is_cast(module):
        return
    _, earlier, _, _ = vars(module)["forward"].args
    del module.forward
    if earlier is not None:
        module.forward = earlier


def is_cast(module: nn.Module) -> bool:
    """Return True if `cast_forward` has changed the module."""
    return getattr(vars(module).get("forward"), "func", None) is _cast


def _cast(
    module: nn.Module, earlier: Callable[..., Any] | None, device: str, precision: str, *args: Any, **kwargs: Any
) -> Any:
    with torch.autocast(device, _TYPES[precision]):
        output = type(module).forward(module, *args, **kwargs) if earlier is None else earlier(*args, **kwargs)
    return tree_map(_to_float32, output)


def _to_float32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value
