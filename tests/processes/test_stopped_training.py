"""What an interrupt leaves of a Trainer's run: checkpoints of whole steps, and trained weights in the notebook."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nblaunch import notebook_launcher
from nblaunch.errors import LaunchStoppedError, RankRaisedError
from nblaunch.launch.handle import live_launches
from nblaunch.training import Parallelism, Trainer
from tests.conftest import eventually
from tests.processes.trained import assert_same, assert_same_run, points, timeless, trainer

SIZES = pytest.mark.parametrize("nprocs", [1, 2])
STEPS = 15
STOP_LIMIT = 54.0


pytestmark = pytest.mark.usefixtures("imported_ahead", "one_thread", "quiet")


class Marks:
    """A callback that makes a file at a step, once, and gives the interrupt time to arrive in later ones."""

    def __init__(self, step: int, mark: Path, pause: float = 1.0) -> None:
        self.step, self.mark, self.pause, self.is_first = step, mark, pause, not mark.exists()

    def on_step_end(self, trainer: Trainer, loss: Tensor) -> None:
        if self.is_first and trainer.step >= self.step:
            self.mark.touch()
            time.sleep(self.pause)


@contextmanager
def interrupts(mark: Path, how: str = "interrupt") -> Iterator[None]:
    """Interrupt this process, or click Stop, once the mark is there."""

    def wait_and_interrupt() -> None:
        eventually(mark.exists)
        if how == "stop":
            live_launches()[0].stop()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait_and_interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def run(callbacks: tuple[object, ...] = (), **config: Any) -> Trainer:
    """Five steps an epoch on any number of ranks."""
    nprocs = config.get("nprocs", 2)
    return trainer(callbacks, **{"batch_size": 30 // nprocs, **config})


def stopped(mark: Path, step: int, **config: Any) -> Trainer:
    """Return a Trainer whose run was interrupted at that step or a later one."""
    one = run((Marks(step, mark),), **config)
    with interrupts(mark), pytest.raises(KeyboardInterrupt):
        one.fit(points(150), points(50))
    assert time.time() - mark.stat().st_mtime < 20  # since the interrupt: imports may take long
    return one


# ------------------------------------------------------------------ with checkpoints
@pytest.mark.parametrize(("nprocs", "step", "parallelism"), [(1, 5, None), (2, 7, Parallelism())])
def test_a_stopped_run_resumes_from_its_last_step(
    tmp_path: Path, nprocs: int, step: int, parallelism: Parallelism | None
) -> None:
    settings: dict[str, Any] = {"nprocs": nprocs, "parallelism": parallelism}
    whole = run(**settings)
    whole.fit(points(150), points(50))
    one = stopped(tmp_path / "mark", step, checkpoint_dir=tmp_path / "c", **settings)
    assert step <= one.step < STEPS
    assert (tmp_path / "c" / f"step-{one.step}.pt").exists()
    saved: Any = torch.load(tmp_path / "c" / f"step-{one.step}.pt", weights_only=True)
    for name, tensor in one.model.state_dict().items():  # the notebook has them too
        assert torch.equal(saved["model"][0][name], tensor)
    again = run((Marks(99, tmp_path / "mark"),), checkpoint_dir=tmp_path / "c", **settings)
    again.fit(points(150), points(50))
    assert_same(again, whole)
    assert timeless(again.history) == timeless(whole.history)
    assert again.validations == whole.validations


def test_a_rank_that_waits_for_a_slow_one_ends_with_it(tmp_path: Path) -> None:
    """The interrupt finds rank 1 in a collective of the next step."""
    whole = run()
    whole.fit(points(150))
    one = run((Slow(3, tmp_path / "mark"),), checkpoint_dir=tmp_path / "c")
    with interrupts(tmp_path / "mark", "stop"), pytest.raises(LaunchStoppedError) as caught:
        one.fit(points(150))
    assert one.step == 4
    path = tmp_path / "c" / "step-4.pt"
    assert caught.value.__notes__ == [f"the next fit resumes after step 4, from {path}"]
    one.fit(points(150))
    assert_same(one, whole)


class Spoils(Marks):
    """Replaces the folder of the checkpoints by a file."""

    def __init__(self, step: int, mark: Path, folder: Path) -> None:
        super().__init__(step, mark)
        self.folder = folder

    def on_step_end(self, trainer: Trainer, loss: Tensor) -> None:
        if trainer.accelerator.is_main_process and trainer.step == self.step and self.is_first:
            self.folder.rmdir()
            self.folder.touch()
        super().on_step_end(trainer, loss)


@SIZES
@pytest.mark.filterwarnings("always:the checkpoint")
def test_where_no_checkpoint_can_be_written_the_weights_come_back(tmp_path: Path, nprocs: int) -> None:
    folder, mark = tmp_path / "c", tmp_path / "mark"
    one = run((Spoils(3, mark, folder),), nprocs=nprocs, checkpoint_dir=folder)
    before = copy.deepcopy(one.model.state_dict())
    warned = pytest.warns(UserWarning, match="checkpoint of step 3 could not be written: .*File exists")
    with warned if nprocs == 1 else nullcontext(), interrupts(mark), pytest.raises(KeyboardInterrupt) as caught:
        one.fit(points(150))
    said = "the model, the optimizer and history have the state after step 3. The next fit starts a new run from it"
    assert caught.value.__notes__ == [said]
    assert one.step == 3
    assert any(not torch.equal(tensor, before[name]) for name, tensor in one.model.state_dict().items())


class Slow(Marks):
    """Only rank 0 is."""

    def on_step_end(self, trainer: Trainer, loss: Tensor) -> None:
        if trainer.step == self.step and self.is_first:
            other = self.mark.with_suffix(".other")
            if trainer.accelerator.is_main_process:
                eventually(other.exists)
                time.sleep(1.0)  # for rank 1 to begin the next step
                self.mark.touch()
                time.sleep(2.0)
            else:
                other.touch()


@pytest.mark.parametrize(("nprocs", "every"), [(1, None), (2, 2)])
def test_a_run_stopped_in_validation_validates_again(tmp_path: Path, nprocs: int, every: int | None) -> None:
    """Its best step and its patience are those of a whole run."""
    settings: dict[str, Any] = {"nprocs": nprocs, "validate_every": every, "early_stop": 3, "batch_size": 6}
    whole = run(checkpoint_dir=tmp_path / "whole", **settings)
    whole.fit(points(60), points(60))
    mark = tmp_path / "mark"
    one = run(checkpoint_dir=tmp_path / "c", **settings)
    with interrupts(mark), pytest.raises(KeyboardInterrupt):
        one.fit(points(60), Lingering(60, mark))
    assert one.progress.due
    assert one.step == (every or 10 // nprocs)
    assert one.validations == []
    again = run(checkpoint_dir=tmp_path / "c", **settings)
    again.fit(points(60), points(60))
    assert_same_run(again, whole)


def test_a_run_stopped_in_its_last_validation_ends_with_it(tmp_path: Path) -> None:
    """Its steps are done, but a warning that nothing is left would be wrong."""
    settings: dict[str, Any] = {"nprocs": 1, "epochs": None, "max_steps": 3, "batch_size": 6}
    whole = run(**settings)
    whole.fit(points(60), points(30))
    one = run(checkpoint_dir=tmp_path / "c", **settings)
    with interrupts(tmp_path / "mark"), pytest.raises(KeyboardInterrupt):
        one.fit(points(60), Lingering(30, tmp_path / "mark"))
    assert (one.step, one.progress.due, one.history) == (3, "run", [])
    again = run(checkpoint_dir=tmp_path / "c", **settings)
    again.fit(points(60), points(30))
    assert timeless(again.history) == timeless(whole.history)
    more = run(checkpoint_dir=tmp_path / "c", **settings | {"max_steps": 5})
    more.fit(points(60), points(30))
    assert [results["step"] for results in more.history] == [5.0]


class Lingering(Dataset[Any]):
    """Its samples take a while, and make a file."""

    def __init__(self, count: int, mark: Path, pause: float = 0.05) -> None:
        self.data, self.mark, self.pause = points(count), mark, pause

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.mark.touch()
        time.sleep(self.pause)
        return self.data[index]


@pytest.mark.parametrize(("nprocs", "workers"), [(1, 0), (2, 1)])
def test_a_run_stopped_while_it_loads_resumes(tmp_path: Path, nprocs: int, workers: int) -> None:
    settings: dict[str, Any] = {"nprocs": nprocs, "batch_size": 4, "epochs": 1, "num_workers": workers}
    settings["gradient_accumulation_steps"] = 2
    whole = run(**settings)
    whole.fit(points(48))
    one = run(checkpoint_dir=tmp_path / "c", **settings)
    with interrupts(tmp_path / "mark"), pytest.raises(KeyboardInterrupt):
        one.fit(Lingering(48, tmp_path / "mark"))
    assert 0 < one.step < 48 // 8 // nprocs
    again = run(checkpoint_dir=tmp_path / "c", **settings)
    again.fit(points(48))
    assert_same(again, whole)


def test_a_launch_of_fit_itself_is_stopped_with_a_checkpoint(tmp_path: Path) -> None:
    one, mark = run((Marks(3, tmp_path / "mark"),), checkpoint_dir=tmp_path / "c"), tmp_path / "mark"
    launch: Any = notebook_launcher(one.fit, args=(points(150),), num_processes=2, device="cpu", block=False)
    eventually(mark.exists)
    launch.stop()
    with pytest.raises(LaunchStoppedError):
        launch.result()
    whole = run()
    whole.fit(points(150))
    one.fit(points(150))
    assert one.history[0]["step"] == 5
    assert_same(one, whole)


# ------------------------------------------------------------------ without
@pytest.mark.parametrize(("nprocs", "parallelism"), [(1, None), (2, Parallelism())])
def test_without_checkpoints_what_was_trained_comes_back(
    tmp_path: Path, nprocs: int, parallelism: Parallelism | None
) -> None:
    one = stopped(tmp_path / "mark", 6, nprocs=nprocs, parallelism=parallelism)
    assert 6 <= one.step < STEPS
    assert [results["epoch"] for results in one.history] == [0.0, 1.0][: one.step // 5]
    part = run(nprocs=nprocs, parallelism=parallelism, max_steps=one.step)
    part.fit(points(150), points(50))
    assert_same(one, part)


def test_a_stop_says_that_nothing_would_continue(tmp_path: Path) -> None:
    one, mark = run((Marks(3, tmp_path / "mark"),)), tmp_path / "mark"
    with interrupts(mark, "stop"), pytest.raises(LaunchStoppedError, match=r"Trainer\.fit was stopped after") as caught:
        one.fit(points(150))
    (note,) = caught.value.__notes__
    assert f"have the state after step {one.step}. The next fit starts a new run from it; with a checkpoint_dir" in note
    assert caught.value.results[0] is one.progress
    held = [part for part in gc.get_objects() if type(part).__name__ == "_Unfinished" and part.states]
    assert not held  # by the error


# ------------------------------------------------------------------ what does not end
class Hangs(Marks):
    """In Python, on one rank."""

    def on_step_end(self, trainer: Trainer, loss: Tensor) -> None:
        if trainer.step == self.step and trainer.accelerator.is_main_process and self.is_first:
            self.mark.touch()
            threading.Event().wait()


def test_a_step_that_hangs_is_interrupted_all_the_same(tmp_path: Path) -> None:
    one, mark = run((Hangs(3, tmp_path / "mark"),)), tmp_path / "mark"
    with interrupts(mark), pytest.raises(KeyboardInterrupt) as caught:
        one.fit(points(150))
    assert time.time() - mark.stat().st_mtime < STOP_LIMIT
    said = "the trained state is lost; with a checkpoint_dir the next fit would resume this run"
    assert caught.value.__notes__ == [said]


def raise_it(rank: int) -> None:
    if rank == 1:
        raise KeyboardInterrupt("enough")


def test_a_keyboard_interrupt_of_the_users_own_is_not_called_one() -> None:
    with pytest.raises(RankRaisedError, match=r"^rank 1 raised KeyboardInterrupt: enough$"):
        notebook_launcher(raise_it, num_processes=2)


# ------------------------------------------------------------------ what is said of the next fit
def test_a_stop_without_resume_says_that_nothing_continues(tmp_path: Path) -> None:
    one = run((Marks(3, tmp_path / "mark"),), nprocs=1, checkpoint_dir=tmp_path / "c", resume=False)
    with interrupts(tmp_path / "mark"), pytest.raises(KeyboardInterrupt) as caught:
        one.fit(points(150))
    (note,) = caught.value.__notes__
    assert note.endswith("The next fit starts a new run from it; with resume=True it would resume this run")


def test_a_stop_names_the_checkpoint_that_was_loaded(tmp_path: Path) -> None:
    """Without a folder the next fit begins there again."""
    first = run(epochs=1, checkpoint_dir=tmp_path / "c")
    first.fit(points(150))
    path = (tmp_path / "c" / "step-5.pt").rename(tmp_path / "kept.pt")
    one = run((Marks(7, tmp_path / "mark"),))
    one.load(path)
    with interrupts(tmp_path / "mark"), pytest.raises(KeyboardInterrupt) as caught:
        one.fit(points(150))
    assert caught.value.__notes__ == [f"the next fit resumes after step 5, from {path}"]
