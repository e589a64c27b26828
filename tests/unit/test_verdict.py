"""Verdicts: the first primary failure, and errors that only follow from it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.launch.group import RankEnd
from nblaunch.launch.stopping import ByUser, Ladder, PeerFailed, Reason, TimedOut
from nblaunch.launch.verdict import Verdict, judge
from nblaunch.wire.messages import Done, Failed, RankExited

Kind = Literal["exception", "exit", "interrupt", "result"]


def seconds(at: float) -> int:
    return int(at * 1e9)


def exited(status: int, at: float) -> RankExited:
    return RankExited(0, status, seconds(at))


def failed(at: float, kind: Kind = "exception", collective: str = "", status: int = 0) -> Failed:
    return Failed(0, 1, seconds(at), kind, "ValueError", "text", "traceback", collective=collective, status=status)


# What may become of a rank; its number is given later.
def returned(at: float = 1.0, status: int = 0) -> RankEnd:
    return RankEnd(0, Done(0, 1, seconds(at)), None, exited(status, at + 0.1))


def raised(at: float = 1.0, kind: Kind = "exception", **more: Any) -> RankEnd:
    return RankEnd(0, None, failed(at, kind, **more), exited(1, at + 0.1))


def echoed(at: float = 1.0, collective: str = "all_reduce") -> RankEnd:
    return raised(at, collective=collective)


def died(at: float = 1.0, status: int = -signal.SIGKILL) -> RankEnd:
    return RankEnd(0, None, None, exited(status, at))


def vanished() -> RankEnd:
    return RankEnd(0, None, None, None)


def ranks(*ends: RankEnd) -> list[RankEnd]:
    return [replace(end, rank=rank) for rank, end in enumerate(ends)]


BY_USER = ByUser()


def stopping(
    at: float, reason: Reason = BY_USER, interrupted: Sequence[int] = (0, 1), killed: Sequence[int] = ()
) -> Ladder:
    return Ladder(reason, at, 30.0, interrupted=set(interrupted), killed=set(killed))


def test_ranks_that_an_interrupt_made_return_were_stopped() -> None:
    ends = ranks(
        *(replace(end, done=replace(end.done, was_stopped=True)) for end in (returned(), returned()) if end.done)
    )
    assert judge(ends, stopping(0.5), lost=False).state == "stopped"
    assert judge(ranks(returned(), returned()), stopping(0.5), lost=False).state == "finished"


def headline(verdict: Verdict) -> tuple[str, str, int]:
    cause = verdict.cause
    return verdict.state, "" if cause is None else cause.kind, -1 if cause is None else cause.rank


@pytest.mark.parametrize(
    ("ends", "ladder", "expected"),
    [
        pytest.param([returned(), returned()], None, ("finished", "", -1), id="all return"),
        pytest.param([returned(), raised()], None, ("failed", "exception", 1), id="one raises"),
        pytest.param([raised(2.0), raised(1.0)], None, ("failed", "exception", 1), id="the first by time counts"),
        pytest.param([echoed(3.0), echoed(2.0)], None, ("failed", "exception", 1), id="echoes alone: the first"),
        pytest.param([returned(), died()], None, ("failed", "died", 1), id="killed by a signal"),
        pytest.param([returned(), died(status=0)], None, ("failed", "died", 1), id="left early with status 0"),
        pytest.param([raised(kind="exit"), returned()], None, ("failed", "exit", 0), id="sys.exit"),
        pytest.param([raised(kind="result"), returned()], None, ("failed", "result", 0), id="result cannot travel"),
        pytest.param([returned(), returned(status=3)], None, ("finished", "", -1), id="done, then status 3"),
        pytest.param([returned(), returned(status=-11)], None, ("finished", "", -1), id="done, then SIGSEGV"),
        pytest.param([raised(2.0), returned(1.0, -11)], None, ("failed", "exception", 0), id="raised after a crash"),
        pytest.param(
            [echoed(2.0), returned(1.0, -11)], None, ("failed", "collective", 0), id="waits for a crashed rank"
        ),
        pytest.param([returned(1.0), echoed(2.0)], None, ("failed", "collective", 1), id="waits for a finished rank"),
        pytest.param([echoed(1.0), returned(2.0)], None, ("failed", "exception", 0), id="failed before the other left"),
        pytest.param([raised(kind="interrupt"), returned()], None, ("failed", "interrupt", 0), id="SIGINT of others"),
        pytest.param(
            [raised(5.1, "interrupt"), raised(5.2, "interrupt")], stopping(5.0), ("stopped", "", -1), id="stopped"
        ),
        pytest.param([died(8.0), died(8.0)], stopping(5.0, killed=(0, 1)), ("stopped", "", -1), id="killed by us"),
        pytest.param(
            [raised(5.1, "interrupt"), returned(4.0)], stopping(5.0), ("stopped", "", -1), id="one had returned"
        ),
        pytest.param([returned(5.1), returned(5.2)], stopping(5.0), ("finished", "", -1), id="stopped too late"),
        pytest.param(
            [returned(4.0, -9), returned(4.0)], stopping(5.0, killed=(0,)), ("finished", "", -1), id="would not leave"
        ),
        pytest.param(
            [returned(4.0), returned(5.2)], stopping(5.0, TimedOut()), ("stopped", "", -1), id="returned out of time"
        ),
        pytest.param(
            [returned(4.0), returned(4.9)], stopping(5.0, TimedOut()), ("finished", "", -1), id="returned just in time"
        ),
        pytest.param(
            [raised(4.9), died(5.4)],
            stopping(5.0, PeerFailed(), interrupted=(1,), killed=(1,)),
            ("failed", "exception", 0),
            id="the survivors of a failure are ours",
        ),
        pytest.param(
            [echoed(4.9), died(5.4)],
            stopping(5.0, PeerFailed(), interrupted=(1,), killed=(1,)),
            ("failed", "exception", 0),
            id="an echo that nothing explains",
        ),
        pytest.param(
            [echoed(4.8), died(5.4, -signal.SIGBUS)],
            stopping(5.0, PeerFailed(), interrupted=(1,)),
            ("failed", "died", 1),
            id="a death that is seen after its echo",
        ),
        pytest.param(
            [raised(4.9), raised(5.1, "interrupt")],
            stopping(5.0),
            ("failed", "exception", 0),
            id="a failure before the stop",
        ),
        pytest.param(
            [died(4.9), raised(5.1, "interrupt")], stopping(5.0), ("failed", "died", 0), id="a death before the stop"
        ),
        pytest.param(
            [raised(4.99, "interrupt"), raised(5.1, "interrupt")],
            stopping(5.0),
            ("stopped", "", -1),
            id="an editor's interrupt came before ours",
        ),
        pytest.param(
            [raised(4.98, "interrupt"), echoed(4.99)],
            stopping(5.0, interrupted=()),
            ("stopped", "", -1),
            id="an editor's interrupt, and its echo",
        ),
        pytest.param(
            [raised(4.9, "interrupt"), raised(5.1, "interrupt")],
            stopping(5.0, PeerFailed(), interrupted=(1,)),
            ("failed", "interrupt", 0),
            id="another's interrupt of one rank",
        ),
    ],
)
def test_the_ending_is_judged(ends: list[RankEnd], ladder: Ladder | None, expected: tuple[str, str, int]) -> None:
    assert headline(judge(ranks(*ends), ladder, lost=False)) == expected


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        pytest.param([vanished(), vanished()], ("failed", "lost", -1), id="the reaper died, and all with it"),
        pytest.param([returned(), vanished()], ("failed", "lost", -1), id="one had returned"),
        pytest.param([raised(), vanished()], ("failed", "exception", 0), id="one had failed before"),
        pytest.param([echoed(), vanished()], ("failed", "lost", -1), id="an echo of that"),
        pytest.param([returned(), returned()], ("finished", "", -1), id="all had returned and left"),
    ],
)
def test_the_loss_of_the_reaper_is_the_cause_where_nothing_else_is(
    ends: list[RankEnd], expected: tuple[str, str, int]
) -> None:
    assert headline(judge(ranks(*ends), None, lost=True)) == expected


@pytest.mark.parametrize(
    ("ends", "ladder", "crashed"),
    [
        pytest.param([returned(), returned()], None, [], id="all left well"),
        pytest.param([returned(), returned(status=3), returned(status=-11)], None, [1, 2], id="two crashed"),
        pytest.param([returned(), replace(returned(), exited=None)], None, [1], id="lost with its reaper"),
        pytest.param([returned(4.0, -9), returned(4.0)], stopping(4.0, killed=(0,)), [], id="killed by us"),
    ],
)
def test_a_crash_after_all_returned_is_reported_with_the_result(
    ends: list[RankEnd], ladder: Ladder | None, crashed: list[int]
) -> None:
    verdict = judge(ranks(*ends), ladder, lost=False)
    assert verdict.state == "finished"
    assert [end.rank for end in verdict.crashed] == crashed


PRIMARIES = [raised, died, lambda at: raised(at, "exit"), lambda at: raised(at, "result"), lambda at: died(at, 0)]


@given(
    st.sampled_from(PRIMARIES),
    st.lists(st.sampled_from([echoed, returned]), min_size=1, max_size=4),
    st.data(),
)
@settings(derandomize=True, deadline=None)
def test_a_primary_failure_wins_in_any_order_of_ranks(primary: Any, others: list[Any], data: st.DataObject) -> None:
    times = data.draw(st.permutations([1.0 + n for n in range(len(others) + 1)]))
    ends = [primary(times[0]), *(other(at) for other, at in zip(others, times[1:], strict=True))]
    order = data.draw(st.permutations(range(len(ends))))
    verdict = judge(ranks(*(ends[i] for i in order)), None, lost=False)
    assert headline(verdict)[0] == "failed"
    assert headline(verdict)[2] == order.index(0)


@given(
    st.lists(
        st.sampled_from([lambda at: raised(at, "interrupt"), raised, died, echoed, returned]), min_size=2, max_size=4
    ),
    st.lists(st.floats(5.0, 9.0), min_size=4, max_size=4),
    st.sampled_from([ByUser(), TimedOut()]),
)
@settings(derandomize=True, deadline=None)
def test_effects_of_our_own_signals_are_never_the_headline(
    kinds: list[Any], times: list[float], reason: Reason
) -> None:
    ends = ranks(*(kind(at) for kind, at in zip(kinds, times, strict=False)))
    everyone = range(len(ends))
    verdict = judge(ends, stopping(5.0, reason, interrupted=everyone), lost=False)
    assert verdict.cause is None
    returned_in_time = all(end.done for end in ends) and reason != TimedOut()
    assert verdict.state == ("finished" if returned_in_time else "stopped")
