"""Printed lines sent to the page: each once, numbered, in fair shares; during a flood the last ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.launch.views import LogLines, Stream
from nblaunch.notebook.log_feed import MAX_LINES, LogFeed

Sent = tuple[int, str, int, list[str], list[str]]


class Logs:
    """A feed, and what ranks print."""

    def __init__(self) -> None:
        self.feed, self.now = LogFeed(), 0.0

    def write(
        self,
        *lines: str,
        rank: int = 0,
        stream: Stream = "out",
        attempt: int = 0,
        open: tuple[str, ...] = (),
        retracted: int = 0,
    ) -> None:
        self.now += 1.0
        self.feed.add(attempt, LogLines(rank, stream, f"rank{rank}.{stream}", lines, open, retracted), self.now)

    def take(self, most: int = 1 << 20) -> list[Sent]:
        """The rank, the stream, the number of the first line, the lines, and the unfinished ones."""
        parts = self.feed.take(most)
        return [
            (part.rank, part.stream, part.first, [line.text for line in part.lines], [*part.open]) for part in parts
        ]


@pytest.fixture
def logs() -> Logs:
    return Logs()


def test_a_bar_is_sent_whenever_it_moves_and_is_a_line_at_the_end(logs: Logs) -> None:
    logs.write("begun", open=(" 10%",))
    assert logs.take() == [(0, "out", 0, ["begun"], [" 10%"])]
    assert logs.take() == []
    logs.write(open=(" 20%",))
    assert logs.take() == [(0, "out", 1, [], [" 20%"])]
    logs.write(" 20%")
    assert logs.take() == [(0, "out", 1, [" 20%"], [])]
    assert not logs.feed.has_more


def test_lines_that_are_taken_back_are_sent_again(logs: Logs) -> None:
    logs.write("above", "outer 0", "inner 0")
    logs.take()
    logs.write(open=("outer 1", "inner 0"), retracted=2)
    assert logs.take() == [(0, "out", 1, [], ["outer 1", "inner 0"])]
    logs.write("outer 1", "inner 0")
    assert logs.take() == [(0, "out", 1, ["outer 1", "inner 0"], [])]


def test_a_noisy_rank_leaves_the_others_their_share(logs: Logs) -> None:
    logs.write(*["noise"] * 1000, rank=0)
    logs.write("signal", rank=1)
    noisy, other = logs.take(1000)
    assert other == (1, "out", 0, ["signal"], [])
    assert len(noisy[3]) < 100


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.text("ab", max_size=9)))), st.integers(1, 500))
def test_every_line_is_sent_exactly_once_whatever_the_budget(writes: list[tuple[int, list[str]]], most: int) -> None:
    logs = Logs()
    written: dict[int, list[str]] = {}
    got: dict[int, list[str]] = {}

    def take() -> None:
        for rank, _, first, lines, _ in logs.take(most):
            assert first == len(got.setdefault(rank, []))
            got[rank] += lines

    for rank, lines in writes:
        logs.write(*lines, rank=rank)
        written.setdefault(rank, []).extend(lines)
        take()
    while logs.feed.has_more:
        take()
    assert got == {rank: lines for rank, lines in written.items() if lines or rank in got}


def test_of_a_flood_the_last_lines_are_sent(logs: Logs) -> None:
    lines = [f"line {number}" for number in range(3 * MAX_LINES)]
    logs.write(*lines)
    assert logs.take() == [(0, "out", 2 * MAX_LINES, lines[-MAX_LINES:], [])]
    logs.feed.rewind({(0, 0, "out"): 1})
    assert logs.take() == [(0, "out", 2 * MAX_LINES, lines[-MAX_LINES:], [])]


def test_a_page_is_never_far_behind_many_noisy_ranks(logs: Logs) -> None:
    lines = ["x" * 100 + str(number) for number in range(MAX_LINES)]
    for rank in range(4):
        logs.write(*lines, rank=rank)
    assert [sent[:3] for sent in logs.take()] == [(rank, "out", MAX_LINES - 2000) for rank in range(4)]
    assert logs.feed.waiting < 1 << 20


def test_after_a_rewind_a_page_gets_what_it_lacks_of_a_log(logs: Logs) -> None:
    logs.write("one", "two")
    logs.write("other", rank=1, open=("bar",))
    logs.take()
    logs.feed.rewind({(0, 0, "out"): 1})
    assert logs.take() == [(0, "out", 1, ["two"], []), (1, "out", 0, ["other"], ["bar"])]
    logs.feed.rewind({(0, 0, "out"): 99, (0, 1, "out"): 1})
    assert logs.take() == [(1, "out", 1, [], ["bar"])]
    logs.write(rank=1)  # the bar is gone, which no message has said
    logs.feed.rewind({(0, 0, "out"): 99, (0, 1, "out"): 1})
    assert logs.take() == [(1, "out", 1, [], [])]


def test_the_tail_merges_both_streams_of_the_last_attempt_by_time(logs: Logs) -> None:
    logs.write("of the attempt before")
    for number in range(30):
        logs.write(f"out {number}", attempt=1)
        logs.write(f"err {number}", stream="err", attempt=1, open=("bar",) if number == 29 else ())
    (tail,) = logs.feed.tails(5)
    assert tail.lines == ("out 28", "err 28", "out 29", "err 29", "bar")
    assert (tail.more, tail.path) == (True, "rank0.out")
    (tail,) = logs.feed.tails(99)
    assert (len(tail.lines), tail.more) == (61, False)
