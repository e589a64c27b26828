"""A Trainer's configuration, and how it writes checkpoints."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nblaunch.errors import ArgumentError
from nblaunch.training import Accelerator, Accuracy, TrainConfig, Trainer, checkpoint, shard
from nblaunch.training.train_config import loader_of


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"epochs": -1}, r"epochs=-1: must be an integer, at least 0"),
        ({"batch_size": 2.5}, r"batch_size=2\.5: must be an integer, at least 1"),
        ({"nprocs": 0}, r"nprocs=0: must be an integer, at least 1"),
        ({"checkpoint_every": True}, r"checkpoint_every=True: must be an integer"),
        ({"gradient_accumulation_steps": None}, r"gradient_accumulation_steps=None: must be an integer"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0\.0: must be above 0, or None"),
        ({"schedule": "cosinus"}, r"schedule='cosinus': use one of constant, linear, cosine, or a function"),
        ({"seed": "a"}, r"seed='a'"),
        ({"resume": "yes"}, r"resume='yes': use True or False"),
        ({"warmup": 3}, r"warmup=3 needs a schedule: use one of constant, linear, cosine"),
        ({"checkpoint_every": 5}, r"checkpoint_every=5 needs a checkpoint_dir"),
        ({"restore_best": True}, r"restore_best=True needs a checkpoint_dir"),
        ({"checkpoint_dir": 3}, r"checkpoint_dir=3: must be the path of a folder"),
        ({"checkpoint_dir": __file__}, r"checkpoint_dir='.*test_trainer\.py': must be the path of a folder"),
        ({"mixed_precision": "fp17"}, r"mixed_precision='fp17'"),
        (
            {"ddp_kwargs": ["bucket_cap_mb"]},
            r"ddp_kwargs=\['bucket_cap_mb'\]: must be a dict of arguments for Distributed",
        ),
        ({"launch": "slurm"}, r"launch='slurm': must be a dict of arguments for notebook_launcher"),
        (
            {"launch": {"device": "cuda"}},
            r"launch=\{'device': 'cuda'\}: the Trainer sets device itself: set .*compute_s",
        ),
    ],
)
def test_a_wrong_setting_is_named_before_anything_starts(wrong: dict[str, Any], said: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ArgumentError, match=said):
        Trainer(model, torch.optim.SGD(model.parameters()), TrainConfig(**wrong), loss_fn=nn.functional.mse_loss)


def trainer(**config: Any) -> Trainer:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    return Trainer(model, optimizer, TrainConfig(**config), loss_fn=nn.functional.mse_loss)


def test_a_figure_that_no_epoch_has_is_named_before_anything_starts() -> None:
    one = trainer(early_stop=1, monitor="valid_accuracy")
    with pytest.raises(ArgumentError, match=r"monitor='valid_accuracy': the results of training are step, loss, sec"):
        one.fit(TensorDataset(torch.ones(4, 1), torch.ones(4, 1)))


def test_gpus_are_refused_where_none_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a rank, which may be on another machine, and not where a launch may go to one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = r"compute_setup=\"gpu\", but no GPU is visible: use \"auto\", which takes a GPU"
    with pytest.raises(ArgumentError, match=said):
        TrainConfig(compute_setup="gpu")
    accelerator = Accelerator(compute_setup="gpu")  # it may be sent to a machine that has GPUs
    with pytest.raises(ArgumentError, match=said):
        accelerator.distribute(print)
    assert callable(accelerator.distribute(print, engine="slurm"))
    assert TrainConfig(compute_setup="gpu", launch={"engine": "slurm"}).nprocs is None
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert TrainConfig(compute_setup="gpu").compute_setup == "gpu"


class Misspelt:
    def on_step_ends(self, trainer: Trainer) -> None: ...


class Callback:
    def on_fit_end(self, trainer: Trainer) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"metrics": {"a": Accuracy}}, r"metrics: 'a' is <class .*Accuracy'>: use a metric with update"),
        ({"metrics": [Accuracy()]}, r"metrics=\[<.*\]: must be a dict, such as"),
        ({"callbacks": [Misspelt()]}, r"callbacks: <.*Misspelt object .* has none of the methods on_fit_begin, on_ep"),
        ({"callbacks": [Callback]}, r"callbacks: Callback is a class: pass Callback\(\)"),
        ({"callbacks": 3}, r"callbacks=3: must be a list of objects"),
    ],
)
def test_a_callback_never_called_is_named_before_anything_starts(wrong: dict[str, Any], said: str) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ArgumentError, match=said):
        Trainer(model, optimizer, loss_fn=nn.functional.mse_loss, **wrong)
    with pytest.raises(ArgumentError, match=r"optimizer has none of the model's parameters"):
        Trainer(nn.Linear(1, 1), optimizer, loss_fn=nn.functional.mse_loss)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    first, second = (checkpoint.CheckpointFolder(tmp_path / "c", keep=1) for _ in range(2))
    assert first.begin(resume=True) is None
    with pytest.raises(ArgumentError, match=r"checkpoint_dir='.*/c': another run is writing checkpoints there"):
        second.begin(resume=True)
    first.close()
    second.begin(resume=True)
    second.close()
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"checkpoint_dir='.*/file/c': the folder is not writable"):
        checkpoint.CheckpointFolder(tmp_path / "file" / "c", keep=1).begin(resume=True)


def test_what_a_trainer_is_made_of_is_checked() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ArgumentError, match=r"model=3: must be a torch\.nn\.Module"):
        Trainer(3, optimizer)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"optimizer=None: must be a torch\.optim\.Optimizer"):
        Trainer(model, None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"loss_fn='mean': must be a function \(.*\) -> loss"):
        Trainer(model, optimizer, loss_fn="mean")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"config=\{'epochs': 2\}: must be a TrainConfig"):
        Trainer(model, optimizer, {"epochs": 2})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"fit\(\) .* 'val': did you mean 'valid'"):
        Trainer(model, optimizer).fit(None, val=None)  # type: ignore[arg-type, call-arg]


def test_a_damaged_checkpoint_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "step-3.pt"
    path.write_bytes(b"garbage")
    with pytest.raises(RuntimeError, match=r"step-3\.pt is damaged: delete it to resume from the previous checkpoint"):
        checkpoint.read(path)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_data_that_does_not_fit_is_refused_before_anything_starts() -> None:
    with pytest.raises(ArgumentError, match=r"train=None: must be a dataset"):
        trainer().fit(None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"train=<.*with at least one sample"):
        trainer().fit(TensorDataset(torch.ones(0, 1)))
    for train in (Endless(), DataLoader(Endless(), 2)):
        with pytest.raises(ArgumentError, match=r"schedule='cosine': train has no length, .*: set max_steps"):
            trainer(schedule="cosine", epochs=2).fit(train)
    with pytest.raises(ArgumentError, match=r"validate_every=3 needs validation data: pass valid= to fit"):
        trainer(validate_every=3).fit(TensorDataset(torch.ones(4, 1), torch.ones(4, 1)))
    with pytest.raises(ArgumentError, match=r"valid=<.*>: must be a dataset or DataLoader with .* sample, or None"):
        trainer().fit(TensorDataset(torch.ones(4, 1), torch.ones(4, 1)), TensorDataset(torch.ones(0, 1)))


@pytest.mark.parametrize("samples", [[1, 2, 3], [{"x": 1.0}], [(1.0, 2.0, 3.0)]])
def test_batches_of_another_form_name_the_data_of_fit(samples: list[Any]) -> None:
    with pytest.raises(ArgumentError, match=r"the batch is .*: change the samples of train and valid") as caught:
        trainer(nprocs=1, compute_setup="cpu").fit(samples)  # type: ignore[arg-type]  # it is wrong
    assert "evaluate" not in str(caught.value)


def test_a_loader_of_the_users_own_restarts_and_keeps_its_seed() -> None:
    own = shard(DataLoader(TensorDataset(torch.arange(8)), 2), seed=7)
    own.load_state_dict({"epoch": 3, "batches": 2, "seed": 7})
    assert loader_of(own, TrainConfig(seed=1), shuffle=True) is own
    state = own.state_dict()
    assert (state["epoch"], state["batches"], state["seed"]) == (0, 0, 7)
    assert len(list(own)) == 4


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.0, 0.5, 1.0, 0.8536, 0.5, 0.1464, 0.0]),
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_a_schedule_rises_and_falls(schedule: str, expected: list[float]) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    made = TrainConfig(schedule=schedule, warmup=2).make_scheduler(optimizer, steps=6)
    assert made is not None
    rates = []
    for _ in expected:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    assert rates == pytest.approx(expected, abs=1e-4)


class Rates:
    """A callback that notes the learning rate that each step was taken with."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_fit_begin(self, trainer: Trainer) -> None:
        trainer.optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs: self.rates.append(optimizer.param_groups[0]["lr"])
        )


