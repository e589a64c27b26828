"""`Accelerator`: the same training loop for one process, for a launch's ranks, and under torchrun or srun."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nblaunch.ranks.report import report
from nblaunch.training import checkpoint, collectives, figures, precision
from nblaunch.training.distribute import distributed
from nblaunch.training.prepare import Preparation, move
from nblaunch.training.settings import Settings
from nblaunch.training.stepping import Stepping
from nblaunch.training.unwrap import unwrapped
from nblaunch.training.world import ensure_group, world


class Accelerator(Settings):
    """Places models and data, and trains over however many ranks there are: none besides this process, or many.

    It holds settings only, and finds out where it is when it is asked: one made in the notebook is right in the ranks
    that it is sent to. Alone on the CPU it changes nothing, so the same cell runs without a launch. Methods that say
    so are collectives: every rank must call them.

    Args:
        nprocs: Ranks that `distribute` launches. Default: one per GPU, without GPUs 2.
        compute_setup: Where to compute: ``"cpu"``, ``"gpu"``, or ``"auto"`` (default), a GPU where there is one.
        log_setup: Where `all_reduce_dict` leaves tensors: ``"cpu"`` (default), or ``"auto"``, where it computes.
        dtype: Of modules and batches: their floating-point tensors; complex ones take the matching type. Default: as
            they are.
        backend: Of the process group: ``"gloo"`` or ``"nccl"``. Default: what fits the device.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``. Default: what the launcher's ``mixed_precision=`` says,
            else no.
        gradient_accumulation_steps: Batches for one optimizer step, counted by `accumulate`. Default 1.
        ddp_kwargs: More arguments for ``DistributedDataParallel``.
        seed: What the orders of prepared loaders are drawn from. Default: that of `seed_everything`, else 0.
        schedule_steps: What one ``step`` of a prepared schedule counts: ``"optimizer"``, an optimizer step, so that the
            schedule is the same for any number of ranks; or ``"rank"``, an optimizer step of each rank, so that N ranks
            take N steps at once, as accelerate does unless it is given ``split_batches=True``. Default: as
            ``"optimizer"``; where there are several ranks `prepare` warns that the two differ.
        step_scheduler_with_optimizer: Whether schedules wait for their optimizer's step (default). False: each ``step``
            is one step, whatever the optimizer does, for schedules of epochs.

    Raises:
        ArgumentError: One of them is wrong.
    """

    # ------------------------------------------------------------------ preparing
    def prepare(self, *objects: Any) -> Any:
        """Make objects ready for the ranks; any number, in any order, in nests too. A collective.

        Modules go to the device and dtype, and into DDP where there are other ranks and something to train. Optimizers
        stay as they are, unless accumulation or float16 must decide when they step. Schedules likewise: unless
        `schedule_steps` says otherwise they count optimizer steps, so with 4 ranks a schedule of 1000 steps takes 1000
        steps, where accelerate's takes 250.
        DataLoaders give each rank its part, on the device (see `nblaunch.training.data.shard`). All else passes.

        Without other ranks a DataLoader comes back as it is, unless something must be done with it: batches to be moved
        (a GPU, a `dtype`), the last of a pass to be told (accumulation), or orders to be drawn from `seed`. A loop that
        itself uses ``set_epoch``, ``is_last`` or ``state_dict`` prepares ``shard(loader)``, which has them alone too.

        Returns:
            One object as itself, several as a tuple.

        Raises:
            ArgumentError: One is a `Prefetcher`: prepare its loader, and wrap that.
        """
        self._join()
        how = Preparation(
            self.device,
            self.dtype,
            self.mixed_precision,
            self._steps,
            self.seed,
            self.ddp_kwargs,
            self.schedule_steps if self.step_scheduler_with_optimizer else "call",
        )
        prepared = how.all(objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_batch(self, batch: Any) -> Any:
        """The batch on the device: any nest of tensors; `dtype` for floating-point and complex ones only."""
        return move(batch, self.device, self.dtype)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True) -> Any:
        """The user's own module, without DDP or ``torch.compile`` around it.

        Args:
            model: A prepared module.
            keep_fp32_wrapper: Whether its forward goes on running in mixed precision, as is needed if training goes
                on (default). False takes that off the module, and so off the prepared one too.
        """
        own = unwrapped(model)
        if not keep_fp32_wrapper:
            precision.plain_forward(own)
        return own

    def distribute(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """A function that, called in a notebook, runs `fun` over `nprocs` ranks; called in a rank, it just runs it.

        It takes what `fun` takes; ``rank``, ``world_size``, ``local_rank`` and ``device`` may be left out. It gives
        back a `LaunchResult`: ``result[rank]`` is what a rank returned, of a single one too. Modules, optimizers and
        schedules have rank 0's states afterwards: those among its arguments, in the object of a bound method, and in
        the variables that it, or a function of the notebook among them, names; within nests and plain objects too, as
        deep as ``self.trainer.model``. Others, such as in a global of an imported module, stay as they were.

        Args:
            fun: A function or bound method, defined in a cell or anywhere.
            options: More arguments for `notebook_launcher`, such as ``view`` and ``timeout``.

        Raises:
            Exception: As `notebook_launcher` does.
        """
        return distributed(self, fun, options)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ training
    @property
    def sync_gradients(self) -> bool:
        """Whether the present batch ends an optimizer step."""
        return self._steps.sync

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of float16, else None."""
        return self._steps.scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether infinite gradients kept an optimizer from its last step."""
        return self._steps.has_skipped()

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """The context for one batch. Every `gradient_accumulation_steps`-th and a loader's last end an optimizer step.

        In between ranks exchange no gradients, prepared optimizers and schedules do not step, gradients stay. What a
        ``break`` leaves behind in mid-step goes into the next step.
        """
        return self._steps.accumulate(models)

    @contextmanager
    def no_sync(self, *models: nn.Module) -> Iterator[None]:
        """A context in which ranks exchange no gradients of these modules (default: of all)."""
        with ExitStack() as stack:
            self._steps.hold_back(stack, models)
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward``, with the loss divided by the batches of its optimizer step, and scaled for float16.

        These are `gradient_accumulation_steps`; in the last step of a pass as many as are left, so of 10 batches by 4
        the last two are halved. (Where the length of the loader is not known, or several prepared ones are iterated at
        once, all steps divide by `gradient_accumulation_steps`.)
        """
        self._steps.backward(loss, **kwargs)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip, and give the norm before; nothing happens, and None comes, in between optimizer steps."""
        own = _listed(parameters)
        if not self.sync_gradients:
            return None
        self._steps.unscale(own)
        return nn.utils.clip_grad_norm_(own, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each gradient's value; nothing happens in between optimizer steps."""
        own = _listed(parameters)
        if self.sync_gradients:
            self._steps.unscale(own)
            nn.utils.clip_grad_value_(own, clip_value)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of mixed precision. Prepared modules need none."""
        return precision.autocast(self.device, self.mixed_precision)

    # ------------------------------------------------------------------ over all ranks
    def all_reduce_dict(self, d: Mapping[Any, Any], op: str = "mean") -> dict[Any, Any]:
        """Figures over all ranks, the same bits on each: in one collective while they are few. A collective.

        It is one while each rank's figures pickle into 1,016 bytes, which are some 25 numbers with names; two beyond.

        Args:
            d: By name ints (of int64's range), floats, bools, or tensors of any shape; in any order, the same names on
                every rank. A number that is a float on one rank is a float on all.
            op: ``"mean"`` (default), ``"sum"``, ``"max"`` or ``"min"``. Ints are summed exactly, and their mean is a
                float; floats are summed in float64. Tensors keep their shape, and their dtype but for means of
                integers (float64) and sums of bools (int64); they are left on `log_device`.

        Raises:
            ArgumentError: On every rank, where names, types or shapes differ between ranks (it says who lacks what), or
                a figure is none of these.
        """
        self._join()
        return figures.all_reduce_dict(d, op, self.log_device)

    def gather(self, nest: Any) -> Any:
        """Every tensor of a nest joined along dimension 0, by rank. A collective.

        The first dimensions may differ between ranks. A tensor without dimensions counts as one row.

        Raises:
            ArgumentError: On every rank, where other dimensions, dtypes or the nests themselves differ.
        """
        self._join()
        return collectives.gather(nest)

    def gather_for_metrics(self, nest: Any, use_gather_object: bool = False) -> Any:
        """`gather`, without what a rank computed from a repeated sample: over a pass each sample counts once.

        A collective. Things that are no tensors, or anything with `use_gather_object`, come as a list: of each rank's
        value, or of their elements where they are lists or tuples.
        """
        self._join()
        return collectives.gather_for_metrics(nest, is_padding=self._steps.is_padding, as_objects=use_gather_object)

    def reduce(self, nest: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Every tensor of a nest combined over ranks. A collective, but for ``"none"``.

        Args:
            nest: Tensors, of the same shapes and dtypes on every rank.
            reduction: ``"sum"`` (default, as in accelerate), ``"mean"``, ``"max"``, or ``"none"``, which gives the nest
                back. Sums of bools are int64, means of integers float64; all else keeps its dtype.
            scale: Is accelerate's, which uses it on TPUs alone: it changes nothing here.

        Raises:
            ArgumentError: On every rank, where shapes, dtypes or the nests themselves differ, or ``"max"`` is asked of
                complex numbers.
        """
        self._join()
        return collectives.reduce(nest, reduction)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s object, of any kind, on every rank; its GPU tensors on each rank's own GPU. A collective."""
        self._join()
        return collectives.broadcast(obj, src, self.device)

    def wait_for_everyone(self) -> None:
        """Wait until every rank is here. A collective."""
        self._join()
        collectives.wait()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the body before the others: it downloads, they find what it left. A collective."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The same with each machine's rank 0. A collective."""
        with self._first(self.is_local_main_process):
            yield

    # ------------------------------------------------------------------ once, for all
    def print(self, *values: Any, **kwargs: Any) -> None:
        """Python's own, on the main process only."""
        if self.is_main_process:
            builtins.print(*values, **kwargs)  # noqa: T201  # the user's

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Show figures of this rank in the notebook: `nblaunch.report`. Outside a launch nothing happens."""
        report(step, **values)

    def save(self, obj: Any, path: str | os.PathLike[str]) -> None:
        """``torch.save`` on the main process only. The file is there whole or, if that fails, as it was before."""
        if self.is_main_process:
            checkpoint.write(obj, Path(path))

    # ------------------------------------------------------------------ inside
    @property
    def _steps(self) -> Stepping:
        """This process's own, made when it is first needed."""
        if self._stepping is None:
            scaler = precision.scaler_for(self.device, self.mixed_precision)
            self._stepping = Stepping(self.gradient_accumulation_steps, scaler)
        return self._stepping

    def _join(self) -> None:
        """Be in a process group before a collective; in a launch it is there, under torchrun or srun it is made now."""
        if not world().is_shared:
            return
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # nccl goes by it
        ensure_group(self.backend)

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:  # the others are let go though the body failed
                self.wait_for_everyone()


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
