"""`Accelerator`: one training loop for a single process, the ranks of a launch, and ranks of torchrun or srun."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from nblaunch.errors import ArgumentError
from nblaunch.machine.arguments import named_arguments, one_of, whole_number
from nblaunch.training import checkpoint, collectives
from nblaunch.training.checkpoint import PreparedObjects, SavedStates
from nblaunch.training.distribute import distributed
from nblaunch.training.gradients import GradientState, SteppedOptimizer, SteppedScheduler, cast_forward, precision_of
from nblaunch.training.loader import Prefetcher, agreed_seed, shard
from nblaunch.training.parallelism import (
    HALF,
    MeshSizes,
    Parallelism,
    clip_grad_norm,
    full_state,
    is_divided,
    is_fully_sharded,
    is_sharded,
    rebind,
    shard_model,
    unwrapped,
)
from nblaunch.training.pytree import dtype_for, parameters_of, to_device, tree_leaves, tree_map
from nblaunch.training.seeding import checked_seed
from nblaunch.training.topology import data_world, ensure_group, own_device, world


@named_arguments
class Accelerator:
    """One training loop for a single process and for any number of ranks.

    It holds only settings, and looks up rank and device on each use. So an Accelerator created in the notebook also
    works in the ranks, and the same cell runs without a launch. Every rank must call the methods marked as
    collectives. `save_state` and `load_state` resume a loop exactly.

    Args:
        nprocs: Number of ranks that `distribute` launches. Default: one per GPU, or 2 without GPUs.
        compute_setup: ``"cpu"``, ``"gpu"``, or ``"auto"`` (default): a GPU if one is visible.
        log_setup: Device of the tensors returned by `all_reduce_dict`: ``"cpu"`` (default), or ``"auto"``, the compute
            device.
        dtype: Dtype of the floating-point tensors in modules and batches. Complex tensors get the matching complex
            dtype. Default: unchanged.
        backend: Backend of the process group: ``"gloo"`` or ``"nccl"``. Default: chosen by device.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``. Default: the launcher's ``mixed_precision=``, else no.
        gradient_accumulation_steps: Batches per optimizer step, counted by `accumulate`. Default 1.
        ddp_kwargs: Additional arguments for ``DistributedDataParallel``.
        parallelism: A `Parallelism` to shard each prepared module instead of replicating it.
        seed: Seed of the sample order of prepared loaders. Default: rank 0's seed when `prepare` is called, from the
            loader's generator, else from ``torch.manual_seed`` or `seed_everything`.

    Raises:
        ArgumentError: An argument is wrong or unknown; the message names it.
    """

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
    ) -> None:
        given: Any = dtype
        if given is not None and not (isinstance(given, torch.dtype) and (given.is_floating_point or given.is_complex)):
            raise ArgumentError(f"dtype={given!r}: must be a floating-point or complex dtype, such as torch.float32")
        if parallelism is not None and not isinstance(parallelism, Parallelism):
            raise ArgumentError(f"parallelism={parallelism!r:.80}: must be a Parallelism, such as Parallelism()")
        precision_of(mixed_precision)
        self.nprocs = None if nprocs is None else whole_number("nprocs", nprocs, least=1)
        self.compute_setup = one_of("compute_setup", compute_setup, ("auto", "cpu", "gpu"))
        self.log_setup = one_of("log_setup", log_setup, ("cpu", "auto"))
        self.dtype = dtype
        self.backend = None if backend is None else one_of("backend", backend, ("gloo", "nccl"))
        self._mixed_precision = mixed_precision
        self.gradient_accumulation_steps = whole_number(
            "gradient_accumulation_steps", gradient_accumulation_steps, least=1
        )
        self.ddp_kwargs = dict(ddp_kwargs or {})
        self.parallelism = parallelism
        self.seed = checked_seed(seed)
        self._registered: list[Any] = []
        self._prepared = PreparedObjects()
        self._gradient_state: GradientState | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_prepared": PreparedObjects(), "_gradient_state": None}  # these belong to this process

    # ------------------------------------------------------------------ position
    @property
    def device(self) -> torch.device:
        """This rank's compute device."""
        return own_device(self.compute_setup)

    @property
    def log_device(self) -> torch.device:
        """Device of the tensors returned by `all_reduce_dict`."""
        return torch.device("cpu") if self.log_setup == "cpu" else self.device

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"`` or ``"bf16"``."""
        return precision_of(self._mixed_precision)

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

    @property
    def copies(self) -> int:
        """Number of ranks with the same samples: the size of a tensor-parallel group."""
        return 1 if self.parallelism is None else self.parallelism.copies(world().size)

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return world().rank == 0

    # ------------------------------------------------------------------ preparing
    def prepare(self, *objects: Any) -> Any:
        """Prepare modules, optimizers, schedulers and DataLoaders, in any order and inside pytrees. A collective.

        Modules move to the device and dtype. With several ranks, modules with trainable parameters are wrapped in DDP.
        With `parallelism` they are sharded in place instead, and their optimizers get the new parameters. Optimizers
        and schedulers are wrapped only for gradient accumulation and float16. Schedulers count optimizer steps, for
        any number of ranks. DataLoaders yield this rank's part, on the device, and have a position to resume from (see
        `nblaunch.training.shard`). Other objects are returned unchanged.

        Returns:
            The prepared object, or a tuple of several.

        Raises:
            ArgumentError: An object is a `Prefetcher`. Prepare its loader and wrap the result.
        """
        prepared = self._preparation().all(objects)
        self._prepared.add(prepared)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_batch(self, batch: Any) -> Any:
        """Return the batch (any pytree) on the device, with floating-point and complex tensors cast to `dtype`."""
        device = self.device
        return to_device(batch, device, self.dtype, non_blocking=device.type == "cuda")  # copies of pinned memory

    def unwrap_model(self, model: Any) -> Any:
        """Return the original module, without its DDP and ``torch.compile`` wrappers."""
        return unwrapped(model)

    def distribute(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return a function that runs `fun` on `nprocs` ranks. In a rank it calls `fun` directly.

        Pass it the arguments of `fun`; ``rank``, ``world_size``, ``local_rank`` and ``device`` may be left out. It
        returns a `LaunchResult`: ``result[rank]`` is a rank's return value, even with a single rank. With ``nprocs=1``
        and no option but ``view`` it runs in this process, and the result has no metrics or logs.

        Afterwards the notebook's modules, optimizers and schedulers have rank 0's states. They are found in the
        arguments, in the object of a bound method, and in variables used by `fun` and the notebook functions it calls.
        Pytrees and plain objects are searched too, as deep as ``self.trainer.model``. Others, such as a global of an
        imported module, are not updated.

        Args:
            fun: A function or bound method, defined in a cell or in a module.
            options: Additional arguments for `notebook_launcher`, such as ``view`` and ``timeout``.

        Raises:
            ArgumentError: ``compute_setup="gpu"`` on this machine, but no GPU is visible.
            Exception: See `notebook_launcher`.
        """
        return distributed(self, fun, options)

    # ------------------------------------------------------------------ training
    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch ends an optimizer step."""
        return self._gradients.sync

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context manager for one batch.

        An optimizer step ends with every `gradient_accumulation_steps`-th batch and with the last batch of a loader.
        Until then gradients accumulate without synchronization, and prepared optimizers and schedulers do not step.
        After a ``break``, an unfinished step continues with the next batch. With several prepared loaders, nested or
        side by side, the one that yielded last counts.
        """
        return self._gradients.accumulate(models)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Call ``loss.backward()``, with the loss divided by the batches in its step and scaled for float16.

        The divisor is `gradient_accumulation_steps`. In the last step of a pass it is the number of batches left, if
        the loader has a length: with 10 batches and 4 per step, the last two losses are halved.

        Gradients are averaged over the ranks, so samples in a smaller batch count for more. The last batches of a pass
        may be smaller on some ranks. `Trainer` weights by samples. In your own loop, with a prepared loader and no
        accumulation, call ``backward(loss * loader.sample_weight)`` for a loss that is a mean over the batch.
        """
        self._gradients.backward(loss, **kwargs)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip the gradient norm and return the norm before. Within an unfinished step, do nothing and return None.

        For sharded gradients this is a collective, and the norm is that of the full gradients.
        """
        own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.sync_gradients:
            return None
        self._gradients.unscale(own)
        return clip_grad_norm(own, max_norm, norm_type)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the ``torch.autocast`` context of `mixed_precision`. Prepared modules enter it themselves."""
        dtype = HALF.get(self.mixed_precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    # ------------------------------------------------------------------ collectives
    def all_reduce_dict(self, d: Mapping[Any, Any], op: str = "mean") -> dict[Any, Any]:
        """Reduce a dict of numbers and tensors over all ranks, with bit-identical results on each. A collective.

        It takes one collective if each rank's values pickle to at most 1,016 bytes (about 25 named numbers), else two.
        The ranks of a tensor-parallel group have the same samples, and count as one.

        Args:
            d: The values by name: ints (in int64's range), floats, bools, or tensors of any shape. Every rank passes
                the same names, in any order. A number that is a float on one rank is a float on all.
            op: ``"mean"`` (default; ``"avg"`` is the same), ``"sum"``, ``"max"`` or ``"min"``. Ints are summed exactly,
                and their mean is a float; floats are summed in float64. Tensors are returned on `log_device`. They keep
                their shape and dtype, except for means of integers (float64) and sums of bools (int64).

        Raises:
            ArgumentError: On every rank: names, types or shapes differ between ranks, or a type is not supported.
        """
        self._join()
        return collectives.all_reduce_dict(d, op, self.log_device, self.copies)

    def gather(self, nest: Any) -> Any:
        """Concatenate every tensor of a pytree along dimension 0, by rank. A collective.

        The size of dimension 0 may differ between ranks. A 0-d tensor counts as one row.

        Raises:
            ArgumentError: On every rank: other dimensions, dtypes or the structures of the pytrees differ.
        """
        self._join()
        return collectives.gather(nest)

    def gather_for_metrics(self, nest: Any) -> Any:
        """Like `gather`, without repeated samples: over a pass each sample counts once. A collective."""
        self._join()
        return collectives.gather(nest, is_padding=self._gradients.is_padding or self.rank % self.copies != 0)

    def reduce(self, nest: Any, reduction: str = "sum") -> Any:
        """Reduce every tensor of a pytree over all ranks. A collective.

        The ranks of a tensor-parallel group have the same samples, and count as one.

        Args:
            nest: A pytree of tensors, with the same shapes and dtypes on every rank.
            reduction: ``"sum"`` (default), ``"mean"`` or ``"max"``. Sums of bools are int64 and means of integers
                float64; all others keep their dtype.

        Raises:
            ArgumentError: On every rank: shapes, dtypes or structures differ, or ``"max"`` of a complex tensor.
        """
        self._join()
        return collectives.reduce(nest, reduction, self.copies)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object on every rank, with GPU tensors on each rank's own GPU. A collective."""
        self._join()
        return collectives.broadcast(obj, src, self.device)

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this method. A collective."""
        self._join()
        collectives.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the body on rank 0 before the other ranks, for example to download data once. A collective."""
        if not self.is_main_process:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if self.is_main_process:  # release the others even if the body failed
                self.wait_for_everyone()

    def print(self, *values: Any, **kwargs: Any) -> None:
        """Call Python's ``print`` on the main process only."""
        if self.is_main_process:
            builtins.print(*values, **kwargs)  # noqa: T201  # the user's

    # ------------------------------------------------------------------ files
    def save(self, obj: Any, path: str | os.PathLike[str]) -> None:
        """Call ``torch.save`` on the main process only. The write is atomic: on failure the old file stays.

        Raises:
            ArgumentError: `obj` holds sharded tensors, of which the main process has only a part.
        """
        if any(map(is_sharded, tree_leaves(obj))):
            raise ArgumentError(
                "save: obj holds sharded tensors: call accelerator.get_state_dict(model) on every rank, and save that"
            )
        if self.is_main_process:
            checkpoint.write(obj, Path(path))

    def get_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the ``state_dict`` of the original module, without wrappers.

        For a sharded module this is a collective: rank 0 gets the full state on the CPU, other ranks an empty dict.
        """
        return full_state(model) if is_divided(model) else unwrapped(model).state_dict()

    def save_state(self, output_dir: str | Path) -> Path:
        """Save the state of all prepared objects, to resume exactly. A collective.

        The state holds the prepared modules, optimizers, schedulers and gradient scaler, the positions of prepared
        loaders, the registered objects, and each rank's random states (Python, NumPy, torch). Prepared objects that
        no longer exist are left out. Gradients are not saved: save between optimizer steps.

        Rank 0 writes one file, ``state.pt``; all machines must share the folder. The write is atomic: after a crash,
        Stop or a full disk the earlier file remains. ``torch.load`` reads it without ranks (without a GPU:
        ``map_location="cpu"``); ``"model"`` is a list of the original modules' ``state_dict``. Sharded models are
        gathered on rank 0, which needs CPU memory for their full states.

        Args:
            output_dir: The folder.

        Returns:
            The folder.

        Raises:
            ArgumentError: `output_dir` is a file, or an optimizer step begun by `accumulate` is unfinished.
            OSError: On every rank: the file could not be written.
        """
        self._join()
        return self._states.save(output_dir)

    def load_state(self, input_dir: str | Path, *, strict: bool = True, weights_only: bool = True) -> None:
        """Load a state saved by `save_state`. A collective.

        First prepare and register the same objects in the same order. The whole state is checked before any object
        changes. Gradients are cleared.

        Prepared loaders resume at their batch: the next pass yields the remaining batches. A pass in progress does not
        move, so leave its loop before you load. `skip_first_batches` does not skip the same batches twice.

        On the CPU with one or two ranks the resumed run is bit-identical to an uninterrupted one. With more ranks it is
        equal up to rounding, because DDP sums the gradients of its first step in another order. The number of ranks may
        change: the remaining samples are divided again, if `ShardedLoader` can, and new ranks get random states derived
        from rank 0's. The models may be sharded in another way, or not at all.

        Args:
            input_dir: The folder.
            strict: Whether the keys of the modules' ``state_dict`` must match the saved ones exactly.
            weights_only: Whether to load without running code (default). Use False only if you trust the folder, for
                registered objects whose state holds other types than tensors, numbers and strings.

        Raises:
            ArgumentError: On every rank: the folder has no state, or the state does not match the objects.
            RuntimeError: On every rank: the file is damaged.
        """
        self._join()
        self._states.load(input_dir, strict=strict, weights_only=weights_only)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects with ``state_dict`` and ``load_state_dict`` in `save_state` and `load_state`.

        Rank 0's state is saved, and loaded on every rank. It should hold only tensors, numbers, strings and containers
        of them. Other types are pickled, and `load_state` then needs ``weights_only=False``.

        Raises:
            ArgumentError: An object lacks one of the two methods.
        """
        for thing in objects:
            missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(thing, name, None))]
            if missing:
                raise ArgumentError(f"objects: {thing!r:.80} has no {' and no '.join(missing)}: it needs both methods")
            if not any(thing is other for other in self._registered):
                self._registered.append(thing)

    # ------------------------------------------------------------------ inside
    def _join(self) -> None:
        """Ensure a process group before a collective: a launch has one, under torchrun and srun it is made now."""
        if not world().is_shared:
            return
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # nccl uses the current device
        ensure_group(self.backend)

    @property
    def _gradients(self) -> GradientState:
        if self._gradient_state is None:
            is_half = self.mixed_precision == "fp16"
            scaler = torch.amp.GradScaler(self.device.type) if is_half else None
            self._gradient_state = GradientState(self.gradient_accumulation_steps, scaler)
        return self._gradient_state

    def _preparation(self) -> Preparation:
        self._join()
        return Preparation(self, self._gradients)

    @property
    def _states(self) -> SavedStates:
        return SavedStates(self._prepared, self._registered, self._gradients, self.copies)


