"""What an Accelerator logs: into the panel's reports, and into trackers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nblaunch.errors import ArgumentError
from nblaunch.ranks import report as reports
from nblaunch.training import Accelerator, get_logger
from nblaunch.training.accelerator.tracker_backends import numbers_in


@pytest.fixture
def reported(tmp_path: Path) -> Iterator[Any]:
    """This process as a rank of a launch; returns what it has reported."""
    spool = tmp_path / "spool"
    descriptor = os.open(spool, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    reports.enter(reports.Context(0, 0, 1, "cpu", descriptor, str(tmp_path)))
    yield lambda: [json.loads(line)["metrics"] for line in spool.read_text().splitlines()]
    reports.enter(None)
    os.close(descriptor)


class Own:
    """A tracker of the user's."""

    name = "own"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @property
    def tracker(self) -> str:
        return "the run"

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.calls.append((values, step, options))

    def finish(self) -> None:
        self.calls.append("finish")


def test_numbers_reach_the_panel_and_the_rest_does_not_fail(reported: Any) -> None:
    accelerator = Accelerator(cpu=True)
    values = {
        "loss": torch.tensor([0.5]),
        "accuracy": np.float32(0.25),
        "valid": {"f1": 1, "more": {"text": "x", "n": True}},
        "name": "run 1",
        "digits": "12",
        "nothing": None,
        "many": torch.ones(2),
        "list": [1],
        "array": np.array([0.75]),
        "step": 4,
    }
    accelerator.log(values, step=3)
    assert reported() == [{"loss": 0.5, "accuracy": 0.25, "valid/f1": 1.0, "valid/more/n": 1.0, "array": 0.75}]
    with pytest.raises(ArgumentError, match="values=3: must be a mapping of names to values"):
        accelerator.log(3)  # type: ignore[arg-type]
    assert numbers_in({"z": torch.tensor(1j), "big": 10**400}) == {}


def test_a_tracker_of_the_users_gets_everything() -> None:
    own = Own()
    accelerator = Accelerator(cpu=True, log_with=own)
    assert accelerator.trackers == []
    accelerator.log({"loss": 1.0})  # before init_trackers it is not written
    accelerator.init_trackers("project", config={"lr": 1})
    accelerator.log({"loss": 1.0, "text": "x"}, step=2, log_kwargs={"own": {"commit": True}, "other": {"a": 1}})
    assert accelerator.get_tracker("own") is own
    assert accelerator.get_tracker("own", unwrap=True) == "the run"
    with pytest.raises(ArgumentError, match=r"name='wandb': the trackers are \['own'\]: give log_with"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    assert own.calls == ["start", {"lr": 1}, ({"loss": 1.0, "text": "x"}, 2, {"commit": True}), "finish"]
    assert accelerator.trackers == []


def test_trackers_that_start_again_are_finished_first() -> None:
    own = Own()
    accelerator = Accelerator(cpu=True, log_with=own)
    for _ in range(2):  # a cell that runs twice
        accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    assert own.calls == ["start", "finish", "start", ({"loss": 1.0}, None, {})]


def test_tensorboard_files_are_written(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", "tensorboard"], project_dir=tmp_path)
    assert accelerator.log_with == ["tensorboard"]
    accelerator.init_trackers(
        "run", config={"lr": 0.1, "layers": [1, 2]}, init_kwargs={"tensorboard": {"flush_secs": 9}}
    )
    parameter = nn.Parameter(torch.tensor(0.5))
    values: dict[Any, Any] = {
        "loss": parameter,
        "note": "hello",
        "both": {"a": 1.0, "b": {"c": 2.0}},
        "list": [1],
        7: 1,
    }
    accelerator.log(values, step=1)
    writer: Any = accelerator.get_tracker("tensorboard", unwrap=True)
    assert hasattr(writer, "add_scalar")
    accelerator.end_training()
    content = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("events.*"))
    assert all(word in content for word in (b"loss", b"note", b"hello", b"lr"))
    configured = SimpleNamespace(project_dir=str(tmp_path), logging_dir="logs")
    accelerator = Accelerator(project_config=configured)
    assert (accelerator.project_dir, accelerator.logging_dir) == (str(tmp_path), "logs")


def test_wandb_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        config=SimpleNamespace(update=lambda values, **options: calls.append((values, options))),
        log=lambda values, **options: calls.append((values, options)),
        finish=lambda: calls.append("finish"),
    )
    wandb = ModuleType("wandb")
    wandb.__spec__ = SimpleNamespace(name="wandb")  # type: ignore[assignment]  # find_spec reads no more

    def init(**options: Any) -> Any:
        calls.append(options)
        return run

    wandb.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    accelerator = Accelerator(cpu=True, log_with="wandb")
    accelerator.init_trackers("project", {"lr": 1}, {"wandb": {"name": "first"}})
    accelerator.log({"loss": 1.0}, step=4)
    assert accelerator.get_tracker("wandb", unwrap=True) is run
    accelerator.end_training()
    assert calls == [
        {"project": "project", "name": "first"},
        ({"lr": 1}, {"allow_val_change": True}),
        ({"loss": 1.0}, {"step": 4}),
        "finish",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mlflow", "log_with='mlflow': must be 'tensorboard', 'wandb', 'all', or an object with name, store_init"),
        ("tensorboard", "log_with='tensorboard' needs a folder: give project_dir="),
        ([3], "log_with: int is no tracker: it lacks name, store_init_configuration, log, finish"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_named(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Accelerator(log_with=given)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ArgumentError, match="log_with='wandb': wandb is not installed: pip install wandb"):
        Accelerator(log_with="wandb")
    assert "wandb" not in Accelerator(log_with="all").log_with


def test_loggers_name_the_rank(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("tests.own", log_level="info")
    logger.info("hello %s", "you")
    logger.debug("unheard")
    logger.warning("all", main_process_only=False)
    logger.error("one by one", in_order=True)
    assert [record.getMessage() for record in caplog.records] == [
        "[RANK 0] hello you",
        "[RANK 0] all",
        "[RANK 0] one by one",
    ]
    assert caplog.records[0].filename == "test_trackers.py"
