"""Metrics as numbers, and as charts that need no script: SVG in a data URI."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from nblaunch.launch.output.metric_names import ChartPlan, Kind, Part, direction, family, formatted, number_of
from nblaunch.notebook.downsampling import MAX_DRAWABLE, MAX_POINTS, Point, downsampled, is_drawable

MAX_LINES = 16
"""Ranks drawn as lines; more ranks are drawn as a band."""
COLOURS = ("#c2703d", "#2f8f6b", "#8a63c9", "#c2528b", "#7d8a2e", "#2f8aa8", "#b5555a", "#6b7fa8")
"""Colours of the ranks' lines: mid-tones, visible on white and on black."""
MEAN_COLOUR = "#3f7fe0"
_PART_COLOURS: dict[Part, str] = {"training": "#8f8f8f", "epoch": "#b98a00", "valid": "#cc4fc0", "test": "#16968f"}
"""Colours of the lines beside the training's."""

_FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML or UTF-8 cannot hold, and invisible control characters."""
_MIN_RANGE = 1e-280
"""Parts of a smaller range may be zero."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 8.0, 8.0, 18.0
"""The margins of a chart, in pixels."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One metric in numbers."""

    name: str
    mean: tuple[Point, ...]
    """Mean over the ranks at each x where at least half of them have a point."""
    latest: float
    best: float | None
    """Best mean; None if the direction is unknown or no value is finite."""
    by_rank: Mapping[int, float]
    """The latest value of each rank."""
    marked: Point | None = None
    """The step that is marked as the best one, and its value, which may be NaN."""
    is_numbered: bool = False
    """The x of its points are the numbers of the reports, because steps went back."""

    @property
    def ring(self) -> Point | None:
        """Where the best step is marked in the chart."""
        return None if self.is_numbered else self.marked

    @property
    def differs(self) -> bool:
        """True if the latest values of the ranks differ."""
        return len({repr(value) for value in self.by_rank.values()}) > 1

    @property
    def latest_text(self) -> str:
        """The latest value."""
        return number_of(self.name, self.latest)

    @property
    def best_text(self) -> str:
        """The best value, with its step if that is marked; empty if it is unknown."""
        if self.marked is None:
            return "" if self.best is None else f"best {number_of(self.name, self.best)}"
        step, value = self.marked
        shown = f" {number_of(self.name, value)}" if math.isfinite(value) else ""
        return f"best{shown} at step {step:,.0f}"


def clean(text: str) -> str:
    """Replace characters that a document cannot hold, such as control characters, by U+FFFD."""
    return _FORBIDDEN.sub("\ufffd", text)


def summarise(
    metrics: Mapping[str, Mapping[int, Sequence[Point]]],
    charts: Iterable[Sequence[str]] | None = None,
    best: Mapping[str, Point] | None = None,
    numbered: Collection[str] = (),
) -> list[list[Summary]]:
    """Summarise the metrics with points, as they are drawn: a list for each chart.

    Args:
        metrics: The points of each rank.
        charts: The names of each chart's metrics. Default: by their names and last steps.
        best: The points that are marked as the best ones, by metric.
        numbered: The metrics with the numbers of their reports as x.
    """
    if charts is None:
        plan = ChartPlan(
            (name, points[-1][0], rank) for name, series in metrics.items() for rank, points in series.items() if points
        )
        charts = [chart.names for chart in plan.charts]
    marks = best or {}
    groups = (
        [
            _summary(name, metrics[name], marks.get(name), name in numbered)
            for name in names
            if any(metrics.get(name, {}).values())
        ]
        for names in charts
    )
    return [group for group in groups if group]


def mean_of(series: Mapping[int, Sequence[Point]]) -> tuple[Point, ...]:
    """Return the mean over the ranks, by x, at each x where at least half of them have a point."""
    ranks = [{x: y for x, y in points if math.isfinite(x)} for points in series.values() if points]
    count = Counter(x for values in ranks for x in values)
    sums = dict.fromkeys((x for x in count if 2 * count[x] >= len(ranks)), 0.0)
    for values in ranks:
        for x, y in values.items():
            if x in sums:
                sums[x] += y / count[x]
    return tuple(sorted(sums.items()))


