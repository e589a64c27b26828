"""report and progress: written to the spool in a rank, without effect elsewhere."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import nblaunch
from nblaunch.ranks import report as reports
from nblaunch.ranks.report import Context, Progress, current, enter, mark_best
from nblaunch.wire.tables import Dropped, Drops, RankTable


class Rank:
    """This process as a rank, for the time of a test."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "rank1.spool"
        self.spool = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.table = RankTable(str(folder), ranks=2)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(reports, "_is_torn", False)
    here = Rank(tmp_path)
    enter(Context(1, 1, 2, "cpu", here.spool, str(tmp_path), Drops(str(tmp_path), 1)))
    yield here
    enter(None)
    here.table.close()
    os.close(here.spool)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


# ------------------------------------------------------------------ outside a launch
def test_outside_a_launch_reports_do_nothing_whatever_they_are_given() -> None:
    assert current() is None
    nblaunch.report(step="no step", accuracy="no number")  # type: ignore[arg-type]  # on purpose
    mark_best("loss", "no step")  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    "make",
    [lambda: [0, 1, 2], lambda: iter(range(3)), lambda: (n for n in range(3)), lambda: DataLoader(Stream(), None)],
)
def test_outside_a_launch_progress_only_iterates(make: Callable[[], Any]) -> None:
    assert list(nblaunch.progress(make(), desc="train")) == [0, 1, 2]


