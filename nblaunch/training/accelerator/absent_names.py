"""Names and arguments of accelerate's Accelerator that ours does not have, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nblaunch.errors import AbsentNameError, ArgumentError
from nblaunch.machine.argument_names import unknown_argument

_ITSELF = "accelerate's own Accelerator, which runs unchanged in a launch"
_FP8 = f'mixed_precision="bf16", or for FP8 {_ITSELF}'
_DEEPSPEED = f"for DeepSpeed {_ITSELF}"
_MESH = "a DeviceMesh of your own (torch.distributed.device_mesh.init_device_mesh)"
_HANDLER = "the argument kwargs_handlers="

ABSENT_NAMES: dict[str, str] = {
    "ao_recipe_handler": _FP8,
    "autocast_handler": _HANDLER,
    "context_parallel_rank": _MESH,
    "ddp_handler": f"{_HANDLER} or ddp_kwargs=",
    "deepspeed_ulysses_dl_adapter": _DEEPSPEED,
    "delayed_fp8_autocast": _FP8,
    "flag_tensor": "set_trigger() and check_trigger()",
    "fp8_backend": _FP8,
    "fp8_enabled": _FP8,
    "fp8_recipe_handler": _FP8,
    "has_fp8_handler": _FP8,
    "has_lomo_optimizer": f"for LOMO {_ITSELF}",
    "init_handler": _HANDLER,
    "lomo_backward": f"for LOMO {_ITSELF}",
    "msamp_recipe_handler": _FP8,
    "native_amp": "mixed_precision",
    "pipeline_parallel_rank": _MESH,
    "profile_handler": _HANDLER,
    "scaler_handler": _HANDLER,
    "step": "a count of your own, and sync_gradients: whether this batch ends an optimizer step",
    "te_recipe_handler": _FP8,
}
"""Attributes by name, each with what to use instead."""

ABSENT_ARGUMENTS: dict[str, str] = {
    "deepspeed_plugin": _DEEPSPEED,
    "deepspeed_plugins": _DEEPSPEED,
    "dynamo_backend": "torch.compile(model) before prepare",
    "dynamo_plugin": "torch.compile(model) before prepare",
    "megatron_lm_plugin": f"for Megatron-LM {_ITSELF}",
    "torch_tp_plugin": "parallelism=Parallelism(shard=False, tensor=2, plan=...)",
}
"""Arguments of the constructor by name, each with what to use instead. None says that they are not given."""


def refuse_attribute(name: str) -> AttributeError:
    """Return the error for a name that the Accelerator lacks; with advice if accelerate has it."""
    if name in ABSENT_NAMES:
        return AbsentNameError(f"nblaunch's Accelerator has no {name}: use {ABSENT_NAMES[name]}", name=name)
    return AttributeError(f"'Accelerator' object has no attribute {name!r}", name=name)


def refuse_arguments(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse arguments that the Accelerator lacks, unless they are None. `known` are those that it has.

    Raises:
        ArgumentError: accelerate has the argument; the message says what to use.
        UnknownArgumentError: It is unknown to both.
    """
    for name, value in given.items():
        if name not in ABSENT_ARGUMENTS:
            raise unknown_argument("Accelerator", name, known)
        if value is not None:
            shown = repr(value) if isinstance(value, (str, int)) else f"{type(value).__name__}(...)"
            raise ArgumentError(
                f"{name}={shown}: nblaunch's Accelerator has no such argument: use {ABSENT_ARGUMENTS[name]}"
            )
