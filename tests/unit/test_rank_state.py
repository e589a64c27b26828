"""The state of a rank, from its messages and its exit."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nblaunch.engines.protocol import Descriptors
from nblaunch.launch.group import Member
from nblaunch.launch.rank_state import Rank
from nblaunch.wire.messages import Done, Failed, RankExited
from tests.unit.fake_engine import FakeWorker

DONE = Done(1, 1, 5)
CRASHED = RankExited(1, -9, 7)
LEFT = RankExited(1, 0, 7)


def failed(collective: str = "") -> Failed:
    return Failed(1, 1, 5, "exception", "ValueError", "no", "", collective=collective)


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank(Member(1, FakeWorker(1)))
    yield rank
    rank.close()


def test_a_rank_goes_from_starting_to_running_to_returned(rank: Rank) -> None:
    assert rank.state(()) == "starting"
    rank.is_running = True
    assert rank.state(()) == "running"
    rank.done = DONE
    assert rank.state(()) == "running"  # its process may have threads of its own to wait for
    rank.member.exited = LEFT
    assert rank.state(()) == "returned"


def test_a_rank_that_is_asked_to_end_is_stopping_and_then_has_ended(rank: Rank) -> None:
    rank.is_running = True
    assert rank.state({1}) == "stopping"
    rank.member.exited = CRASHED
    assert rank.state({1}) == "ended"


def test_a_rank_that_returns_all_the_same_has_returned(rank: Rank) -> None:
    rank.done, rank.member.exited = DONE, LEFT
    assert rank.state({1}) == "returned"


@pytest.mark.parametrize("asked", [(), {0, 2}])
def test_a_rank_that_raises_or_dies_of_itself_has_failed(rank: Rank, asked: set[int]) -> None:
    rank.failed = failed()
    assert rank.state(asked) == "failed"
    rank.failed, rank.member.exited = None, CRASHED
    assert rank.state(asked) == "failed"


def test_an_error_out_of_a_collective_is_an_echo_of_anothers(rank: Rank) -> None:
    rank.failed = failed(collective="all_reduce")
    assert rank.state(()) == "ended"


def test_an_untaken_result_is_closed_with_its_rank(rank: Rank) -> None:
    taken, left = os.pipe()
    rank.result = Descriptors([taken])
    assert rank.take_result() == [taken]
    rank.result = Descriptors([left])
    rank.close()
    os.close(taken)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(left)


def test_a_rank_that_has_called_exec_listens_no_more(rank: Rank) -> None:
    worker = FakeWorker(1)
    member = Member(1, worker)
    assert member.listens
    worker.is_open = False
    assert not member.listens
