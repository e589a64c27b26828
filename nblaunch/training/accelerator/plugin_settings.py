"""Settings of loaders, accumulation, DDP, autocast and profiles, read from accelerate's own objects or from mappings.

Objects are recognised by their attributes: accelerate is never imported, and their copies here hold plain values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from nblaunch.errors import ArgumentError
from nblaunch.machine.argument_checks import one_of

S = TypeVar("S")

Semantics = Literal["own", "moved", "exact", "accelerate"]
"""Which semantics apply: ours, except for ``"accelerate"``. ``"moved"``: the loop was written for accelerate and chose
none, so each difference warns once. With any but ``"own"`` all optimizers and schedulers are wrapped."""


# ------------------------------------------------------------------ plugins
@dataclass
class LoaderSettings:
    """How prepared loaders behave; the fields are those of accelerate's ``DataLoaderConfiguration``."""

    split_batches: bool = False
    """Whether a loader's batch size is that of all ranks together."""
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass(frozen=True)
class AccumulationSettings:
    """How gradients accumulate; the fields are those of accelerate's ``GradientAccumulationPlugin``."""

    num_steps: int = 1
    adjust_scheduler: bool = True
    """Accepted. It has no effect, as in accelerate 1.15: schedules always count optimizer steps."""
    sync_with_dataloader: bool = True
    """Whether a loader's last batch ends an optimizer step."""
    sync_each_batch: bool = False
    """Whether ranks exchange gradients with every batch: slower, with less memory."""


def read(kind: type[S], name: str, given: Any) -> S:
    """Return the settings that an object with the same attributes, or a mapping, holds.

    Raises:
        ArgumentError: It holds none of them, or a mapping has other keys.
    """
    known = {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]  # each kind is a dataclass
    if isinstance(given, Mapping):
        if unknown := sorted(map(str, given.keys() - known)):
            raise ArgumentError(f"{name}: unknown {', '.join(unknown)}: the keys are {', '.join(sorted(known))}")
        return kind(**given)
    found = {key: getattr(given, key) for key in known if getattr(given, key, None) is not None}
    if not any(hasattr(given, key) for key in known):
        raise ArgumentError(f"{name}={given!r:.80}: must have the attributes of {kind.__name__}, or be a mapping")
    return kind(**found)


# ------------------------------------------------------------------ handlers
_DDP_DEFAULTS = {
    "dim": 0,
    "broadcast_buffers": True,
    "bucket_cap_mb": 25,
    "find_unused_parameters": False,
    "check_reduction": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "comm_hook": "no",
    "comm_wrapper": "no",
    "comm_state_option": {},
}
_SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
_PROFILE = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


@dataclass(frozen=True)
class Handlers:
    """Arguments that ``kwargs_handlers`` change, by what they are for; None where nothing was given."""

    ddp: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    group: dict[str, Any] = field(default_factory=dict)
    autocast: dict[str, Any] = field(default_factory=dict)
    profile: Any = None


def read_handlers(given: Iterable[Any]) -> Handlers:
    """Return what the handlers change.

    Raises:
        ArgumentError: A handler is not known, or of the same kind as another.
    """
    found: dict[str, Any] = {}
    if not isinstance(given, Iterable):
        raise ArgumentError(f"kwargs_handlers={given!r:.80}: must be a list of handlers")
    for handler in given:
        kind = next(
            (kind for kind, (marks, _) in _KINDS.items() if all(hasattr(handler, mark) for mark in marks)), None
        )
        name = type(handler).__name__
        if kind is None:
            raise ArgumentError(
                f"kwargs_handlers: {name} is not supported: give DistributedDataParallelKwargs, GradScalerKwargs, "
                "InitProcessGroupKwargs, AutocastKwargs or ProfileKwargs, or use accelerate's own Accelerator, which "
                "runs unchanged in a launch"
            )
        if kind in found:
            raise ArgumentError(f"kwargs_handlers: two handlers are like {name}: give one")
        found[kind] = _KINDS[kind][1](handler)
    return Handlers(**found)


