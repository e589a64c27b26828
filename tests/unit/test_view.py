"""Views: text below Jupyter's limits, and the frontend that chooses the view."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.engines.local import LocalEngine
from nblaunch.errors import ArgumentError
from nblaunch.launch.frontend import Frontend, view_choice
from nblaunch.launch.machines import with_usable_method
from nblaunch.launch.options import Options
from nblaunch.launch.output.terminal_lines import LineAssembler
from nblaunch.launch.plan import make_plan
from nblaunch.launch.text_view import STARTING, TextView, is_terminal, plain_writer
from nblaunch.launch.views import (
    Countdown,
    Ended,
    Event,
    LaunchInfo,
    LogLines,
    Logs,
    Note,
    NullView,
    Outcome,
    Preparing,
    RanksChanged,
    RankStatus,
    Reports,
    ShieldedView,
    Started,
    Stuck,
    Tick,
    View,
    preparing,
)
from nblaunch.machine.inventory import Machine
from tests.unit.fake_engine import FakeEngine, FakeWorkers

Stream = Literal["out", "err"]
INFO = LaunchInfo("abc", "train", 2, "cpu", Path("/logs"))
FINISHED = Outcome("finished", 3.21, "")


def lines_of(rank: int, stream: Stream, *lines: str, open: Sequence[str] = ()) -> LogLines:
    return LogLines(rank, stream, f"/logs/rank{rank}.{stream}", lines, open)


class Cell:
    """A cell's output: every message with its time, and what a reader sees."""

    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        self.messages: list[tuple[float, Stream, str]] = []
        self.assemblers: dict[tuple[int, Stream], LineAssembler] = {}
        self.view = TextView(self._write, clock=lambda: self.now, **options)
        self.view.on(Started(INFO))
        self.view.on(RanksChanged([RankStatus(0, "running", 7)]))

    def _write(self, text: str, stream: Stream) -> None:
        assert text
        self.messages.append((self.now, stream, text))

    def prints(self, text: str | bytes, rank: int = 0, stream: Stream = "out") -> None:
        data = text if isinstance(text, bytes) else text.encode()
        assembler = self.assemblers.setdefault((rank, stream), LineAssembler())
        lines = assembler.feed(data)
        self.view.on(Logs([lines_of(rank, stream, *lines, open=assembler.partials)]))

    def ends(self, outcome: Outcome = FINISHED) -> None:
        ends = [lines_of(*key, *assembler.finish()) for key, assembler in self.assemblers.items()]
        self.view.on(Logs([end for end in ends if end.lines]))
        self.view.on(Ended(outcome))

    def reports(self, rank: int = 0, *, at: float = 0.0, step: int | None = None, **metrics: float) -> None:
        self.view.on(Reports(rank, [{"time": at, "step": step, "metrics": metrics}]))

    def passes(self, seconds: float = 0.4) -> None:
        self.now += seconds
        self.view.on(Tick())

    def text(self, stream: Stream = "out") -> str:
        return "".join(text for _, at, text in self.messages if at == stream)

    def screen(self, stream: Stream = "out") -> list[str]:
        """The lines that a reader sees now, the status line too where there is one."""
        rows = []
        for row in self.text(stream).split("\n"):
            shown = ""
            for part in row.split("\r"):
                shown = part + shown[len(part) :]
            rows.append(shown.rstrip())
        return rows if rows[-1] else rows[:-1]


@pytest.fixture
def cell() -> Cell:
    return Cell()


# ------------------------------------------------------------------ lines
def test_the_first_output_is_shown_at_once_with_its_rank(cell: Cell) -> None:
    cell.prints("hello\nworld\n", rank=1)
    assert cell.messages == [(100.0, "out", "[rank 1] hello\n[rank 1] world\n")]


def test_later_lines_are_gathered_and_shown_in_order(cell: Cell) -> None:
    cell.prints("a\n")
    for rank in (1, 0, 1):
        cell.now += 0.05
        cell.prints(f"from {rank}\n", rank=rank)
    assert len(cell.messages) == 1
    cell.passes(0.25)
    assert cell.messages[1:] == [(cell.now, "out", "[rank 1] from 1\n[rank 0] from 0\n[rank 1] from 1\n")]


