"""The settings of an `Accelerator`, and the process's position among its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from nblaunch.errors import ArgumentError
from nblaunch.machine.argument_checks import one_of, whole_number
from nblaunch.training import precision
from nblaunch.training.gradient_accumulation import GradientState
from nblaunch.training.parallelism import Parallelism
from nblaunch.training.seeding import checked_seed
from nblaunch.training.topology import own_device, world


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
        schedule_steps: str | None = None,
        step_scheduler_with_optimizer: bool = True,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: Any = None,
    ) -> None:
        given: Any = dtype
        if given is not None and not (isinstance(given, torch.dtype) and (given.is_floating_point or given.is_complex)):
            raise ArgumentError(f"dtype={given!r}: must be a floating-point or complex type, such as torch.float32")
        if schedule_steps is not None:
            one_of("schedule_steps", schedule_steps, ("optimizer", "rank"))
        self.nprocs = None if nprocs is None else whole_number("nprocs", nprocs, least=1)
        self.compute_setup = one_of("compute_setup", compute_setup, ("auto", "cpu", "gpu"))
        self.log_setup = one_of("log_setup", log_setup, ("cpu", "auto"))
        self.dtype = dtype
        self.backend = None if backend is None else one_of("backend", backend, ("gloo", "nccl"))
        self.gradient_accumulation_steps = whole_number(
            "gradient_accumulation_steps", gradient_accumulation_steps, least=1
        )
        self.ddp_kwargs = dict(ddp_kwargs or {})
        if parallelism is not None and not isinstance(parallelism, Parallelism):
            raise ArgumentError(f"parallelism={parallelism!r:.80}: must be a Parallelism, such as Parallelism()")
        self.parallelism = parallelism
        self.seed = checked_seed(seed)
        self.schedule_steps = schedule_steps
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.project_dir = project_dir
        self.project_configuration = project_config
        self._mixed_precision = mixed_precision
        self._gradient_state: GradientState | None = None
        precision.precision_of(mixed_precision)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_gradient_state": None}  # belongs to this process

    # ------------------------------------------------------------------ position
    @property
    def rank(self) -> int:
        """This process's rank, over all machines."""
        return world().rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine."""
        return world().local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return world().size

    process_index, local_process_index, num_processes = rank, local_rank, world_size  # accelerate's names

    @property
    def copies(self) -> int:
        """Ranks that compute on the same samples: those of one tensor-parallel group."""
        return 1 if self.parallelism is None else self.parallelism.copies(world().size)

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
