"""`Accelerator`: one training loop for a single process, the ranks of a launch, and ranks of torchrun or srun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nblaunch.errors import ArgumentError
from nblaunch.training import precision
from nblaunch.training.accelerator import plugin_settings
from nblaunch.training.accelerator.batch_size_search import release_memory
from nblaunch.training.accelerator.gradient_accumulation import GradientState
from nblaunch.training.accelerator.preparation import Preparation, move_batch, unwrapped
from nblaunch.training.accelerator.rank_collectives import RankCollectives
from nblaunch.training.accelerator.trackers import Trackers
from nblaunch.training.distribute import distributed
from nblaunch.training.parallel.sharded_models import clip_grad_norm, is_sharded
from nblaunch.training.pytree import parameters_of, tree_leaves
from nblaunch.training.states import checkpoint
from nblaunch.training.states.state_files import StateFiles

T = TypeVar("T")


class Accelerator(StateFiles, Trackers, RankCollectives):
    """Places models and data and trains over any number of ranks, including a single process.

    It holds settings only and looks up rank and device on each use: an Accelerator made in the notebook is valid in
    the ranks that it is sent to. In a single process on the CPU it only prepares loaders, so the same cell runs without
    a launch. Every rank must call the methods marked as collectives. `save_state` and `load_state` resume a loop
    exactly.

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
        semantics: ``"exact"``: as described here. ``"accelerate"``: as accelerate where the two differ: schedules
            count steps of each rank, loaders take their order from torch's generators and repeat samples so that all
            batches are whole, every optimizer step divides by `gradient_accumulation_steps`, and `load_state` does not
            move loaders. Default: like ``"exact"``; if accelerate's arguments are given, a process warns once about
            each difference.
        schedule_steps: What one ``step`` of a prepared scheduler counts. ``"optimizer"``: an optimizer step, so the
            schedule is the same for any number of ranks. ``"rank"``: an optimizer step of each rank, so N ranks take
            N steps at once, as accelerate does unless it is given ``split_batches=True``. Default: like
            ``"optimizer"``; with several ranks `prepare` warns that the two differ.
        step_scheduler_with_optimizer: Whether schedulers wait for their optimizer's step (default). False: each
            ``step`` counts, whatever the optimizer does; for schedules of epochs.
        cpu: Compute on the CPU: ``compute_setup="cpu"``.
        device_placement: Whether modules, states of optimizers and batches move to the device (default).
        split_batches: Whether a loader's batch size is that of all ranks together. Default: of each rank.
        dataloader_config: accelerate's ``DataLoaderConfiguration``, or a mapping of its fields.
        rng_types: Global generators (``"torch"``, ``"cuda"``) whose states each pass over a loader takes from rank 0.
        gradient_accumulation_plugin: accelerate's ``GradientAccumulationPlugin``, or a mapping of its fields.
        kwargs_handlers: accelerate's ``DistributedDataParallelKwargs``, ``GradScalerKwargs``,
            ``InitProcessGroupKwargs``, ``AutocastKwargs`` and ``ProfileKwargs``.
        fsdp_plugin: accelerate's ``FullyShardedDataParallelPlugin(fsdp_version=2)``, for the same `parallelism`.
        parallelism_config: accelerate's ``ParallelismConfig``, for the same `parallelism`. With ``tp_size`` give a
            `Parallelism` instead, for its `plan`.
        log_with: ``"tensorboard"``, ``"wandb"``, ``"all"`` for those that are installed, objects with the interface of
            accelerate's ``GeneralTracker``, or a list of these. See `init_trackers`.
        project_dir: The folder of the trackers' files, and of `save_state` without arguments, unless `project_config`
            names others.
        project_config: accelerate's ``ProjectConfiguration``, or an object with its attributes.

    Raises:
        ArgumentError: An argument is wrong; the message names it. Or only accelerate has it; the message says what to
            use instead. Attributes that only accelerate has raise an `AbsentNameError`.
    """

    # ------------------------------------------------------------------ preparing
    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare objects for the ranks: any number, in any order, inside pytrees too. A collective.

        Modules go to the device and dtype, and into DDP if there are other ranks and something to train. With
        `parallelism` the ranks divide them in place, and optimizers of them get the new parameters. Optimizers are
        wrapped only if accumulation or float16 must decide when they step, or if `semantics` or accelerate's arguments
        are given. The same holds for schedulers: unless `schedule_steps` says otherwise they count optimizer steps, so
        with 4 ranks a schedule of 1000 steps takes 1000 steps, where accelerate's takes 250.
        DataLoaders give each rank its part, on the device (see `nblaunch.training.data.shard`). Other objects come
        back unchanged.

        In a single process too, a DataLoader is sharded: its order comes from the seed, as with several ranks. One of
        a subclass of DataLoader is sharded only if its batches must be moved (a GPU, a `dtype`), its last batch
        detected (accumulation), or its order drawn from `seed`. Otherwise it comes back unchanged, and has no position
        in `save_state`: prepare ``shard(loader)`` for that, or for ``is_last``.

        Args:
            objects: What to prepare.
            device_placement: For each object whether it moves to the device. Default: as in the constructor.

        Returns:
            A single object as itself, several as a tuple.

        Raises:
            ArgumentError: An object is a `Prefetcher`: prepare its loader, and wrap that. Or `device_placement` does
                not fit the objects.
        """
        prepared = self._preparation().all(objects, device_placement)
        self._prepared.add(prepared)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """`prepare` a module; with `evaluation_mode` without DDP. A collective."""
        return self._noted(self._preparation(device_placement).module(model, evaluation_mode))

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """`prepare` an optimizer."""
        return self._noted(self._preparation(device_placement).optimizer(optimizer))

    def prepare_scheduler(self, scheduler: LRScheduler) -> LRScheduler:
        """`prepare` a scheduler."""
        return self._noted(self._preparation().scheduler(scheduler))

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> DataLoader[Any]:
        """`prepare` a DataLoader."""
        return self._noted(self._preparation(device_placement).loader(data_loader))

    def _noted(self, prepared: T) -> T:
        """Return the object; saved states hold it."""
        self._prepared.add((prepared,))
        return prepared

    def prepare_batch(self, batch: Any) -> Any:
        """Return the batch, any pytree, on the device; `dtype` applies to floating-point and complex tensors only."""
        return move_batch(batch, self.device, self.dtype)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True) -> Any:
        """Return the user's own module, without DDP or ``torch.compile`` around it.

        Args:
            model: A prepared module.
            keep_fp32_wrapper: Whether its forward still runs in mixed precision, as further training needs (default).
                False removes that from the module, and so from the prepared one too.
        """
        own = unwrapped(model)
        if not keep_fp32_wrapper:
            precision.plain_forward(own)
        return own

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

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._gradients.sync = value

    @property
    def gradient_state(self) -> GradientState:
        """The state of accumulation, with accelerate's names."""
        return self._gradients

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of float16, else None."""
        return self._gradients.scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether infinite gradients made an optimizer skip its last step."""
        return self._gradients.has_skipped()

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context for one batch. Every `gradient_accumulation_steps`-th and a loader's last end a step.

        In between ranks exchange no gradients, prepared optimizers and schedulers do not step, and gradients stay. A
        step that a ``break`` leaves unfinished continues with the next batch.
        """
        return self._gradients.accumulate(models)

    @contextmanager
    def no_sync(self, *models: nn.Module) -> Iterator[None]:
        """A context in which ranks exchange no gradients of these modules (default: of all)."""
        with ExitStack() as stack:
            self._gradients.enter_no_sync(stack, models)
            yield

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
        own = _as_list(parameters)
        if not self.sync_gradients:
            return None
        self._gradients.unscale(own)
        return clip_grad_norm(own, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each gradient's value; between optimizer steps do nothing."""
        own = _as_list(parameters)
        if self.sync_gradients:
            self._gradients.unscale(own)
            nn.utils.clip_grad_value_(own, clip_value, foreach=False if any(map(is_sharded, own)) else None)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of float16, of some prepared optimizers (default: of all), once per step."""
        given = [] if optimizer is None else optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        chosen = [parameter for own in given for parameter in parameters_of(own)]
        self._gradients.unscale(None if optimizer is None else chosen)

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """A context in which ``backward`` exchanges gradients, although the forward ran in `no_sync`."""
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        ddp: Any = model
        earlier = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
        ddp.reducer.prepare_for_backward([])  # DDP does it in a forward, and this one's was without exchange
        try:
            yield
        finally:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = earlier

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Return the context of mixed precision. Prepared modules enter it themselves.

        Args:
            autocast_handler: ``enabled`` and ``cache_enabled``, as accelerate's ``AutocastKwargs``. Default: those of
                ``kwargs_handlers``, else torch's.
        """
        handlers = self._handlers if autocast_handler is None else plugin_settings.read_handlers([autocast_handler])
        return precision.autocast(self.device, self.mixed_precision, handlers.autocast)

    @staticmethod
    def maybe_context_parallel(**buffers: Any) -> AbstractContextManager[None]:
        """A context that does nothing: sequences are not divided, and a ``cp_size`` is refused."""
        return nullcontext()

    @staticmethod
    def verify_device_map(model: nn.Module) -> bool:
        """Return True if a part of the module was spread over devices by ``device_map``: it cannot be trained."""
        return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())

    # ------------------------------------------------------------------ files and memory
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

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget what was prepared, collect garbage and empty the GPU's cache.

        Returns:
            A None for each object, for the variables that hold them: ``model, data = free_memory(model, data)``.
        """
        if self._gradient_state is not None:
            self._gradient_state.forget()
        self._prepared.clear()
        released: list[None] = [None] * len(objects)
        del objects
        release_memory()
        return released

    clear = free_memory

    # ------------------------------------------------------------------ inside
    def _preparation(self, places: bool | None = None) -> Preparation:
        """Return what prepares objects, for this process. Without `places` as in ``device_placement``."""
        self._join()
        return Preparation(
            self.device,
            self.dtype,
            self.mixed_precision,
            self._gradients,
            seed=self.seed,
            ddp_kwargs=self.ddp_kwargs,
            schedule_steps=self._counted_steps,
            loaders=self.dataloader_config,
            rng_types=tuple(self.rng_types),
            places=self.device_placement if places is None else places,
            parallelism=self.parallelism,
            copies=self.copies,
        )


def _as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
