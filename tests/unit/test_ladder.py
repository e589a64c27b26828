"""Stopping ranks, on a fake clock."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.launch.stopping import EXPRESSION, QUESTION, SESSION, ByUser, Ladder, PeerFailed, Reason, TimedOut

BEGUN = 100.0
GRACE = 30.0
BY_USER = ByUser()
REASONS: list[Reason] = [ByUser(), PeerFailed(), TimedOut()]


class Stop:
    """The stopping of some ranks, asked at times after its beginning."""

    def __init__(self, ranks: int = 1, reason: Reason = BY_USER, grace: float = GRACE) -> None:
        self.ladder = Ladder(reason, BEGUN, grace)
        self.live = list(range(ranks))
        self.running = set(self.live)
        self.leaving: set[int] = set()

    def at(self, seconds: float) -> tuple[list[int], list[int]]:
        """The ranks to interrupt, and those to kill."""
        return self.ladder.due(BEGUN + seconds, self.live, self.running, self.leaving)

    def answers(self, rank: int) -> None:
        self.ladder.answered.add(rank)


def interrupts(*ranks: int) -> tuple[list[int], list[int]]:
    return list(ranks), []


def kills(*ranks: int) -> tuple[list[int], list[int]]:
    return [], list(ranks)


NOTHING = interrupts()


@pytest.mark.parametrize("reason", REASONS)
def test_a_rank_that_does_not_answer_is_killed_with_its_group(reason: Reason) -> None:
    stop = Stop(2, reason)
    assert stop.at(0) == interrupts(0, 1)
    assert stop.at(2.99) == NOTHING
    assert stop.at(3.01) == kills(0, 1)
    assert stop.at(8.0) == NOTHING


@pytest.mark.parametrize("reason", REASONS)
def test_a_rank_that_answers_has_the_whole_grace(reason: Reason) -> None:
    stop = Stop(2, reason)
    stop.at(0)
    stop.answers(1)
    assert stop.at(GRACE - 0.01) == kills(0)
    assert stop.at(GRACE) == kills(1)


def test_a_second_interrupt_kills_now_also_those_that_answered() -> None:
    stop = Stop(2)
    stop.at(0)
    stop.answers(0)
    stop.ladder.at_once = True
    assert stop.at(0.1) == kills(0, 1)


def test_a_rank_whose_function_has_not_begun_is_killed_at_once() -> None:
    stop = Stop(2)
    stop.running = {1}
    assert stop.at(0) == ([1], [0])


@pytest.mark.parametrize("reason", REASONS)
def test_a_rank_that_is_leaving_is_not_interrupted_and_has_a_second(reason: Reason) -> None:
    stop = Stop(2, reason)
    stop.leaving = {0}
    stop.answers(1)
    assert stop.at(0) == interrupts(1)
    assert stop.at(0.99) == NOTHING
    assert stop.at(1.0) == kills(0)


def test_leaving_after_a_long_checkpoint_still_has_a_second() -> None:
    stop = Stop()
    stop.at(0)
    stop.answers(0)
    assert stop.at(20) == NOTHING
    stop.leaving = {0}
    assert stop.at(20.1) == stop.at(21.0) == NOTHING
    assert stop.at(21.2) == kills(0)


def test_the_countdown_is_shown_once_a_rank_has_answered() -> None:
    stop = Stop(2)
    assert stop.ladder.countdown(BEGUN + 1, 1) == "stopping"
    stop.answers(0)
    assert stop.ladder.countdown(BEGUN + 1.2, 1) == "stopping: 29 s left for checkpoints; interrupt again to kill now"
    assert stop.ladder.countdown(BEGUN + 99, 1).startswith("stopping: 0 s left")
    stop.ladder.at_once = True
    assert stop.ladder.countdown(BEGUN + 2, 1) == "stopping"


def test_a_countdown_says_how_many_interrupts_kill() -> None:
    stop = Stop(1, PeerFailed())
    stop.answers(0)
    assert stop.ladder.countdown(BEGUN, 2) == "stopping: 30 s left for checkpoints; interrupt twice to kill now"
    assert stop.ladder.countdown(BEGUN, 0) == "stopping: 30 s left for checkpoints"
    kept = Ladder(ByUser(), BEGUN, GRACE, SESSION)
    assert kept.countdown(BEGUN, 2) == "stopping: 30 s left; interrupt twice more to kill now"
    assert kept.countdown(BEGUN, 1) == "stopping: 30 s left; interrupt again to kill now"


# ------------------------------------------------------------------ whatever happens
RANKS = 3
Happening = tuple[str, int, float]
happenings = st.lists(
    st.tuples(
        st.sampled_from(["answer", "begin", "leave", "end", "kill", "nothing"]),
        st.integers(0, RANKS - 1),
        st.floats(0, 5),
    ),
    max_size=25,
)


@given(st.sampled_from(REASONS), st.floats(0.0, 40.0), st.sets(st.integers(0, RANKS - 1)), happenings)
@settings(derandomize=True, deadline=None, max_examples=400)
def test_no_rank_gets_two_interrupts_nor_anything_after_its_kill(
    reason: Reason, grace: float, running: set[int], happens: Sequence[Happening]
) -> None:
    stop = Stop(RANKS, reason, grace)
    stop.running = set(running)
    sent: dict[int, list[int]] = {rank: [] for rank in range(RANKS)}
    now = 0.0
    for what, rank, seconds in happens:
        now += seconds
        match what:
            case "answer":
                stop.answers(rank)
            case "begin":
                stop.running.add(rank)
            case "leave":
                stop.leaving.add(rank)
            case "end":
                stop.live = [other for other in stop.live if other != rank]
            case "kill":
                stop.ladder.at_once = True
        for signum, ranks in zip((signal.SIGINT, signal.SIGKILL), stop.at(now), strict=True):
            for rank in ranks:
                assert rank in stop.live
                sent[rank].append(signum)
    stop.at(now + grace)
    for rank, signals in sent.items():
        assert signals in ([], [signal.SIGINT], [signal.SIGKILL], [signal.SIGINT, signal.SIGKILL])
        assert rank not in stop.live or rank in stop.ladder.killed, "it must end when the grace is over"


# ------------------------------------------------------------------ ranks that stay
def test_a_kept_rank_is_interrupted_then_freed_and_not_killed() -> None:
    stop = Stop(2)
    stop.ladder = ladder = Ladder(ByUser(), BEGUN, GRACE, SESSION)
    stop.running = set()  # it waits for the others to join the group
    assert stop.at(0) == interrupts(0, 1)
    assert ladder.to_free(BEGUN + 0.49, [0, 1], has_left=False) == []
    assert ladder.to_free(BEGUN + 0.51, [0, 1], has_left=False) == [0, 1]
    assert ladder.to_free(BEGUN + 0.6, [0, 1], has_left=False) == []
    assert ladder.to_free(BEGUN + 1.6, [1], has_left=False) == [1]  # it waits in the next collective
    assert stop.at(GRACE - 0.01) == NOTHING
    assert stop.at(GRACE) == kills(0, 1)


def test_a_kept_rank_in_its_finally_is_freed_once_a_peer_has_left() -> None:
    ladder = Ladder(ByUser(), BEGUN, GRACE, SESSION)
    ladder.due(BEGUN, [0, 1, 2], [0, 1, 2], [])
    ladder.answered = {0, 1}
    assert ladder.to_free(BEGUN + 1, [0, 1, 2], has_left=False) == [2]
    assert ladder.to_free(BEGUN + 1.5, [0, 1], has_left=True) == []
    assert ladder.to_free(BEGUN + 1.9, [0, 1], has_left=True) == []
    assert ladder.to_free(BEGUN + 2.1, [0, 1], has_left=True) == [0, 1]


def test_a_kept_rank_in_its_finally_is_freed_before_it_is_killed() -> None:
    ladder = Ladder(ByUser(), BEGUN, GRACE, SESSION)
    ladder.due(BEGUN, [0, 1], [0, 1], [])
    ladder.answered = {0, 1}
    assert ladder.to_free(BEGUN + GRACE * 0.49, [0, 1], has_left=False) == []
    assert ladder.to_free(BEGUN + GRACE * 0.51, [0, 1], has_left=False) == [0, 1]


def test_a_question_kills_no_rank_and_is_given_up() -> None:
    for policy, freed in ((QUESTION, []), (EXPRESSION, [0])):
        stop = Stop(1)
        stop.ladder = ladder = Ladder(PeerFailed(), BEGUN, 2.5, policy)
        assert stop.at(0) == interrupts(0)
        assert ladder.to_free(BEGUN + 0.11, [0], has_left=False) == freed
        assert stop.at(60) == NOTHING
        assert (ladder.is_given_up(BEGUN + 2.4), ladder.is_given_up(BEGUN + 2.5)) == (False, True)
