"""Where a Trainer's run ends, goes on and is the best: steps, streams, validations, checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nblaunch.errors import ArgumentError
from nblaunch.training import TrainConfig, Trainer, checkpoint
from tests.processes.trained import (
    Breaks,
    Stream,
    assert_same,
    assert_same_run,
    fitted,
    points,
    timeless,
    trainer,
    weights,
)

pytestmark = pytest.mark.usefixtures("imported_ahead", "one_thread", "quiet")


def run(callbacks: tuple[object, ...] = (), **config: Any) -> Trainer:
    return trainer(callbacks, **{"batch_size": 11, **config})


class Augmented(Dataset[Any]):
    """Points that move a little, each time that they are loaded."""

    def __init__(self) -> None:
        self.at, self.labels = points(150).tensors

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, index: int) -> Any:
        return self.at[index] + 0.1 * torch.randn(2), self.labels[index]


class JitteredStream(Stream):
    """Its points move a little, each time that they are read."""

    def __iter__(self) -> Iterator[Any]:
        return ((at + 0.1 * torch.randn(2), label) for at, label in super().__iter__())


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.data)


# ------------------------------------------------------------------ a number of steps
def test_more_steps_continue_within_the_epoch(tmp_path: Path) -> None:
    """Without validation, which is also due where a run ends."""
    settings: dict[str, Any] = {"nprocs": 1, "epochs": None, "checkpoint_dir": tmp_path}
    part = run(max_steps=3, **settings)
    assert [result["step"] for result in fitted(part, points(150))] == [3.0]
    assert (part.epoch, part.step) == (0, 3)
    more, plain = run(max_steps=8, **settings), run(nprocs=1, epochs=None, max_steps=8)
    assert timeless(fitted(more, points(150))) == timeless(fitted(plain, points(150)))
    assert_same(more, plain)
    assert more.step == 8


def test_the_steps_of_a_schedule_may_be_given(tmp_path: Path) -> None:
    one = run(epochs=None, max_steps=4, schedule="linear", log_every=1, checkpoint_dir=tmp_path)
    one.fit(Stream(points(150)))
    assert one.result is not None
    rates = [report.values["lr"] for report in one.result.metrics if "lr" in report.values]
    assert rates == pytest.approx([0.0075, 0.005, 0.0025, 0.0])


def test_a_run_of_enough_steps_says_that_none_is_left(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nprocs": 1, "epochs": None, "max_steps": 2, "checkpoint_dir": tmp_path}
    history = fitted(run(**settings), points(150))
    with pytest.warns(UserWarning, match=r"nothing is left to train: .* is at epoch 0 and step 2\. Set more epochs"):
        assert fitted(run(**settings), points(150)) == history


# ------------------------------------------------------------------ validations
def test_validations_change_no_step() -> None:
    often, plain = run(nprocs=1, validate_every=2), run(nprocs=1)
    often.fit(points(150), points(50))
    plain.fit(points(150))
    assert_same(often, plain)
    steps = often.step
    assert [result["step"] for result in often.validations] == [*range(2, steps, 2), steps]
    last = often.validations[-1]
    assert often.history[-1]["valid_loss"] == last["valid_loss"] == often.validate(points(50))["valid_loss"]


def test_a_run_broken_between_validations_resumes(tmp_path: Path) -> None:
    """Augmented by workers; its best step and its patience are those of a whole run."""
    settings: dict[str, Any] = {
        "num_workers": 1,
        "validate_every": 2,
        "early_stop": 3,
        "checkpoint_every": 3,
        "epochs": 3,
    }
    whole = run(checkpoint_dir=tmp_path / "whole", **settings)
    whole.fit(Augmented(), points(50))
    breaks = Breaks(step=7, mark=tmp_path / "mark")
    with pytest.raises(OSError, match="a disk has gone"):
        run((breaks,), checkpoint_dir=tmp_path / "broken", **settings).fit(Augmented(), points(50))
    again = run((breaks,), checkpoint_dir=tmp_path / "broken", **settings)
    again.fit(Augmented(), points(50))
    assert_same_run(again, whole)
    again.restore_best()
    whole.restore_best()
    assert_same(again, whole)


def test_patience_counts_validations() -> None:
    one = run(nprocs=1, epochs=50, validate_every=3, early_stop=3, monitor="valid_accuracy", higher_is_better=True)
    one.fit(points(150), points(50))
    accuracies = [result["valid_accuracy"] for result in one.validations]
    assert one.step < 50 * 14
    assert len(accuracies) - 1 - accuracies.index(max(accuracies)) == 3
    assert one.history[-1]["step"] == one.step == one.validations[-1]["step"]


class Notes:
    """A callback that notes what is validated and adds a result."""

    def on_validation_end(self, trainer: Trainer, results: dict[str, Any]) -> None:
        results["gap"] = -float(trainer.step)


def test_a_result_that_a_callback_adds_decides() -> None:
    one = run((Notes(),), nprocs=1, monitor="gap", validate_every=4)
    one.fit(points(150), points(50))
    assert one.best is not None
    assert one.best.value == -one.step == -42.0
    with pytest.raises(ArgumentError, match=r"monitor='gap': the results of training are epoch, step, loss, sec"):
        run((Late(),), nprocs=1, monitor="gap").fit(points(150))


class Late:
    def on_epoch_end(self, trainer: Trainer, results: dict[str, Any]) -> None: ...


# ------------------------------------------------------------------ the best step
class Turns(Trainer):
    """Its validation is best after the second epoch."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().compute_loss(model, batch)
        return loss if model.training else (torch.tensor(float(abs(self.epoch - 1))), loss[1])


