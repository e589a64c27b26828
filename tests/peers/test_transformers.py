"""transformers.Trainer in a launch, with the panel's callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from nblaunch.transfer import pickling
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


# ------------------------------------------------------------------ what the notebook makes for its one process
def test_what_knows_one_process_is_refused_with_advice(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from transformers import TrainingArguments

    try:
        for made in (TrainingArguments(str(tmp_path), report_to=[]), Accelerator(cpu=True), AcceleratorState()):
            error = pickling.explain({"made": made}, "it")
            assert error is not None
            assert str(error).startswith("it['made'], which was created for a single process")
            assert error.advice == "create it inside the function"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
