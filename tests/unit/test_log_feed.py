"""Printed lines sent to the page: each once, numbered, in fair shares; during a flood the last ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.engines.rank_files import LogFile
from nblaunch.launch.views import Stream
from nblaunch.notebook.log_feed import MAX_LINES, LogFeed
from nblaunch.wire.launch_files import rank_file

Sent = tuple[int, str, int, list[str], list[str]]


class Logs:
    """Growing files, and the feed that follows them."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.feed = directory, LogFeed()
        self.now = 0.0

    def write(self, data: bytes, rank: int = 0, stream: Stream = "out", attempt: int = 0, after: float = 1.0) -> None:
        self.now += after
        with rank_file(self.directory, rank, stream).open("ab") as file:
            file.write(data)
            size = file.tell()
        self.feed.grew(attempt, rank, stream, self.log(rank, stream), size, self.now)

    def log(self, rank: int, stream: Stream) -> LogFile:
        return LogFile(rank_file(self.directory, rank, stream))

    def take(self, most: int = 1 << 20, *, is_over: bool = False) -> list[Sent]:
        """The rank, the stream, the number of the first line, the lines, and the unfinished ones."""
        parts = self.feed.take(most, is_over=is_over)
        return [
            (part.rank, part.stream, part.first, [line.text for line in part.lines], [*part.open]) for part in parts
        ]


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def test_output_is_sent_once(logs: Logs) -> None:
    logs.write(b"a\n", rank=1)
    logs.write(b"b\n", rank=0, stream="err")
    logs.write(b"c\n", rank=1)
    assert logs.take() == [(1, "out", 0, ["a", "c"], []), (0, "err", 0, ["b"], [])]
    assert logs.take() == []
    assert not logs.feed.has_more
    assert logs.feed.waiting == 0
    logs.write(b"d\n", rank=1)
    assert logs.take() == [(1, "out", 2, ["d"], [])]


def test_very_many_short_lines_are_all_sent(logs: Logs) -> None:
    logs.write(b"".join(b"%d\n" % number for number in range(10_000)))
    sent: list[str] = []
    while parts := logs.take(25_600):
        ((_, _, first, lines, _),) = parts
        assert first == len(sent)
        sent += lines
    assert sent == [str(number) for number in range(10_000)]


def test_the_last_lines_of_a_flood_take_nothing_from_the_page(logs: Logs) -> None:
    logs.write(b"".join(b"%d\n" % number for number in range(20_000)))
    (tail,) = logs.feed.tails(3)
    assert (tail.lines, tail.more) == (("19997", "19998", "19999"), True)
    ((_, _, first, lines, _),) = logs.take(1000)
    assert (first, lines[:2]) == (0, ["0", "1"])


def test_each_line_has_the_time_at_which_it_was_printed(logs: Logs) -> None:
    for line in (b"one\n", b"two\n", b"three\n"):
        logs.write(line)
    (part,) = logs.feed.take(1000)
    assert part.lines == [(1.0, "one"), (2.0, "two"), (3.0, "three")]


def test_lines_of_nearly_the_same_time_have_one(logs: Logs) -> None:
    for _ in range(5):
        logs.write(b"tick\n", after=0.02)
    (part,) = logs.feed.take(1000)
    assert {line.time for line in part.lines} == {0.02}


def test_a_bar_is_sent_whenever_it_moves_and_is_a_line_at_the_end(logs: Logs) -> None:
    logs.write(b"begun\n 10%")
    assert logs.take() == [(0, "out", 0, ["begun"], [" 10%"])]
    assert logs.take() == []
    logs.write(b"\r 20%")
    assert logs.take() == [(0, "out", 1, [], [" 20%"])]
    assert logs.take(is_over=True) == [(0, "out", 1, [" 20%"], [])]
    assert not logs.feed.has_more


def test_nested_bars_take_lines_back(logs: Logs) -> None:
    logs.write(b"outer 0\ninner 0\n")
    assert logs.take() == [(0, "out", 0, ["outer 0", "inner 0"], [])]
    logs.write(b"\x1b[2A\router 1")
    assert logs.take() == [(0, "out", 0, [], ["outer 1", "inner 0"])]
    logs.write(b"\n\n")
    logs.take()
    assert logs.take(is_over=True) == [(0, "out", 0, ["outer 1", "inner 0"], [])]


def test_another_attempt_ends_the_lines_of_the_one_before(logs: Logs, tmp_path: Path) -> None:
    logs.write(b"bar")
    logs.take()
    (tmp_path / "again").mkdir()
    again = Logs(tmp_path / "again")
    again.feed = logs.feed
    again.write(b"second\n", attempt=1)
    assert again.take() == [(0, "out", 0, ["bar"], []), (0, "out", 0, ["second"], [])]
    assert again.feed.tails(9)[0].lines == ("second",)


def test_a_noisy_rank_leaves_the_others_their_share(logs: Logs) -> None:
    logs.write(b"noise\n" * 1000, rank=0)
    logs.write(b"signal\n", rank=1)
    noisy, other = logs.take(1000)
    assert other == (1, "out", 0, ["signal"], [])
    assert len(noisy[3]) < 100