def turning(folder: Path | None, **config: Any) -> Turns:
    one = trainer()
    config = {"nprocs": 1, "epochs": 4, "batch_size": 32, "compute_setup": "cpu", "save_total_limit": 1, **config}
    return Turns(one.model, one.optimizer, TrainConfig(checkpoint_dir=folder, **config), loss_fn=one.loss_fn)


def test_the_best_step_is_kept_and_restored(tmp_path: Path) -> None:
    two = turning(None, epochs=2)
    two.fit(points(64), points(16))
    four = turning(tmp_path / "c", monitor="valid_loss")
    four.fit(points(64), points(16))
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"best.pt", "step-8.pt"}
    assert four.best == (4, 1, 0.0, tmp_path / "c" / "best.pt")
    last = weights(four)
    assert four.restore_best() == four.best
    assert not all(map(torch.equal, last, weights(four)))
    assert all(map(torch.equal, weights(two), weights(four)))
    restored = turning(tmp_path / "restored", restore_best=True)
    restored.fit(points(64), points(16))
    assert_same(restored, two)
    more = turning(tmp_path / "restored", restore_best=True, epochs=5)
    assert fitted(more, points(64), points(16))[-1]["step"] == 10  # it continues the latest step, not the best
    assert_same(more, two)


def test_the_best_of_another_run_or_result_does_not_count(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 16, "save_total_limit": 9, "monitor": "valid_loss"}
    first = turning(tmp_path / "first", **settings)  # the best is step 4 of 8, or of 16 in the other
    first.fit(points(32), points(16))
    turning(tmp_path / "other", **settings).fit(points(64), points(16))
    loaded = turning(tmp_path / "other", restore_best=True, **settings)
    loaded.load(tmp_path / "first" / "step-6.pt")
    loaded.fit(points(32), points(16))
    assert loaded.restore_best()[:3] == (8, 3, 2.0)  # of what has come since: its first one, and later ones tie
    back = turning(tmp_path / "first", **settings)
    back.load(tmp_path / "first" / "step-2.pt")  # best.pt is a later step's
    back.fit(points(32), points(16))
    assert back.restore_best()[:3] == (4, 1, 0.0)
    changed = turning(tmp_path / "first", epochs=5, higher_is_better=True, **settings)
    changed.fit(points(32), points(16))
    assert changed.restore_best()[:3] == (10, 4, 3.0)


def test_without_a_best_checkpoint_restoring_says_what_to_give(tmp_path: Path) -> None:
    one = run(nprocs=1, epochs=1)
    one.fit(points(30), points(30))
    assert one.best is not None
    assert one.best.path is None
    with pytest.raises(ArgumentError, match=r"checkpoint_dir=None: there is no best checkpoint: use TrainConfig\("):
        one.restore_best()


