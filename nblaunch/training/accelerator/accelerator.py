"""`Accelerator`: one training loop for a single process, the ranks of a launch, and ranks of torchrun or srun."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nblaunch.errors import ArgumentError
from nblaunch.machine.arguments import named_arguments, one_of, whole_number
from nblaunch.training import collectives, precision
from nblaunch.training.accelerator.preparation import Preparation, move_batch
from nblaunch.training.distribute import distributed
from nblaunch.training.parallel.parallelism import Parallelism
from nblaunch.training.parallel.sharded_models import clip_grad_norm, has_sharded_parameters, is_sharded
from nblaunch.training.parallel.sharded_states import full_state
from nblaunch.training.pytree import tree_leaves
from nblaunch.training.seeding import checked_seed
from nblaunch.training.states import checkpoint
from nblaunch.training.states.prepared_objects import PreparedObjects
from nblaunch.training.states.saved_states import SavedStates
from nblaunch.training.topology import ensure_group, own_device, world
from nblaunch.training.wrappers import GradientState, unwrapped


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
        precision.precision_of(mixed_precision)
        self.nprocs = None if nprocs is None else whole_number("nprocs", nprocs, least=1)
        self.compute_setup = one_of("compute_setup", compute_setup, ("auto", "cpu", "gpu"))
        self.log_setup = one_of("log_setup", log_setup, ("cpu", "auto"))
        self.dtype = dtype
        self.backend = None if backend is None else one_of("backend", backend, ("gloo", "nccl"))
        self._mixed_precision = mixed_precision
        self._every = whole_number("gradient_accumulation_steps", gradient_accumulation_steps, least=1)
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
        return precision.precision_of(self._mixed_precision)

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
        `nblaunch.training.data.shard`). Other objects come back unchanged.

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
        return move_batch(batch, self.device, self.dtype)

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
    def gradient_accumulation_steps(self) -> int:
        """Batches per optimizer step."""
        return self._every

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch ends an optimizer step."""
        return self._gradients.sync

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context for one batch. Every `gradient_accumulation_steps`-th and a loader's last end a step.

        In between ranks exchange no gradients, prepared optimizers and schedulers do not step, and gradients stay. A
        step that a ``break`` leaves unfinished continues with the next batch.
        """
        return self._gradients.accumulate(models)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward``, with the loss divided by the batches of its optimizer step, and scaled for float16.

        The divisor is `gradient_accumulation_steps`, and in the last step of a pass the batches that are left: of 10
        batches by 4 the last two are halved. (If the loader has no length, or several prepared loaders are iterated at
        once, all steps divide by `gradient_accumulation_steps`.)

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
        return precision.autocast(self.device, self.mixed_precision)

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

    def gather_for_metrics(self, nest: Any, use_gather_object: bool = False) -> Any:
        """`gather` without results of repeated samples: over a pass each sample counts once. A collective.

        Objects that are not tensors, or anything with `use_gather_object`, come back as a list of the ranks' values,
        or of their elements if the values are lists or tuples.
        """
        self._join()
        is_padding = self._gradients.is_padding or self.rank % self.copies != 0
        return collectives.gather_for_metrics(nest, is_padding=is_padding, as_objects=use_gather_object)

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
        return full_state(model) if has_sharded_parameters(model) else unwrapped(model).state_dict()

    def save_state(self, output_dir: str | Path) -> Path:
        """Save the state of everything that was prepared, to resume exactly. A collective.

        It holds the prepared modules, optimizers, schedulers and the gradient scaler; the random states of each rank
        (Python's, NumPy's, torch's); the positions of prepared loaders; and registered objects. Prepared objects that
        no longer exist are left out. Gradients are not saved: save between optimizer steps.

        The folder is written beside its place and moved there when it is complete: a crash, Stop or a full disk leaves
        the earlier one. Rank 0 writes; ranks on other machines must see the same folder. One process without a process
        group reads each file by ``torch.load`` (without a GPU: ``map_location="cpu"``): ``model.pt``, ``model_1.pt``
        ... are the ``state_dict`` of the users' own modules. Where ranks divide models (`parallelism`), their whole
        states are gathered on rank 0, which needs CPU memory for them.

        Args:
            output_dir: The folder. A state that is there is replaced.

        Returns:
            The folder.

        Raises:
            ArgumentError: `output_dir` holds files that are not of a saved state, or `accumulate` has begun an
                optimizer step and not finished it.
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
            weights_only: Whether files are read without running code (default). False is for registered objects whose
                state holds other types than tensors, numbers and strings, from a folder that you trust.

        Raises:
            ArgumentError: On every rank: there is no such folder; it is incomplete or damaged; or it is of another
                model or other objects. The message says which.
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
        """This process's state of accumulation, made on first use."""
        if self._gradient_state is None:
            scaler = precision.scaler_for(self.device, self.mixed_precision)
            self._gradient_state = GradientState(self._every, scaler)
        return self._gradient_state

    def _preparation(self) -> Preparation:
        """Return what prepares objects, in this process."""
        self._join()
        return Preparation(
            self.device,
            self.dtype,
            self.mixed_precision,
            self._gradients,
            seed=self.seed,
            ddp_kwargs=self.ddp_kwargs,
            parallelism=self.parallelism,
            copies=self.copies,
        )

    @property
    def _states(self) -> SavedStates:
        """What saves and loads the prepared objects of this process."""
        return SavedStates(self._prepared, self._registered, self._gradients, self.copies)
