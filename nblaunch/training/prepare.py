"""Making modules, optimizers, schedules and loaders ready for the ranks, in any order and nesting."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nblaunch.errors import ArgumentError, warn
from nblaunch.training.data.orders import length_of
from nblaunch.training.data.prefetch import Prefetcher
from nblaunch.training.data.sharding import shard
from nblaunch.training.nests import dtype_for, leaves, map_nest, to_device
from nblaunch.training.precision import cast_forward
from nblaunch.training.stepping import SteppedOptimizer, SteppedScheduler, Stepping
from nblaunch.training.world import exchange, world


@dataclass(frozen=True, slots=True)
class Preparation:
    """How an Accelerator wants its objects."""

    device: torch.device
    dtype: torch.dtype | None
    precision: str
    stepping: Stepping
    seed: int | None = None
    ddp_kwargs: Mapping[str, Any] = field(default_factory=dict)
    schedule_steps: str | None = None
    """That of `Accelerator`, or ``"call"`` where schedules do not wait for their optimizer's step."""

    def all(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """The objects, prepared. A collective."""
        found = {id(leaf): leaf for leaf in leaves(objects)}
        if any(isinstance(leaf, Prefetcher) for leaf in found.values()):
            raise ArgumentError(
                "a Prefetcher cannot be prepared, for it reads ahead of the loader that accumulation follows: prepare "
                "the loader, then wrap it: Prefetcher(accelerator.prepare(loader), accelerator.device)"
            )
        if self.schedule_steps is None and world().rank == 0 and world().is_shared:
            _warn_of_schedules(found.values())
        ready: dict[int, Any] = {}
        phases: tuple[tuple[type, Callable[[Any], Any]], ...] = (
            (nn.Module, self.module),
            (Optimizer, self.optimizer),  # its parameters have been moved by now
            (LRScheduler, self.schedule),
            (DataLoader, self.loader),
        )
        for kind, make in phases:
            ready |= {key: make(leaf) for key, leaf in found.items() if isinstance(leaf, kind)}
        _compare_lengths([leaf for leaf in ready.values() if isinstance(leaf, DataLoader)])
        prepared: tuple[Any, ...] = map_nest(lambda leaf: ready.get(id(leaf), leaf), objects)
        return prepared

    # ------------------------------------------------------------------ modules
    def module(self, module: nn.Module) -> nn.Module:
        """On the device, of the dtype, in DDP where ranks must agree on gradients."""
        if isinstance(module, DistributedDataParallel):
            cast_forward(module.module, self.device, self.precision)
            self.stepping.note_module(module)
            return module
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            return module  # of DTensors, so sharded by its user: placed already, and no case for DDP
        self._place(module)
        cast_forward(module, self.device, self.precision)
        if world().is_shared and any(parameter.requires_grad for parameter in module.parameters()):
            module = DistributedDataParallel(module, **{**self._device_ids(), **self.ddp_kwargs})
            self.stepping.note_module(module)
        return module

    def _place(self, module: nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        if any(tensor.device != self.device for tensor in tensors):
            module.to(self.device)
        if any(dtype_for(tensor, self.dtype) not in (None, tensor.dtype) for tensor in tensors):
            # Module.to would make complex parameters real
            change: Any = module._apply
            change(lambda tensor: tensor.to(dtype=dtype_for(tensor, self.dtype) or tensor.dtype))

    def _device_ids(self) -> dict[str, Any]:
        return {"device_ids": [self.device]} if self.device.type == "cuda" else {}

    # ------------------------------------------------------------------ optimizers and schedules
    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The same one: its parameters were moved in place. Its state is moved after them."""
        if isinstance(optimizer, SteppedOptimizer):
            return optimizer
        _move_state(optimizer)
        if not self.stepping.needs_wraps:
            return optimizer
        self.stepping.note_optimizer(optimizer)
        return SteppedOptimizer(optimizer, self.stepping)

    def schedule(self, schedule: LRScheduler) -> LRScheduler:
        """The same one, or one that steps only with its optimizer."""
        if isinstance(schedule, SteppedScheduler):
            return schedule
        _track_steps(schedule)
        per_rank = self.schedule_steps == "rank"
        if self.schedule_steps == "call" or not (per_rank or self.stepping.needs_wraps):
            return schedule
        return SteppedScheduler(schedule, self.stepping, per_rank)

    # ------------------------------------------------------------------ data
    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """This rank's part of it, on the device. Alone, with nothing to move, count or seed, the loader itself."""
        moves = self.device.type != "cpu" or self.dtype is not None
        if not (world().is_shared or moves or self.stepping.every > 1 or self.seed is not None):
            return loader
        prepared = shard(loader, seed=self.seed, move=functools.partial(move, device=self.device, dtype=self.dtype))
        prepared.follower = self.stepping
        return prepared


def _warn_of_schedules(leaves: Iterable[Any]) -> None:
    """Say that a schedule's steps are not accelerate's, to who has not chosen."""
    if any(isinstance(leaf, LRScheduler) and not isinstance(leaf, SteppedScheduler) for leaf in leaves):
        ranks = world().size
        warn(
            f"this schedule takes one step with each optimizer step of the {ranks} ranks, "
            f"where accelerate's would take {ranks}: "
            'choose Accelerator(schedule_steps="optimizer"), or schedule_steps="rank" for as many'
        )


def move(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """A batch to the device; from pinned memory without waiting for it."""
    return to_device(batch, device, dtype, non_blocking=device.type == "cuda")


def _move_state(optimizer: Optimizer) -> None:
    """Bring what an optimizer keeps of each parameter to the parameter's device and type.

    Not by its own ``load_state_dict``, which leaves the types of complex parameters' states as they are.
    """
    for group in optimizer.param_groups:
        counts_there = group.get("capturable") or group.get("fused")  # else torch wants the step counts on the CPU
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key != "step":
                    state[key] = value.to(parameter.device, dtype_for(value, parameter.dtype))
                elif isinstance(value, torch.Tensor) and counts_there:
                    state[key] = value.to(parameter.device)


def _track_steps(schedule: LRScheduler) -> None:
    """Put back what torch put around the optimizer's ``step`` for the schedule, and pickling left behind.

    Without it the first step of a schedule that came from the notebook warns that ``optimizer.step()`` was overridden.
    """
    optimizer: Any = schedule.optimizer
    if hasattr(optimizer.step, "_wrapped_by_lr_sched") or "step" in vars(optimizer):
        return
    reference, step = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        own: Any = reference()
        own._opt_called = True
        return step(own, *args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # the mark that torch looks for
    optimizer.step = tracked


def _compare_lengths(loaders: list[DataLoader[Any]]) -> None:
    """Warn where ranks are about to iterate different numbers of batches. A collective, if there are loaders."""
    if not loaders or not world().is_shared:
        return
    by_rank = exchange([length_of(loader) for loader in loaders])
    if world().rank != 0 or all(lengths == by_rank[0] for lengths in by_rank):
        return
    counts = ", ".join(f"rank {rank}: {_listed(lengths)}" for rank, lengths in enumerate(by_rank))
    warn(
        f"the prepared loaders do not have equally many batches on every rank ({counts}): DDP would wait forever for "
        "a rank that has no more. Build them from the same dataset and batch size on every rank"
    )


def _listed(lengths: list[int | None]) -> str:
    return " and ".join("unknown" if length is None else str(length) for length in lengths)
