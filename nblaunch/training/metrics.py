"""Metrics over every sample of every rank: exact, and the same for any number of ranks.

Counts and sums are integers until the final division. So neither the order of batches nor their distribution over
ranks can change a digit, and a rank without samples is no special case.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsFloat, runtime_checkable

import torch
from torch import Tensor

from nblaunch.errors import ArgumentError
from nblaunch.machine.arguments import whole_number
from nblaunch.training.collectives import exchange
from nblaunch.training.pytree import tensors_in, to_device

_UNIT_BITS = 1074
"""Every float64 is an integer multiple of 2 ** -1074, the smallest positive one."""


@runtime_checkable
class Metric(Protocol):
    """A metric that `evaluate` can compute."""

    def update(self, output: Any, target: Any, /) -> None:
        """Add a batch of this rank."""

    def compute(self) -> float:
        """Return the value over all ranks, the same on each. A collective, also for a rank without samples."""

    def reset(self) -> None:
        """Discard all batches."""


class Mean:
    """The mean of values such as losses, correctly rounded for any split over ranks and calls.

    The sum is an integer multiple of 2 ** -1074, as in Kulisch's accumulator ("Computer Arithmetic and Validity",
    2013): additions do not round, only the final division does. An update takes about a microsecond per value.

    Attributes:
        count: Number of values on all ranks, at the last `compute`.
    """

    def __init__(self) -> None:
        self.reset()

    def update(self, value: SupportsFloat | Tensor, count: int = 1) -> None:
        """Add a value of this rank.

        Args:
            value: A number or a tensor of numbers.
            count: Weight of each value: the batch size for a loss that is a mean over the batch. With 0 the value is
                ignored, even if it is NaN.

        Raises:
            ArgumentError: `count` is not an integer, or is negative.
        """
        count = whole_number("count", count, least=0)
        if count == 0:
            return
        numbers = value.detach().double().flatten().tolist() if isinstance(value, Tensor) else [float(value)]
        for number in numbers:
            self._count += count
            if math.isfinite(number):
                above, below = number.as_integer_ratio()  # `below` is a power of two
                self._sum += (above * count) << (_UNIT_BITS + 1 - below.bit_length())
            else:
                self._nonfinite += number

    def compute(self) -> float:
        """Return the mean over all ranks, the same on each; NaN if no rank has a value. A collective.

        NaN and infinite values propagate as in a sum of floats.
        """
        sums, nonfinite, counts = zip(*exchange((self._sum, self._nonfinite, self._count)), strict=True)
        self.count = sum(counts)
        if self.count == 0 or sum(nonfinite) != 0.0:
            return sum(nonfinite) if self.count else math.nan
        mean: float = sum(sums) / (self.count << _UNIT_BITS)  # Python rounds the quotient of integers correctly
        return mean

    def reset(self) -> None:
        """Discard all values."""
        self._sum, self._nonfinite, self._count = 0, 0.0, 0
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's values, for a checkpoint."""
        return {"sum": hex(self._sum), "nonfinite": self._nonfinite, "count": self._count}

    def add_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add the values of a `state_dict`, such as another rank's."""
        self._sum += int(state["sum"], 16)
        self._nonfinite += state["nonfinite"]
        self._count += state["count"]


