"""Runs laid over each other."""

from __future__ import annotations

import base64
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import pandas
import pytest

from nblaunch import LaunchResult, compare
from nblaunch.launch.output.reports import Report, ReportList
from nblaunch.launch.result import Metrics
from nblaunch.notebook.charts import COLOURS
from nblaunch.notebook.comparison import Comparison


def reports_of(end: float, ranks: int = 2, best: int | None = None) -> ReportList:
    columns = ReportList()
    for step in range(1, 101):
        for rank in range(ranks):
            columns.add(rank, step + rank / 10, step, {"loss": 2 - (2 - end) * step / 100 + rank * 0.1})
        if step % 25 == 0:
            columns.add(0, step + 0.5, step, {"valid_loss": end + 1 / step, "lr": 1e-3 / step})
    if best is not None:
        columns.mark(0, "valid_loss", best, None)
    return columns


def result_of(end: float, name: str = "train", **more: Any) -> LaunchResult:
    return LaunchResult(name, [None], Metrics(reports_of(end, **more)), [], 1.0)


def result_with(*reports: Report) -> LaunchResult:
    return LaunchResult("train", [None], Metrics(reports), [], 1.0)


def rows_of(comparison: Comparison) -> list[list[str]]:
    return [re.split(r"  +", line) for line in repr(comparison).splitlines()]


class Images(HTMLParser):
    """The sources and texts of a page's images."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.alts: list[str] = []
        self.charts: list[ET.Element] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            found = dict(attrs)
            image = ET.fromstring(base64.b64decode((found["src"] or "").partition(",")[2]))
            self.alts.append(found["alt"] or "")
            self.charts.append(image)


def test_the_table_has_last_and_best_values_and_differences() -> None:
    assert rows_of(compare(baseline=result_of(0.5), bigger=result_of(0.25, best=75))) == [
        ["", "baseline", "bigger"],
        ["loss", "0.55, best 0.55", "0.3 (−0.25), best 0.3"],
        ["valid_loss", "0.51, best 0.51", "0.26 (−0.25), best 0.2633 at step 75"],
        ["lr", "1e-5", "1e-5 (+0)"],
    ]


def test_a_constant_has_a_chart_if_it_differs_between_runs() -> None:
    runs = [
        result_with(*(Report(0, float(step), step, {"lr": lr, "seed": 1.0, "bad": math.nan}) for step in range(2)))
        for lr in (1e-3, 3e-3)
    ]
    images = Images(compare(*runs)._repr_mimebundle_()["text/html"])
    assert images.alts == ["chart of lr: train 1e-3, train 2 3e-3"]


def test_each_metric_has_a_chart_with_a_line_for_each_run() -> None:
    bundle = compare(result_of(0.5, best=50), result_of(0.25))._repr_mimebundle_()
    images = Images(bundle["text/html"])
    assert images.alts[:2] == [
        "chart of loss: train 0.55, train 2 0.3",
        "chart of valid_loss: train 0.51, train 2 0.26",
    ]
    drawn = [path for path in images.charts[1].iter("{http://www.w3.org/2000/svg}path") if path.get("stroke-width")]
    assert [path.get("stroke") for path in drawn] == [*COLOURS[:2]]
    assert ET.tostring(images.charts[1], encoding="unicode").count("circle ") == 1
    assert len(images.charts) == 3
    assert bundle["text/plain"].startswith(" ")
    assert "<style" not in bundle["text/html"]


def test_runs_whose_steps_go_back_are_laid_over_each_other_by_report() -> None:
    straight, back = (
        result_with(*(Report(0, at, step, {"loss": at}) for at, step in enumerate(s))) for s in ((5, 6), (5, 5))
    )
    points = [run["loss"][0] for run in compare(straight, back)._points.values()]
    assert points == [[(0.0, 0), (1.0, 1)]] * 2
    assert "<b>loss</b> by report<" in compare(straight, back)._repr_mimebundle_()["text/html"]


def test_runs_without_a_label_have_their_names() -> None:
    labels = rows_of(compare(result_of(1), result_of(1), result_of(1, "test"), train=result_of(1)))[0]
    assert labels == ["", "train 2", "train 3", "test", "train"]


def test_a_metric_of_one_run_alone_leaves_the_other_empty() -> None:
    more = result_with(Report(0, 1.0, 1, {"accuracy": 0.5}))
    rows = rows_of(compare(a=result_of(0.5), b=more))
    assert rows[3] == ["accuracy", "–", "0.5, best 0.5"]
    assert rows[1][2] == "–"


@pytest.mark.parametrize("odd", [None, math.nan, "x"])
def test_rows_need_no_rank_time_or_step(odd: object) -> None:
    first = pandas.DataFrame([{"loss": 1.0, "rank": odd, "time": odd, "step": odd}])
    comparison = compare(a=first, b=pandas.DataFrame([{"loss": 0.5}]))
    assert comparison._points == {label: {"loss": {0: [(0.0, y)]}} for label, y in (("a", 1.0), ("b", 0.5))}


def test_a_data_frame_of_metrics_is_a_run() -> None:
    result = result_of(0.5)
    first, second = compare(result, result.metrics.to_pandas())._points.values()
    assert first == second


def test_text_of_runs_becomes_no_markup() -> None:
    evil = "<img src=x onerror=alert(1)>"
    runs: dict[str, Any] = {evil: result_of(0.5), "b": result_with(Report(0, 1.0, 1, {evil: 1.0}))}
    html = compare(**runs)._repr_mimebundle_()["text/html"]
    assert "onerror" in html
    assert "<img src=x" not in html


# ------------------------------------------------------------------ errors
def test_what_is_no_run_is_named() -> None:
    with pytest.raises(ValueError, match=r"^compare\(\) needs at least two runs, but got 1"):
        compare(result_of(0.5))
    other: Any = 5
    with pytest.raises(TypeError, match=r"^compare\(argument 2: 5\): must be a result"):
        compare(result_of(1), other)
    with pytest.raises(TypeError, match=r"^compare\(b=5\): must be a result"):
        compare(a=result_of(1), b=other)


def test_a_run_without_metrics_is_named() -> None:
    with pytest.raises(ValueError, match=r"^compare\(b=<LaunchResult>\): it has no metrics"):
        compare(a=result_of(1), b=result_with())
    with pytest.raises(ValueError, match=r"^compare\(b=<DataFrame>\): it has no metrics"):
        compare(a=result_of(1), b=pandas.DataFrame([{"name": "x"}]))