# ------------------------------------------------------------------ report
@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (3, 3.0),
        (0.5, 0.5),
        (True, 1.0),
        (torch.tensor(0.25), 0.25),
        (torch.tensor([[0.25]], requires_grad=True), 0.25),
        (numpy.float32(0.5), 0.5),
        (numpy.array(2), 2.0),
        (numpy.array([2.5]), 2.5),
    ],
)
def test_numbers_and_tensors_of_one_element_are_kept(rank: Rank, value: Any, kept: float) -> None:
    nblaunch.report(loss=value)
    assert [record["metrics"] for record in rank.records()] == [{"loss": kept}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_went_wrong_is_kept_as_it_is(rank: Rank, value: float) -> None:
    nblaunch.report(loss=value)
    assert repr(rank.records()[0]["metrics"]["loss"]) == repr(value)


def test_each_report_is_a_line_with_its_step_and_time(rank: Rank) -> None:
    nblaunch.report(step=1, loss=0.5)
    nblaunch.report(loss=0.25)
    nblaunch.report(2, loss=0.1, lr=0.01)
    nblaunch.report({"loss": 0.05}, step=3, lr=0.01)  # as for wandb
    records = rank.records()
    assert [record["step"] for record in records] == [1, None, 2, 3]
    assert records[3]["metrics"] == {"loss": 0.05, "lr": 0.01}
    assert records[2]["metrics"] == {"loss": 0.1, "lr": 0.01}
    assert sorted(record["time"] for record in records) == [record["time"] for record in records]


@pytest.mark.parametrize("value", ["high", None, [0.5], torch.ones(2), numpy.ones(2), 1j, {}, object])
def test_a_metric_that_is_no_number_is_named_with_its_value(rank: Rank, value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^report\(accuracy=(.|\n)*\): a metric must be a number or a one-element tensor$"
    ):
        nblaunch.report(loss=0.5, accuracy=value)
    with pytest.raises(TypeError, match=r"^report\(2, step=3\): give the step once"):
        nblaunch.report(2, step=3)
    with pytest.raises(TypeError, match=r"^report\(\{1: \.\.\.\}\): metric names must be strings") as caught:
        nblaunch.report({1: 0.5})  # type: ignore[dict-item]
    assert caught.value.__context__ is None
    assert rank.records() == []


@pytest.mark.parametrize("step", [2, 2.0, numpy.int64(2), numpy.array(2), torch.tensor(2), torch.tensor([2])])
def test_a_whole_step_is_kept_as_an_int(rank: Rank, step: Any) -> None:
    nblaunch.report(step=step)
    assert [json.dumps(record["step"]) for record in rank.records()] == ["2"]


@pytest.mark.parametrize("step", [2.7, "one", "2.7", float("nan"), float("inf"), torch.tensor(2.5), torch.ones(2)])
def test_a_step_that_is_not_whole_is_named(rank: Rank, step: Any) -> None:
    expected = re.escape(f"report(step={step!r}): a step must be an integer")
    with pytest.raises(TypeError, match=f"^{expected}"):
        nblaunch.report(step=step)
    assert rank.records() == []


# ------------------------------------------------------------------ a disk that is full
@pytest.fixture
def limit_growth(rank: Rank) -> Iterator[Callable[[int], None]]:
    """Let the spool grow by so many bytes only, as a disk does that is nearly full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        soft = before[0] if size < 0 else rank.file.stat().st_size + size
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_the_reports_which_is_noted(rank: Rank, tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    enter(Context(1, 1, 2, "cpu", full, str(tmp_path), Drops(str(tmp_path), 1)))
    nblaunch.report(loss=0.5)  # a warning would be an error here
    nblaunch.report(loss=0.25)
    assert list(nblaunch.progress([1, 2])) == [1, 2]
    os.close(full)
    assert rank.table.dropped(1) == Dropped(reports=True, reason=errno.ENOSPC)
    assert rank.table.dropped(0) == Dropped()


def test_reports_are_written_again_once_there_is_room(rank: Rank, limit_growth: Callable[[int], None]) -> None:
    limit_growth(0)
    nblaunch.report(loss=0.5)
    limit_growth(-1)
    nblaunch.report(loss=0.125)
    assert [record["metrics"] for record in rank.records()] == [{"loss": 0.125}]


def test_a_report_after_one_that_was_torn_is_whole(rank: Rank, limit_growth: Callable[[int], None]) -> None:
    limit_growth(5)
    nblaunch.report(loss=0.5)
    limit_growth(-1)
    nblaunch.report(loss=0.25)
    nblaunch.report(loss=0.125)
    torn, *whole = rank.file.read_text().splitlines()
    assert len(torn) == 5
    assert [json.loads(line)["metrics"]["loss"] for line in whole] == [0.25, 0.125]


# ------------------------------------------------------------------ progress
@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still unless a test moves it."""
    now = [0.0]
    monkeypatch.setattr(reports.time, "monotonic", lambda: now[0])  # type: ignore[attr-defined]  # the module's own
    return now


def test_progress_shows_the_begin_and_the_end(rank: Rank, clock: list[float]) -> None:
    assert list(nblaunch.progress(["a", "b"], desc="train")) == ["a", "b"]
    assert rank.records() == [
        {"progress": "train", "done": 0, "total": 2, "seconds": 0.0, "first": 0, "level": 0},
        {"progress": "train", "done": 2, "total": 2, "seconds": 0.0, "first": 0, "level": 0},
    ]


def test_progress_between_is_shown_ten_times_a_second_at_most(rank: Rank, clock: list[float]) -> None:
    for _ in nblaunch.progress(range(100)):
        clock[0] += 0.03
    shown = [record["done"] for record in rank.records()]
    assert shown[0] == 0
    assert shown[-1] == 100
    assert all(later - earlier >= 4 for earlier, later in pairwise(shown[:-1]))
    assert len(shown) > 20


@pytest.mark.parametrize(
    ("iterable", "given", "total"),
    [([1, 2], None, 2), (iter([1, 2]), None, None), (iter([1, 2]), 2, 2), (DataLoader(Stream(), None), None, None)],
)
def test_the_length_is_shown_where_it_is_known(rank: Rank, iterable: Any, given: int | None, total: int | None) -> None:
    bar = nblaunch.progress(iterable, total=given)
    list(bar)
    assert {record["total"] for record in rank.records()} == {total}
    assert bar.total == total


def test_progress_has_the_length_of_what_it_goes_through() -> None:
    assert len(nblaunch.progress([1, 2, 3])) == 3
    with pytest.raises(TypeError, match="no length; pass total="):
        len(nblaunch.progress(iter([1])))


def test_a_bar_within_another_has_a_deeper_level(rank: Rank, clock: list[float]) -> None:
    for _ in nblaunch.progress(range(2), desc="fit"):
        for _ in nblaunch.progress(range(3), desc="epoch"):
            break  # an epoch that ends early is closed, too, and no time is left
    assert [record["seconds"] for record in rank.records() if record["done"] == 0] == [0.0, 0.0, None, 0.0, None]
    assert {(record["progress"], record["level"]) for record in rank.records()} == {("fit", 0), ("epoch", 1)}


def test_a_new_task_begins_with_no_open_bar(rank: Rank) -> None:
    left = reports.Progress(10, "left open")
    enter(current())
    reports.Progress(10, "next")
    assert [record["level"] for record in rank.records()] == [0, 0]
    left.close()
    assert len(rank.records()) == 2


def test_a_resumed_bar_says_where_it_began(rank: Rank, clock: list[float]) -> None:
    bar = Progress(100, "fit", done=40)
    clock[0] += 10.0
    bar.reach(60)
    assert rank.records()[-1] == {"progress": "fit", "done": 60, "total": 100, "seconds": 10.0, "first": 40, "level": 0}


@pytest.mark.parametrize(
    ("given", "total"), [(torch.tensor(3), 3), (2.5, 2.5), (math.inf, None), (math.nan, None), ("10", None), (-3, None)]
)
def test_a_total_that_is_no_number_is_unknown(rank: Rank, given: Any, total: float | None) -> None:
    Progress(given, 7)  # type: ignore[arg-type]  # on purpose
    assert {(record["progress"], record["total"]) for record in rank.records()} == {("7", total)}


# ------------------------------------------------------------------ the best step
def test_the_best_step_is_marked(rank: Rank) -> None:
    mark_best("valid_loss", 3)
    mark_best("valid_loss", 4, torch.tensor(0.25))
    marks = [(record["best"], record["step"], record["value"]) for record in rank.records()]
    assert marks == [("valid_loss", 3, None), ("valid_loss", 4, 0.25)]


def test_a_mark_without_a_step_or_value_is_named(rank: Rank) -> None:
    with pytest.raises(TypeError, match=r"^mark_best\(step=2\.5\): a step must be an integer"):
        mark_best("loss", 2.5)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match=r"^mark_best\(value='low'\): a metric must be a number"):
        mark_best("loss", 2, "low")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match=r"^mark_best\(metric=\['loss'\]\): expected the name of a metric"):
        mark_best(["loss"], 2)  # type: ignore[arg-type]  # on purpose
    assert rank.records() == []
