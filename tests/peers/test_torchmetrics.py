"""torchmetrics in a launch: metrics over all samples, with unequal and empty parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch.errors import ArgumentError
from nblaunch.training import Accuracy, FromTorchmetrics, Metric, evaluate
from tests.processes.conftest import Launcher

SIZE = 61
BATCHES_OF_EACH = (0, 1, 4)
"""Of the five batches: rank 0 has none."""


def samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(SIZE, 4, generator=draw).softmax(1), torch.randint(4, (SIZE,), generator=draw))


def classes(output: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return output, target


def values(output: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return output[:, 0], target.float()


def documents(output: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return output[:, 0], target > 1, target


def kinds() -> dict[str, tuple[Any, Callable[..., tuple[Tensor, ...]]]]:
    """A metric for each kind of state, with what its update is given. torchmetrics is imported in ranks alone."""
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
    from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef
    from torchmetrics.retrieval import RetrievalMAP

    return {
        "sums": (MulticlassAccuracy(4, average="micro"), classes),
        "sums for each class": (MulticlassF1Score(4, average="macro"), classes),
        "joined lists of rows and of whole numbers": (MulticlassAUROC(4, thresholds=None), classes),
        "joined lists": (SpearmanCorrCoef(), values),
        "lists left as they are": (RetrievalMAP(), documents),
        "a reduction of its own": (PearsonCorrCoef(), values),
        "two metrics in one": (MulticlassAccuracy(4, average="micro") + MulticlassF1Score(4), classes),
    }


def computed(rank: int, shares: tuple[int, ...]) -> dict[str, float]:
    """Every kind, with this rank's share of the batches; computed twice, for a metric goes on after `compute`."""
    begin = sum(shares[:rank])
    batches = list(zip(*(part.split(15) for part in samples().tensors), strict=True))[begin : begin + shares[rank]]
    figures = {}
    for name, (kind, given) in kinds().items():
        metric = FromTorchmetrics(kind)
        for batch in batches[:1]:
            kind.update(*given(*batch))
        metric.compute()
        for batch in batches[1:]:
            kind.update(*given(*batch))
        figures[name] = metric.compute()
        metric.reset()
        assert math.isnan(metric.compute())
    return figures


def evaluated() -> tuple[dict[str, float], int]:
    from torchmetrics.classification import MulticlassAccuracy

    ours = Accuracy()
    metrics: dict[str, Metric] = {"ours": ours, "theirs": FromTorchmetrics(MulticlassAccuracy(4, average="micro"))}
    loader = DataLoader(samples(), batch_size=4)
    figures = evaluate(nn.Identity(), loader, metrics=metrics)
    alone = evaluate(nn.Identity(), loader, metrics=metrics["theirs"])
    return {**figures, **alone}, ours.count


def in_ranks(rank: int) -> tuple[dict[str, float], tuple[dict[str, float], int]]:
    return computed(rank, BATCHES_OF_EACH), evaluated()


# ------------------------------------------------------------------ the tests
@pytest.mark.filterwarnings("ignore:Metric .* will save all targets")  # in its constructor, of metrics that keep lists
def test_every_kind_of_metric_is_that_of_one_process(launch: Launcher) -> None:
    alone = computed(0, (5,))
    accuracy, _ = evaluated()
    for figures, (in_evaluate, counted) in launch(in_ranks, num_processes=3):
        assert figures == {name: pytest.approx(value, rel=1e-5) for name, value in alone.items()}
        assert in_evaluate == accuracy
        assert counted == SIZE
    assert set(accuracy) == {"ours", "theirs", "multiclassaccuracy"}
    assert accuracy["theirs"] == pytest.approx(accuracy["ours"])


def test_a_value_for_each_class_is_refused() -> None:
    from torchmetrics.classification import MulticlassAccuracy

    metric = FromTorchmetrics(MulticlassAccuracy(4, average=None))
    metric.update(*samples().tensors)
    with pytest.raises(ArgumentError, match=r"MulticlassAccuracy returned tensor\(.*not one number: set its average="):
        metric.compute()
