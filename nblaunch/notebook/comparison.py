"""`compare`: the metrics of several runs laid over each other, as charts and as a table."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from nblaunch.launch.output.metric_names import Chart, ChartPlan, family, number_of
from nblaunch.launch.output.reports import Report
from nblaunch.launch.result import LaunchResult, Metrics
from nblaunch.notebook.charts import (
    MEAN_COLOUR,
    Line,
    Point,
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
from nblaunch.notebook.record import BOX, DIM, card, in_rows, one_line

if TYPE_CHECKING:
    import pandas

_NOT_METRICS = {"rank", "time", "step", "epoch"}
"""Columns beside the metrics."""
_MAX_CHARTS = 12
_MAX_NAME = 60
_MAX_CHART_POINTS = 100


def compare(*runs: LaunchResult | pandas.DataFrame, **named: LaunchResult | pandas.DataFrame) -> Comparison:
    """Lay the metrics of two or more runs over each other: ``compare(baseline=first, bigger=second)``.

    The last expression of a cell shows charts and a table of the last and best values, as means over the ranks. The
    differences are those to the first run.

    Args:
        runs: A result of `notebook_launcher`, or a DataFrame with a column for each metric, such as
            ``result.metrics.to_pandas()`` or ``pandas.DataFrame(trainer.history)``.
        named: The same, with their labels.

    Raises:
        TypeError: An argument is neither.
        ValueError: There are fewer than two runs, or a run has no metrics.
    """
    given = [(f"argument {number}: ", run) for number, run in enumerate(runs, start=1)]
    given += [(f"{name}=", run) for name, run in named.items()]
    if len(given) < 2:
        raise ValueError(f"compare() needs at least two runs, and got {len(given)}: compare(first, second)")
    metrics = [_metrics_of(argument, source) for argument, source in given]
    labels = [*named]
    for at, run in enumerate(runs):
        name = run.name if isinstance(run, LaunchResult) else "DataFrame"
        labels.insert(at, next(label for label in _numbered(name) if label not in labels))
    return Comparison(dict(zip(labels, metrics, strict=True)))


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name} {number}" for number in itertools.count(2))


def _metrics_of(argument: str, source: Any) -> Metrics:
    if isinstance(source, LaunchResult):
        metrics = source.metrics
    elif hasattr(source, "columns") and hasattr(source, "to_dict"):
        metrics = Metrics([_report_of(number, row) for number, row in enumerate(source.to_dict("records"))])
    else:
        raise TypeError(f"compare({argument}{source!r:.80}): must be a result of notebook_launcher or a DataFrame")
    if not any(report.values for report in metrics):
        why = "its ranks never called report()" if isinstance(source, LaunchResult) else "no column holds numbers"
        raise ValueError(f"compare({argument}<{type(source).__name__}>): it has no metrics: {why}")
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
    """Several runs. A notebook shows charts and a table; elsewhere it is the table as text."""

    def __init__(self, runs: Mapping[str, Metrics]) -> None:
        self._points: list[dict[str, dict[int, list[Point]]]] = [{} for _ in runs]
        self._plan = ChartPlan()
        for at, (metrics, reports) in enumerate(zip(self._points, runs.values(), strict=True)):
            for report in reports:
                for name, value in report.values.items():
                    known = metrics.setdefault(name, {}).setdefault(report.rank, [])
                    known.append((float(len(known) if report.step is None else report.step), value))
                    self._plan.add(name, known[-1][0], (at, report.rank))
        self._summaries: dict[str, dict[str, Summary]] = {}
        """Of each run, by its label."""
        for metrics, (label, run) in zip(self._points, runs.items(), strict=True):
            for name in self._plan.numbered & metrics.keys():
                for known in metrics[name].values():
                    known[:] = [(float(number), y) for number, (_, y) in enumerate(known)]
            best = {
                name: (float(best.step), math.nan if best.value is None else best.value)
                for name, best in run.best.items()
            }
            groups = summarise(metrics, [[name] for name in metrics], best, self._plan.numbered)
            self._summaries[label] = {summary.name: summary for (summary,) in groups}

    def __repr__(self) -> str:
        rows = [["", *(one_line(label, _MAX_NAME) for label in self._summaries)], *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join(lines)

    def _rows(self) -> list[list[str]]:
        names = (name for chart in self._plan.charts for name in chart.names)
        return [[one_line(name, _MAX_NAME), *self._cells(name)] for name in names]

    def _cells(self, name: str) -> list[str]:
        """Return the values of a metric in each run: the last one, its difference to the first run's, the best one."""
        summaries = [summaries.get(name) for summaries in self._summaries.values()]
        first, cells = summaries[0], []
        for summary in summaries:
            if summary is None:
                cells.append("–")
                continue
            change = ""
            if first is not None and summary is not first:
                change = f" ({_signed(name, summary.latest - first.latest)})"
            cells.append(f"{summary.latest_text}{change}{summary.best_text and f', {summary.best_text}'}")
        return cells

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return HTML that needs no script, as a saved notebook keeps it; see `nblaunch.notebook.record`."""
        drawn = [chart for chart in self._plan.charts if any(self._lines(chart))][:_MAX_CHARTS]
        content = in_rows([self._card(chart) for chart in drawn]) + self._table()
        return {
            "text/plain": repr(self),
            "text/html": f'<div class="tex2jax_ignore mathjax_ignore" style="{BOX}">{content}</div>',
        }

    def _lines(self, chart: Chart) -> list[Line]:
        """Return the lines of a chart; none if no run has two steps of it."""
        found = [
            (number, points, summaries[name])
            for name in chart.names
            for number, (points, summaries) in enumerate(zip(self._points, self._summaries.values(), strict=True))
            if name in summaries
        ]
        if not any(has_line(points, [summary]) for _, points, summary in found):
            return []
        return [
            Line(line_of(points, summary), _stroke(chart, summary.name, colour_of(number)), summary.ring)
            for number, points, summary in found
        ]

    def _card(self, chart: Chart) -> str:
        names = [
            f'<span style="white-space:nowrap">{_stroke(chart, name).sample} <b>{_text(name)}</b>'
            f"{' by report' * (name in self._plan.numbered)}</span>"
            for name in chart.names
        ]
        labelled = self._summaries.items()
        runs = [
            f'<span style="color:{colour_of(number)};white-space:nowrap">━ {_text(label)}</span>'
            for number, (label, summaries) in enumerate(labelled)
            if not summaries.keys().isdisjoint(chart.names)
        ]
        said = "; ".join(
            f"{name}: " + ", ".join(f"{label} {known[name].latest_text}" for label, known in labelled if name in known)
            for name in chart.names
        )
        title = one_line(" and ".join(chart.names), _MAX_NAME)
        drawn = line_chart(
            {},
            (),
            title,
            lines=self._lines(chart),
            kind=chart.kind,
            way=chart.direction,
            most_points=_MAX_CHART_POINTS,
        )
        return card([" ".join(names), " ".join(runs)], data_uri(drawn), f"chart of {_text(said, 600)}")

    def _table(self) -> str:
        heads = "".join(
            f'<th style="color:{colour_of(number)}">{_text(label)}</th>' for number, label in enumerate(self._summaries)
        )
        rows = "".join(
            f"<tr><th>{_text(name)}</th>{''.join(f'<td>{_text(cell, 120)}</td>' for cell in cells)}</tr>"
            for name, *cells in self._rows()
        )
        first = _text(next(iter(self._summaries)))
        note = f"last value, its difference to that of {first}, and the best; means over the ranks"
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


def _signed(name: str, difference: float) -> str:
    sign = "+" if difference >= 0 else "−"
    return f"{sign}{number_of(name, float(f'{abs(difference):.3g}'))}" if math.isfinite(difference) else "–"


def _text(text: str, most: int = _MAX_NAME) -> str:
    return escape(one_line(text, most))
