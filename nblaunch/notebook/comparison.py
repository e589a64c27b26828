"""`compare`: the metrics of several runs laid over each other, as charts and as a table."""

from __future__ import annotations

import itertools
import math
import numbers
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from nblaunch.launch.handle import Launch
from nblaunch.launch.output.metric_names import Chart, ChartPlan, family, number_of
from nblaunch.launch.output.report_columns import Report
from nblaunch.launch.output.saved_reports import saved_reports
from nblaunch.launch.result import LaunchResult, Metrics
from nblaunch.notebook.charts import (
    MEAN_COLOUR,
    Line,
    Stroke,
    Summary,
    colour_of,
    data_uri,
    has_line,
    line_chart,
    line_of,
    stroke_beside,
    summarise,
)
from nblaunch.notebook.downsampling import Point
from nblaunch.notebook.record import DIM, card, in_rows, one_line

Source: TypeAlias = "LaunchResult | Launch | Metrics | Sequence[Mapping[str, Any]] | str | os.PathLike[str]"
_NOT_METRICS = {"rank", "time", "step", "epoch"}
"""What rows hold beside metrics."""
_MAX_CHARTS = 12
_MAX_NAME = 60
_MAX_CHARTS_BYTES = 120 << 10


def compare(*runs: Source, **named: Source) -> Comparison:
    """Lay the metrics of two or more runs over each other: ``compare(baseline=first, bigger=second)``.

    The last expression of a cell shows charts and a table of the last and best values, as means over the ranks. The
    differences are those to the first run.

    Args:
        runs: A result of `notebook_launcher`, its ``metrics``, a `Launch` that has ended, a Trainer, its ``history``,
            rows of ``metrics.to_pandas()``, or the path of a log directory, such as of an earlier kernel or of a run
            that failed. They are labelled by their names.
        named: The same, with their labels.

    Raises:
        TypeError: An argument is none of these.
        ValueError: There are fewer than two runs, or a run has no metrics or has not ended.
        FileNotFoundError: A path is not a log directory.
    """
    given = [(f"argument {number}", "", run) for number, run in enumerate(runs, start=1)]
    given += [(f"{name}=", name, run) for name, run in named.items()]
    if len(given) < 2:
        raise ValueError(f"compare() needs at least two runs, and got {len(given)}: compare(first, second)")
    found = [_run_of(argument, label, source) for argument, label, source in given]
    labels = [*_labels([run.label for run in found[: len(runs)]], set(named)), *named]
    return Comparison([replace(run, label=label) for run, label in zip(found, labels, strict=True)])


@dataclass(frozen=True, slots=True)
class Run:
    """The metrics of one run.

    Attributes:
        label: Its name in charts and tables.
        metrics: The points of each metric by rank.
        order: The name, x and rank of each value, in order of time.
        best: The points that are marked as the best ones.
    """

    label: str
    metrics: Mapping[str, Mapping[int, Sequence[Point]]]
    order: Sequence[tuple[str, float, int]]
    best: Mapping[str, Point]

    @classmethod
    def of(cls, label: str, reports: Metrics) -> Run:
        """Return the run that has reported this."""
        metrics: dict[str, dict[int, list[Point]]] = {}
        order = []
        for report in reports:
            for name, value in report.values.items():
                points = metrics.setdefault(name, {}).setdefault(report.rank, [])
                x = float(len(points) if report.step is None else report.step)
                points.append((x, value))
                order.append((name, x, report.rank))
        marks = {
            name: (float(best.step), math.nan if best.value is None else best.value)
            for name, best in reports.best.items()
        }
        return cls(label, metrics, order, marks)

    def numbered(self, names: Collection[str]) -> Run:
        """Return it with the numbers of the reports as x of these metrics."""
        metrics = {
            name: {rank: [(float(at), y) for at, (_, y) in enumerate(points)] for rank, points in series.items()}
            if name in names
            else series
            for name, series in self.metrics.items()
        }
        return replace(self, metrics=metrics)

    def summaries(self, plan: ChartPlan) -> dict[str, Summary]:
        """Return its metrics in numbers, by name."""
        groups = summarise(self.metrics, [chart.names for chart in plan.charts], self.best, plan.numbered)
        return {summary.name: summary for group in groups for summary in group}