class Accuracy:
    """The fraction of correct predictions, exact over all ranks.

    Args:
        top_k: A prediction is correct if the target is among the `top_k` classes with the highest scores.
        threshold: For binary outputs (floats in the target's shape): a value above it predicts 1. Use 0.5 for
            probabilities and 0 for logits. Default: none, and such outputs raise an ArgumentError.
        ignore_index: Targets with this value are ignored. Default: none.

    Attributes:
        correct: Number of correct predictions on all ranks, at the last `compute`.
        count: Number of predictions on all ranks, at the last `compute`.

    Raises:
        ArgumentError: `top_k` is less than 1, or greater than 1 with a `threshold`.
    """

    def __init__(self, top_k: int = 1, threshold: float | None = None, ignore_index: int | None = None) -> None:
        whole_number("top_k", top_k, least=1)
        if top_k > 1 and threshold is not None:
            raise ArgumentError(f"top_k={top_k}, threshold={threshold}: binary outputs need top_k=1")
        self.top_k, self.threshold, self.ignore_index = top_k, threshold, ignore_index
        self._correct: Tensor | int = 0
        self._counted: Tensor | int = 0
        self.reset()

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add a batch of this rank.

        Args:
            output: Scores of C classes, (N, C) or (N, C, ...). Or predicted labels (integers) in the target's shape. Or
                binary outputs (floats, with a `threshold`) in the target's shape, or with a last dimension of 1.
            target: Labels, (N,) or (N, ...).

        Raises:
            ArgumentError: The shapes do not match, or one is not a tensor; the message names both.
        """
        given: tuple[object, ...] = (output, target)
        if not all(isinstance(value, Tensor) for value in given):
            raise ArgumentError(
                f"output is a {type(output).__name__} and target a {type(target).__name__}: Accuracy takes tensors. "
                "If the model returns more than scores, pass evaluate step=lambda model, batch: (scores, target)"
            )
        target = target.detach().to(output.device)
        is_correct = self._is_correct(output.detach(), target)
        counted = torch.ones_like(is_correct) if self.ignore_index is None else target != self.ignore_index
        self._correct = self._correct + (is_correct & counted).sum()  # stays on the GPU: reading would synchronize
        self._counted = self._counted + counted.sum()

    def compute(self) -> float:
        """Return the accuracy over all ranks, from 0 to 1; NaN if no rank has a target. A collective."""
        corrects, counts = zip(*exchange((int(self._correct), int(self._counted))), strict=True)
        self.correct, self.count = sum(corrects), sum(counts)
        return self.correct / self.count if self.count else math.nan

    def reset(self) -> None:
        """Discard all batches."""
        self._correct = self._counted = 0
        self.correct = self.count = 0

    def _is_correct(self, output: Tensor, target: Tensor) -> Tensor:
        if self.threshold is not None:
            output = output.squeeze(-1) if output.shape == (*target.shape, 1) else output
            if output.shape == target.shape:
                return (output > self.threshold) == target
        elif output.shape == target.shape:
            if not output.is_floating_point() and self.top_k == 1:
                return output == target
        elif _has_classes(output, target, at_least=max(self.top_k, 2)):
            if self.top_k == 1:
                return output.argmax(dim=1) == target
            return (output.topk(self.top_k, dim=1).indices == target.unsqueeze(1)).any(dim=1)
        raise ArgumentError(
            f"output has shape {tuple(output.shape)} ({output.dtype}) and target {tuple(target.shape)}: "
            + self._advice(output, target)
        )

    def _advice(self, output: Tensor, target: Tensor) -> str:
        if self.threshold is not None:
            return f"with threshold={self.threshold} the shapes must be equal"
        if self.top_k > 1:
            return f"top_k={self.top_k} needs scores (N, C) of at least {self.top_k} classes, with labels (N,)"
        if output.shape in (target.shape, (*target.shape, 1)):
            return "for binary outputs use Accuracy(threshold=0.5) with probabilities, threshold=0 with logits"
        return "pass scores (N, C) with labels (N,), scores (N, C, ...) with labels (N, ...), or labels of equal shape"


class FromTorchmetrics:
    """Adapts a torchmetrics metric. It computes on a copy, so updates may continue after `compute`.

    `compute` exchanges the states of all ranks once; torchmetrics then reduces them by the metric's
    ``dist_reduce_fx``. The sync of torchmetrics itself runs one collective per state, and per item of some lists. It
    can hang if ranks have different numbers of batches (https://github.com/Lightning-AI/torchmetrics/issues/813).
    Sums are as exact as the metric's own dtype.

    Args:
        metric: A ``torchmetrics.Metric`` whose value is one number. For per-class values choose an ``average``.

    Raises:
        ArgumentError: `metric` is not a single metric. Use a dict of metrics instead of a MetricCollection.
    """

    def __init__(self, metric: Any) -> None:
        if not all(hasattr(metric, name) for name in ("update", "compute", "metric_state", "distributed_available_fn")):
            raise ArgumentError(f"metric={metric!r:.80}: must be a torchmetrics.Metric; for several use a dict of them")
        self.metric = metric
        self.name = type(metric).__name__.lower()

    def update(self, output: Any, target: Any) -> None:
        """Call the metric's own ``update`` with a batch of this rank."""
        device = next(iter(tensors_in(output)), torch.empty(0)).device
        self.metric.to(device).update(output, target)

    def compute(self) -> float:
        """Return the metric over all ranks, the same on each; NaN if no rank has a batch. A collective.

        Raises:
            ArgumentError: The metric's value is not one number.
        """
        parts = _parts(self.metric)
        has_batch = any(part.update_called for part in parts if part.metric_state)  # a composition has no state
        by_rank = exchange((has_batch, to_device([part.metric_state for part in parts], "cpu")))
        if not any(updated for updated, _ in by_rank):
            return math.nan
        whole = self.metric.clone()
        for part, states in zip(_parts(whole), zip(*(states for _, states in by_rank), strict=True), strict=True):
            _set_states(part, states)
        with warnings.catch_warnings():  # this rank may have no batch of its own
            warnings.filterwarnings("ignore", r"The ``compute`` method of metric .* was called before the ``update``")
            value = whole.compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ArgumentError(f"{type(whole).__name__} returned {value!r:.80}, not one number: set its average=")
        return float(value)

    def reset(self) -> None:
        """Discard all batches."""
        self.metric.reset()


def _has_classes(output: Tensor, target: Tensor, at_least: int) -> bool:
    """Return True if the output has the target's shape plus a dimension of classes after the first."""
    if output.dim() != target.dim() + 1 or output.dim() < 2:
        return False
    return (output.shape[0], *output.shape[2:]) == target.shape and output.shape[1] >= at_least


def _parts(metric: Any) -> list[Any]:
    """Return a torchmetrics metric and its components, in the same order on every rank."""
    return [part for part in metric.modules() if hasattr(part, "metric_state")]


def _set_states(part: Any, by_rank: Sequence[dict[str, Any]]) -> None:
    """Have the sync in `part`'s ``compute`` use these states instead of exchanging any.

    Its list states become the concatenation of all ranks' lists; for a tensor state its sync returns each rank's.
    """
    received: dict[int, list[Tensor]] = {}
    for name, own in part.metric_state.items():
        states = [to_device(state[name], part.device) for state in by_rank]
        if isinstance(own, Tensor):
            received[id(own)] = states
        else:
            setattr(part, name, [item for state in states for item in state])
    part.dist_sync_fn = lambda tensor, group=None: received.get(id(tensor), [tensor])
    part.distributed_available_fn = lambda: True