def test_text_of_ranks_is_never_interpreted(cell: Cell) -> None:
    cell.prints("<b>{x} %s [rank 9] \x1b]0;title\x07\x1b[2J \x1b[31mred\n")
    cell.view.on(Reports(0, [{"progress": "a\r\nb\x1b[2J", "done": 1, "total": 2, "seconds": 0}]))
    cell.passes()
    assert cell.screen() == [
        "[rank 0] <b>{x} %s [rank 9]  \x1b[31mred\x1b[0m",
        "[rank 0] a b [2J: 1/2 50%",
    ]


def test_why_ranks_wait_is_shown_once(cell: Cell) -> None:
    cell.view.on(Stuck(("Waiting for 10 s: rank 0 waits", "rank 1 runs"), (1,)))
    cell.view.on(Stuck())
    cell.passes()
    assert cell.screen() == ["nblaunch: Waiting for 10 s: rank 0 waits", "nblaunch: rank 1 runs"]


# ------------------------------------------------------------------ floods


def test_a_flood_of_one_rank_does_not_hide_another(cell: Cell) -> None:
    flood = lines_of(0, "out", *["noise"] * 100_000)
    cell.view.on(Logs([flood, lines_of(1, "out", "signal"), flood, lines_of(1, "err", "trouble")]))
    assert "[rank 1] signal\n" in cell.text()
    assert cell.text("err") == "[rank 1] trouble\n"
    assert cell.text().count("omitted; see") == 1


def test_after_two_megabytes_output_goes_to_the_logs_alone(cell: Cell) -> None:
    while len(cell.text()) < 2_000_000:
        cell.prints(b"z\n" * 20_000)
        cell.now += 0.4
    written = len(cell.text())
    cell.prints("late\n")
    cell.passes()
    cell.view.on(Note("restarting"))
    cell.view.on(Ended(FINISHED))
    assert cell.text()[written:] == (
        "nblaunch: 2 MB shown; further output goes only to the logs in /logs\n"
        "nblaunch: restarting\nnblaunch: train finished after 3.2 s\n"
    )


_STEPS = st.lists(
    st.tuples(
        st.floats(0, 0.3),
        st.integers(0, 2),
        st.sampled_from(["out", "err"]),
        st.integers(0, 3000),
        st.sampled_from(["", "é" * 40, "x" * 3000]),
        st.booleans(),
    ),
    max_size=40,
)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(_STEPS)
def test_it_stays_below_jupyters_limits_and_loses_no_line(
    steps: Sequence[tuple[float, int, Stream, int, str, bool]],
) -> None:
    cell = Cell()
    printed: dict[tuple[int, Stream], int] = {(0, "out"): 0}
    for pause, rank, stream, count, text, partial in steps:
        before = printed.get((rank, stream), 0)
        printed[rank, stream] = before + count
        lines = [f"{number}{text}\n" for number in range(before, before + count)]
        cell.prints("".join(lines), rank, stream)
        cell.view.on(Countdown(f"{cell.now} s left" if partial else ""))
        cell.passes(pause)
    for begin, _, _ in cell.messages:
        second = [text for at, _, text in cell.messages if begin <= at < begin + 1]
        assert len(second) <= 10
        assert sum(len(text.encode()) for text in second) < 256_000
    cell.ends()
    for (rank, stream), count in printed.items():
        lines = [line for line in cell.screen(stream) if line.startswith(f"[rank {rank}] ")]
        left = [re.search(r"… ([\d,]+) line.* omitted; see /logs/rank", line) for line in lines]
        shown = [int(found[0]) for line in lines if (found := re.search(r"(?<=^\[rank .\] )\d+", line))]
        assert len(shown) + sum(int(found[1].replace(",", "")) for found in left if found) == count
        assert shown == sorted(set(shown))


# ------------------------------------------------------------------ the status line
def test_a_partial_line_is_shown_below_and_redrawn(cell: Cell) -> None:
    cell.prints("done\n 10%|#")
    assert cell.screen() == ["[rank 0] done", "[rank 0] 10%|#"]
    cell.prints("\r 20%|##")
    assert len(cell.messages) == 1
    cell.passes()
    assert cell.screen() == ["[rank 0] done", "[rank 0] 20%|##"]
    cell.prints("\r100%\nnext\n", stream="out")
    cell.passes()
    assert cell.screen() == ["[rank 0] done", "[rank 0] 100%|##", "[rank 0] next"]


