"""Where an interrupted training run ends, in the notebook's own process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
import torch.distributed as dist

from nblaunch.training import step_boundaries
from nblaunch.training.step_boundaries import AgreedStop, StepBoundaries
from nblaunch.training.topology import World


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_the_run_at_the_next_boundary() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StepBoundaries("run") as boundaries:
        boundaries.reach()
        interrupt()
        assert boundaries.is_asked
        with pytest.raises(AgreedStop):
            boundaries.reach()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_takes_effect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_boundaries, "STOP_SIGNAL_INTERVAL_S", 3600.0)
    with StepBoundaries("run"):
        interrupt()
        interrupt()  # that of the kernel, after that of an editor
        monkeypatch.setattr(step_boundaries, "STOP_SIGNAL_INTERVAL_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            interrupt()


def test_a_step_that_takes_too_long_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_boundaries, "STOP_STEP_S", 0.1)
    with StepBoundaries("run"):
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            threading.Event().wait(60.0)


def test_a_checkpoint_that_takes_long_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_boundaries, "STOP_STEP_S", 0.1)
    with StepBoundaries("run") as boundaries:
        boundaries.is_saving = True
        interrupt()
        threading.Event().wait(0.5)
        with pytest.raises(AgreedStop):
            boundaries.reach()


class Unanswered:
    """A store in which no other rank posts its step."""

    def clone(self) -> Unanswered:
        return self

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return False


def test_the_thread_of_a_run_that_has_ended_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_boundaries, "STOP_AGREEMENT_S", 3600.0)
    monkeypatch.setattr(step_boundaries, "world", lambda: World(0, 0, 2))
    monkeypatch.setattr(step_boundaries, "has_group", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Unanswered)
    with StepBoundaries("run") as boundaries:
        boundaries.ask()
    assert boundaries._settled.wait(20.0)


def test_in_another_thread_nothing_is_deferred() -> None:
    before, during = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        with StepBoundaries("run"):
            during.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert during == [before]


def test_a_forked_child_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step needs the workers of its DataLoader, which a terminal interrupts too."""
    monkeypatch.setattr(step_boundaries, "STOP_STEP_S", 0.1)
    with StepBoundaries("run"):
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(KeyboardInterrupt):
                interrupt()
                threading.Event().wait(0.5)
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
