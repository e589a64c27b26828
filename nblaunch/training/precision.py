"""Mixed precision: which one, the context to compute in, and a module's forward that does so by itself."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from nblaunch.errors import ArgumentError
from nblaunch.training.nests import map_nest

_TYPES = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}
_VARIABLE = "ACCELERATE_MIXED_PRECISION"
"""What ``mixed_precision=`` of the launcher sets in the ranks, and ``accelerate launch`` in its own."""


def precision_of(asked: str | None) -> str:
    """``"no"``, ``"fp16"`` or ``"bf16"``: what is asked for, else what the launch set, else no.

    Raises:
        ArgumentError: It is none of the three.
    """
    name = asked if asked is not None else os.environ.get(_VARIABLE, "no")
    if name not in _TYPES:
        raise ArgumentError(f'mixed_precision={name!r}: an Accelerator knows "no", "fp16" and "bf16"')
    return name


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The context in which operations run in `precision`."""
    dtype = _TYPES[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def scaler_for(device: torch.device, precision: str) -> torch.amp.GradScaler | None:
    """What keeps small gradients from vanishing: float16 alone needs it."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


def cast_forward(module: nn.Module, device: torch.device, precision: str) -> None:
    """Have the module's forward run in autocast, and give its half-precision outputs as float32.

    Done on the instance by what pickles and deep-copies along with it; a second time changes nothing.
    `plain_forward` undoes it.
    """
    if precision == "no" or _is_cast(module):
        return
    earlier = vars(module).get("forward")
    module.forward = functools.partial(_cast, module, earlier, device.type, precision)


def plain_forward(module: nn.Module) -> None:
    """Undo `cast_forward`, if it was done."""
    if not _is_cast(module):
        return
    _, earlier, _, _ = vars(module)["forward"].args
    del module.forward
    if earlier is not None:
        module.forward = earlier


def _is_cast(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) is _cast


def _cast(
    module: nn.Module, earlier: Callable[..., Any] | None, device: str, precision: str, *args: Any, **kwargs: Any
) -> Any:
    with torch.autocast(device, _TYPES[precision]):
        output = type(module).forward(module, *args, **kwargs) if earlier is None else earlier(*args, **kwargs)
    return map_nest(_full, output)


def _full(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value