class Preparation:
    def __init__(self, accelerator: Accelerator, gradient_state: GradientState) -> None:
        self.accelerator, self.gradient_state = accelerator, gradient_state
        self.device, self.dtype, self.precision = accelerator.device, accelerator.dtype, accelerator.mixed_precision
        self.parallelism = accelerator.parallelism if world().is_shared else None
        sizes = MeshSizes(1, 1, 1) if self.parallelism is None else self.parallelism.sizes(world().size)
        self.divides = sizes.shard * sizes.tensor > 1  # with whole modules on every rank DDP serves
        self.shards_all = self.divides and sizes.is_fully_sharded  # not only what a plan names

    def all(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        leaves = {id(leaf): leaf for leaf in tree_leaves(objects)}
        if any(isinstance(leaf, Prefetcher) for leaf in leaves.values()):
            raise ArgumentError(
                "a Prefetcher cannot be prepared, because it reads ahead: prepare its loader and wrap the result: "
                "Prefetcher(accelerator.prepare(loader), accelerator.device)"
            )
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
        prepared: tuple[Any, ...] = tree_map(lambda leaf: ready.get(id(leaf), leaf), objects)
        return prepared

    # ------------------------------------------------------------------ modules
    def module(self, module: nn.Module, evaluates: bool = False) -> nn.Module:
        if isinstance(module, DistributedDataParallel):
            cast_forward(module.module, self.device, self.precision)
            self.gradient_state.modules.add(module)
            return module
        if is_divided(module):
            whole = (name for name, parameter in module.named_parameters() if not is_sharded(parameter))
            if self.shards_all and (name := next(whole, None)) is not None:
                raise ArgumentError(
                    f"prepare: the {type(module).__name__} is sharded, but its {name} is not: prepare the whole "
                    "module instead of a submodule"
                )
            if is_fully_sharded(module):
                self.gradient_state.modules.add(module)
            elif self.divides and data_world(self.accelerator.copies).is_shared:
                raise ArgumentError(
                    f"prepare: the {type(module).__name__} is already tensor-parallel, and its gradients would not be "
                    "synchronized: prepare the original module, with Parallelism(plan=...)"
                )
            return module  # already placed and sharded, perhaps by the user
        if self.parallelism is not None and self.divides and any(True for _ in module.parameters()):
            own = unwrapped(module)
            self._cast(own)
            cast_forward(own, self.device, self.precision)
            shard_model(own, self.parallelism, self.device, self.precision)
            self.gradient_state.modules.add(own)
            return module
        if any(tensor.device != self.device for tensor in (*module.parameters(), *module.buffers())):
            module.to(self.device)
        self._cast(module)
        cast_forward(module, self.device, self.precision)
        if not evaluates and world().is_shared and any(parameter.requires_grad for parameter in module.parameters()):
            device_ids = {"device_ids": [self.device]} if self.device.type == "cuda" else {}
            module = DistributedDataParallel(module, **{**device_ids, **self.accelerator.ddp_kwargs})
            self.gradient_state.modules.add(module)
        return module

    def _cast(self, module: nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        if any(dtype_for(tensor, self.dtype) not in (None, tensor.dtype) for tensor in tensors):
            # Module.to would make complex parameters real
            change: Any = module._apply
            change(lambda tensor: tensor.to(dtype=dtype_for(tensor, self.dtype) or tensor.dtype))

    # ------------------------------------------------------------------ optimizers and schedulers
    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        if isinstance(optimizer, SteppedOptimizer):
            if optimizer.gradient_state is self.gradient_state:
                return optimizer
            optimizer = optimizer.inner  # of another Accelerator, or of another process
        rebind(optimizer)
        own = parameters_of(optimizer)
        whole = [parameter for parameter in own if not is_sharded(parameter)]
        if self.divides and len(whole) > (0 if self.shards_all else len(own) - 1):
            raise ArgumentError(
                f"prepare: the {type(optimizer).__name__} has a parameter of shape {list(whole[0].shape)} that is in "
                "no sharded module: create it from module.parameters(), and prepare the module with it or before it"
            )
        move_state(optimizer)
        if not self.gradient_state.needs_wrappers:
            return optimizer
        self.gradient_state.optimizers.add(optimizer)
        return SteppedOptimizer(optimizer, self.gradient_state)

    def scheduler(self, scheduler: LRScheduler) -> LRScheduler:
        if isinstance(scheduler, SteppedScheduler):
            if scheduler.gradient_state is self.gradient_state:
                return scheduler
            scheduler = scheduler.inner
        optimizer: Any = scheduler.optimizer
        is_wrapped = hasattr(optimizer.step, "_wrapped_by_lr_sched") or "step" in vars(optimizer)
        if not (is_wrapped or isinstance(scheduler, ReduceLROnPlateau)):
            ConstantLR(optimizer, 1.0)  # wraps the optimizer's step as before it was pickled; else torch warns
        if not self.gradient_state.needs_wrappers:
            return scheduler
        return SteppedScheduler(scheduler, self.gradient_state)

    # ------------------------------------------------------------------ data
    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        moves = self.dtype is not None or self.device.type != "cpu"
        seed = agreed_seed(loader) if self.accelerator.seed is None else self.accelerator.seed
        move = self.accelerator.prepare_batch if moves else None
        prepared = shard(loader, seed=seed, move=move, copies=self.accelerator.copies)
        prepared.observer = self.gradient_state
        return prepared


def move_state(optimizer: Optimizer) -> None:
    """Move it as ``Optimizer.load_state_dict`` does, which leaves the types of complex parameters' states unchanged."""
    for group in optimizer.param_groups:
        moves_steps = group.get("capturable") or group.get("fused")  # else torch wants step counts on the CPU
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key != "step":
                    state[key] = value.to(parameter.device, dtype_for(value, parameter.dtype))
                elif isinstance(value, torch.Tensor) and moves_steps:
                    state[key] = value.to(parameter.device)
