"""Accuracy and means over every sample of every rank: exact, and the same figure for any number of ranks.

Counts and sums are kept as whole numbers until the end. So the order of batches, and which rank had them, cannot change
a digit, and a rank without a sample is no special case.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsFloat, runtime_checkable

import torch
from torch import Tensor

from nblaunch.errors import ArgumentError
from nblaunch.training.nests import tensors_in, to_device
from nblaunch.training.world import exchange

_UNIT = 1074
"""Every float64 is a whole multiple of 2 ** -1074, the smallest one above zero."""


@runtime_checkable
class Metric(Protocol):
    """What `evaluate` computes. Everything here that takes an output and a target is one."""

    def update(self, output: Any, target: Any, /) -> None:
        """Take a batch in, on this rank."""

    def compute(self) -> float:
        """The figure over all ranks, the same on each. A collective: every rank calls it, with or without samples."""

    def reset(self) -> None:
        """Forget every batch."""


class Mean:
    """The mean of values such as losses, exact: correctly rounded, however they are split over ranks and calls.

    The sum is a whole number of 2 ** -1074, as in Kulisch's accumulator ("Computer Arithmetic and Validity", 2013), so
    adding rounds nothing; only the final division does, once. An update takes about a microsecond a value.

    Attributes:
        count: The values of all ranks together, at the last `compute`.
    """

    def __init__(self) -> None:
        self.reset()

    def update(self, value: SupportsFloat | Tensor, count: int = 1) -> None:
        """Take in a value of this rank.

        Args:
            value: A number, or a tensor: every element of one is a value.
            count: How many samples each value stands for: the batch's size for a loss that is a mean over the batch.
                With 0 nothing is taken in, not even a NaN.

        Raises:
            ArgumentError: `count` is no whole number, or negative.
        """
        if not _is_natural(count):
            raise ArgumentError(f"count={count!r}: give the number of samples, 0 or more")
        for number in _numbers(value) if count else ():
            self._count += count
            if math.isfinite(number):
                above, below = number.as_integer_ratio()  # `below` is a power of two
                self._sum += (above * count) << (_UNIT + 1 - below.bit_length())
            else:
                self._beyond += number

    def compute(self) -> float:
        """The mean over all ranks, the same on each; NaN where no rank has a value. A collective.

        A NaN among the values makes it NaN, as do infinities of both signs; infinities of one sign make it infinite.
        """
        sums, beyond, counts = zip(*exchange((self._sum, self._beyond, self._count)), strict=True)
        self.count = sum(counts)
        if self.count == 0 or sum(beyond) != 0.0:
            return sum(beyond) if self.count else math.nan
        mean: float = sum(sums) / (self.count << _UNIT)  # of whole numbers of any size Python rounds it correctly
        return mean

    def reset(self) -> None:
        """Forget every value."""
        self._sum, self._beyond, self._count = 0, 0.0, 0
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """What this rank has taken in, for a checkpoint."""
        return {"sum": hex(self._sum), "beyond": self._beyond, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be where `state_dict` was taken."""
        self._sum, self._beyond, self._count = int(state["sum"], 16), state["beyond"], state["count"]


class Accuracy:
    """The share of targets that are predicted right: two whole numbers, added over all ranks, and one division.

    Args:
        top_k: A prediction is right if the target is among the `top_k` classes with the highest scores.
        threshold: For binary outputs (of the target's shape, floating): above it is a 1. Use 0.5 for probabilities
            and 0 for logits. Default: none, and such outputs are refused, for which they are cannot be told.
        ignore_index: Targets with this value are not counted. Default: every target is.

    Attributes:
        correct: The right predictions of all ranks together, at the last `compute`.
        count: All predictions of all ranks together, at the last `compute`.

    Raises:
        ArgumentError: `top_k` is less than 1, or more than 1 along with a `threshold`.
    """

    def __init__(self, top_k: int = 1, threshold: float | None = None, ignore_index: int | None = None) -> None:
        if top_k < 1:
            raise ArgumentError(f"top_k={top_k!r}: use 1 or more")
        if top_k > 1 and threshold is not None:
            raise ArgumentError(f"top_k={top_k} with threshold={threshold}: a binary output has no {top_k} best")
        self.top_k, self.threshold, self.ignore_index = top_k, threshold, ignore_index
        self._correct: Tensor | int = 0
        self._counted: Tensor | int = 0
        self.reset()

    def update(self, output: Tensor, target: Tensor) -> None:
        """Take in a batch of this rank.

        Args:
            output: Scores of C classes, (N, C) or (N, C, ...); or predicted labels (integers) in the target's shape; or
                binary outputs (floats, with a `threshold`) in the target's shape, or with one column more.
            target: Labels, (N,) or (N, ...).

        Raises:
            ArgumentError: The shapes do not belong together, or one is no tensor; the message names both.
        """
        if not (_is_tensor(output) and _is_tensor(target)):
            raise ArgumentError(
                f"output is a {type(output).__name__} and target a {type(target).__name__}: Accuracy takes tensors. "
                "Where the model returns more than its scores, give evaluate step=lambda model, batch: (scores, target)"
            )
        target = target.detach().to(output.device)
        is_right = self._is_right(output.detach(), target)
        counted = torch.ones_like(is_right) if self.ignore_index is None else target != self.ignore_index
        self._correct = self._correct + (is_right & counted).sum()  # stays on the GPU: reading it would wait for it
        self._counted = self._counted + counted.sum()

    def compute(self) -> float:
        """The accuracy over all ranks, from 0 to 1, the same on each; NaN where no rank has a target. A collective."""
        corrects, counts = zip(*exchange((int(self._correct), int(self._counted))), strict=True)
        self.correct, self.count = sum(corrects), sum(counts)
        return self.correct / self.count if self.count else math.nan

    def reset(self) -> None:
        """Forget every batch."""
        self._correct = self._counted = 0
        self.correct = self.count = 0

    def _is_right(self, output: Tensor, target: Tensor) -> Tensor:
        """For each target whether it is predicted; of the target's shape."""
        if self.threshold is not None:
            output = output.squeeze(-1) if output.shape == (*target.shape, 1) else output
            if output.shape == target.shape:
                return (output > self.threshold) == target
        elif output.shape == target.shape:
            if not output.is_floating_point() and self.top_k == 1:
                return output == target
        elif _has_classes(output, target, at_least=max(self.top_k, 2)):
            return self._best(output, target)
        raise ArgumentError(
            f"output has the shape {tuple(output.shape)} ({output.dtype}) and target {tuple(target.shape)}: "
            + self._refusal(output, target)
        )

    def _best(self, output: Tensor, target: Tensor) -> Tensor:
        if self.top_k == 1:
            return output.argmax(dim=1) == target
        return (output.topk(self.top_k, dim=1).indices == target.unsqueeze(1)).any(dim=1)

    def _refusal(self, output: Tensor, target: Tensor) -> str:
        """What to do about shapes that do not belong together."""
        if self.threshold is not None:
            return f"with threshold={self.threshold} they must be alike"
        if self.top_k > 1:
            return f"top_k={self.top_k} takes scores of at least {self.top_k} classes, (N, C) with (N,)"
        if output.shape in (target.shape, (*target.shape, 1)):
            return "give Accuracy(threshold=0.5) for probabilities of a binary output, threshold=0 for its logits"
        return "give scores (N, C) with labels (N,), scores (N, C, ...) with (N, ...), or labels of one shape"