def _summary(name: str, series: Mapping[int, Sequence[Point]], marked: Point | None, is_numbered: bool) -> Summary:
    by_rank = {rank: points[-1][1] for rank, points in sorted(series.items()) if points}
    mean = mean_of(series)
    latest = mean[-1][1] if mean else sum(value / len(by_rank) for value in by_rank.values())
    candidates = mean or [point for points in series.values() for point in points]
    finite = [y for _, y in candidates if math.isfinite(y)]
    pick = {"up": max, "down": min}.get(direction(name))
    return Summary(name, mean, latest, pick(finite) if pick and finite else None, by_rank, marked, is_numbered)


def has_line(metrics: Mapping[str, Mapping[int, Sequence[Point]]], group: Iterable[Summary]) -> bool:
    """Return True if one of these metrics has points at two steps."""
    every = (metrics[summary.name].values() for summary in group)
    return any(len({x for line in series for x, _ in filter(is_drawable, line)}) > 1 for series in every)


def line_of(metrics: Mapping[str, Mapping[int, Sequence[Point]]], summary: Summary) -> Sequence[Point]:
    """Return a metric as one line: its mean, or what its lowest rank has reported."""
    series = metrics[summary.name]
    return summary.mean or sorted(series[min(summary.by_rank)])


# ------------------------------------------------------------------ the picture
@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float
    height: float

    def across(self, x: float) -> float:
        return _LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (self.width - _LEFT - _RIGHT)

    def down(self, y: float) -> float:
        return self.height - _BOTTOM - (y - self.y[0]) / (self.y[1] - self.y[0]) * (self.height - _TOP - _BOTTOM)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart beside those of the ranks."""

    points: Sequence[Point]
    colour: str
    dashes: str = "5 4"
    """As in SVG's ``stroke-dasharray``; empty for a solid line."""
    marked: Point | None = None
    """The best point, drawn as a ring."""


