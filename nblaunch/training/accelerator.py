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
    """Places models and data and trains over any number of ranks, including a single process.

    It holds settings only and looks up rank and device on each use: an Accelerator made in the notebook is valid in
    the ranks that it is sent to. The same cell runs without a launch. Every rank must call the methods marked as
    collectives. `save_state` and `load_state` resume a loop exactly.

    Args:
        nprocs: Ranks that `distribute` launches. Default: one per GPU; 2 without GPUs.
        compute_setup: Where to compute: ``"cpu"``, ``"gpu"``, or ``"auto"`` (default), a GPU if there is one.
        log_setup: Device of the tensors that `all_reduce_dict` returns: ``"cpu"`` (default), or ``"auto"``, the
            device that computes.
        dtype: Type of modules and batches: of their floating-point tensors; complex ones take the matching type.
            Default: unchanged.
        backend: Backend of the process group: ``"gloo"`` or ``"nccl"``. Default: the one that fits the device.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``. Default: the launcher's ``mixed_precision=``, else no.
        gradient_accumulation_steps: Batches per optimizer step, counted by `accumulate`. Default 1.
        ddp_kwargs: More arguments for ``DistributedDataParallel``.
        parallelism: A `Parallelism`: ranks divide each prepared module instead of holding copies of it.
        seed: Seed of the order of prepared loaders. Default: that of the loader's own generator, else that of
            ``torch.manual_seed`` or `seed_everything`: rank 0's, when `prepare` is called.

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
            raise ArgumentError(f"dtype={given!r}: must be a floating-point or complex type, such as torch.float32")
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
        """The device that this rank computes on."""
        return own_device(self.compute_setup)

    @property
    def log_device(self) -> torch.device:
        """The device of the tensors that `all_reduce_dict` returns."""
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
        """Ranks that compute on the same samples: those of one tensor-parallel group."""
        return 1 if self.parallelism is None else self.parallelism.copies(world().size)

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return world().rank == 0

    # ------------------------------------------------------------------ preparing
    def prepare(self, *objects: Any) -> Any:
        """Prepare objects for the ranks: any number, in any order, inside pytrees too. A collective.

        Modules go to the device and dtype, and into DDP if there are other ranks and something to train. With
        `parallelism` the ranks divide them in place, and optimizers of them get the new parameters. Optimizers and
        schedulers are wrapped only if accumulation or float16 must decide when they step. A schedule counts optimizer
        steps, for any number of ranks. DataLoaders give each rank its part, on the device, and have a position (see
        `nblaunch.training.shard`). Other objects come back unchanged.

        Returns:
            A single object as itself, several as a tuple.

        Raises:
            ArgumentError: An object is a `Prefetcher`: prepare its loader, and wrap that.
        """
        prepared = self._preparation().all(objects)
        self._prepared.add(prepared)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_batch(self, batch: Any) -> Any:
        """Return the batch, any pytree, on the device; `dtype` applies to floating-point and complex tensors only."""
        device = self.device
        return to_device(batch, device, self.dtype, non_blocking=device.type == "cuda")  # copies of pinned memory

    def unwrap_model(self, model: Any) -> Any:
        """Return the user's own module, without DDP or ``torch.compile`` around it."""
        return unwrapped(model)

    def distribute(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return a function that runs `fun` over `nprocs` ranks when a notebook calls it; in a rank it just calls it.

        It takes the arguments of `fun`; ``rank``, ``world_size``, ``local_rank`` and ``device`` may be left out. It
        returns a `LaunchResult`: ``result[rank]`` is a rank's return value, also for a single rank. With ``nprocs=1``
        and no other option than ``view`` it runs in this process, and the result has no metrics and logs. Afterwards
        modules, optimizers and schedulers have rank 0's states: those among its arguments, in the object of a bound
        method, and in variables that it, or a notebook function among them, names; inside pytrees and plain objects
        too, as deep as ``self.trainer.model``. Others, such as a global of an imported module, do not change.

        Args:
            fun: A function or bound method, defined in a cell or anywhere.
            options: More arguments for `notebook_launcher`, such as ``view`` and ``timeout``.

        Raises:
            ArgumentError: ``compute_setup="gpu"``, the ranks are to run on this machine, and no GPU is visible.
            Exception: As `notebook_launcher` does.
        """
        return distributed(self, fun, options)

    # ------------------------------------------------------------------ training
    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch ends an optimizer step."""
        return self._gradients.sync

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context for one batch. Every `gradient_accumulation_steps`-th and a loader's last end a step.

        Of several prepared loaders, nested or side by side, the one that yielded last counts.

        In between ranks exchange no gradients, prepared optimizers and schedulers do not step, and gradients stay. A
        step that a ``break`` leaves unfinished continues with the next batch.
        """
        return self._gradients.accumulate(models)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward``, with the loss divided by the batches of its optimizer step, and scaled for float16.

        The divisor is `gradient_accumulation_steps`, and in the last step of a pass the batches that are left: of 10
        batches by 4 the last two are halved. (If the loader has no length, all steps divide by
        `gradient_accumulation_steps`.)

        The ranks' gradients are averaged, so a sample in a smaller batch counts for more: the last batches of a pass
        may be smaller on some ranks. `Trainer` weighs by samples. So does ``backward(loss * loader.sample_weight)``
        with a prepared loader, where each batch is an optimizer step and the loss is a mean over the batch.
        """
        self._gradients.backward(loss, **kwargs)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip the gradients' norm and return the norm before; between optimizer steps do nothing and return None.

        The norm is that of whole gradients, also where ranks divide them; then this is a collective.
        """
        own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.sync_gradients:
            return None
        self._gradients.unscale(own)
        return clip_grad_norm(own, max_norm, norm_type)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of mixed precision. Prepared modules enter it themselves."""
        dtype = HALF.get(self.mixed_precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    # ------------------------------------------------------------------ collectives
    def all_reduce_dict(self, d: Mapping[Any, Any], op: str = "mean") -> dict[Any, Any]:
        """Reduce a dict of numbers and tensors over all ranks, to the same bits on each. A collective.

        It takes one collective if each rank's values pickle to at most 1,016 bytes (some 25 numbers with names), else
        two. Ranks that compute on the same samples (`copies`) count as one.

        Args:
            d: By name ints (of int64's range), floats, bools, or tensors of any shape; in any order, the same names on
                every rank. A number that is a float on one rank is a float on all.
            op: ``"mean"`` (default; ``"avg"`` is the same), ``"sum"``, ``"max"`` or ``"min"``. Ints are summed exactly,
                and their mean is a float; floats are summed in float64. Tensors keep their shape, and their dtype
                except for means of integers (float64) and sums of bools (int64); they are returned on `log_device`.

        Raises:
            ArgumentError: On every rank: names, types or shapes differ between ranks (the message says how), or a
                value has another type.
        """
        self._join()
        return collectives.all_reduce_dict(d, op, self.log_device, self.copies)

    def gather(self, nest: Any) -> Any:
        """Concatenate every tensor of a pytree along dimension 0, by rank. A collective.

        The first dimensions may differ between ranks. A tensor without dimensions counts as one row.

        Raises:
            ArgumentError: On every rank: other dimensions, dtypes or the pytrees themselves differ.
        """
        self._join()
        return collectives.gather(nest)

    def gather_for_metrics(self, nest: Any) -> Any:
        """`gather` without results of repeated samples: over a pass each sample counts once. A collective."""
        self._join()
        return collectives.gather(nest, is_padding=self._gradients.is_padding or self.rank % self.copies != 0)

    def reduce(self, nest: Any, reduction: str = "sum") -> Any:
        """Combine every tensor of a pytree over the ranks. A collective.

        Ranks that compute on the same samples (`copies`) count as one.

        Args:
            nest: Tensors, of the same shapes and dtypes on every rank.
            reduction: ``"sum"`` (default), ``"mean"`` or ``"max"``. Sums of bools are int64, means of integers float64;
                all else keeps its dtype.

        Raises:
            ArgumentError: On every rank: shapes, dtypes or the pytrees themselves differ, or ``"max"`` of complex
                numbers was requested.
        """
        self._join()
        return collectives.reduce(nest, reduction, self.copies)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object, of any kind, on every rank; GPU tensors on each rank's own GPU. A collective."""
        self._join()
        return collectives.broadcast(obj, src, self.device)

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called it. A collective."""
        self._join()
        collectives.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the body on rank 0 before the others, such as a download that the others then find. A collective."""
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
            ArgumentError: `obj` holds tensors that ranks divide; the main process has only a part of them.
        """
        if any(map(is_sharded, tree_leaves(obj))):
            raise ArgumentError(
                "save: obj holds tensors that the ranks divide: give accelerator.get_state_dict(model), which every "
                "rank must call"
            )
        if self.is_main_process:
            checkpoint.write(obj, Path(path))

    def get_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the ``state_dict`` of the user's own module, without wrappers.

        Where ranks divide the module this is a collective: every rank must call it. It gives the whole state on rank
        0's CPU; on other ranks an empty dict.
        """
        return full_state(model) if is_divided(model) else unwrapped(model).state_dict()

    def save_state(self, output_dir: str | Path) -> Path:
        """Save the state of everything that was prepared, to resume exactly. A collective.

        It holds the prepared modules, optimizers, schedulers and the gradient scaler; the random states of each rank
        (Python's, NumPy's, torch's); the positions of prepared loaders; and registered objects. Prepared objects that
        no longer exist are left out. Gradients are not saved: save between optimizer steps.

        The folder gets one file, ``state.pt``, in place of an earlier one when it is complete: a crash, Stop or a full
        disk leaves the earlier state. Rank 0 writes; ranks on other machines must see the same folder. ``torch.load``
        reads it without ranks (without a GPU: ``map_location="cpu"``): under ``"model"`` is a list with the
        ``state_dict`` of each of the users' own modules. Where ranks divide models (`parallelism`), their whole states
        are gathered on rank 0, which needs CPU memory for them.

        Args:
            output_dir: The folder.

        Returns:
            The folder.

        Raises:
            ArgumentError: `output_dir` is a file, or `accumulate` has begun an optimizer step and not finished it.
            OSError: On every rank, if one cannot write.
        """
        self._join()
        return self._states.save(output_dir)

    def load_state(self, input_dir: str | Path, *, strict: bool = True, weights_only: bool = True) -> None:
        """Restore a state that `save_state` wrote. A collective.

        Prepare the same objects in the same order first, and register the same objects. Everything is checked before
        anything changes.

        Break off a loop over a prepared loader before you load: a pass in progress does not move. Prepared loaders
        continue at their batch: the next pass yields those that were left. `skip_first_batches` with a script's own
        count does not skip twice, see there.

        On the CPU a run of one or two ranks that continues reaches bit-equal weights; with more ranks they are equal up
        to rounding, because DDP sums the gradients of its first step in another order. With another number of ranks the
        remaining samples are divided again, if `ShardedLoader` can; ranks that did not exist get random states derived
        from rank 0's. Ranks may divide the models in another way than those that saved, or not at all. The modules'
        gradients are cleared.

        Args:
            input_dir: The folder.
            strict: Whether the names of the modules' weights must be those that were saved.
            weights_only: Whether the file is read without running code (default). False is for registered objects
                whose state holds other types than tensors, numbers and strings, from a folder that you trust.

        Raises:
            ArgumentError: On every rank: there is no state in the folder, or it is of another model or other objects.
                The message says which.
            RuntimeError: On every rank: the file is damaged.
        """
        self._join()
        self._states.load(input_dir, strict=strict, weights_only=weights_only)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the states of these objects too: anything with ``state_dict`` and ``load_state_dict``.

        Rank 0's state is saved, and loaded on every rank. It should hold tensors, numbers, strings, and containers of
        these; other types are pickled, and `load_state` then asks for ``weights_only=False``.

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
                "a Prefetcher cannot be prepared, because it reads ahead of the loader that accumulation follows: "
                "prepare the loader, then wrap it: Prefetcher(accelerator.prepare(loader), accelerator.device)"
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
                    f"prepare: the ranks have divided a part of the {type(module).__name__}, and not its {name}: "
                    "prepare the whole module instead of its part"
                )
            if is_fully_sharded(module):
                self.gradient_state.modules.add(module)
            elif self.divides and data_world(self.accelerator.copies).is_shared:
                raise ArgumentError(
                    f"prepare: the layers of the {type(module).__name__} are divided already, and parallelism would "
                    "not exchange its gradients: give the module undivided, and a plan to Parallelism(plan=...)"
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
                f"prepare: the {type(optimizer).__name__} has a parameter of shape {list(whole[0].shape)} that belongs "
                "to no module that the ranks have divided: make the optimizer of the module's parameters, and prepare "
                "the module before it or with it"
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