class FromTorchmetrics:
    """A torchmetrics metric, for `evaluate` or by itself; on a copy, so that it can go on after `compute`.

    What it syncs: `compute` exchanges the states of all ranks once, and torchmetrics then reduces them as the metric
    says (its ``dist_reduce_fx``). torchmetrics' own exchange runs one collective for each state, and for each item of
    some lists, so ranks with unequal numbers of batches, or none, can hang
    (https://github.com/Lightning-AI/torchmetrics/issues/813). Sums are as exact as the metric's own dtype.

    Args:
        metric: A ``torchmetrics.Metric`` whose value is one number. For per-class values choose an ``average``.

    Raises:
        ArgumentError: It is something else, such as a MetricCollection: use a dict of metrics.
    """

    def __init__(self, metric: Any) -> None:
        if not all(hasattr(metric, name) for name in ("update", "compute", "metric_state", "distributed_available_fn")):
            raise ArgumentError(f"metric={metric!r:.80}: give one torchmetrics.Metric; for several, a dict of them")
        self.metric = metric
        self.name = type(metric).__name__.lower()

    def update(self, output: Any, target: Any) -> None:
        """Take in a batch of this rank, as the metric's own ``update``."""
        device = next(iter(tensors_in(output)), torch.empty(0)).device
        self.metric.to(device).update(output, target)

    def compute(self) -> float:
        """The metric over all ranks, the same on each; NaN where no rank has a batch. A collective.

        Raises:
            ArgumentError: The metric's value is not one number.
        """
        parts = _parts(self.metric)
        has_batch = any(part.update_called for part in parts if part.metric_state)  # a sum of metrics has none itself
        came = exchange((has_batch, to_device([part.metric_state for part in parts], "cpu")))
        if not any(updated for updated, _ in came):
            return math.nan
        whole = self.metric.clone()
        for part, by_rank in zip(_parts(whole), zip(*(states for _, states in came), strict=True), strict=True):
            _give(part, by_rank)
        with warnings.catch_warnings():  # this rank may have had no batch, and needs none
            warnings.filterwarnings("ignore", r"The ``compute`` method of metric .* was called before the ``update``")
            value = whole.compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ArgumentError(f"{type(whole).__name__} gives {value!r:.80}, not one number: set its average=")
        return float(value)

    def reset(self) -> None:
        """Forget every batch."""
        self.metric.reset()


def _is_natural(count: object) -> bool:
    return isinstance(count, int) and count >= 0


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _has_classes(output: Tensor, target: Tensor, at_least: int) -> bool:
    """Whether the output is the target's shape with a dimension of classes after the first."""
    if output.dim() != target.dim() + 1 or output.dim() < 2:
        return False
    return (output.shape[0], *output.shape[2:]) == target.shape and output.shape[1] >= at_least


def _numbers(value: SupportsFloat | Tensor) -> Sequence[float]:
    if isinstance(value, Tensor):
        numbers: list[float] = value.detach().double().flatten().tolist()
        return numbers
    return (float(value),)


def _parts(metric: Any) -> list[Any]:
    """A torchmetrics metric and those that it is made of, in one order on every rank."""
    return [part for part in metric.modules() if hasattr(part, "metric_state")]


def _give(part: Any, by_rank: Sequence[dict[str, Any]]) -> None:
    """Have `part`'s own sync, which its ``compute`` calls, find these states instead of exchanging any.

    The lists of all ranks take the place of its list, and for a tensor state its sync is told each rank's.
    """
    told: dict[int, list[Tensor]] = {}
    for name, own in part.metric_state.items():
        states = [to_device(state[name], part.device) for state in by_rank]
        if isinstance(own, Tensor):
            told[id(own)] = states
        else:
            setattr(part, name, [item for state in states for item in state])
    part.dist_sync_fn = lambda tensor, group=None: told.get(id(tensor), [tensor])
    part.distributed_available_fn = lambda: True
