"""The wait for nodes: who may end it, and that nothing is started after. No agent ever joins here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from nblaunch.engines.node_engine import NodeEngine
from nblaunch.engines.protocol import GivenUpError
from nblaunch.wire.link_messages import Boot, Proof
from tests.conftest import eventually


class Starter:
    """Starts nothing. `addresses` waits as long as it is told to."""

    name, count = "a cluster", 1
    proof: Proof = ""

    def __init__(self) -> None:
        self.started = self.stopped = 0
        self.has_addresses = threading.Event()
        self.has_addresses.set()
        self.is_asked = threading.Event()
        self.state_text = "job 1 is queued"

    def addresses(self, check: Callable[[], None]) -> Sequence[str]:
        self.is_asked.set()
        while not self.has_addresses.wait(0.02):
            check()
        return ["127.0.0.1"]

    def start(self, boot: Boot) -> None:
        self.started += 1

    def state(self) -> str:
        return self.state_text

    def problem(self) -> str:
        return ""

    def stop(self) -> None:
        self.stopped += 1


class Waiter(threading.Thread):
    """A launch that waits for the nodes of an engine."""

    def __init__(self, engine: NodeEngine) -> None:
        super().__init__(daemon=True)
        self.engine, self.has_given_up = engine, threading.Event()
        self.shown: list[str] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.engine.machines(self.shown.append, self.has_given_up.is_set)
        except BaseException as error:
            self.error = error


@pytest.fixture
def starter() -> Starter:
    return Starter()


@pytest.fixture
def engine(starter: Starter) -> NodeEngine:
    return NodeEngine(starter)


def test_nothing_is_started_after_it_was_given_up(starter: Starter, engine: NodeEngine) -> None:
    starter.has_addresses.clear()
    waiter = Waiter(engine)
    assert starter.is_asked.wait(10)
    waiter.has_given_up.set()
    waiter.join(10)
    assert isinstance(waiter.error, GivenUpError)
    assert not starter.started
    assert not waiter.shown


def test_a_second_launch_may_give_up_first(starter: Starter, engine: NodeEngine) -> None:
    first = Waiter(engine)
    eventually(lambda: first.shown)
    second = Waiter(engine)
    eventually(lambda: second.shown)
    assert second.shown[0] == "a cluster: another launch is starting agents on these nodes"
    second.has_given_up.set()
    second.join(10)
    assert isinstance(second.error, GivenUpError)
    assert first.is_alive()
    assert (starter.started, starter.stopped) == (1, 0)
    first.has_given_up.set()
    first.join(10)
    assert isinstance(first.error, GivenUpError)
    assert first.shown == ["job 1 is queued"]
    assert (starter.started, starter.stopped) == (1, 1)


def test_a_release_ends_every_wait(starter: Starter, engine: NodeEngine) -> None:
    waiters = [Waiter(engine), Waiter(engine)]
    eventually(lambda: all(waiter.shown for waiter in waiters))
    engine.stop()
    for waiter in waiters:
        waiter.join(10)
        assert isinstance(waiter.error, GivenUpError)
    assert starter.started == 1