def _run_of(argument: str, label: str, source: Any) -> Run:
    if isinstance(getattr(source, "history", None), list):  # a Trainer; one that ran in place has no result
        source = getattr(source, "result", None) or source.history
    if isinstance(source, Launch):
        if not source.done:
            raise ValueError(f"compare({_said(argument, source)}): it still runs: compare after its end")
        name, metrics = source.name, _result_of(argument, source).metrics
    elif isinstance(source, LaunchResult):
        name, metrics = source.name, source.metrics
    elif isinstance(source, Metrics):
        name, metrics = "metrics", source
    elif (rows := _rows_of(source)) is not None:
        name, metrics = "history", rows
    elif isinstance(source, (str, os.PathLike)):
        folder = Path(source)
        if not folder.is_dir():
            raise FileNotFoundError(f"compare({_said(argument, source)}): there is no such log directory")
        name, metrics = folder.name, Metrics(saved_reports(folder))
    else:
        raise TypeError(
            f"compare({_said(argument, source)}): expected a result, its metrics, a Launch, a Trainer, its history, or "
            "the path of a log directory"
        )
    run = Run.of(label or name, metrics)
    if not run.metrics:
        raise ValueError(f"compare({_said(argument, source)}): it has no metrics: its ranks never called report()")
    return run


def _rows_of(source: Any) -> Metrics | None:
    """Return what a history or a DataFrame of `Metrics.to_pandas` holds; None if the source is neither."""
    rows = source.to_dict("records") if hasattr(source, "to_dict") and hasattr(source, "columns") else source
    if isinstance(rows, str) or not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        return None
    is_history = all("epoch" in row and "seconds" in row for row in rows)  # whose loss is the mean of an epoch
    names = {"loss": "epoch_loss"} if is_history else {}
    reports = []
    for number, row in enumerate(rows):
        values = {
            names.get(name, str(name)): float(value)
            for name, value in row.items()
            if name not in _NOT_METRICS and isinstance(value, numbers.Real) and (rows is source or value == value)
        }  # a DataFrame has NaN where nothing was reported
        at = _finite(row.get("step", row.get("epoch", number)))
        step = None if at is None else int(at)
        reports.append(Report(int(_finite(row.get("rank")) or 0), _finite(row.get("time")) or number, step, values))
    return Metrics(reports)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None


def _result_of(argument: str, launch: Launch) -> LaunchResult:
    try:
        return launch.result()
    except BaseException as error:  # also that of a stopped launch, which is no Exception
        raise ValueError(
            f"compare({_said(argument, launch)}): it has no result, because it failed or was stopped: pass the path of "
            f"its log directory"
        ) from error


def _said(argument: str, value: object) -> str:
    """Return an argument with its value: ``bigger=5``, or ``argument 2: 5``."""
    return f"{argument}{value!r:.80}" if argument.endswith("=") else f"{argument}: {value!r:.80}"


def _labels(names: Sequence[str], given: set[str]) -> Iterator[str]:
    """Return a label for each run: its name, with a number where that is not unique."""
    count = Counter(names)
    taken = given | {name for name in names if count[name] == 1}
    for name in names:
        numbered = (f"{name} {number}" for number in itertools.count(1))
        label = name if count[name] == 1 and name not in given else next(x for x in numbered if x not in taken)
        taken.add(label)
        yield label


