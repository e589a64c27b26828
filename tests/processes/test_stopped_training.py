"""What an interrupt leaves of a Trainer's run: checkpoints of whole steps, and trained weights in the notebook."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from nblaunch.errors import LaunchStoppedError
from nblaunch.launch.handle import live_launches
from nblaunch.training import Parallelism, Trainer
from tests.conftest import eventually
from tests.processes.trained import assert_same, points, timeless, trainer, weights

SIZES = pytest.mark.parametrize("nprocs", [1, 2])
STEPS = 15


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv("NBLAUNCH_VIEW", "none")


class Marks:
    """A callback that makes a file at a step, once, and gives the interrupt time to arrive in later ones."""

    def __init__(self, step: int, mark: Path, pause: float = 0.05) -> None:
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
    before = time.monotonic()
    with interrupts(mark), pytest.raises(KeyboardInterrupt):
        one.fit(points(150), points(50))
    assert time.monotonic() - before < 20
    return one


# ------------------------------------------------------------------ with checkpoints
@SIZES
@pytest.mark.parametrize("step", [3, 5, 7])
def test_a_stopped_run_resumes_from_its_last_step(tmp_path: Path, nprocs: int, step: int) -> None:
    whole = run(nprocs=nprocs)
    whole.fit(points(150), points(50))
    one = stopped(tmp_path / "mark", step, nprocs=nprocs, checkpoint_dir=tmp_path / "c")
    assert step <= one.step < STEPS
    assert (tmp_path / "c" / f"step-{one.step}.pt").exists()
    saved: Any = torch.load(tmp_path / "c" / f"step-{one.step}.pt", weights_only=True)
    for name, tensor in one.model.state_dict().items():  # the notebook has them too
        assert torch.equal(saved["parts"]["model"][name], tensor)
    again = run((Marks(99, tmp_path / "mark"),), nprocs=nprocs, checkpoint_dir=tmp_path / "c")
    again.fit(points(150), points(50))
    assert_same(again, whole)
    assert timeless(again.history) == timeless(whole.history)
    assert again.validations == whole.validations
