"""Trainers to test: what they are trained on, callbacks that break them off, and how two of them compare."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from nblaunch.training import Accuracy, TrainConfig, Trainer

Figures = list[dict[str, float]]


def points(count: int) -> TensorDataset:
    """Points in the plane, labelled by a curve through it."""
    generator = torch.Generator().manual_seed(7)
    at = torch.randn(count, 2, generator=generator)
    return TensorDataset(at, (at[:, 0] * at[:, 1] > 0).long())


class Stream(IterableDataset[Any]):
    """Samples that come one by one, without a length."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise of all three generators to each sample."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(3) + random.random() + np.random.rand()
        return torch.full((3,), float(index)) + noise, torch.tensor(index % 2)


def net() -> nn.Sequential:
    """Has dropout, so that a resumed run shows whether the random states are right."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))


def trainer(callbacks: tuple[object, ...] = (), **config: Any) -> Trainer:
    model = net()
    config = {"nprocs": 2, "epochs": 3, "batch_size": 16, "compute_setup": "cpu", **config}
    return Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        TrainConfig(**config),
        loss_fn=nn.functional.cross_entropy,
        metrics={"accuracy": Accuracy()},
        callbacks=callbacks,
    )


class Breaks:
    """A callback that ends one rank at one step, in one way, unless a file says that it has been done."""

    def __init__(self, step: int, mark: Path, kill: bool = False, rank: int = 1) -> None:
        self.step, self.mark, self.kill, self.rank = step, mark, kill, rank

    def on_step_end(self, trainer: Trainer, loss: Tensor) -> None:
        if trainer.step == self.step and trainer.accelerator.rank == self.rank and not self.mark.exists():
            self.mark.touch()
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("a disk has gone")


def without_dropout(one: Trainer) -> None:
    for part in one.model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def weights(one: Trainer) -> list[Tensor]:
    return [tensor.clone() for tensor in one.model.state_dict().values()]


def fitted(one: Trainer, *data: Any) -> Figures:
    """Train, and return the history."""
    assert one.fit(*data) == (one.model, one.optimizer)
    return one.history


def timeless(history: Figures) -> list[dict[str, str]]:
    """The rows without times, as text: a NaN equals itself."""
    return [{name: repr(value) for name, value in figures.items() if name != "seconds"} for figures in history]


def assert_same(one: Trainer, other: Trainer) -> None:
    """Weights and optimizer states, to the last bit."""
    assert all(map(torch.equal, weights(one), weights(other)))
    mine, theirs = one.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    assert mine
    assert mine.keys() == theirs.keys()
    for index, state in mine.items():
        assert all(torch.equal(value, theirs[index][name]) for name, value in state.items())


def assert_same_run(one: Trainer, other: Trainer) -> None:
    """All that validated runs leave: states, rows of history, validations and the best step."""
    assert_same(one, other)
    assert timeless(one.history) == timeless(other.history)
    assert one.validations == other.validations
    assert one.best is not None
    assert other.best is not None
    assert one.best[:3] == other.best[:3]
