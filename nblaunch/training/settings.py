"""What an Accelerator is told, and where the process stands that asks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nblaunch.errors import ArgumentError
from nblaunch.training import precision
from nblaunch.training.seeding import checked_seed
from nblaunch.training.stepping import Stepping
from nblaunch.training.world import own_device, world


class Settings:
    """The part of an `Accelerator` that is the same in every process that it is sent to; see there."""

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
        seed: int | None = None,
        schedule_steps: str | None = None,
        step_scheduler_with_optimizer: bool = True,
    ) -> None:
        self.nprocs = None if nprocs is None else _at_least_one("nprocs", nprocs)
        self.compute_setup = _one_of("compute_setup", compute_setup, ("auto", "cpu", "gpu"))
        self.log_setup = _one_of("log_setup", log_setup, ("cpu", "auto"))
        self.dtype = _inexact(dtype)
        self.backend = None if backend is None else _one_of("backend", backend, ("gloo", "nccl"))
        self.gradient_accumulation_steps = _at_least_one("gradient_accumulation_steps", gradient_accumulation_steps)
        self.ddp_kwargs = dict(ddp_kwargs or {})
        self.seed = checked_seed(seed)
        known = ("optimizer", "rank")
        self.schedule_steps = None if schedule_steps is None else _one_of("schedule_steps", schedule_steps, known)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._mixed_precision = mixed_precision
        self._stepping: Stepping | None = None
        precision.precision_of(mixed_precision)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stepping": None}  # what is under way here is nothing to another process

    # ------------------------------------------------------------------ where this is
    @property
    def rank(self) -> int:
        """This process's rank, over all machines."""
        return world().rank

    @property
    def local_rank(self) -> int:
        """Its rank on its machine."""
        return world().local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return world().size

    process_index, local_process_index, num_processes = rank, local_rank, world_size  # accelerate's names

    @property
    def is_main_process(self) -> bool:
        return world().rank == 0

    @property
    def is_local_main_process(self) -> bool:
        return world().local_rank == 0

    @property
    def is_last_process(self) -> bool:
        return world().rank == world().size - 1

    @property
    def use_distributed(self) -> bool:
        return world().is_shared

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return own_device(self.compute_setup)

    @property
    def log_device(self) -> torch.device:
        """Where reduced figures are left."""
        return torch.device("cpu") if self.log_setup == "cpu" else self.device

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"`` or ``"bf16"``."""
        return precision.precision_of(self._mixed_precision)


def _at_least_one(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name}={value!r}: must be a whole number, at least 1")
    return value


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ArgumentError(f"{name}={value!r}: must be one of {', '.join(known)}")
    return str(value)


def _inexact(dtype: Any) -> torch.dtype | None:
    if dtype is None or (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):
        return dtype
    raise ArgumentError(f"dtype={dtype!r}: must be a floating-point or complex type, such as torch.float32")
