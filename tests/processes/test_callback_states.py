"""The states of a Trainer's callbacks in its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nblaunch.errors import ArgumentError
from nblaunch.training import Trainer
from tests.processes.trained import Breaks, points, trainer

pytestmark = pytest.mark.usefixtures("imported_ahead", "one_thread", "quiet")


class Averages:
    """An average of the weights, and how often it was updated."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.updates = 0

    def on_step_end(self, trainer: Trainer, loss: torch.Tensor) -> None:
        new = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        self.weights = [0.9 * old + 0.1 * own for old, own in zip(self.weights or new, new, strict=True)]
        self.updates += 1

    def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        results["updates"] = float(self.updates)
        results["average"] = sum(weight.double().sum().item() for weight in self.weights)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.updates = state["weights"], state["updates"]


class Counts:
    """Has no state."""

    def on_step_end(self, trainer: Trainer, loss: torch.Tensor) -> None: ...


def test_a_resumed_run_has_the_callbacks_states(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_every": 2}
    whole = trainer((Averages(),), checkpoint_dir=tmp_path / "whole", **settings)
    whole.fit(points(160))
    breaks = Breaks(step=7, mark=tmp_path / "mark")
    for _ in range(2):
        again = trainer((Counts(), Averages(), breaks), checkpoint_dir=tmp_path / "c", **settings)
        if not breaks.mark.exists():
            with pytest.raises(OSError, match="a disk has gone"):
                again.fit(points(160))
    again.fit(points(160))
    for name in ("updates", "average"):
        assert [row[name] for row in again.history] == [row[name] for row in whole.history]


def test_callbacks_in_other_places_start_fresh(tmp_path: Path) -> None:
    trainer((Averages(),), nprocs=1, epochs=1, checkpoint_dir=tmp_path).fit(points(64))
    assert torch.load(tmp_path / "step-4.pt")["object"][0].keys() == {"0 Averages"}
    moved = trainer((Counts(), Averages()), nprocs=1, epochs=2, checkpoint_dir=tmp_path)
    moved.fit(points(64))
    assert moved.history[-1]["updates"] == 4


class Unsafe(Averages):
    def state_dict(self) -> dict[str, Any]:
        return {"scale": np.float64(0.5), "weights": self.weights}


def test_a_state_that_cannot_be_read_again_is_refused(tmp_path: Path) -> None:
    one = trainer((Unsafe(),), nprocs=1, checkpoint_dir=tmp_path)
    with pytest.raises(ArgumentError, match=r"callbacks: the state_dict\(\) of 0 Unsafe cannot be saved"):
        one.fit(points(32))
    assert not list(tmp_path.glob("*.pt"))
