"""transformers.Trainer in a launch, with the panel's callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from nblaunch.errors import PayloadError
from tests.peers import documents
from tests.peers.conftest import GOOD, STEPS
from tests.processes.conftest import Launcher


def trained_by_transformers() -> dict[str, Any]:
    """The document's, with our callback; its model's accuracy is ours to count, for the program prints none."""
    from nblaunch.training import evaluate
    from nblaunch.training.peers import PanelCallback

    group = dist.group.WORLD
    trainer = documents.train_trainer_ddp(callbacks=[PanelCallback()])
    return {
        "processes": trainer.args.world_size,
        "is our group": dist.group.WORLD is group,
        "steps": trainer.state.global_step,
        "test": evaluate(trainer.model, DataLoader(trainer.eval_dataset, batch_size=64), prefix="test_"),
    }


# transformers pins memory unless `use_cpu` is set, and torch warns that there is no GPU
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning")
def test_train_trainer_ddp(launch: Launcher, readers_folder: Path) -> None:
    result = launch(trained_by_transformers)
    assert [came["processes"] for came in result] == [2, 2]
    assert all(came["is our group"] for came in result)
    assert [came["steps"] for came in result] == [STEPS, STEPS]
    assert result[0]["test"] == result[1]["test"]
    assert result[0]["test"]["test_accuracy"] > GOOD

    saved = {path.name for path in (readers_folder / "basic-trainer" / f"checkpoint-{STEPS}").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"} <= saved

    logged = [report for report in result.metrics if report.step is not None]
    assert {report.rank for report in logged} == {0}
    assert [report.step for report in logged if "loss" in report.values] == [3, 6]
    (evaluated,) = [report.values["eval_loss"] for report in logged if "eval_loss" in report.values]
    assert 0 < evaluated < 2.3  # as good as guessing is log(10)
    assert 0 < result.metrics.last["train_loss"] < 3
    assert result.metrics.last["epoch"] == 1.0


# ------------------------------------------------------------------ the callback alone
def test_the_callback_shows_how_far_training_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainerControl, TrainerState

    from nblaunch.machine import timeouts
    from nblaunch.ranks import report
    from nblaunch.training import peers

    shown: list[tuple[str, int, int | None]] = []

    def keep(record: dict[str, Any]) -> None:
        shown.append((record["progress"], record["done"], record["total"]))

    monkeypatch.setattr(report, "spool", keep)
    monkeypatch.setattr(timeouts, "PROGRESS_INTERVAL_S", 0.0)
    callback, control = peers.PanelCallback(), TrainerControl()
    state = TrainerState(max_steps=3, global_step=1)  # resumed
    callback.on_train_begin(None, state, control)
    assert shown.pop() == ("training", 1, 3)
    for step in (2, 3):
        state.global_step = step
        callback.on_step_end(None, state, control)
        assert shown.pop() == ("training", step, 3)
    callback.on_prediction_step(None, state, control, eval_dataloader=range(2))
    callback.on_prediction_step(None, state, control, eval_dataloader=range(2))
    assert shown.pop() == ("evaluating", 2, 2)
    callback.on_evaluate(None, state, control)
    callback.on_prediction_step(None, state, control, eval_dataloader=iter(()))  # of unknown length
    callback.on_predict(None, state, control, {})
    assert shown.pop() == ("evaluating", 1, None)
    callback.on_train_end(None, state, control)
    callback.on_step_end(None, state, control)  # after the end there is nothing to show


def test_the_callback_reports_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainerControl, TrainerState

    from nblaunch.training import peers

    reported: list[Any] = []
    monkeypatch.setattr(peers, "report", lambda values, step: reported.append((step, values)))
    callback = peers.PanelCallback()
    logs = {"loss": 0.5, "step": 3, "name": "run", "shape": [1, 2]}
    callback.on_log(None, TrainerState(global_step=7), TrainerControl(), logs=logs)
    callback.on_log(None, TrainerState(global_step=8), TrainerControl(), logs={"name": "run"})
    assert reported == [(7, {"loss": 0.5})]


# ------------------------------------------------------------------ arguments that the notebook makes
def test_an_accelerator_with_a_plugin_belongs_into_the_function(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    import accelerate

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # an Accelerator with the plugin sets it
    accelerator = accelerate.Accelerator(cpu=True)
    try:
        with pytest.raises(PayloadError, match="create it inside the function"):
            launch(lambda: accelerator.num_processes)
    finally:
        accelerator.state._reset_state(reset_partial_state=True)


def test_arguments_of_the_notebook_are_each_ranks_own(launch: Launcher, tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState
    from transformers import Seq2SeqTrainingArguments, TrainingArguments

    given: dict[str, Any] = {"output_dir": str(tmp_path), "report_to": [], "per_device_train_batch_size": 3}
    arguments = [TrainingArguments(**given), Seq2SeqTrainingArguments(**given, use_cpu=True)]

    def placed() -> list[tuple[Any, ...]]:
        return [(a.process_index, a.world_size, a.should_save, a.device.type, a.train_batch_size) for a in arguments]

    try:
        assert list(launch(placed)) == [[(0, 2, True, "cpu", 3)] * 2, [(1, 2, False, "cpu", 3)] * 2]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning")
def test_a_trainer_of_the_notebook_trains_on_all_ranks(launch: Launcher, tmp_path: Path) -> None:
    import torch
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            logits = self.layer(x)
            return {"loss": (logits - labels).square().mean(), "logits": logits}

    data = [{"x": torch.ones(2) * each, "labels": torch.ones(1)} for each in range(16)]
    settings = TrainingArguments(
        str(tmp_path), report_to=[], max_steps=2, disable_tqdm=True, use_cpu=True, save_strategy="no"
    )
    trainer: Any = Trainer(Net(), settings, train_dataset=data)

    def train() -> tuple[Any, ...]:
        trainer.train()
        return trainer.accelerator.process_index, trainer.is_world_process_zero(), trainer.model.layer.weight.tolist()

    try:
        first, second = launch(train)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert (first[:2], second[:2]) == ((0, True), (1, False))
    assert first[2] == second[2] != trainer.model.layer.weight.tolist()
