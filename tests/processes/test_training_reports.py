"""What a training run reports: its first and last step, losses that are no numbers, and rows of one form."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import nn

import nblaunch
from nblaunch.training import Trainer, fit_display
from tests.processes.trained import points, trainer

pytestmark = pytest.mark.usefixtures("one_thread", "quiet")


Reports = list[tuple[int, dict[str, float]]]


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Reports:
    """What a run in this process would report to a notebook."""
    found: Reports = []

    def keep(first: Any, step: int = 0, **values: float) -> None:
        found.append((step, first) if isinstance(first, dict) else (first, values))

    monkeypatch.setattr(fit_display, "report", keep)
    return found


def steps_of(name: str, reported: Reports) -> list[int]:
    return [step for step, values in reported if name in values]


class Stops:
    """Ends training after the first epoch."""

    def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("config", "callbacks", "loss_at", "rate_at"),
    [
        ({"epochs": 1, "log_every": 10}, (), [1, 5], []),
        ({"epochs": 1, "log_every": 2}, (), [1, 2, 4, 5], [2, 4]),
        ({"max_steps": 3, "epochs": None, "log_every": 3}, (), [1, 3], [3]),
        ({"epochs": 3, "log_every": 100}, (Stops(),), [1, 5], []),
        ({"max_steps": 1, "epochs": None}, (), [1], []),
    ],
)
def test_the_first_and_the_last_step_are_reported(
    config: dict[str, Any], callbacks: tuple[object, ...], loss_at: list[int], rate_at: list[int], reported: Reports
) -> None:
    trainer(callbacks, nprocs=1, **config).fit(points(80), points(20))
    assert steps_of("loss", reported) == steps_of("lr", reported) == loss_at
    assert steps_of("samples_per_second", reported) == rate_at


def test_a_resumed_run_reports_its_own_first_step(tmp_path: Path, reported: Reports) -> None:
    for max_steps in (3, 7):
        trainer(nprocs=1, max_steps=max_steps, epochs=None, checkpoint_dir=tmp_path).fit(points(80))
    assert steps_of("loss", reported) == [1, 3, 4, 7]
    assert steps_of("samples_per_second", reported) == [3, 7]  # without validation too


# ------------------------------------------------------------------ losses that are no numbers
class Broken(Trainer):
    """The third step's loss is not finite on the last rank."""

    value = math.nan

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        loss, *rest = super().compute_loss(model, batch)
        is_broken = self.step == 2 and self.accelerator.rank == self.accelerator.world_size - 1 and model.training
        return loss * torch.tensor(self.value if is_broken else 1.0), *rest


def broken(**config: Any) -> Broken:
    given = trainer(**config)
    return Broken(given.model, given.optimizer, given.config, loss_fn=given.loss_fn)


def test_a_loss_that_is_no_number_is_a_warning_once() -> None:
    one = broken(nprocs=1, log_every=2)
    with pytest.warns(
        UserWarning, match=r"the loss is nan at step 3 on rank 0, and training continues: check"
    ) as caught:
        one.fit(points(100))
    assert len(caught) == 1
    assert math.isnan(one.history[-1]["loss"])


@pytest.mark.filterwarnings("default:the loss is nan")
def test_each_rank_names_its_first_such_loss() -> None:
    one = broken(log_every=100, epochs=1)
    one.fit(points(160))
    assert one.result is not None
    for rank, step in ((0, 4), (1, 3)):
        log = one.result.logs[rank].err.read_text()
        assert log.count("the loss is nan") == 1
        assert f"the loss is nan at step {step} on rank {rank}, and training continues: check that batch" in log


# ------------------------------------------------------------------ rows
class Adds:
    """A result of the user's own in each validation."""

    def on_validation_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        results["valid_own"] = 1.0


@pytest.mark.parametrize("config", [{}, {"early_stop": 2}])
def test_every_epoch_has_the_same_results(config: dict[str, Any]) -> None:
    one = trainer(nprocs=1, epochs=4, validate_every=7, **config)
    one.fit(points(64), points(20))  # four steps an epoch: validation within the second and fourth, and at the end
    names = ["epoch", "step", "loss", "valid_accuracy", "valid_loss", "seconds"]
    assert [sorted(row) for row in one.history] == [sorted(names)] * 4
    assert [math.isnan(row["valid_loss"]) for row in one.history] == [True, True, True, False]
    assert [row["step"] for row in one.validations] == [7, 14, 16]
    assert not any(math.isnan(value) for row in one.validations for value in row.values())
    assert one.best is not None
    assert one.best.step in (7, 14, 16)


def test_rows_after_a_validation_have_what_callbacks_add() -> None:
    one = trainer((Adds(),), nprocs=1, epochs=3, validate_every=3, max_steps=11)
    one.fit(points(64), points(20))
    assert ["valid_own" in row for row in one.history] == [True] * 3


def test_histories_with_gaps_can_be_compared() -> None:
    one = trainer(nprocs=1, epochs=2, validate_every=7)
    one.fit(points(64), points(20))
    history = pandas.DataFrame(one.history)
    table = repr(nblaunch.compare(run=history, again=history))
    assert "valid_loss" in table
    assert "nan" not in table