@given(st.lists(st.tuples(st.integers(0, 2), st.text("ab\n", min_size=1)), max_size=30), st.integers(1, 500))
def test_every_line_is_sent_exactly_once_whatever_the_budget(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, str]], most: int
) -> None:
    logs = Logs(tmp_path_factory.mktemp("logs"))
    whole: dict[int, str] = {}
    got: dict[int, list[str]] = {}

    def take(*, is_over: bool = False) -> None:
        for rank, _, first, lines, _ in logs.take(most, is_over=is_over):
            assert first == len(got.setdefault(rank, []))
            got[rank] += lines

    for rank, text in writes:
        logs.write(text.encode(), rank=rank, after=0.1)
        whole[rank] = whole.get(rank, "") + text
        take()
    for is_over in (False, True):
        take(is_over=is_over)
        while logs.feed.has_more:
            take(is_over=is_over)
    assert {rank: lines for rank, lines in got.items() if lines} == {
        rank: text.split("\n") if not text.endswith("\n") else text.split("\n")[:-1] for rank, text in whole.items()
    }


def test_of_a_flood_the_last_lines_are_sent(logs: Logs) -> None:
    logs.write(b"".join(b"line %d\n" % number for number in range(100_000)))
    sent = [line for _ in range(3) for _, _, _, lines, _ in logs.take(1 << 22) for line in lines]
    assert sent[0].endswith(" bytes not shown …")
    assert sent[1:] == [f"line {number}" for number in range(98_001, 100_000)]


def test_a_live_panel_is_never_far_behind_however_long_the_lines(logs: Logs) -> None:
    logs.write((b"x" * 9_999 + b"\n") * 1000)
    assert logs.feed.waiting == 10_000_000
    (sent,) = logs.take(1000)
    skipped = int(sent[3][0].split()[1].replace(",", ""))
    assert skipped >= 10_000_000 - (2 << 20)
    assert skipped % 10_000 == 0  # up to a line's beginning


def test_the_lines_of_many_noisy_ranks_are_bounded(logs: Logs) -> None:
    for rank in range(8):
        logs.write(b"".join(b"line %05d %s\n" % (number, b"." * 80) for number in range(20_000)), rank=rank)
    got: dict[int, list[str]] = {}
    while logs.feed.has_more:
        for rank, _, _, lines, _ in logs.take(1 << 16, is_over=True):
            got.setdefault(rank, []).extend(lines)
    for rank in range(8):
        assert [line[:10] for line in got[rank][-1999:]] == [f"line {n:05d}" for n in range(18_001, 20_000)]


def test_a_log_that_the_user_cuts_goes_on_from_its_beginning(logs: Logs) -> None:
    logs.write(b"x" * 1000 + b"\n")
    logs.take()
    rank_file(logs.directory, 0, "out").write_bytes(b"")
    logs.write(b"new\n")
    assert logs.take() == [(0, "out", 1, ["new"], [])]
    assert not logs.feed.has_more


def test_after_a_rewind_a_page_gets_what_it_lacks_of_a_log(logs: Logs) -> None:
    logs.write(b"one\ntwo\n")
    logs.write(b"other\nbar", rank=1)
    logs.take()
    logs.feed.rewind({(0, 0, "out"): 1})
    assert logs.take() == [(0, "out", 1, ["two"], []), (1, "out", 0, ["other"], ["bar"])]
    logs.feed.rewind({(0, 0, "out"): 99, (0, 1, "out"): 1})
    assert logs.take() == [(1, "out", 1, [], ["bar"])]


def test_after_a_rewind_far_back_only_the_last_lines_come(logs: Logs) -> None:
    lines = [f"line {number}" for number in range(3 * MAX_LINES)]
    for line in lines:
        logs.write(f"{line}\n".encode(), after=0.01)
    while logs.feed.has_more:
        logs.take()
    logs.feed.rewind({(0, 0, "out"): 1})
    (sent,) = logs.take()
    assert sent == (0, "out", 2 * MAX_LINES, lines[-MAX_LINES:], [])


def test_a_log_that_has_gone_is_left_out(logs: Logs) -> None:
    logs.write(b"line\n")
    rank_file(logs.directory, 0, "out").unlink()
    assert all(not lines for *_, lines, _ in logs.take())
    assert not logs.feed.has_more


def test_the_tail_merges_both_streams_by_time(logs: Logs) -> None:
    for number in range(30):
        logs.write(b"out %d\n" % number)
        logs.write(b"err %d\n" % number, stream="err")
    (tail,) = logs.feed.tails(4)
    assert tail.lines == ("out 28", "err 28", "out 29", "err 29")
    assert tail.more


def test_the_tail_is_as_a_terminal_would_show_it(logs: Logs) -> None:
    logs.write(b"0%\r50%\r100%\ndone")
    (tail,) = logs.feed.tails(20)
    assert tail.lines == ("100%", "done")
    assert not tail.more
    assert logs.take() == [(0, "out", 0, ["100%"], ["done"])]  # the page gets it, too


def test_marks_of_a_log_that_is_not_read_stay_bounded(logs: Logs) -> None:
    for number in range(20_000):
        logs.feed.grew(0, 0, "out", logs.log(0, "out"), number + 1, float(number))
    assert len(logs.feed._logs[0, 0, "out"]._times) <= 4096
