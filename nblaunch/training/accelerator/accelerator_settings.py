"""The settings of an `Accelerator`."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from nblaunch.errors import ArgumentError
from nblaunch.machine.argument_checks import one_of, whole_number
from nblaunch.training import precision
from nblaunch.training.accelerator import plugin_settings
from nblaunch.training.accelerator.absent_names import refuse_arguments, refuse_attribute
from nblaunch.training.accelerator.gradient_accumulation import GradientState
from nblaunch.training.accelerator.plugin_settings import AccumulationSettings, LoaderSettings, Semantics
from nblaunch.training.accelerator.tracker_backends import requested
from nblaunch.training.parallel.parallelism import Parallelism, from_accelerate
from nblaunch.training.seeding import checked_seed
from nblaunch.training.topology import own_device

_GENERATORS = ("generator", "torch", "cuda")


class AcceleratorSettings:
    """The picklable part of an `Accelerator`, where the arguments are described."""

    def __init__(
        self,
        nprocs: int | None = None,
        compute_setup: str = "auto",
        log_setup: str = "cpu",
        dtype: torch.dtype | None = None,
        backend: str | None = None,
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        ddp_kwargs: Mapping[str, Any] | None = None,
        parallelism: Parallelism | None = None,
        seed: int | None = None,
        semantics: str | None = None,
        schedule_steps: str | None = None,
        step_scheduler_with_optimizer: bool = True,
        cpu: bool | None = None,
        device_placement: bool = True,
        split_batches: bool = False,
        dataloader_config: Any = None,
        rng_types: Iterable[Any] | None = None,
        gradient_accumulation_plugin: Any = None,
        kwargs_handlers: Iterable[Any] | None = None,
        fsdp_plugin: Any = None,
        parallelism_config: Any = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: Any = None,
        **absent: Any,
    ) -> None:
        if absent:
            refuse_arguments(absent, [*inspect.signature(AcceleratorSettings).parameters][:-1])
        given: Any = dtype
        if given is not None and not (isinstance(given, torch.dtype) and (given.is_floating_point or given.is_complex)):
            raise ArgumentError(f"dtype={given!r}: must be a floating-point or complex type, such as torch.float32")
        if semantics is not None:
            one_of("semantics", semantics, ("exact", "accelerate"))
        if schedule_steps is not None:
            one_of("schedule_steps", schedule_steps, ("optimizer", "rank"))
        if cpu and compute_setup == "gpu":
            raise ArgumentError('cpu=True contradicts compute_setup="gpu": give one of them')
        handlers = plugin_settings.read_handlers(kwargs_handlers or ())
        self.nprocs = None if nprocs is None else whole_number("nprocs", nprocs, least=1)
        self.compute_setup = "cpu" if cpu else one_of("compute_setup", compute_setup, ("auto", "cpu", "gpu"))
        self.log_setup = one_of("log_setup", log_setup, ("cpu", "auto"))
        self.dtype = dtype
        backend = handlers.group.get("backend") if backend is None else backend
        self.backend = None if backend is None else one_of("backend", backend, ("gloo", "nccl"))
        self.ddp_kwargs = {**handlers.ddp, **(ddp_kwargs or {})}
        self.parallelism = _parallelism(parallelism, fsdp_plugin, parallelism_config)
        self.fsdp_plugin, self.parallelism_config = fsdp_plugin, parallelism_config
        self.seed = checked_seed(seed)
        self.schedule_steps = schedule_steps
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.device_placement = device_placement
        self.dataloader_config = plugin_settings.read(LoaderSettings, "dataloader_config", dataloader_config or {})
        self.dataloader_config.split_batches |= bool(split_batches)
        kinds = ("generator",) if rng_types is None else (rng_types,) if isinstance(rng_types, str) else rng_types
        self.rng_types = [one_of("rng_types", str(getattr(kind, "value", kind)), _GENERATORS) for kind in kinds]
        if project_config is not None and not hasattr(project_config, "project_dir"):
            raise ArgumentError(
                f"project_config={project_config!r:.80}: must have the attributes of accelerate's ProjectConfiguration"
            )
        configured = getattr(project_config, "project_dir", None)
        self.project_dir = project_dir if configured is None else configured
        self.project_configuration = project_config
        self.log_with = requested(log_with, self.logging_dir)
        """The trackers that were requested: names, and the user's objects."""
        self._handlers = handlers
        self._accumulation = _accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
        of_accelerate = [split_batches, dataloader_config, rng_types, gradient_accumulation_plugin, kwargs_handlers]
        of_accelerate += [cpu is not None, log_with, project_dir, project_config, fsdp_plugin, parallelism_config]
        chosen: Any = semantics or ("moved" if any(of_accelerate) else "own")
        self.semantics: Semantics = chosen
        self._mixed_precision = mixed_precision
        self._gradient_state: GradientState | None = None
        self._is_triggered = False
        self._trackers: list[Any] = []
        precision.precision_of(mixed_precision)

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_gradient_state": None, "_is_triggered": False, "_trackers": []}
        return {**vars(self), **own}  # these belong to this process

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            raise refuse_attribute(name)

    # ------------------------------------------------------------------ where it computes
    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return own_device(self.compute_setup)

    @property
    def log_device(self) -> torch.device:
        """The device of the tensors that `all_reduce_dict` returns."""
        return torch.device("cpu") if self.log_setup == "cpu" else self.device

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"`` or ``"bf16"``."""
        return precision.precision_of(self._mixed_precision)

    @property
    def _timeout(self) -> timedelta | None:
        """The timeout of a process group that this Accelerator makes; None for torch's."""
        return self._handlers.group.get("timeout")

    @property
    def logging_dir(self) -> Any:
        """The folder of the trackers' files: the project's unless the configuration names another one, or None."""
        own = getattr(self.project_configuration, "logging_dir", None)
        return self.project_dir if own is None else own

    # ------------------------------------------------------------------ accumulation
    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per optimizer step. It can be set before `prepare`."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        steps = whole_number("gradient_accumulation_steps", value, least=1)
        if self._gradient_state is not None:
            self._gradient_state.set_steps(steps)
        self._accumulation = dataclasses.replace(self._accumulation, num_steps=steps)

    @property
    def _gradients(self) -> GradientState:
        """This process's state, made on first use."""
        if self._gradient_state is None:
            scaler = precision.scaler_for(self.device, self.mixed_precision, self._handlers.scaler)
            # In accelerate's semantics loaders share generators themselves.
            kinds = [kind for kind in self.rng_types if kind != "generator" and self.semantics != "accelerate"]
            self._gradient_state = GradientState(self._accumulation, scaler, self.semantics, tuple(kinds))
        return self._gradient_state

    @property
    def _counted_steps(self) -> str | None:
        """What a scheduler's step counts, for `Preparation`."""
        if not self.step_scheduler_with_optimizer:
            return "call"
        if self.schedule_steps is not None:
            return self.schedule_steps
        if self.semantics == "accelerate":
            return "optimizer" if self.split_batches else "rank"
        return "optimizer" if self.split_batches or self.semantics == "exact" else None

    # ------------------------------------------------------------------ loaders
    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all ranks together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads streams for all ranks; None: it does."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """As it was given. Ranks have equally many batches either way."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """As it was given. The order is drawn from (seed, epoch) either way."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """As it was given. Copies from pinned memory to a GPU are asynchronous either way."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether the order of a single process is drawn from a seed too, so that other numbers of ranks continue it.

        With ``semantics="accelerate"``: whether `load_state` moves loaders to where they were.
        """
        return self.dataloader_config.use_stateful_dataloader


def _parallelism(given: Parallelism | None, fsdp_plugin: Any, config: Any) -> Parallelism | None:
    if given is not None and not isinstance(given, Parallelism):
        raise ArgumentError(f"parallelism={given!r:.80}: must be a Parallelism, such as Parallelism()")
    if fsdp_plugin is None and config is None:
        return given
    if given is not None:
        name = "parallelism_config" if fsdp_plugin is None else "fsdp_plugin"
        raise ArgumentError(f"parallelism={given!r:.80} beside {name}: give one of them")
    return from_accelerate(fsdp_plugin, config)


def _accumulation(steps: int, plugin: Any) -> AccumulationSettings:
    steps = whole_number("gradient_accumulation_steps", steps, least=1)
    if plugin is None:
        return AccumulationSettings(steps)
    if steps != 1:
        raise ArgumentError(
            f"gradient_accumulation_steps={steps} beside gradient_accumulation_plugin: give its num_steps only"
        )
    settings = plugin_settings.read(AccumulationSettings, "gradient_accumulation_plugin", plugin)
    whole_number("gradient_accumulation_plugin.num_steps", settings.num_steps, least=1)
    return settings