def line_chart(
    series: Mapping[int, Sequence[Point]],
    mean: Sequence[Point],
    title: str,
    *,
    lines: Sequence[Line] = (),
    marked: Point | None = None,
    kind: Kind = "",
    width: int = 340,
    height: int = 150,
    most_points: int = MAX_POINTS,
) -> str:
    """Draw an SVG document: a thin line for each rank and a thick one for their mean, on a transparent ground.

    Args:
        series: The points of each rank; a non-finite point leaves a gap.
        mean: The points of the mean, or none.
        title: Title for screen readers.
        lines: Further lines, such as those of the validation.
        marked: The best point of the mean, drawn as a ring.
        kind: How to write the values. The scale of a rate begins at 0.
        width: In pixels.
        height: In pixels.
        most_points: Points of one line; see `downsampled`. Many ranks get fewer each.
    """
    ranks = {
        rank: sorted(points, key=lambda point: math.inf if math.isnan(point[0]) else point[0])
        for rank, points in sorted(series.items())
        if points
    }
    rings = [(line.marked, line.colour) for line in lines] + [(marked, MEAN_COLOUR)]
    marks = [(point, colour) for point, colour in rings if point is not None and is_drawable(point)]
    known = [point for points in (*ranks.values(), mean, *(line.points for line in lines)) for point in points]
    across = _span(x for x, _ in known if abs(x) < MAX_DRAWABLE)  # to the last x, even if its y is NaN
    levels = [y for x, y in known if is_drawable((x, y))] + [y for (_, y), _ in marks] + [0.0] * (kind == "rate")
    scale = _Scale(across, _span(levels), width, height)
    parts = _axes(scale, kind)
    if len(ranks) > MAX_LINES:
        parts.append(_band(ranks, scale))
    else:
        most = max(8, most_points // max(1, len(ranks) // 4))
        for rank, points in ranks.items():
            parts.append(_line(downsampled(points, most), scale, colour_of(rank), 1.0, ' opacity=".7"'))
    if mean:
        parts.append(_line(downsampled(mean, most_points), scale, MEAN_COLOUR, 2.0))
    for line in lines:
        dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        parts.append(_line(downsampled(line.points, most_points), scale, line.colour, 2.0, dashes))
    parts += [_ring(point, scale, colour) for point, colour in marks if scale.x[0] <= point[0] <= scale.x[1]]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return (
        f'{head} role="img" font-family="sans-serif" font-size="10" fill="none" stroke-linejoin="round"'
        ' stroke-linecap="round">'
        f"<title>{escape(clean(title))}</title>{''.join(parts)}</svg>"
    )


def data_uri(svg: str) -> str:
    """Return the document as the source of an ``<img>``."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _span(values: Iterable[float]) -> tuple[float, float]:
    """Return the lowest and the highest value, widened if they are equal."""
    known = list(values) or [0.0]
    low, high = min(known), max(known)
    largest = max(abs(low), abs(high))
    if high - low > max(1e-9 * largest, _MIN_RANGE):
        return low, high
    room = 0.1 * largest if largest > _MIN_RANGE else 0.5
    return low - room, high + room


def colour_of(rank: int) -> str:
    """Return the colour of a rank's line."""
    return COLOURS[rank % len(COLOURS)]


def _line(points: Sequence[Point], scale: _Scale, colour: str, width: float, more: str = "") -> str:
    strokes: list[list[Point]] = [[]]
    for point in points:
        if is_drawable(point):
            strokes[-1].append(point)
        elif strokes[-1]:
            strokes.append([])
    path = ""
    for stroke in filter(None, strokes):
        through = stroke if len(stroke) > 1 else [*stroke, *stroke]  # becomes a dot, because line caps are round
        path += "M" + "L".join(f"{scale.across(x):.1f} {scale.down(y):.1f}" for x, y in through)
    return f'<path d="{path}" stroke="{colour}" stroke-width="{width:g}"{more}/>'


def _ring(point: Point, scale: _Scale, colour: str) -> str:
    x, y = scale.across(point[0]), scale.down(point[1])
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" stroke="{colour}" stroke-width="2"/>'


def colour_beside(name: str) -> str:
    """Return the colour of a metric's line in the chart of another one."""
    return _PART_COLOURS[family(name)[1]]


def _band(ranks: Mapping[int, Sequence[Point]], scale: _Scale, columns: int = 80) -> str:
    """Return the area between the lowest and the highest of all ranks, in columns."""
    found: dict[int, list[Point]] = {}
    for points in ranks.values():
        for x, y in filter(is_drawable, points):
            share = (x - scale.x[0]) / (scale.x[1] - scale.x[0])
            lowest, highest = found.setdefault(min(columns - 1, int(share * columns)), [(x, y), (x, y)])
            if y < lowest[1]:
                found[min(columns - 1, int(share * columns))][0] = (x, y)
            elif y > highest[1]:
                found[min(columns - 1, int(share * columns))][1] = (x, y)
    lows, highs = ([found[column][side] for column in sorted(found)] for side in (0, 1))
    corners = [f"{scale.across(x):.1f} {scale.down(y):.1f}" for x, y in [*lows, *reversed(highs)]]
    return f'<path d="M{"L".join(corners)}Z" fill="{COLOURS[0]}" fill-opacity=".35"/>' if corners else ""


def _axes(scale: _Scale, kind: Kind) -> list[str]:
    bottom, right = scale.height - _BOTTOM, scale.width - _RIGHT
    parts = []
    for y in _ticks(*scale.y):
        at = scale.down(y)
        parts.append(f'<path d="M{_LEFT:g} {at:.1f}H{right:g}" stroke="#888" stroke-opacity=".3"/>')
        parts.append(
            f'<text x="{_LEFT - 5:g}" y="{at + 3.5:.1f}" text-anchor="end" fill="#808080">{_tick(y, kind)}</text>'
        )
    for x in _ticks(*scale.x):
        at = scale.across(x)
        anchor = "end" if at > right - 12 else "middle"
        parts.append(f'<text x="{at:.1f}" y="{bottom + 14:g}" text-anchor="{anchor}" fill="#808080">{_tick(x)}</text>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Return two to five round numbers between these."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, first + 6) if k * step <= high + 1e-9 * step]


def _tick(value: float, kind: Kind = "") -> str:
    if kind:
        return formatted(value, kind) if value else "0"
    return f"{value:.3g}" if abs(value) < 1000 or abs(value) >= 1e6 else f"{value / 1000:.4g}k"