# ------------------------------------------------------------------ loading
def test_a_loaded_checkpoint_is_continued_exactly(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nprocs": 1, "batch_size": 22, "epochs": 2}
    whole = run(checkpoint_dir=tmp_path / "whole", checkpoint_every=3, save_total_limit=9, **settings)
    whole.fit(points(150), points(50))
    other = run(checkpoint_dir=tmp_path / "other", **settings)
    other.load(tmp_path / "whole" / "step-9.pt")
    assert (other.epoch, other.step, len(other.history)) == (1, 9, 1)
    assert timeless(fitted(other, points(150), points(50))) == timeless(whole.history)
    assert_same(other, whole)
    assert [path.name for path in checkpoint.find(tmp_path / "other")] == ["step-14.pt"]
    back = run(checkpoint_dir=tmp_path / "whole", save_total_limit=9, **settings)
    back.load(tmp_path / "whole" / "step-6.pt")
    back.fit(points(150), points(50))
    assert_same(back, whole)
    assert [checkpoint.step_of(path) for path in checkpoint.find(tmp_path / "whole")] == [3, 6, 7, 14]


def test_a_loaded_checkpoint_gives_its_weights_to_another_run(tmp_path: Path) -> None:
    first = run(epochs=1, checkpoint_dir=tmp_path)
    first.fit(points(150))
    one = run(nprocs=1, epochs=1)
    one.load(tmp_path)
    assert_same(one, first)
    assert one.step == 7
    with pytest.raises(ArgumentError, match=r"nprocs=2, but this run has nprocs=1.*load\(path, progress=False\)"):
        one.fit(points(150))
    one.load(tmp_path, progress=False)
    assert [result["step"] for result in fitted(one, points(150))] == [14.0]
    again = run(nprocs=1, epochs=1, checkpoint_dir=tmp_path)
    again.load(tmp_path, progress=False)
    with pytest.raises(ArgumentError, match=r"has checkpoints, .* instead of the weights of .*step-7\.pt: use resume="):
        again.fit(points(150))
    again.config = dataclasses.replace(again.config, resume=False)
    assert timeless(fitted(again, points(150))) == timeless(one.history)
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step-14.pt"]
    assert_same(again, one)
    with pytest.raises(ArgumentError, match=r"path='.*none': no such file or folder"):
        one.load(tmp_path / "none")
    torch.save(one.model.state_dict(), tmp_path / "other.pt")
    with pytest.raises(ArgumentError, match=r"path='.*other\.pt': not a checkpoint written by fit"):
        one.load(tmp_path / "other.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match=r"path='.*empty': the folder has no checkpoint \(step-N\.pt"):
        one.load(tmp_path / "empty")


def test_a_resumed_run_reports_what_came_before(tmp_path: Path) -> None:
    """So its charts, and the metrics of its result, have the whole run."""
    settings: dict[str, Any] = {"nprocs": 2, "validate_every": 2, "checkpoint_dir": tmp_path, "monitor": "valid_loss"}
    run(epochs=1, **settings).fit(points(150), points(50))
    more = run(epochs=2, **settings)
    more.fit(points(150), points(50))

    def reported(one: Trainer, name: str) -> list[Any]:
        assert one.result is not None
        rows = [(row.rank, row.step, row.values[name]) for row in one.result.metrics if name in row.values]
        return sorted(rows)

    assert [step for _, step, _ in reported(more, "epoch_loss")] == [7, 14]
    assert len(reported(more, "epoch_loss")) == len(more.history) == 2
    assert [(step, value) for _, step, value in reported(more, "valid_loss")] == [
        (results["step"], results["valid_loss"]) for results in more.validations
    ]
    assert more.result is not None
    assert more.best is not None
    assert more.result.metrics.best["valid_loss"].step == more.best.step


def test_after_a_failure_the_history_is_the_checkpoints(tmp_path: Path) -> None:
    whole = run(epochs=1)
    whole.fit(points(150))
    one = run((Breaks(step=9, mark=tmp_path / "mark"),), checkpoint_dir=tmp_path / "c")
    with pytest.raises(OSError, match="a disk has gone"):
        one.fit(points(150))
    assert timeless(one.history) == timeless(whole.history)
    assert one.step == 7
    lost = run((Breaks(step=3, mark=tmp_path / "lost"),), checkpoint_dir=tmp_path / "d")
    with pytest.raises(OSError, match="a disk has gone"):
        lost.fit(points(150))
    assert lost.history == []


# ------------------------------------------------------------------ streams
@pytest.mark.parametrize(("nprocs", "kind"), [(1, SizedStream), (2, Stream), (2, JitteredStream)])
def test_a_stream_is_trained_and_resumed(tmp_path: Path, nprocs: int, kind: type[Stream]) -> None:
    settings: dict[str, Any] = {"nprocs": nprocs, "epochs": 2, "gradient_accumulation_steps": 2}
    whole = run(**settings)
    whole.fit(kind(points(150)), Stream(points(50)))
    if kind is not JitteredStream:
        listed = run(**settings)
        listed.fit(DataLoader(points(150), 11), points(50))  # not shuffled, as a stream is
        assert timeless(whole.history) == timeless(listed.history)
        assert_same(whole, listed)
    breaks = Breaks(step=whole.step - 1, mark=tmp_path / "mark", rank=nprocs - 1)
    settings |= {"checkpoint_dir": tmp_path / "c", "checkpoint_every": 1}
    with pytest.raises(OSError, match="a disk has gone"):
        run((breaks,), **settings).fit(kind(points(150)), Stream(points(50)))
    again = run((breaks,), **settings)
    assert timeless(fitted(again, kind(points(150)), Stream(points(50)))) == timeless(whole.history)
    assert_same(again, whole)


class Once(IterableDataset[Any]):
    """A stream that cannot begin again."""

    def __init__(self) -> None:
        data = points(40)
        self.left = [data[index] for index in range(40)]

    def __iter__(self) -> Iterator[Any]:
        while self.left:
            yield self.left.pop()


def test_a_stream_that_does_not_begin_again_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"train yielded no batch in epoch 2: .* must start over with each iter"):
        run(nprocs=1, epochs=None, max_steps=9).fit(Once())
