"""`Accelerator.prepare`: prepares modules, optimizers, schedulers and loaders for the ranks."""

from __future__ import annotations

import functools
import io
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from nblaunch.errors import ArgumentError, warn
from nblaunch.training.data.index_source import length_of
from nblaunch.training.data.prefetch import Prefetcher
from nblaunch.training.data.sharded_loader import ShardedLoader, agreed_seed, shard
from nblaunch.training.exchange import exchange
from nblaunch.training.parallel.parallelism import Parallelism
from nblaunch.training.parallel.sharded_models import (
    has_sharded_parameters,
    is_fully_sharded,
    is_sharded,
    rebind,
    shard_model,
)
from nblaunch.training.precision import cast_forward
from nblaunch.training.pytree import dtype_for, parameters_of, to_device, tree_leaves, tree_map
from nblaunch.training.topology import data_world, world
from nblaunch.training.wrappers import GradientState, SteppedOptimizer, SteppedScheduler, unwrapped


@dataclass(frozen=True, slots=True)
class Preparation:
    """Prepares objects for one Accelerator."""

    device: torch.device
    dtype: torch.dtype | None
    precision: str
    gradient_state: GradientState
    seed: int | None
    ddp_kwargs: Mapping[str, Any]
    parallelism: Parallelism | None
    copies: int
    """Ranks that compute on the same samples."""

    def all(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the objects, prepared. A collective."""
        leaves = {id(leaf): leaf for leaf in tree_leaves(objects)}
        if any(isinstance(leaf, Prefetcher) for leaf in leaves.values()):
            raise ArgumentError(
                "a Prefetcher cannot be prepared, because it reads ahead of the loader that accumulation follows: "
                "prepare the loader, then wrap it: Prefetcher(accelerator.prepare(loader), accelerator.device)"
            )
        if world().rank == 0 and data_world(self.copies).is_shared:
            _warn_about_undivided(leaves.values())
        ready: dict[int, Any] = {}
        phases: tuple[tuple[type, Callable[[Any], Any]], ...] = (
            (nn.Module, self.module),
            (Optimizer, self.optimizer),  # after the modules, which move its parameters
            (LRScheduler, self.scheduler),
            (DataLoader, self.loader),
        )
        for kind, prepare in phases:
            for key, leaf in leaves.items():
                if isinstance(leaf, kind):
                    ready[key] = prepare(leaf)
        _compare_lengths([leaf for leaf in ready.values() if isinstance(leaf, DataLoader)])
        prepared: tuple[Any, ...] = tree_map(lambda leaf: ready.get(id(leaf), leaf), objects)
        return prepared

    # ------------------------------------------------------------------ modules
    def module(self, module: nn.Module, evaluates: bool = False) -> nn.Module:
        """Move the module to the device and dtype; wrap it in DDP if ranks must exchange gradients."""
        if isinstance(module, DistributedDataParallel):
            cast_forward(module.module, self.device, self.precision)
            self.gradient_state.add_module(module)
            return module
        if has_sharded_parameters(module):
            self._check_divided(module)
            if is_fully_sharded(module):
                self.gradient_state.add_module(module)
            elif self._divides and data_world(self.copies).is_shared:
                raise ArgumentError(
                    f"prepare: the layers of the {type(module).__name__} are divided already, and parallelism would "
                    "not exchange its gradients: give the module undivided, and a plan to Parallelism(plan=...)"
                )
            return module  # already placed and sharded, perhaps by the user
        if self._divides and any(True for _ in module.parameters()):
            return self._divided(module)
        self._place(module)
        cast_forward(module, self.device, self.precision)
        if not evaluates and world().is_shared and any(parameter.requires_grad for parameter in module.parameters()):
            device_ids = {"device_ids": [self.device]} if self.device.type == "cuda" else {}
            module = DistributedDataParallel(module, **{**device_ids, **self.ddp_kwargs})
            self.gradient_state.add_module(module)
        return module

    @property
    def _divides(self) -> bool:
        """Return True if ranks hold parts of modules; with whole modules on every rank DDP serves."""
        if self.parallelism is None or not world().is_shared:
            return False
        sizes = self.parallelism.sizes(world().size)
        return sizes.shard > 1 or sizes.tensor > 1

    @property
    def _shards_all(self) -> bool:
        """Return True if ranks hold parts of every parameter, not only of those that a plan names."""
        return self._divides and self.parallelism is not None and self.parallelism.sizes(world().size).is_fully_sharded

    def _check_divided(self, module: nn.Module) -> None:
        """Refuse a module that was divided in part: the ranks would not exchange gradients of the rest."""
        if not self._shards_all:
            return
        whole = next((name for name, parameter in module.named_parameters() if not is_sharded(parameter)), None)
        if whole is not None:
            raise ArgumentError(
                f"prepare: the ranks have divided a part of the {type(module).__name__}, and not its {whole}: prepare "
                "the whole module instead of its part"
            )

    def _divided(self, module: nn.Module) -> nn.Module:
        """Divide the module among the ranks, in place."""
        assert self.parallelism is not None
        own = unwrapped(module)
        self._cast(own)
        cast_forward(own, self.device, self.precision)
        shard_model(own, self.parallelism, self.device, self.precision)
        self.gradient_state.add_module(own)
        return module

    def _place(self, module: nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        if any(tensor.device != self.device for tensor in tensors):
            module.to(self.device)
        self._cast(module)

    def _cast(self, module: nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        if any(dtype_for(tensor, self.dtype) not in (None, tensor.dtype) for tensor in tensors):
            # Module.to would make complex parameters real
            change: Any = module._apply
            change(lambda tensor: tensor.to(dtype=dtype_for(tensor, self.dtype) or tensor.dtype))

    # ------------------------------------------------------------------ optimizers and schedulers
    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Move the optimizer's state to its parameters' devices; wrap it for accumulation or float16."""
        if isinstance(optimizer, SteppedOptimizer):
            if optimizer.gradient_state is self.gradient_state:
                return optimizer
            optimizer = optimizer.inner  # of another Accelerator, or of another process
        rebind(optimizer)
        own = parameters_of(optimizer)
        whole = [parameter for parameter in own if not is_sharded(parameter)]
        if self._divides and len(whole) > (0 if self._shards_all else len(own) - 1):
            raise ArgumentError(
                f"prepare: the {type(optimizer).__name__} has a parameter of shape {list(whole[0].shape)} that belongs "
                "to no module that the ranks have divided: make the optimizer of the module's parameters, and prepare "
                "the module before it or with it"
            )
        move_state(optimizer)
        if not self.gradient_state.needs_wrappers:
            return optimizer
        self.gradient_state.add_optimizer(optimizer)
        return SteppedOptimizer(optimizer, self.gradient_state)

    def scheduler(self, scheduler: LRScheduler) -> LRScheduler:
        """Wrap the scheduler if its steps depend on its optimizer's."""
        if isinstance(scheduler, SteppedScheduler):
            if scheduler.gradient_state is self.gradient_state:
                return scheduler
            scheduler = scheduler.inner
        _restore_step_tracking(scheduler)
        if not self.gradient_state.needs_wrappers:
            return scheduler
        return SteppedScheduler(scheduler, self.gradient_state)

    # ------------------------------------------------------------------ data
    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Shard the loader, and move its batches to the device and dtype."""
        moves = self.dtype is not None or self.device.type != "cpu"
        move = functools.partial(move_batch, device=self.device, dtype=self.dtype) if moves else None
        seed = agreed_seed(loader) if self.seed is None else self.seed
        prepared = shard(loader, seed=seed, move=move, copies=self.copies)
        prepared.observer = self.gradient_state
        return prepared


def move_batch(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return the batch on the device; copies from pinned memory are asynchronous."""
    return to_device(batch, device, dtype, non_blocking=device.type == "cuda")


def move_state(optimizer: Optimizer) -> None:
    """Move an optimizer's state to the device and type of its parameters.

    ``Optimizer.load_state_dict`` would do it, but leaves the types of complex parameters' states unchanged.
    """
    for group in optimizer.param_groups:
        moves_steps = group.get("capturable") or group.get("fused")  # else torch wants step counts on the CPU
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key != "step":
                    state[key] = value.to(parameter.device, dtype_for(value, parameter.dtype))
                elif isinstance(value, torch.Tensor) and moves_steps:
                    state[key] = value.to(parameter.device)


def _restore_step_tracking(scheduler: LRScheduler) -> None:
    """Restore torch's wrapper around the optimizer's ``step``, which pickling drops.

    Without it the first step of a scheduler from the notebook warns that ``optimizer.step()`` was overridden.
    """
    optimizer: Any = scheduler.optimizer
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


def _warn_about_undivided(leaves: Iterable[Any]) -> None:
    """Warn about iterables of batches that are no DataLoader, such as webdataset's or DALI's."""
    known = (nn.Module, Optimizer, LRScheduler, DataLoader, torch.Tensor, Set, io.IOBase, type)
    for leaf in leaves:
        is_prepared = isinstance(getattr(leaf, "loader", None), ShardedLoader)  # without its first batches
        iterates = hasattr(leaf, "__iter__") and not hasattr(leaf, "__getitem__")
        if isinstance(leaf, known) or is_prepared or not (iterates or isinstance(leaf, IterableDataset)):
            continue
        warn(
            f"prepare: the {type(leaf).__name__} is no DataLoader, so it is not divided: each rank iterates what it "
            "yields there, perhaps all of it. Give prepare a torch DataLoader of the dataset. If the object divides "
            "itself, such as by webdataset's split_by_node or DALI's shard_id, leave it out of prepare"
        )


def _compare_lengths(loaders: list[DataLoader[Any]]) -> None:
    """Warn if the ranks would iterate different numbers of batches. A collective if there are loaders."""
    if not loaders or not world().is_shared:
        return
    by_rank = exchange([length_of(loader) for loader in loaders])
    if world().rank != 0 or all(lengths == by_rank[0] for lengths in by_rank):
        return
    counts = ", ".join(
        f"rank {rank}: " + " and ".join("unknown" if length is None else str(length) for length in lengths)
        for rank, lengths in enumerate(by_rank)
    )
    warn(
        f"the prepared loaders do not have equally many batches on every rank ({counts}): DDP would wait forever for "
        "a rank that has run out. Build them from the same dataset and batch size on every rank"
    )