def _ddp(handler: Any) -> dict[str, Any]:
    values = {name: _plain(getattr(handler, name, default)) for name, default in _DDP_DEFAULTS.items()}
    return {name: value for name, value in values.items() if value != _DDP_DEFAULTS[name]}


def _group(handler: Any) -> dict[str, Any]:
    values = {name: getattr(handler, name, None) for name in ("backend", "init_method", "timeout")}
    # Its backend is nccl unless it was given another one, on the CPU too: nccl says nothing.
    return {name: value for name, value in values.items() if value is not None and value != "nccl"}


def _chosen(names: tuple[str, ...]) -> Callable[[Any], dict[str, Any]]:
    return lambda handler: {name: getattr(handler, name) for name in names if hasattr(handler, name)}


_KINDS: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "ddp": (("find_unused_parameters", "bucket_cap_mb"), _ddp),
    "scaler": (("growth_factor", "backoff_factor"), _chosen(_SCALER)),
    "group": (("init_method", "timeout"), _group),
    "profile": (("profile_memory", "with_flops"), lambda handler: handler),
    "autocast": (("cache_enabled",), _chosen(("enabled", "cache_enabled"))),
}
"""For each kind of handler the attributes that identify it, and the function that reads it."""


def _plain(value: Any) -> Any:
    """Return an enum's value, and anything else itself."""
    return getattr(value, "value", value)


# ------------------------------------------------------------------ DDP's communication hooks
_HOOKS = ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")
_WRAPPERS = ("no", "fp16", "bf16")


def wrap_in_ddp(module: torch.nn.Module, arguments: Mapping[str, Any]) -> DistributedDataParallel:
    """Return the module in DDP, with the communication hook that `arguments` may name besides DDP's own arguments.

    Args:
        module: The module.
        arguments: ``comm_hook``: ``"fp16"``, ``"bf16"``, ``"power_sgd"`` or ``"batched_power_sgd"``;
            ``comm_wrapper``: ``"fp16"`` or ``"bf16"``; ``comm_state_option``: the arguments of a ``PowerSGDState``.

    Raises:
        ArgumentError: A hook or wrapper has another name.
    """
    own = dict(arguments)
    hook = one_of("comm_hook", _plain(own.pop("comm_hook", "no")), _HOOKS)
    wrapper = one_of("comm_wrapper", _plain(own.pop("comm_wrapper", "no")), _WRAPPERS)
    options = own.pop("comm_state_option", {})
    wrapped = DistributedDataParallel(module, **own)
    if hook != "no":
        _register(wrapped, hook, wrapper, options)
    return wrapped


def _register(module: DistributedDataParallel, hook: str, wrapper: str, options: Mapping[str, Any]) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    state = None
    if hook in ("fp16", "bf16"):
        function = getattr(default_hooks, f"{hook}_compress_hook")
    else:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # needs NumPy

        function = powerSGD_hook.powerSGD_hook if hook == "power_sgd" else powerSGD_hook.batched_powerSGD_hook
        state = powerSGD_hook.PowerSGDState(None, **options)
    if wrapper != "no":
        function = getattr(default_hooks, f"{wrapper}_compress_wrapper")(function)
    module.register_comm_hook(state, function)


# ------------------------------------------------------------------ profiles
def make_profile(handler: Any) -> tuple[torch.profiler.profile, Any]:
    """Return torch's profiler with a handler's settings, and the folder for its traces or None."""
    known = ("activities", "schedule_option", "on_trace_ready", "output_trace_dir", *_PROFILE)
    is_mapping = isinstance(handler, Mapping)
    given = {name: handler.get(name) if is_mapping else getattr(handler, name, None) for name in known}
    folder = given.pop("output_trace_dir")
    names, schedule = given.pop("activities"), given.pop("schedule_option")
    profiler: Any = torch.profiler
    made = profiler.profile(
        activities=None if names is None else [getattr(profiler.ProfilerActivity, name.upper()) for name in names],
        schedule=None if schedule is None else profiler.schedule(**schedule),
        on_trace_ready=given.pop("on_trace_ready"),
        **{name: bool(value) for name, value in given.items()},
    )
    return made, folder
