"""Losses of training: the default one, the parts that `compute_loss` returns, and the weight of each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from nblaunch.errors import ArgumentError, warn
from nblaunch.training.accelerator.accelerator import Accelerator
from nblaunch.training.pytree import batch_size_of, parameters_of
from nblaunch.training.topology import data_world

_LOSSES = (
    "mse",
    "l1",
    "smooth_l1",
    "huber",
    "nll",
    "cross_entropy",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
"""Names of losses in `torch.nn.functional`, without ``_loss``."""


class SampleWeights:
    """Weighs the losses of one training run, each a mean over its batch.

    DistributedDataParallel averages the ranks' gradients, and accumulation those of batches, so a sample in a small
    batch counts for more. Here a batch of n samples, in a round of N over W ranks, has the weight n W / N. A step of
    rounds of different sizes is divided by its samples at the end. Where all sizes are equal nothing is computed.

    Args:
        accelerator: Divides the losses by the batches of a step.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._factor = 1.0
        self._first = self._seen = 0
        """Samples of all ranks in the step's first round, and in all of it."""
        self._usual: int | None = None
        """The size of this rank's first batch, if the other ranks' sizes are unknown; 0 once that was said."""

    def begin_batch(self, loader: Any, batch: Any) -> tuple[int, int]:
        """Return the samples of this rank's batch and of all ranks' batches, each counted once.

        Where the loader does not know them all, the other ranks are taken to have as many.
        """
        own, of_all, ranks = loader.own_samples, loader.all_samples, data_world(self._accelerator.copies).size
        if not of_all:
            own = batch_size_of(batch) or 1
            of_all = own * ranks
            if ranks > 1:
                self._warn_if_uneven(own)
        if self._seen == 0:
            self._first = of_all
        self._seen += of_all
        self._factor = own * ranks / self._first
        return own, of_all

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the loss of the batch, weighted."""
        return loss * self._factor if self._factor != 1.0 else loss

    def end_step(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the step's samples, if they are other than its first round implied."""
        expected, seen = self._first * self._accelerator._gradients.divisor, self._seen
        self._seen = 0
        if expected != seen:
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    parameter.grad.mul_(expected / seen)

    def _warn_if_uneven(self, own: int) -> None:
        self._usual = own if self._usual is None else self._usual
        if self._usual and own != self._usual:
            warn(
                f"batches of {self._usual} and {own} samples: as the loader's own sampler divides the data, the other "
                "ranks' sizes are unknown, and this step averages batches instead of samples. For exact weights give "
                "the dataset, or a DataLoader without a distributed sampler"
            )
            self._usual = 0


def loss_named(name: str) -> Callable[[Any, Any], Tensor]:
    """Return the loss of a name in `torch.nn.functional`, with or without ``_loss``, in any case.

    Raises:
        ArgumentError: There is no such loss.
    """
    short = name.lower().removesuffix("_loss")
    if short not in _LOSSES:
        known = ", ".join(map(repr, _LOSSES))
        raise ArgumentError(f"loss_fn={name!r}: give a function (output, target) -> loss, or one of {known}")
    found: Any = mean_squared_error if short == "mse" else getattr(F, short, None) or getattr(F, f"{short}_loss")
    return found  # type: ignore[no-any-return]  # a function of torch's


def mean_squared_error(output: Any, target: Any) -> Tensor:
    """Return the default loss.

    Raises:
        ArgumentError: The target is no tensor of floats in the output's shape.
    """
    is_float = isinstance(target, Tensor) and isinstance(output, Tensor) and target.is_floating_point()
    if not is_float or output.shape != target.shape:
        raise ArgumentError(
            "loss_fn=None is the mean squared error, which needs outputs and targets of floats in the same shape, and "
            f"the output is {_kind(output)}, the target {_kind(target)}: give loss_fn, such as "
            "torch.nn.functional.cross_entropy for classes, or override compute_loss(self, model, batch)"
        )
    return F.mse_loss(output, target)


def loss_parts(computed: Any) -> tuple[Tensor, Any, Any]:
    """Return (loss, output, target) of what `Trainer.compute_loss` returned, with None for what it left out."""
    loss, output, target = (*computed, None, None)[:3] if isinstance(computed, tuple) else (computed, None, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ArgumentError(f"compute_loss returned {_kind(loss)}: return a tensor with one element, or (loss, output)")
    return loss, output, target


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
