"""The Trainer over real ranks: results, exact metrics, and bit-equal resuming."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch.errors import RankDiedError
from nblaunch.training import Accuracy, Parallelism, TrainConfig, Trainer, evaluate
from nblaunch.training.collectives import exchange
from tests.processes.trained import (
    Breaks,
    Figures,
    assert_same,
    fitted,
    net,
    points,
    timeless,
    trainer,
    weights,
    without_dropout,
)

pytestmark = pytest.mark.usefixtures("imported_ahead", "quiet")


# ------------------------------------------------------------------ training
def test_the_trained_weights_and_the_history_are_in_the_notebook() -> None:
    one = trainer(epochs=8, schedule="cosine", warmup=4, max_grad_norm=1.0)
    before = weights(one)
    history = fitted(one, points(331), points(101))
    assert [figures["epoch"] for figures in history] == [float(epoch) for epoch in range(8)]
    assert {"epoch", "step", "loss", "valid_loss", "valid_accuracy", "seconds"} == set(history[0])
    assert (one.epoch, one.step) == (8, 8 * 11)
    assert history[-1]["loss"] < history[0]["loss"] / 2
    assert history[-1]["valid_accuracy"] > 0.9
    assert not all(map(torch.equal, before, weights(one)))
    assert one.history == history
    assert evaluate(one.model, DataLoader(points(101), 10))["accuracy"] == history[-1]["valid_accuracy"]
    assert one.optimizer.state_dict()["state"]


class Encodes(Trainer):
    """Its batches hold no target, or one of its own kind."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        point, *rest = batch
        output = model(point)
        return nn.functional.mse_loss(output, point) if not rest else (output.square().mean(), output, rest[0] % 2)


def test_batches_of_any_kind_are_trained_on_and_validated() -> None:
    def encoder(**more: Any) -> Encodes:
        model = net()
        config = TrainConfig(nprocs=2, compute_setup="cpu")
        return Encodes(model, torch.optim.SGD(model.parameters(), lr=0.1), config, **more)

    at, labels = points(40).tensors
    assert fitted(encoder(), TensorDataset(at), TensorDataset(at))[0]["valid_loss"] > 0
    threes = TensorDataset(at, labels + 2, torch.ones(40))
    assert 0 < fitted(encoder(metrics={"accuracy": Accuracy()}), threes, threes)[0]["valid_accuracy"] < 1
    with pytest.raises(ValueError, match=r"a list of 1, neither .*for metrics it must return \(loss, output, target\)"):
        encoder(metrics={"accuracy": Accuracy()}).fit(TensorDataset(at), TensorDataset(at))


class Enough:
    """A callback that has seen enough, on one rank only."""

    def on_epoch_end(self, trainer: Trainer, figures: dict[str, float]) -> None:
        trainer.should_stop = trainer.accelerator.rank == 1 and trainer.epoch == 1


def test_a_callback_of_one_rank_can_end_it(tmp_path: Path) -> None:
    kept = {"epochs": 3, "checkpoint_dir": tmp_path}
    assert len(fitted(trainer((Enough(),), **kept), points(40))) == 2
    assert len(fitted(trainer((Enough(),), **kept), points(40))) == 3  # another fit continues


class Judges:
    """A callback that gives each rank another figure to watch, as NumPy's number; rank 1 never has a best one."""

    def on_epoch_end(self, trainer: Trainer, figures: dict[str, Any]) -> None:
        figures["mine"] = np.float64(math.nan if trainer.accelerator.rank else abs(trainer.epoch - 1))

    def on_fit_end(self, trainer: Trainer) -> None:
        assert trainer.best is not None
        assert trainer.best[:3] == (4, 1, 0.0)
        first, second = exchange(weights(trainer))
        assert all(map(torch.equal, first, second))


def test_where_ranks_judge_differently_the_first_decides(tmp_path: Path) -> None:
    config: dict[str, Any] = {"early_stop": 2, "monitor": "mine", "restore_best": True, "checkpoint_dir": tmp_path}
    history = fitted(trainer((Judges(),), epochs=6, **config), points(40))
    assert len(history) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it ended early
        assert fitted(trainer((Judges(),), epochs=6, **config), points(40)) == history


def test_gradients_of_untrained_parameters_do_not_count_in_the_norm() -> None:
    frozen, idle = (trainer(nprocs=1, max_grad_norm=0.1) for _ in range(2))
    for one in (frozen, idle):
        head: Any = one.model[-1]  # type: ignore[index]  # a Sequential
        one.optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    frozen.model[0].requires_grad_(False)  # type: ignore[index]
    assert timeless(fitted(frozen, points(64))) == timeless(fitted(idle, points(64)))
    assert all(map(torch.equal, weights(frozen), weights(idle)))


# ------------------------------------------------------------------ resuming
def resumed(callbacks: tuple[object, ...] = (), **config: Any) -> Trainer:
    return trainer(callbacks, **{"nprocs": 2, "batch_size": 16, **config})