def test_stderr_lines_come_between_the_old_status_and_the_new(cell: Cell) -> None:
    cell.prints("abc")
    cell.passes()
    cell.prints("warning\n", stream="err")
    assert [(stream, text.strip(" \r\n")) for _, stream, text in cell.messages[1:]] == [
        ("out", ""),
        ("err", "[rank 0] warning"),
        ("out", "[rank 0] abc"),
    ]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            {"progress": "epoch 1", "done": 45, "total": 100, "seconds": 3.65},
            "epoch 1: 45/100 45% 12.3 it/s, 4.5 s left",
        ),
        ({"progress": "", "done": 0, "total": 100, "seconds": 0.0}, "0/100 0%"),
        ({"progress": "", "done": 3, "total": 10, "seconds": 5.0, "first": 4}, "3/10 30%"),
        ({"progress": "", "done": 50_000, "total": None, "seconds": 10}, "50000 5,000 it/s"),
        ({"progress": "", "done": 1, "total": 3, "seconds": 20.0}, "1/3 33% 0.05 it/s, 40.0 s left"),
        (
            {"progress": "fit", "done": 6000, "total": 90_000, "seconds": 10.0, "first": 5000, "level": 0},
            "fit: 6000/90000 7% 100 it/s, 14 min 00 s left",
        ),
    ],
)
def test_progress_is_shown_below(cell: Cell, record: dict[str, Any], text: str) -> None:
    cell.view.on(Reports(0, [record]))
    assert cell.screen() == [f"[rank 0] {text}"]


def test_the_best_step_is_named_at_the_end(cell: Cell) -> None:
    cell.view.on(Reports(0, [{"metrics": {"valid_loss": 0.25}, "time": 1.0, "step": 1200}]))
    cell.view.on(Reports(0, [{"best": "valid_loss", "step": 1200, "value": 0.25}]))
    cell.view.on(Ended(FINISHED))
    assert cell.screen()[-1] == "[rank 0] valid_loss 0.25; best valid_loss 0.25 at step 1,200 (1 report)"


def test_of_many_ranks_three_are_shown(cell: Cell) -> None:
    cell.view.on(Logs([lines_of(rank, "out", open=[f"{rank}" * 60]) for rank in range(8)]))
    (status,) = cell.screen()
    assert status.endswith("…  … and 5 more")
    assert re.findall(r"\[rank \d\]", status) == ["[rank 0]", "[rank 1]", "[rank 2]"]
    assert len(status) <= 120


def test_the_countdown_takes_the_place_of_the_rest(cell: Cell) -> None:
    cell.prints("bar")
    cell.view.on(Countdown("stopping: 27 s left for checkpoints; interrupt again to kill now"))
    cell.passes()
    assert cell.screen() == ["stopping: 27 s left for checkpoints; interrupt again to kill now"]


def test_in_a_terminal_the_status_fits_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    cell = Cell(is_terminal=True)
    cell.prints("x" * 100)
    assert cell.screen() == ["[rank 0] " + "x" * 29 + "…"]


# ------------------------------------------------------------------ metrics


def test_a_flood_of_reports_goes_to_the_status(cell: Cell) -> None:
    for step in range(1000):
        cell.reports(step=step, at=1000.0 + step / 100, loss=1 / (step + 1))
        cell.passes(0.01)
    cell.passes()
    lines = cell.screen()
    assert lines[:10] == [line for line in lines if line.startswith("[rank 0] step")][:10]
    assert lines[10:] == ["[rank 0] step 999: loss 0.001"]
    cell.reports(step=1000, at=1030.0, loss=0.5)
    cell.passes()
    assert cell.screen()[10:] == ["[rank 0] step 1000: loss 0.5"]
    assert cell.text().endswith("\n")
    cell.view.on(Ended(FINISHED))
    assert cell.screen()[11:] == ["[rank 0] loss 0.5 (1,001 reports)"]


def test_each_ranks_last_metrics_are_shown_at_the_end(cell: Cell) -> None:
    cell.reports(1, loss=0.5)
    cell.reports(0, step=1, loss=0.25)
    cell.reports(0, accuracy=0.9711, samples=1_000_000, big=12345.678, tiny=1e-5, nan=float("nan"))
    cell.view.on(Ended(FINISHED))
    assert cell.screen()[-2:] == [
        "[rank 0] loss 0.25, accuracy 0.9711, samples 1,000,000, big 12,345.7, tiny 1e-05, nan nan (2 reports)",
        "[rank 1] loss 0.5 (1 report)",
    ]


