"""Ranks that wait in a collective for nothing are explained while they wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

import nblaunch
from nblaunch.engines import fork_servers
from nblaunch.engines.fork_servers import Servers
from nblaunch.errors import CollectiveError, LaunchTimeoutError
from nblaunch.launch.failures import describe
from nblaunch.launch.frontend import Frontend
from nblaunch.launch.views import Event, NullView, Stuck
from nblaunch.machine import timeouts
from tests.conftest import LONG, eventually
from tests.processes.conftest import Launcher


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STUCK_AFTER_S", 1.0)
    monkeypatch.setattr(timeouts, "STUCK_POLL_S", 0.2)
    monkeypatch.setattr(timeouts, "STUCK_REPEAT_S", 0.5)


@pytest.fixture
def _without_hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks log their collectives as with a torch before 2.14, which has no hook."""
    own = Servers()
    monkeypatch.setattr("nblaunch.engines.local.servers", own)
    monkeypatch.setattr(fork_servers, "_PRELOAD", ("tests.processes.without_hook", *fork_servers._PRELOAD))
    yield
    own.stop()


# ------------------------------------------------------------------ what ranks run
def agreed() -> None:
    dist.all_reduce(torch.ones(2))


def a_late_rank(rank: int) -> None:
    agreed()
    if rank == 1:
        time.sleep(60)
    dist.barrier()


def a_group_of_its_own(rank: int) -> None:
    group: Any = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=group)
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=group)
    time.sleep(60)


def a_missing_backward(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(4, 2))
    for _ in range(2):  # DDP arranges its buckets after the first pass
        model(torch.ones(1, 4)).sum().backward()
    if rank == 0:
        model(torch.ones(1, 4)).sum().backward()
    time.sleep(60)


def a_receive_without_a_send(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(4), 1)
    time.sleep(60)


def a_wait_on_another_line(rank: int) -> None:
    agreed()
    if rank == 0:
        work: Any = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait()
    time.sleep(60)


def different_sizes(rank: int) -> None:
    dist.all_reduce(torch.ones(2 + rank))


def slow_but_healthy(rank: int) -> int:
    for step in range(4):
        time.sleep(1.0 * (rank == step % 2))
        agreed()
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        torch.rand(50, 50) @ torch.rand(50, 50)
    return rank


# ------------------------------------------------------------------ the tests
@pytest.mark.usefixtures("imported_ahead")
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (a_group_of_its_own, ["rank 0 waits in all_reduce #2 (4 float32", "rank 1 has started 1 of 2"]),
        (a_receive_without_a_send, ["rank 0 waits in recv (4 float32", "rank 1 is at", "time.sleep(60)"]),
        (a_wait_on_another_line, ["rank 0 waits in all_reduce #2 (4 float32", "rank 1 has started 1 of 2"]),
        (a_missing_backward, ["rank 0 waits in all_reduce #", "rank 1 has started", "time.sleep(60)"]),
    ],
)
def test_the_wait_is_explained(
    function: Callable[..., Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    launch: Any = nblaunch.notebook_launcher(function, num_processes=2, block=False, view="text")
    shown: list[str] = []

    def is_explained() -> bool:
        shown.append(capsys.readouterr().out)
        return all(word in "".join(shown) for word in words)

    eventually(is_explained, LONG, lambda: "".join(shown))
    launch.kill()
    launch.wait()
    assert "".join(shown).count("Waiting for") == 1


def test_the_wait_is_in_the_timeouts_error(launch: Launcher) -> None:
    with pytest.raises(LaunchTimeoutError, match=r"(?s)rank 0 waits in barrier #2.*rank 1 has started 1 of 2"):
        launch(a_late_rank, timeout=8.0, stop_grace=0.1)


def test_the_error_names_calls_that_differ(launch: Launcher) -> None:
    table = (
        r"the ranks called different.*\n +rank 0: all_reduce #1 \(\d float32, .*, line \d+\)\n +rank 1: all_reduce #1"
    )
    with pytest.raises(CollectiveError, match=table) as caught:
        launch(different_sizes)
    assert "gloo" not in str(caught.value)
    assert describe(caught.value, None).headline == "The ranks called different collectives as #1."
    with (
        nblaunch.session(2, name="sizes") as session,
        pytest.raises(CollectiveError, match=table),
    ):
        session.run(different_sizes)


def test_checks_find_calls_that_differ(launch: Launcher) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Detected mismatch between collectives on ranks.*shapes"):
        launch(different_sizes, checks=True)


def test_ranks_that_wait_for_too_long_are_stopped(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "COLLECTIVE_TIMEOUT_S", 5.0)
    with pytest.raises(CollectiveError, match=r"(?s)was stopped:.*rank 0 waits in barrier #2") as caught:
        launch(a_late_rank, view="text")
    assert caught.value.rank == 1


def a_barrier_alone(rank: int) -> None:
    if rank == 0:
        dist.barrier()


def test_a_wait_for_a_finished_rank_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with nblaunch.session(2, name="alone") as session:
        with pytest.raises(CollectiveError, match=r"rank 1 returned after \d of \d collectives: this will never"):
            session.run(a_barrier_alone, view="text", timeout=60.0)
        assert "rank 1 returned after" in capsys.readouterr().out
        session.run(agreed, view="none")


@pytest.mark.skipif(not hasattr(ProcessGroup, "register_pre_hook"), reason="the tests above are without it")
@pytest.mark.usefixtures("_without_hook")
def test_a_torch_without_hooks_shows_the_same(launch: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    test_the_error_names_calls_that_differ(launch)
    test_a_wait_for_a_finished_rank_ends(capsys)


class Remembers(NullView):
    """Keeps the events of one kind that are shown."""

    def __init__(self, kind: type[Event]) -> None:
        self.kind = kind
        self.shown: list[Any] = []

    def on(self, event: Event) -> None:
        if isinstance(event, self.kind):
            self.shown.append(event)


def waits_twice(files: str, rank: int) -> None:
    agreed()
    for number in range(2):
        while rank == 1 and not Path(f"{files}{number}").exists():
            time.sleep(0.05)
        agreed()


def test_the_reason_goes_when_the_ranks_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = Remembers(Stuck)
    monkeypatch.setattr(Frontend, "view", lambda self, choice: view)
    monkeypatch.setattr(timeouts, "STUCK_AFTER_S", 3.0)  # longer than ranks start apart
    launch: Any = nblaunch.notebook_launcher(waits_twice, (str(tmp_path / "go"),), num_processes=2, block=False)
    for number in range(2):
        eventually(lambda: len(view.shown) == 1 + 2 * (tmp_path / "go0").exists())
        assert view.shown[-1].ranks == (1,)
        assert f"rank 0 waits in all_reduce #{number + 2}" in view.shown[-1].lines[0]
        (tmp_path / f"go{number}").touch()
    launch.wait()
    assert view.shown[1] == Stuck()


def test_slow_training_raises_no_alarm(
    launch: Launcher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "STUCK_AFTER_S", 3.0)  # longer than any step
    assert list(launch(slow_but_healthy, view="text")) == [0, 1]
    shown = capsys.readouterr().out
    assert "Waiting" not in shown
    assert "Stuck" not in shown