class Comparison:
    """Several runs, as `compare` returns them. A notebook shows charts and a table; elsewhere it is the table as text.

    Attributes:
        runs: The runs, with their labels.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        plan = ChartPlan((name, x, (at, rank)) for at, run in enumerate(runs) for name, x, rank in run.order)
        self.runs = tuple(run.numbered(plan.numbered) for run in runs)
        self._charts, self._numbered = plan.charts, plan.numbered
        self._summaries = [run.summaries(plan) for run in self.runs]

    @property
    def last(self) -> dict[str, dict[str, float]]:
        """The last value of each metric by the label of the run, as a mean over the ranks."""
        return {name: {label: summary.latest for label, summary in self._of(name)} for name in self._names()}

    @property
    def best(self) -> dict[str, dict[str, float]]:
        """The best value of each metric by the label of the run: the marked one, else the best mean over the ranks."""
        return {
            name: found
            for name in self._names()
            if (found := {label: best for label, summary in self._of(name) if (best := _best(summary)) is not None})
        }

    def _names(self) -> list[str]:
        return [name for chart in self._charts for name in chart.names]

    def _of(self, name: str) -> list[tuple[str, Summary]]:
        pairs = zip(self.runs, self._summaries, strict=True)
        return [(run.label, summaries[name]) for run, summaries in pairs if name in summaries]

    # -------------------------------------------------------------- as text
    def __repr__(self) -> str:
        rows = [self._head(), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join(lines)

    def _head(self) -> list[str]:
        return ["", *(one_line(run.label, _MAX_NAME) for run in self.runs)]

    def _rows(self) -> list[list[str]]:
        return [[one_line(name, _MAX_NAME), *self._cells(name)] for name in self._names()]

    def _cells(self, name: str) -> list[str]:
        """Return the values of a metric in each run: the last one, its difference to the first run's, the best one."""
        found = dict(self._of(name))
        first = found.get(self.runs[0].label)
        cells = []
        for run in self.runs:
            summary = found.get(run.label)
            if summary is None:
                cells.append("–")
                continue
            is_other = first is not None and summary is not first
            change = f" ({_signed(name, summary.latest - first.latest)})" if is_other and first is not None else ""
            best = f", {summary.best_text}" if summary.best_text else ""
            cells.append(f"{summary.latest_text}{change}{best}")
        return cells

    # -------------------------------------------------------------- in a notebook
    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self._html()}

    def _html(self) -> str:
        """Return HTML that needs no script, as a saved notebook keeps it; see `nblaunch.notebook.record_html`."""
        drawn = [chart for chart in self._charts if self._has_line(chart)][:_MAX_CHARTS]
        cards = [self._card(chart, image) for chart, image in zip(drawn, self._images(drawn), strict=True)]
        style = (
            "border:1px solid rgba(128,128,128,0.35);border-radius:6px;padding:10px 14px;margin:2px 0;line-height:1.4"
        )
        parts = [in_rows(cards), self._table()]
        return f'<div class="tex2jax_ignore mathjax_ignore" style="{style}">{"".join(parts)}</div>'

    def _has_line(self, chart: Chart) -> bool:
        return any(
            has_line(run.metrics, [summaries[name]])
            for run, summaries in zip(self.runs, self._summaries, strict=True)
            for name in chart.names
            if name in summaries
        )

    def _images(self, charts: Sequence[Chart]) -> list[str]:
        images: list[str] = []
        for most_points in (300, 150, 75, 40, 20, 8):
            images = [self._image(chart, most_points) for chart in charts]
            if sum(map(len, images)) <= _MAX_CHARTS_BYTES:
                break
        return images

    def _image(self, chart: Chart, most_points: int) -> str:
        lines = [
            Line(line_of(run.metrics, summaries[name]), _stroke(chart, name, colour_of(number)), summaries[name].ring)
            for name in chart.names
            for number, (run, summaries) in enumerate(zip(self.runs, self._summaries, strict=True))
            if name in summaries
        ]
        title = one_line(" and ".join(chart.names), _MAX_NAME)
        drawn = line_chart({}, (), title, lines=lines, kind=chart.kind, way=chart.direction, most_points=most_points)
        return data_uri(drawn)

    def _card(self, chart: Chart, image: str) -> str:
        names = [
            f'<span style="white-space:nowrap">{_stroke(chart, name).sample} <b>{_text(name)}</b>'
            f"{' by report' * (name in self._numbered)}</span>"
            for name in chart.names
        ]
        runs = [
            f'<span style="color:{colour_of(number)};white-space:nowrap">━ {_text(run.label)}</span>'
            for number, run in enumerate(self.runs)
            if any(name in self._summaries[number] for name in chart.names)
        ]
        said = "; ".join(
            f"{name}: " + ", ".join(f"{label} {summary.latest_text}" for label, summary in self._of(name))
            for name in chart.names
        )
        return card([" ".join(names), " ".join(runs)], image, f"chart of {_text(said, 600)}")

    def _table(self) -> str:
        heads = "".join(
            f'<th style="color:{colour_of(number)}">{_text(run.label)}</th>' for number, run in enumerate(self.runs)
        )
        rows = "".join(
            f"<tr><th>{_text(name)}</th>{''.join(f'<td>{_text(cell, 120)}</td>' for cell in cells)}</tr>"
            for name, *cells in self._rows()
        )
        note = f"last value, its difference to that of {_text(self.runs[0].label)}, and the best; means over the ranks"
        return (
            '<div style="overflow-x:auto;margin-top:10px"><table cellpadding="4" '
            'style="border-collapse:collapse;text-align:right">'
            f"<thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
            f'<div style="font-size:12px;{DIM}">{note}</div>'
        )


def _stroke(chart: Chart, name: str, colour: str = MEAN_COLOUR) -> Stroke:
    """Return the stroke of a metric: dashes tell metrics apart, colours runs."""
    is_like_first = family(name)[1] == family(chart.names[0])[1]
    return Stroke(colour, "" if is_like_first else stroke_beside(name).dashes)


def _best(summary: Summary) -> float | None:
    if summary.marked is not None and math.isfinite(summary.marked[1]):
        return summary.marked[1]
    return summary.best


def _signed(name: str, difference: float) -> str:
    sign = "+" if difference >= 0 else "−"
    return f"{sign}{number_of(name, float(f'{abs(difference):.3g}'))}" if math.isfinite(difference) else "–"


def _text(text: str, most: int = _MAX_NAME) -> str:
    return escape(one_line(text, most))