# ------------------------------------------------------------------ the end
def test_a_launch_that_does_not_finish_says_so_in_one_line(cell: Cell) -> None:
    cell.prints("bar")
    cell.view.on(Countdown("stopping"))
    cell.ends(Outcome("failed", 3.21, "ValueError: no"))
    assert cell.screen() == ["[rank 0] bar", "nblaunch: train failed after 3.2 s"]


def test_a_view_that_fails_is_replaced_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(View):
        def on(self, event: Event) -> None:
            raise ValueError("closed")

    view = ShieldedView(Fails())
    view.on(Tick())
    view.on(Tick())
    assert caplog.messages == ["the launch continues, but its display stopped: ValueError: closed"]


# ------------------------------------------------------------------ writers and frontends


def test_the_plain_writer_manages_a_terminal_that_is_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    plain_writer()("é …\n", "out")
    assert raw.getvalue() == b"? ?\n"


def test_a_script_gets_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBLAUNCH_VIEW", raising=False)
    for choice in ("auto", "text"):
        view = Frontend().view(choice)
        view.on(Logs([lines_of(0, "out", "line", open=["partial"])]))
        assert capsys.readouterr().out == "[rank 0] line\n"
    assert isinstance(Frontend().view("none"), NullView)
    assert not is_terminal(object())  # what users put in stdout's place may not say


@pytest.mark.parametrize(
    ("choice", "variable", "chosen"),
    [("auto", "", "auto"), ("auto", "none", "none"), ("auto", "text", "text"), ("text", "none", "text")],
)
def test_the_variable_overrides_auto_alone(
    choice: str, variable: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBLAUNCH_VIEW", variable)
    assert view_choice(choice) == chosen


def test_an_unknown_view_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_VIEW", "loud")
    with pytest.raises(ArgumentError, match="view='panels': must be one of 'auto', 'text', 'none'"):
        Frontend().view("panels")
    with pytest.raises(ArgumentError, match="NBLAUNCH_VIEW='loud': must be one of"):
        Frontend().view("auto")


class Recorder(View):
    """Keeps its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.has_event = threading.Event()

    def on(self, event: Event) -> None:
        self.events.append(event)
        self.has_event.set()


def test_an_awaited_import_is_said_until_the_ranks_run() -> None:
    cell = Cell()
    cell.view.on(Preparing("importing torch (first launch) …"))
    assert cell.screen() == ["nblaunch: importing torch (first launch) …"]
    cell.view.on(Preparing(""))
    assert cell.screen() == []
    cell.view.on(Started(INFO))
    cell.passes()
    cell.view.on(RanksChanged([RankStatus(0, "starting", 0)]))
    assert cell.screen() == []
    cell.passes()
    assert cell.screen() == [f"nblaunch: {STARTING}"]
    cell.view.on(RanksChanged([RankStatus(0, "running", 7), RankStatus(1, "starting", 8)]))
    cell.passes()
    cell.view.on(Ended(Outcome("finished", 3.0, "")))
    assert cell.screen() == []
    log = Cell(status=False)
    log.view.on(Preparing("importing torch (first launch) …"))
    assert log.messages == []


def test_a_view_says_what_a_start_method_waits_for() -> None:
    class Slow(FakeEngine):
        def usable(self, *arguments: Any) -> str:
            arguments[-1]("importing torch")
            assert view.events == [Preparing("importing torch")]
            return "spawn"

    view = Recorder()
    plan = with_usable_method(
        make_plan([Machine(0, 2, "linux", {})], LocalEngine(), Options(num_processes=2)), Slow(FakeWorkers(2)), view
    )
    assert plan.method == "spawn"
    assert view.events == [Preparing("importing torch"), Preparing("")]


def test_slow_packing_says_what_takes_time() -> None:
    view = Recorder()
    with preparing(view, "Cell In[3]"):
        pass
    with preparing(view, "Cell In[4]"):
        assert view.has_event.wait(20)
    (said,) = view.events
    assert isinstance(said, Preparing)
    assert said.text.startswith("preparing Cell In[4]: comparing its data with the cached data")
    cell = Cell()
    cell.view.on(said)
    assert "nblaunch: preparing Cell In[4]" in cell.text()