def rates_of(folder: Path, epochs: int) -> list[float]:
    """The learning rates of a run of four steps an epoch, in this process."""
    model, rates = nn.Linear(1, 1), Rates()
    config = TrainConfig(
        nprocs=1,
        epochs=epochs,
        batch_size=2,
        schedule="cosine",
        checkpoint_dir=folder,
        checkpoint_every=1,
        compute_setup="cpu",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    one = Trainer(model, optimizer, config, loss_fn=nn.functional.mse_loss, callbacks=[rates])
    one.fit(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)))
    return rates.rates


def cosine(step: int, steps: int) -> float:
    return (1 + math.cos(math.pi * step / steps)) / 2


def test_more_epochs_stretch_the_schedule_and_say_so(tmp_path: Path) -> None:
    assert rates_of(tmp_path, 1) == pytest.approx([cosine(step, 4) for step in range(4)])
    with pytest.warns(UserWarning, match=r"step-4\.pt .* to 12 steps.* rate jumps from 0 to 0\.75.*progress=False"):
        rates = rates_of(tmp_path, 3)
    assert rates == pytest.approx([cosine(step, 12) for step in range(4, 12)])


# ------------------------------------------------------------------ checkpoints
def test_checkpoints_are_found_in_the_order_of_steps(tmp_path: Path) -> None:
    for name in ("step-9.pt", "step-100.pt", "step-10.pt", "best.pt", "step-x.pt"):
        (tmp_path / name).touch()
    assert [path.name for path in checkpoint.find(tmp_path)] == ["step-9.pt", "step-10.pt", "step-100.pt"]
    assert checkpoint.find(tmp_path / "missing") == []


