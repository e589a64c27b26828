"""Log bytes sent to the page: each once, in order, in fair shares; during a flood the last lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.engines.rank_files import LogFile
from nblaunch.launch.views.events import Stream
from nblaunch.notebook.log_feed import MAX_LINES, LogFeed
from nblaunch.wire.launch_files import rank_file


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

    def take(self, most: int = 1 << 20) -> list[tuple[int, str, int, bytes]]:
        return [(chunk.rank, chunk.stream, chunk.offset, chunk.data) for chunk in self.feed.take(most)]


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def test_output_is_sent_once_in_order_of_time(logs: Logs) -> None:
    logs.write(b"a\n", rank=1)
    logs.write(b"b\n", rank=0, stream="err")
    logs.write(b"c\n", rank=1)
    assert logs.take() == [(1, "out", 0, b"a\n"), (0, "err", 0, b"b\n"), (1, "out", 2, b"c\n")]
    assert logs.take() == []
    assert logs.feed.waiting == 0


def test_each_part_has_the_time_at_which_it_was_printed(logs: Logs) -> None:
    for line in (b"one\n", b"two\n", b"three\n"):
        logs.write(line)
    assert [(chunk.time, chunk.data) for chunk in logs.feed.take(100)] == [
        (1.0, b"one\n"),
        (2.0, b"two\n"),
        (3.0, b"three\n"),
    ]


def test_parts_of_nearly_the_same_time_are_one(logs: Logs) -> None:
    for _ in range(5):
        logs.write(b"tick\n", after=0.02)
    assert [len(chunk.data) for chunk in logs.feed.take(100)] == [25]


def test_a_noisy_rank_leaves_the_others_their_share(logs: Logs) -> None:
    logs.write(b"noise\n" * 10_000, rank=0)
    logs.write(b"signal\n", rank=1)
    taken = logs.take(1000)
    assert (1, "out", 0, b"signal\n") in taken
    assert sum(len(data) for _, _, _, data in taken) == 1000


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=300)), max_size=30), st.integers(1, 500))
def test_every_byte_is_sent_exactly_once_whatever_the_budget(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, bytes]], most: int
) -> None:
    logs = Logs(tmp_path_factory.mktemp("logs"))
    whole: dict[int, bytes] = {}
    got: dict[int, bytes] = {}

    def take() -> None:
        for rank, _, offset, data in logs.take(most):
            assert offset == len(got.get(rank, b""))
            got[rank] = got.get(rank, b"") + data

    for rank, data in writes:
        logs.write(data, rank=rank, after=0.1)
        whole[rank] = whole.get(rank, b"") + data
        take()
    while logs.feed.waiting:
        take()
    assert got == whole


def test_of_a_flood_the_last_ten_thousand_lines_are_sent(logs: Logs) -> None:
    logs.write(b"".join(b"line %d\n" % number for number in range(100_000)))
    first = logs.take(1 << 22)[0]
    assert first[3].startswith(b"line 90000\n")
    assert first[3].count(b"\n") == MAX_LINES
    assert first[2] > 0  # its offset shows the page what is missing


def test_a_live_panel_is_never_far_behind_however_long_the_lines(logs: Logs) -> None:
    logs.write((b"x" * 9_999 + b"\n") * 1000)
    assert logs.feed.waiting == 10_000_000
    (first,) = logs.take(1000)
    assert first[2] >= 10_000_000 - (2 << 20)
    assert first[2] % 10_000 == 0  # at a line's beginning


def test_lines_omitted_from_the_tail_follow_after_the_launch(logs: Logs) -> None:
    lines = [b"rank %d line %05d %s\n" % (0, number, b"." * 80) for number in range(20_000)]
    for rank in range(8):
        logs.write(b"".join(lines), rank=rank)
    parts = [chunk for chunk in logs.feed.take(1 << 20) if chunk.rank == 3]
    assert parts[0].offset > len(lines[0]) * 10_000  # behind by more than a live panel may be
    while logs.feed.waiting:
        parts += [chunk for chunk in logs.feed.take(1 << 20, is_over=True) if chunk.rank == 3]
    while logs.feed.has_more:
        filled = logs.feed.fill(50_000)
        assert sum(len(chunk.data) for chunk in filled) <= 50_000
        assert not filled or filled[0].data.startswith(b"rank 0 line ")
        parts += [chunk for chunk in filled if chunk.rank == 3]
    parts.sort(key=lambda chunk: chunk.offset)
    assert b"".join(chunk.data for chunk in parts) == b"".join(lines[-10_000:])


def test_a_log_that_the_user_cuts_goes_on_from_its_beginning(logs: Logs) -> None:
    logs.write(b"x" * 1000)
    logs.take()
    rank_file(logs.directory, 0, "out").write_bytes(b"")
    logs.write(b"new\n")
    assert logs.take() == [(0, "out", 0, b"new\n")]
    assert logs.feed.waiting == 0
    assert not logs.feed.has_more


@pytest.mark.parametrize("last", [b"y" * 70_000 + b"\n", b"50%\r" * 25_000])
def test_an_earlier_part_that_ends_in_a_huge_line_comes_too(logs: Logs, last: bytes) -> None:
    logs.write(b"first\n" + last)
    end, got = 6 + len(last), b""
    while end > 0:
        part = logs.feed.older(0, 0, "out", 0, end)
        assert part
        data = b"".join(chunk.data for chunk in part)
        assert part[0].offset + len(data) == end
        end, got = part[0].offset, data + got
    assert got == b"first\n" + last


def test_after_a_rewind_a_page_gets_what_it_lacks_of_a_log(logs: Logs) -> None:
    logs.write(b"one\ntwo\n")
    logs.write(b"other\n", rank=1)
    logs.take()
    logs.feed.rewind({(0, 0, "out"): 2})
    assert logs.take() == [(0, "out", 2, b"e\ntwo\n"), (1, "out", 0, b"other\n")]
    logs.feed.rewind({(0, 0, "out"): 99, (0, 1, "out"): 6})
    assert logs.take() == []


def test_after_a_rewind_far_back_only_the_last_lines_come(logs: Logs) -> None:
    lines = [b"line %d\n" % number for number in range(3 * MAX_LINES)]
    for line in (b"".join(lines[: 2 * MAX_LINES]), b"".join(lines[2 * MAX_LINES :])):
        logs.write(line)
        while logs.feed.waiting:
            logs.feed.take(1 << 20)
    logs.feed.rewind({(0, 0, "out"): len(lines[0])})
    assert not logs.feed.fill(1 << 20)
    (part,) = logs.take(1 << 20)
    assert part[3] == b"".join(lines[-MAX_LINES:])


def test_an_earlier_part_has_whole_lines_up_to_the_requested_end(logs: Logs) -> None:
    logs.write(b"".join(b"line %06d\n" % number for number in range(50_000)))
    end = 12 * 40_000
    chunks = logs.feed.older(0, 0, "out", 0, end)
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[0].offset + len(data) == end
    assert data.startswith(b"line ")
    assert data.endswith(b"line 039999\n")
    assert 60_000 < len(data) <= 64 << 10


@pytest.mark.parametrize(("attempt", "rank", "end"), [(0, 9, 10), (1, 0, 10), (0, 0, -5)])
def test_an_earlier_part_of_no_log_is_nothing(logs: Logs, attempt: int, rank: int, end: int) -> None:
    logs.write(b"line\n")
    assert logs.feed.older(attempt, rank, "out", 0, end) == []


def test_a_log_that_has_gone_is_left_out(logs: Logs) -> None:
    logs.write(b"line\n")
    rank_file(logs.directory, 0, "out").unlink()
    assert logs.take() == []
    assert logs.feed.waiting == 0


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


def test_marks_of_a_long_run_stay_bounded_and_keep_the_latest(logs: Logs) -> None:
    for number in range(20_000):
        logs.feed.grew(0, 0, "out", logs.log(0, "out"), number + 1, float(number))
    log = logs.feed._logs[0, 0, "out"]
    assert len(log.sizes) == len(log.times) <= 4096
    assert log.sizes[-1] == 20_000
    assert log.sizes == sorted(log.sizes)
