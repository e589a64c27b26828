"""`compare`: the metrics of several runs laid over each other, as charts and as a table."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from nblaunch.errors import ArgumentError
from nblaunch.launch.output.metric_names import ChartPlan, direction, kind, number_of
from nblaunch.launch.output.reports import Report
from nblaunch.launch.result import LaunchResult, Metrics
from nblaunch.notebook.charts import (
    Line,
    Point,
    Stroke,
    Summary,
    colour_of,
    data_uri,
    has_line,
    line_chart,
    line_of,
    summarise,
)
from nblaunch.notebook.record import BOX, DIM, MONO, card, one_line

if TYPE_CHECKING:
    import pandas

_NOT_METRICS = {"rank", "time", "step", "epoch"}
"""Columns beside the metrics."""
_MAX_CHARTS = 12
_MAX_NAME = 60
_MAX_CHART_POINTS = 100


def compare(*runs: LaunchResult | pandas.DataFrame, **named: LaunchResult | pandas.DataFrame) -> Comparison:
    """Compare the metrics of two or more runs: ``compare(baseline=first, bigger=second)``.

    As the last expression of a cell, this shows charts and a table of the last and best values. Values are means over
    the ranks, and differences are relative to the first run.

    Args:
        runs: Results of `notebook_launcher`, or DataFrames with one column for each metric, such as
            ``result.metrics.to_pandas()`` or ``pandas.DataFrame(trainer.history)``.
        named: The same, each under its label.

    Raises:
        TypeError: An argument is neither a result nor a DataFrame.
        ValueError: There are fewer than two runs, or a run has no metrics.
    """
    given = [(f"argument {number}: ", run) for number, run in enumerate(runs, start=1)]
    given += [(f"{name}=", run) for name, run in named.items()]
    if len(given) < 2:
        raise ArgumentError(f"compare() needs at least two runs, but got {len(given)}: compare(first, second)")
    metrics = [_metrics_of(argument, source) for argument, source in given]
    labels = [*named]
    for at, run in enumerate(runs):
        name = run.name if isinstance(run, LaunchResult) else "DataFrame"
        numbered = (f"{name} {number}" for number in itertools.count(2))
        labels.insert(at, next(label for label in itertools.chain([name], numbered) if label not in labels))
    return Comparison(dict(zip(labels, metrics, strict=True)))


def _metrics_of(argument: str, source: Any) -> Metrics:
    if isinstance(source, LaunchResult):
        metrics = source.metrics
    elif hasattr(source, "columns") and hasattr(source, "to_dict"):
        metrics = Metrics([_report_of(number, row) for number, row in enumerate(source.to_dict("records"))])
    else:
        raise TypeError(f"compare({argument}{source!r:.80}): must be a result of notebook_launcher or a DataFrame")
    if not any(report.values for report in metrics):
        why = "its ranks never called report()" if isinstance(source, LaunchResult) else "no column holds numbers"
        raise ArgumentError(f"compare({argument}<{type(source).__name__}>): it has no metrics: {why}")
    return metrics


def _report_of(number: int, row: Mapping[Any, Any]) -> Report:
    values = {
        str(name): float(value)
        for name, value in row.items()
        if name not in _NOT_METRICS and isinstance(value, numbers.Real) and value == value
    }  # NaN where nothing was reported
    rank, time, step = (
        float(found) if isinstance(found := row.get(name), numbers.Real) and math.isfinite(found) else None
        for name in ("rank", "time", "step")
    )
    return Report(int(rank or 0), number if time is None else time, None if step is None else int(step), values)


class Comparison:
    """The metrics of several runs, shown as charts and a table in a notebook, and as a text table elsewhere."""

    def __init__(self, runs: Mapping[str, Metrics]) -> None:
        self._points: dict[str, dict[str, dict[int, list[Point]]]] = {label: {} for label in runs}
        plan = ChartPlan()
        for label, metrics in self._points.items():
            for report in runs[label]:
                for name, value in report.values.items():
                    known = metrics.setdefault(name, {}).setdefault(report.rank, [])
                    known.append((float(len(known) if report.step is None else report.step), value))
                    plan.add(name, known[-1][0], (label, report.rank))
        self._names = [name for chart in plan.charts for name in chart.names]
        self._summaries: dict[str, dict[str, Summary]] = {}
        """Of each run, by its label."""
        for label, metrics in self._points.items():
            for name in plan.numbered & metrics.keys():
                for known in metrics[name].values():
                    known[:] = [(float(number), y) for number, (_, y) in enumerate(known)]
            best = {
                name: (float(best.step), math.nan if best.value is None else best.value)
                for name, best in runs[label].best.items()
            }
            groups = summarise(metrics, [[name] for name in metrics], best, plan.numbered)
            self._summaries[label] = {summary.name: summary for (summary,) in groups}

    def __repr__(self) -> str:
        rows = [["", *(one_line(label, _MAX_NAME) for label in self._summaries)], *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join(lines)

    def _rows(self) -> list[list[str]]:
        """Return the values of each metric in each run: the last one, its difference to the first run's, the best."""
        rows = []
        for name in self._names:
            first, *others = (summaries.get(name) for summaries in self._summaries.values())
            cells = [_cell(first, None), *(_cell(summary, first) for summary in others)]
            rows.append([one_line(name, _MAX_NAME), *cells])
        return rows

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return HTML that needs no script, as a saved notebook keeps it; see `nblaunch.notebook.record`."""
        cards = list(itertools.islice(filter(None, map(self._card, self._names)), _MAX_CHARTS))
        note = "last value (difference from the first run), then the best; means over the ranks"
        table = f'<pre style="{MONO};overflow-x:auto;margin-top:10px">{escape(repr(self))}</pre>'
        content = f'{"".join(cards)}{table}<div style="font-size:12px;{DIM}">{note}</div>'
        return {
            "text/plain": repr(self),
            "text/html": f'<div class="tex2jax_ignore mathjax_ignore" style="{BOX}">{content}</div>',
        }

    def _card(self, name: str) -> str:
        """Return the chart of a metric; empty if no run has two steps of it, or all runs have one value."""
        runs = [
            (label, colour_of(number), self._points[label], summaries[name])
            for number, (label, summaries) in enumerate(self._summaries.items())
            if name in summaries
        ]
        drawn = [Line(line_of(points, summary), Stroke(colour), summary.ring) for _, colour, points, summary in runs]
        if not has_line({name: {at: line.points for at, line in enumerate(drawn)}}, [runs[0][3]]):
            return ""
        chart = line_chart(
            {},
            (),
            one_line(name, _MAX_NAME),
            lines=drawn,
            kind=kind(name),
            way=direction(name),
            most_points=_MAX_CHART_POINTS,
        )
        legend = " ".join(
            f'<span style="color:{colour};white-space:nowrap">━ {_text(label)}</span>' for label, colour, _, _ in runs
        )
        said = ", ".join(f"{label} {summary.latest_text}" for label, _, _, summary in runs)
        title = f"<b>{_text(name)}</b>{' by report' * runs[0][3].is_numbered}"
        return card([title, legend], data_uri(chart), _text(f"chart of {name}: {said}", 600))


def _cell(summary: Summary | None, first: Summary | None) -> str:
    if summary is None:
        return "–"
    change = ""
    if first is not None:
        difference = summary.latest - first.latest
        size = number_of(summary.name, float(f"{abs(difference):.3g}"))
        change = f" ({'+' if difference >= 0 else '−'}{size})" if math.isfinite(difference) else " (–)"
    return f"{summary.latest_text}{change}{summary.best_text and f', {summary.best_text}'}"


def _text(text: str, most: int = _MAX_NAME) -> str:
    return escape(one_line(text, most))