@pytest.mark.parametrize("links", [True, False])
def test_the_best_and_the_latest_are_one_file_where_it_can_be(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: Any) -> None:
        raise PermissionError("no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    folder, latest = checkpoint.CheckpointFolder(tmp_path, keep=1), tmp_path / "step-2.pt"
    folder.write({"step": 2}, 2, is_best=True)
    assert checkpoint.read(folder.best) == checkpoint.read(latest) == {"step": 2}
    assert folder.best.samefile(latest) is links


def test_two_processes_that_write_one_file_leave_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.pt"
    with checkpoint.replaced(path) as first:
        first.write_text("first")
        monkeypatch.setattr(os, "getpid", os.getppid)
        with checkpoint.replaced(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["state.pt"]


def test_a_state_that_cannot_be_read_again_is_a_warning_at_once(tmp_path: Path) -> None:
    data, one = TensorDataset(torch.ones(4, 1), torch.ones(4, 1)), of_width(2, tmp_path)
    one.optimizer.param_groups[0]["decay"] = np.ones(1)
    with pytest.warns(UserWarning, match=r"state of the optimizer holds numpy.* a Trainer cannot resume from it"):
        one.fit(data)
    with pytest.raises(ArgumentError, match=r"step-1\.pt holds numpy.*code.*states of the optimizer, schedule and"):
        of_width(2, tmp_path, epochs=2).fit(data)


def test_a_learning_rate_of_numpy_is_saved_as_a_number(tmp_path: Path) -> None:
    data, one = TensorDataset(torch.ones(4, 1), torch.ones(4, 1)), of_width(2, tmp_path)
    one.optimizer.param_groups[0]["lr"] = np.logspace(-2, -1, 2)[0]
    one.fit(data)
    assert checkpoint.read(tmp_path / "step-1.pt")["optimizer"][0]["param_groups"][0]["lr"] == 0.01
    of_width(2, tmp_path, epochs=2).fit(data)


def test_figures_of_any_kind_of_number_can_be_read_again(tmp_path: Path) -> None:
    figures = checkpoint.as_numbers({"a": np.float64(0.5), "b": torch.tensor(2), "c": True})
    checkpoint.write({"history": [figures]}, tmp_path / "step-1.pt")
    assert checkpoint.read(tmp_path / "step-1.pt") == {"history": [{"a": 0.5, "b": 2.0, "c": 1.0}]}
    with pytest.raises(ArgumentError, match=r"results\['worst'\]=\[3\]: an epoch's results must be numbers"):
        checkpoint.as_numbers({"worst": [3]})


def test_files_of_a_killed_write_are_removed(tmp_path: Path) -> None:
    for name in (".step-9.pt.123", "step-9.pt", ".hidden"):
        (tmp_path / name).touch()
    folder = checkpoint.CheckpointFolder(tmp_path, keep=2)
    assert folder.begin(resume=True) == tmp_path / "step-9.pt"
    folder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "step-9.pt"]


def test_a_schedule_of_the_users_own_gets_the_steps_and_is_none_by_results() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    config = TrainConfig(schedule=lambda opt, steps: torch.optim.lr_scheduler.StepLR(opt, steps // 3))
    made: Any = config.make_scheduler(optimizer, steps=9)
    assert made.step_size == 3
    schedule: Any = lambda opt, steps: torch.optim.lr_scheduler.ReduceLROnPlateau(opt)  # noqa: E731
    config = TrainConfig(schedule=schedule)
    with pytest.raises(ArgumentError, match=r"a ReduceLROnPlateau needs a result of validation: step it in a callb"):
        config.make_scheduler(optimizer, steps=6)
    schedule = lambda opt, steps: opt  # noqa: E731
    with pytest.raises(ArgumentError, match=r"(?s)schedule: the function returned SGD .*: it must return an LRS"):
        TrainConfig(schedule=schedule).make_scheduler(optimizer, steps=6)


def of_width(width: int, folder: Path, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **config: Any) -> Trainer:
    model = nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1))
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]  # of its subclasses
    return Trainer(model, optimizer, TrainConfig(nprocs=1, checkpoint_dir=folder, compute_setup="cpu", **config))


def test_a_checkpoint_of_another_model_or_optimizer_is_named(tmp_path: Path) -> None:
    data = TensorDataset(torch.ones(4, 1), torch.ones(4, 1))
    of_width(2, tmp_path).fit(data)
    with pytest.raises(ArgumentError, match=r"step-1\.pt: the state does not match .* has shape \[2, 1\] .*resume=F"):
        of_width(3, tmp_path, epochs=2).fit(data)
    with pytest.raises(ArgumentError, match=r"with optimizer=SGD, but this run has optimizer=Adam"):
        of_width(2, tmp_path, torch.optim.Adam, epochs=2).fit(data)


def test_a_run_without_numbers_has_no_best_step(tmp_path: Path) -> None:
    data = TensorDataset(torch.full((4, 1), torch.nan), torch.ones(4, 1))
    one = of_width(2, tmp_path, monitor="valid_loss")
    with pytest.warns(UserWarning, match="the loss is nan at step 1 on rank 0"):
        one.fit(data, data)
    with pytest.raises(ArgumentError, match="No step is the best if the monitored result was never finite"):
        one.restore_best()
