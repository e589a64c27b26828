"""Metrics as fewer points, as numbers, and as charts that need no script: SVG in a data URI."""

from __future__ import annotations

import base64
import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from nblaunch.launch.output.metric_names import (
    Direction,
    Kind,
    Part,
    direction,
    family,
    formatted,
    number_of,
)

MAX_LINES = 16
"""Ranks drawn as lines: the first."""
COLOURS = ("#2f6fe4", "#d9730d", "#16913f", "#b030c8", "#0b8fa5", "#d6336c", "#7c8b00", "#6b4fd8")
"""Colours of ranks and runs: mid-tones, visible on white and on black. The panel's style sheet has the same."""
MEAN_COLOUR = "#7b7b7b"
"""The mean over the ranks: neutral, because each hue is a rank's."""
LOG_RATIO = 50
"""From this ratio of its highest to its lowest value on, a loss has a logarithmic scale; `chart.js` has the same."""

_FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML or UTF-8 cannot hold, and invisible control characters."""
_MIN_RANGE = 1e-280
"""Parts of a smaller range may be zero."""
WIDTH, HEIGHT = 340, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 8.0, 8.0, 18.0

Point = tuple[float, float]
_Row = TypeVar("_Row", bound=tuple[float, ...])
"""A point, and perhaps more numbers."""

MAX_POINTS = 300
"""Points of one line in a chart: about one a pixel."""
MAX_DRAWABLE = 1e300
"""The difference of larger numbers may be infinite."""


def downsampled(points: Sequence[_Row], most: int = MAX_POINTS) -> list[_Row]:
    """Return at most `most` points (5 or more): the ends, and of each stretch the extremes and one non-finite point."""
    if len(points) <= most:
        return list(points)
    stretches = max(1, (most - 2) // 3)
    kept = {0, len(points) - 1}
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    are_drawable = False
    with contextlib.suppress(OverflowError):  # an integer of 309 digits
        are_drawable = sum(map(abs, xs)) + sum(map(abs, ys)) < MAX_DRAWABLE  # False for NaN
    for stretch in range(stretches):
        indices = range(stretch * len(points) // stretches, (stretch + 1) * len(points) // stretches)
        if are_drawable and indices:  # the same, four times as fast
            part = ys[indices.start : indices.stop]
            kept.add(ys.index(min(part), indices.start))
            kept.add(ys.index(max(part), indices.start))
            continue
        drawable = [i for i in indices if is_drawable(points[i])]
        if drawable:
            kept.add(min(drawable, key=ys.__getitem__))
            kept.add(max(drawable, key=ys.__getitem__))
        kept.update(next(([i] for i in indices if not is_drawable(points[i])), []))
    return [points[i] for i in sorted(kept)]


def is_drawable(point: tuple[float, ...]) -> bool:
    """Return True if both numbers are finite, and small enough to subtract."""
    return abs(point[0]) < MAX_DRAWABLE and abs(point[1]) < MAX_DRAWABLE  # False for NaN


# ------------------------------------------------------------------ numbers
@dataclass(frozen=True, slots=True)
class Summary:
    name: str
    mean: tuple[Point, ...]
    """Mean over the ranks at each x where at least half of them have a point."""
    latest: float
    best: float | None
    """Best mean; None if the direction is unknown or no value is finite."""
    by_rank: Mapping[int, float]
    marked: Point | None = None
    """The step that is marked as the best one, and its value, which may be NaN."""
    is_numbered: bool = False
    """The x of its points are the numbers of the reports, because steps went back."""

    @property
    def ring(self) -> Point | None:
        """The best step, if the chart has steps."""
        return None if self.is_numbered else self.marked

    @property
    def differs(self) -> bool:
        return len({repr(value) for value in self.by_rank.values()}) > 1

    @property
    def latest_text(self) -> str:
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
    charts: Iterable[Sequence[str]],
    best: Mapping[str, Point],
    numbered: Collection[str],
) -> list[list[Summary]]:
    """Summarise the metrics with points, as they are drawn: a list for each chart.

    `best` has the marked points; `numbered` are the metrics with the numbers of their reports as x.
    """
    groups = (
        [
            _summary(name, metrics[name], best.get(name), name in numbered)
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
    """Return True if one of these metrics has several steps and several values: a constant is only a number."""
    every = ([[*filter(is_drawable, line)] for line in metrics[summary.name].values()] for summary in group)
    return any(
        any(len({x for x, _ in line}) > 1 for line in lines) and len({y for line in lines for _, y in line}) > 1
        for lines in every
    )


def line_of(metrics: Mapping[str, Mapping[int, Sequence[Point]]], summary: Summary) -> Sequence[Point]:
    """Return a metric as one line: its mean, or what its lowest rank has reported."""
    series = metrics[summary.name]
    return summary.mean or sorted(series[min(summary.by_rank)])


# ------------------------------------------------------------------ the picture
@dataclass(frozen=True, slots=True)
class _Scale:
    x: tuple[float, float]
    y: tuple[float, float]
    """Of a logarithmic scale: the exponents of 10."""
    is_log: bool

    def across(self, x: float) -> float:
        return _LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - _LEFT - _RIGHT)

    def down(self, y: float) -> float:
        at = math.log10(y) if self.is_log else y
        top = 2 * _TOP if self.is_log else _TOP  # no grid line may strike through "log scale"
        return HEIGHT - _BOTTOM - (at - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - top - _BOTTOM)


@dataclass(frozen=True, slots=True)
class Stroke:
    colour: str
    dashes: str = ""
    """As in SVG's ``stroke-dasharray``; empty for a solid line."""


