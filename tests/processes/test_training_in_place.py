"""One rank in the process that asks for it, and the settings that a Trainer passes on."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nblaunch import LaunchResult
from nblaunch.errors import ArgumentError
from nblaunch.training import Accelerator, TrainConfig, Trainer
from tests.processes.trained import assert_same, fitted, points, trainer, weights

pytestmark = pytest.mark.usefixtures("imported_ahead", "one_thread", "quiet")


class Here:
    """A callback that notes its process."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        self.pids.add(os.getpid())
        assert trainer.accelerator.device == torch.device("cpu")


class Launches:
    """A callback that would launch ranks in a notebook, and does not in a rank."""

    def on_step_end(self, trainer: Trainer, loss: torch.Tensor) -> None:
        if trainer.step == 3:
            assert list(Accelerator(nprocs=2, compute_setup="cpu").distribute(os.getpid)()) == [os.getpid()]
            trainer.predict(points(4))


def drawn() -> Any:
    return torch.rand(2).tolist(), random.random(), np.random.rand()


def test_one_rank_trains_here_and_leaves_the_process_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    here = Here()
    one = trainer((here, Launches()), nprocs=1, dtype=torch.float64, mixed_precision="bf16")
    one.model.eval()
    one.model[1].train()  # type: ignore[index]
    gradients = [torch.ones_like(parameter) for parameter in one.model.parameters()]
    for parameter, gradient in zip(one.model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = drawn()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    with caplog.at_level(logging.INFO, logger="nblaunch.training"):
        one.fit(points(100), points(20))
    assert here.pids == {os.getpid()}
    assert drawn() == expected
    assert "NBLAUNCH_SEED" not in os.environ
    assert {tensor.dtype for tensor in weights(one)} == {torch.float32}
    assert [part.training for part in one.model.modules()] == [False, False, True, False, False]
    assert "forward" not in vars(one.model)
    assert all(parameter.grad is own for parameter, own in zip(one.model.parameters(), gradients, strict=True))
    assert all(map(torch.equal, gradients, map(torch.ones_like, gradients)))
    assert any(message.startswith("step 10: loss ") for message in caplog.messages)


class Interrupted(Trainer):
    """Between the two batches of its sixth step."""

    batches = 0

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        self.batches += 1
        if self.batches == 12:
            raise KeyboardInterrupt
        return super().compute_loss(model, batch)


def test_an_interrupted_run_leaves_whole_steps() -> None:
    settings: dict[str, Any] = {"nprocs": 1, "gradient_accumulation_steps": 2}
    given, five = trainer(**settings), trainer(**settings, max_steps=5)
    five.fit(points(160))
    broken = Interrupted(given.model, given.optimizer, given.config, loss_fn=given.loss_fn)
    with pytest.raises(KeyboardInterrupt):
        broken.fit(points(160))
    assert (broken.step, broken.epoch) == (5, 1)
    assert_same(broken, five)
    whole = Trainer(five.model, five.optimizer, given.config, loss_fn=given.loss_fn)
    for one in (broken, whole):  # nothing of the batch before the interrupt is left
        one.fit(points(160))
    assert_same(broken, whole)


def test_an_interrupts_traceback_has_the_users_frames_only() -> None:
    """And those of fit, which IPython leaves out."""
    given = trainer(nprocs=1, gradient_accumulation_steps=2)
    broken = Interrupted(given.model, given.optimizer, given.config, loss_fn=given.loss_fn)
    with pytest.raises(KeyboardInterrupt) as caught:
        broken.fit(points(160))
    frames = [(frame.path.name, frame.name) for frame in caught.traceback]  # type: ignore[union-attr]  # of files
    own = "test_training_in_place.py"
    test = (own, "test_an_interrupts_traceback_has_the_users_frames_only")
    assert frames == [test, ("arguments.py", "call"), ("trainer.py", "fit"), (own, "compute_loss")]
    assert all("__tracebackhide__" in frame.locals for frame in caught.traceback[1:3])
    assert caught.value.__suppress_context__
    assert [row["epoch"] for row in broken.history] == [0]


def test_an_interrupted_run_of_a_loaded_checkpoint_goes_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nprocs": 1, "checkpoint_every": 1, "save_total_limit": 99}
    whole = trainer(checkpoint_dir=tmp_path / "whole", **settings)
    whole.fit(points(160))
    given = trainer(checkpoint_dir=tmp_path / "c", **settings)
    broken = Interrupted(given.model, given.optimizer, given.config, loss_fn=given.loss_fn, metrics=given.metrics)
    broken.load(tmp_path / "whole" / "step-4.pt")
    with pytest.raises(KeyboardInterrupt):
        broken.fit(points(160))
    assert broken.step == 4 + 11
    broken.fit(points(160))  # from step 15
    assert broken.batches == 12 + 30 - 15
    assert_same(broken, whole)


def test_distribute_calls_a_single_rank_here() -> None:
    model = nn.Linear(1, 1)

    def work(value: float, rank: int, world_size: int, device: torch.device) -> Any:
        nn.init.constant_(model.weight, value)
        return os.getpid(), rank, world_size, device

    accelerator = Accelerator(nprocs=1, compute_setup="cpu")
    result = accelerator.distribute(work, view="none")(2.5)
    assert isinstance(result, LaunchResult)
    assert list(result) == [(os.getpid(), 0, 1, torch.device("cpu"))]
    assert (len(result.metrics), result.logs) == (0, ())
    assert "work: 1 rank" in repr(result)
    assert model.weight.item() == 2.5
    launched = accelerator.distribute(work, view="none", timeout=60.0)(3.5)  # it needs a process of its own
    assert launched[0][0] != os.getpid()
    assert model.weight.item() == 3.5


# ------------------------------------------------------------------ settings that are passed on
class Forked(nn.Module):
    """One of its two layers is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, at: torch.Tensor) -> Any:
        return self.used(at)


def test_arguments_reach_distributed_data_parallel() -> None:
    at = points(40).tensors[0]

    def forked(**config: Any) -> Trainer:
        model = Forked()
        config = {"nprocs": 2, "batch_size": 4, "compute_setup": "cpu", "backend": "gloo", **config}
        return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), TrainConfig(**config))

    data = TensorDataset(at, at.sum(1, keepdim=True))
    assert len(fitted(forked(ddp_kwargs={"find_unused_parameters": True}), data)) == 1
    with pytest.raises(RuntimeError, match=r"find_unused_parameters=True"):
        forked().fit(data)


def test_rates_are_reported_once_and_losses_by_each_rank() -> None:
    one = trainer(log_every=2, epochs=1)
    one.fit(points(160), points(40))
    assert one.result is not None
    by_name: dict[str, list[tuple[int, int | None]]] = {}
    for report in one.result.metrics:
        for name in report.values:
            by_name.setdefault(name, []).append((report.rank, report.step))
    assert sorted(by_name["loss"]) == [(rank, step) for rank in (0, 1) for step in (1, 2, 4, 5)]
    assert by_name["lr"] == [(0, 1), (0, 2), (0, 4), (0, 5)]
    assert by_name["samples_per_second"] == [(0, 2), (0, 4)]
    assert by_name["valid_loss"] == by_name["epoch_loss"] == [(0, 5)]
    assert one.result.name == "Trainer.fit"


def test_classes_need_another_loss_than_the_default() -> None:
    given = trainer(nprocs=1)
    one = Trainer(given.model, given.optimizer, given.config)
    said = r"loss_fn=None is the mean squared .* the target torch\.int64 of shape \(\d+,\): pass loss_fn, such as"
    with pytest.raises(ArgumentError, match=said):
        one.fit(points(40))
