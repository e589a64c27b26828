"""Metrics over real ranks: bit-equal to one process, for unequal and empty parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nblaunch.errors import ArgumentError
from nblaunch.training import Accuracy, ExactDistributedSampler, Mean, Prefetcher, evaluate, shard
from tests.processes.conftest import Launcher

pytestmark = pytest.mark.usefixtures("imported_ahead")

TEST_SET = 1_000
"""3 does not divide it, so DistributedSampler would count more."""
FEW = (0, 1, 2, 7)
"""Sizes of small test sets."""


# ------------------------------------------------------------------ what ranks run
def samples(size: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(size)
    inputs = torch.rand(size, 8, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(10, (size,), generator=draw))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10)).double()
    model[1].get_buffer("running_mean")[::2] = 0.1
    return model


def loss_of_each(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of quarters, so that a batch's composition cannot change a sample's loss by rounding."""
    return (output.gather(1, target[:, None]) * 4).round() / 4


def figures_of(model: nn.Module, size: int) -> tuple[dict[str, float], int, int]:
    accuracy = Accuracy()
    loader = DataLoader(samples(size), batch_size=64)
    figures = evaluate(model, loader, metrics={"accuracy": accuracy}, loss_fn=loss_of_each)
    return figures, accuracy.correct, accuracy.count


def all_figures(wrap: bool) -> list[Any]:
    model: nn.Module = DistributedDataParallel(net()) if wrap else net()
    return [figures_of(model, size) for size in (TEST_SET, *FEW)]


def after_drift(rank: int) -> tuple[dict[str, float], bool]:
    """Ranks' batch norms have seen different batches; rank 0's counts, as it is what a checkpoint holds."""
    model = net()
    model.train()
    model(torch.rand(16, 8, dtype=torch.float64) + 1 + rank)
    figures, _, _ = figures_of(model, TEST_SET)
    return figures, model.training


def uneven(rank: int) -> tuple[float, int, float, int]:
    """Rank 0 has nothing, rank 1 one value, rank 2 two."""
    mean, accuracy = Mean(), Accuracy()
    for value in VALUES[rank]:
        mean.update(value)
        accuracy.update(torch.eye(3), torch.tensor([0, 1, rank % 2]))
    return mean.compute(), mean.count, accuracy.compute(), accuracy.count


VALUES = ((), (1e16,), (1.0, -1e16))
"""Of each rank; in floats they add up to 0."""


def own_parts(rank: int) -> dict[str, float]:
    """What is no DataLoader is each rank's own part: here none, one batch and three."""
    inputs, target = samples(100).tensors
    batches = list(zip(inputs.split(25), target.split(25), strict=True))
    return evaluate(DistributedDataParallel(net()), (batches[:0], batches[:1], batches[1:])[rank])


class Untouched(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a batch was forwarded")


def refusals() -> list[str]:
    """The errors for loaders that would count samples twice."""
    data = samples(100)
    padded: DataLoader[Any] = DataLoader(data, 8, sampler=DistributedSampler(data))
    refused = [padded, shard(padded), Prefetcher(padded, "cpu")]
    return [refusal_of(loader) for loader in refused]


def refusal_of(loader: Any) -> str:
    with pytest.raises(ArgumentError) as caught:
        evaluate(Untouched(), loader)
    return str(caught.value)


def counts() -> list[int]:
    """Samples counted with samplers that shard already, and with a Prefetcher."""
    whole, data = samples(99), samples(100)
    loaders: list[Any] = [
        DataLoader(whole, 8, sampler=DistributedSampler(whole)),
        Prefetcher(DataLoader(whole, 8, sampler=DistributedSampler(whole)), "cpu"),
        DataLoader(data, 8, sampler=DistributedSampler(data, drop_last=True)),
        DataLoader(data, 8, sampler=ExactDistributedSampler(data)),
        DataLoader(data, 8, sampler=ExactDistributedSampler(data), drop_last=True),
        Prefetcher(shard(DataLoader(data, 8)), "cpu"),
        Prefetcher(DataLoader(data, 8), "cpu"),
    ]
    return [count_of(loader) for loader in loaders]


def count_of(loader: Any) -> int:
    accuracy = Accuracy()
    evaluate(net(), loader, metrics=accuracy)
    return accuracy.count


def nothing_anywhere() -> tuple[float, float]:
    return Mean().compute(), Accuracy().compute()


def everything(rank: int) -> dict[str, Any]:
    return {
        "plain": all_figures(wrap=False),
        "ddp": all_figures(wrap=True),
        "drifted": after_drift(rank),
        "uneven": uneven(rank),
        "own parts": own_parts(rank),
        "refusals": refusals(),
        "counts": counts(),
        "nothing": nothing_anywhere(),
    }


# ------------------------------------------------------------------ the figures
def test_figures_are_those_of_one_process(launch: Launcher) -> None:
    result = launch(everything, num_processes=3)
    alone = all_figures(wrap=False)
    assert alone[0][2] == TEST_SET
    assert 0 < alone[0][1] < TEST_SET
    for came in result:
        assert repr(came["plain"]) == repr(alone)  # to the last digit, NaN for no samples too
        assert repr(came["ddp"]) == repr(alone)
        assert came["drifted"] == (after_drift(0)[0], True)
        assert came["uneven"] == (1 / 3, 3, 6 / 9, 9)
        assert came["own parts"] == evaluate(net(), DataLoader(samples(100), batch_size=25))
        assert came["counts"] == [99, 99, 99, 100, 96, 100, 100]
        said = "DistributedSampler repeats 2 of the 100 samples"
        assert all(said in refused for refused in came["refusals"])
        assert all(math.isnan(value) for value in came["nothing"])
    reported = [report for report in result.metrics if report.values.get("accuracy") == alone[0][0]["accuracy"]]
    assert {report.rank for report in reported} == {0}
    assert {report.values["loss"] for report in reported} == {alone[0][0]["loss"]}