PART_STROKES: dict[Part, Stroke] = {
    "training": Stroke("#5b7c99", "3 4"),
    "epoch": Stroke("#b98a00", "0.1 5"),
    "valid": Stroke("#cc3fc0", "6 5"),
    "test": Stroke("#0f9089", "9 5 0.1 5"),
}
"""Strokes of the lines beside the first one of a chart, as in the panel's style sheet and `chart.js`."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart beside those of the ranks."""

    points: Sequence[Point]
    stroke: Stroke
    marked: Point | None = None


def line_chart(
    series: Mapping[int, Sequence[Point]],
    mean: Sequence[Point],
    title: str,
    *,
    lines: Sequence[Line] = (),
    marked: Point | None = None,
    kind: Kind = "",
    way: Direction = "",
    most_points: int = MAX_POINTS,
) -> str:
    """Draw an SVG document on a transparent ground: thin lines for the first ranks and a thick one for the mean of all.

    A rank alone has the thick line. A non-finite point leaves a gap, and `marked` is a ring at the best point.
    The scale of a rate begins at 0; the way "down" allows a logarithmic scale, see `LOG_RATIO`. Many ranks get fewer
    points than `most_points` each.
    """
    ranks = {
        rank: sorted(points, key=lambda point: math.inf if math.isnan(point[0]) else point[0])
        for rank, points in sorted(series.items())
        if points
    }
    colour = MEAN_COLOUR if len(ranks) > 1 or not ranks else colour_of(next(iter(ranks)))
    rings = [(line.marked, line.stroke.colour) for line in lines] + [(marked, colour)]
    marks = [(point, colour) for point, colour in rings if point is not None and is_drawable(point)]
    known = [point for points in (*ranks.values(), mean, *(line.points for line in lines)) for point in points]
    across = _span(x for x, _ in known if abs(x) < MAX_DRAWABLE)  # to the last x, even if its y is NaN
    levels = [y for x, y in known if is_drawable((x, y))] + [y for (_, y), _ in marks] + [0.0] * (kind == "rate")
    is_log = way == "down" and bool(levels) and 0 < LOG_RATIO * min(levels) <= max(levels)
    scale = _Scale(across, _span(map(math.log10, levels) if is_log else levels), is_log)
    parts = _axes(scale, kind, is_flat=len(set(levels)) == 1)
    if len(ranks) > 1:
        most = max(8, most_points // max(1, min(len(ranks), MAX_LINES) // 4))
        for rank, points in itertools.islice(ranks.items(), MAX_LINES):
            parts.append(_line(downsampled(points, most), scale, colour_of(rank), 1.0, ' opacity=".7"'))
    thick = mean if len(ranks) != 1 else next(iter(ranks.values()))
    if thick:
        parts.append(_line(downsampled(thick, most_points), scale, colour, 2.0))
    for line in lines:
        dashes = f' stroke-dasharray="{line.stroke.dashes}"' if line.stroke.dashes else ""
        parts.append(_line(downsampled(line.points, most_points), scale, line.stroke.colour, 2.0, dashes))
    for (x, y), colour in marks:
        if scale.x[0] <= x <= scale.x[1]:
            at = f'cx="{scale.across(x):.1f}" cy="{scale.down(y):.1f}"'
            parts.append(f'<circle {at} r="4.5" stroke="{colour}" stroke-width="2"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return (
        f'{head} role="img" font-family="sans-serif" font-size="10" fill="none" stroke-linejoin="round"'
        ' stroke-linecap="round">'
        f"<title>{escape(clean(title))}</title>{''.join(parts)}</svg>"
    )


def data_uri(svg: str) -> str:
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


def stroke_beside(name: str) -> Stroke:
    """Return the stroke of a metric's line in the chart of another one."""
    return PART_STROKES[family(name)[1]]


def _axes(scale: _Scale, kind: Kind, *, is_flat: bool) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    levels = _log_ticks(*scale.y) if scale.is_log else [sum(scale.y) / 2] if is_flat else _ticks(*scale.y)
    plain = kind == "lr" and max(map(abs, levels)) >= 0.01  # the numbers of an axis are written alike
    for y in levels:
        at, text = scale.down(y), _tick(y, "" if plain else kind)
        parts.append(f'<path d="M{_LEFT:g} {at:.1f}H{right:g}" stroke="#888" stroke-opacity=".3"/>')
        parts.append(f'<text x="{_LEFT - 5:g}" y="{at + 3.5:.1f}" text-anchor="end" fill="#808080">{text}</text>')
    if scale.is_log:
        parts.append(f'<text x="{right:g}" y="{_TOP + 2:g}" text-anchor="end" fill="#808080">log scale</text>')
    for x in filter(float.is_integer, _ticks(*scale.x)):  # steps are whole numbers
        at = scale.across(x)
        anchor = "end" if at > right - 12 else "middle"
        parts.append(f'<text x="{at:.1f}" y="{bottom + 14:g}" text-anchor="{anchor}" fill="#808080">{_tick(x)}</text>')
    return parts


def _log_ticks(low: float, high: float) -> list[float]:
    """Return two to seven round numbers between these powers of 10."""
    decades = range(max(-307, math.floor(low)), math.ceil(high) + 1)  # 10.0**-324 is 0
    factors, every = ((1, 2, 5) if high - low < 2.2 else (1,)), math.ceil((high - low) / 6)
    ticks = [factor * 10.0**decade for decade in decades[::every] for factor in factors]
    return [tick for tick in ticks if low - 1e-9 <= math.log10(tick) <= high + 1e-9]


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, first + 6) if k * step <= high + 1e-9 * step]


def _tick(value: float, kind: Kind = "") -> str:
    if kind:
        return formatted(value, kind) if value else "0"
    return f"{value:.3g}" if abs(value) < 1000 or abs(value) >= 1e6 else f"{value / 1000:.4g}k"