@pytest.fixture(scope="module")
def whole() -> tuple[Trainer, Figures]:
    """A run that nothing breaks off."""
    os.environ["NBLAUNCH_VIEW"] = "none"
    try:
        one = resumed()
        return one, fitted(one, points(150), points(50))
    finally:
        del os.environ["NBLAUNCH_VIEW"]


@pytest.mark.parametrize(("kills", "every", "kept"), [(False, 2, {14, 15}), (True, None, {10, 15})])
def test_after_a_failure_it_takes_the_very_same_steps(
    tmp_path: Path, kills: bool, every: int | None, kept: set[int], whole: tuple[Trainer, Figures]
) -> None:
    folder = tmp_path / "checkpoints"
    breaks = Breaks(step=8, mark=tmp_path / "broken", kill=kills)  # five steps an epoch
    with pytest.raises(RankDiedError if kills else OSError, match="rank 1" if kills else "a disk has gone"):
        resumed((breaks,), checkpoint_dir=folder, checkpoint_every=every).fit(points(150), points(50))
    again = resumed((breaks,), checkpoint_dir=folder, checkpoint_every=every)
    history = fitted(again, points(150), points(50))
    assert timeless(history) == timeless(whole[1])
    assert_same(again, whole[0])
    assert {path.name for path in folder.iterdir()} == {f"step-{step}.pt" for step in kept}


def test_more_epochs_go_on_but_not_in_other_batches(tmp_path: Path, whole: tuple[Trainer, Figures]) -> None:
    resumed(epochs=1, checkpoint_dir=tmp_path).fit(points(150), points(50))
    more = resumed(epochs=3, checkpoint_dir=tmp_path)
    assert timeless(fitted(more, points(150), points(50))) == timeless(whole[1])
    assert_same(more, whole[0])
    with pytest.raises(ValueError, match=r"step-15\.pt was written with batch_size=16, but this run has batch_size=15"):
        resumed(epochs=4, batch_size=15, checkpoint_dir=tmp_path).fit(points(150), points(50))
    with pytest.raises(ValueError, match=r"was written with schedule=None, but this run has schedule=linear"):
        resumed(epochs=4, schedule="linear", checkpoint_dir=tmp_path).fit(points(150), points(50))


def test_steps_of_another_number_of_samples_cannot_go_on(tmp_path: Path) -> None:
    trainer(epochs=1, nprocs=1, checkpoint_dir=tmp_path).fit(points(20))
    said = r"step-2\.pt was written with nprocs=1, but this run has nprocs=2: use the same, or batch_size=8 for"
    with pytest.raises(ValueError, match=said):
        trainer(epochs=2, checkpoint_dir=tmp_path).fit(points(20))


@pytest.mark.parametrize(("before", "after", "parallelism"), [(1, 3, None), (3, 2, Parallelism())])
def test_another_number_of_ranks_goes_on_with_the_same_steps(
    tmp_path: Path, before: int, after: int, parallelism: Parallelism | None
) -> None:
    """Within an epoch, whose loss and validations are the same too; with dropout ranks would draw other numbers."""

    def run(nprocs: int, **config: Any) -> Trainer:
        one = trainer(nprocs=nprocs, batch_size=30 // nprocs, parallelism=parallelism, max_grad_norm=1.0, **config)
        without_dropout(one)
        return one

    whole = run(before)
    whole.fit(points(100), points(50))
    run(before, max_steps=6, checkpoint_dir=tmp_path).fit(points(100), points(50))
    again = run(after, checkpoint_dir=tmp_path)
    again.fit(points(100), points(50))
    for own, others in zip(weights(again), weights(whole), strict=True):
        torch.testing.assert_close(own, others, rtol=1e-5, atol=1e-6)
    assert [results["step"] for results in again.history] == [4.0, 8.0, 12.0]
    for mine, theirs in zip(again.history, whole.history, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_resume_false_replaces_the_checkpoints(tmp_path: Path) -> None:
    first = trainer(epochs=3, nprocs=1, checkpoint_dir=tmp_path / "c", monitor="loss")
    first.fit(points(64))
    assert (tmp_path / "c" / "best.pt").exists()
    restarted = trainer(epochs=1, nprocs=1, checkpoint_dir=tmp_path / "c", resume=False)
    assert len(fitted(restarted, points(64))) == 1
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-4.pt"]


def test_a_resumed_run_says_that_it_keeps_its_rates(tmp_path: Path) -> None:
    fitted(trainer(epochs=1, nprocs=1, checkpoint_dir=tmp_path), points(40))
    other = trainer(epochs=2, nprocs=1, checkpoint_dir=tmp_path)
    for group in other.optimizer.param_groups:
        group["lr"] = 0.5
    with pytest.warns(UserWarning, match=r"has lr=0\.5, but the run resumed .* keeps lr=0\.01"):
        fitted(other, points(40))
    assert other.optimizer.param_groups[0]["lr"] == 0.01
