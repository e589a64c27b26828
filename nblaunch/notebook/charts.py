"""Metrics as numbers, and as charts that need no script: SVG in a data URI."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from nblaunch.notebook.downsampling import MAX_DRAWABLE, MAX_POINTS, Point, downsampled, is_drawable

Direction = Literal["up", "down", ""]

MAX_LINES = 16
"""Ranks drawn as lines; more ranks are drawn as a band."""
COLOURS = ("#c2703d", "#2f8f6b", "#8a63c9", "#c2528b", "#7d8a2e", "#2f8aa8", "#b5555a", "#6b7fa8")
"""Colours of the ranks' lines: mid-tones, visible on white and on black."""
MEAN_COLOUR = "#3f7fe0"

_UP = {"accuracy", "acc", "f1", "auc", "precision", "recall", "map", "iou", "bleu", "score"}
_DOWN = {"loss", "error", "perplexity", "mae", "mse", "rmse"}
_WORD = re.compile(r"f1|[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
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

    @property
    def differs(self) -> bool:
        """True if the latest values of the ranks differ."""
        return len({repr(value) for value in self.by_rank.values()}) > 1


def clean(text: str) -> str:
    """Replace characters that a document cannot hold, such as control characters, by U+FFFD."""
    return _FORBIDDEN.sub("\ufffd", text)


def summarise(metrics: Mapping[str, Mapping[int, Sequence[Point]]]) -> list[Summary]:
    """Summarise each metric with points: accuracies first, then losses, then the others by name."""
    order: dict[Direction, int] = {"up": 0, "down": 1, "": 2}
    names = sorted(metrics, key=lambda name: (order[direction(name)], name.lower(), name))
    return [_summary(name, metrics[name]) for name in names if any(metrics[name].values())]


def direction(name: str) -> Direction:
    """Return "up" or "down" for the better direction of a metric, judged by its name; "" if unknown."""
    # Read names both ways: "valLoss" has two words, "mAP" has one. The last known word decides.
    for word in [*re.findall("f1|[a-z]+", name.lower()), *map(str.lower, _WORD.findall(name))][::-1]:
        if word in _UP:
            return "up"
        if word in _DOWN:
            return "down"
    return ""


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


def _summary(name: str, series: Mapping[int, Sequence[Point]]) -> Summary:
    by_rank = {rank: points[-1][1] for rank, points in sorted(series.items()) if points}
    mean = mean_of(series)
    latest = mean[-1][1] if mean else sum(value / len(by_rank) for value in by_rank.values())
    candidates = mean or [point for points in series.values() for point in points]
    finite = [y for _, y in candidates if math.isfinite(y)]
    pick = {"up": max, "down": min}.get(direction(name))
    return Summary(name, mean, latest, pick(finite) if pick and finite else None, by_rank)


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


def line_chart(
    series: Mapping[int, Sequence[Point]],
    mean: Sequence[Point],
    title: str,
    *,
    width: int = 340,
    height: int = 150,
    most_points: int = MAX_POINTS,
) -> str:
    """Draw an SVG document: a thin line for each rank and a thick one for their mean, on a transparent ground.

    Args:
        series: The points of each rank; a non-finite point leaves a gap.
        mean: The points of the mean, or none.
        title: Title for screen readers.
        width: In pixels.
        height: In pixels.
        most_points: Points of one line; see `downsampled`. Many ranks get fewer each.
    """
    ranks = {
        rank: sorted(points, key=lambda point: math.inf if math.isnan(point[0]) else point[0])
        for rank, points in sorted(series.items())
        if points
    }
    known = [point for points in (*ranks.values(), mean) for point in points]
    across = _span(x for x, _ in known if abs(x) < MAX_DRAWABLE)  # to the last x, even if its y is NaN
    scale = _Scale(across, _span(y for x, y in known if is_drawable((x, y))), width, height)
    parts = _axes(scale)
    if len(ranks) > MAX_LINES:
        parts.append(_band(ranks, scale))
    else:
        most = max(8, most_points // max(1, len(ranks) // 4))
        for rank, points in ranks.items():
            parts.append(_line(downsampled(points, most), scale, colour_of(rank), 1.0, ' opacity=".7"'))
    if mean:
        parts.append(_line(downsampled(mean, most_points), scale, MEAN_COLOUR, 2.0))
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


def _axes(scale: _Scale) -> list[str]:
    bottom, right = scale.height - _BOTTOM, scale.width - _RIGHT
    parts = []
    for y in _ticks(*scale.y):
        at = scale.down(y)
        parts.append(f'<path d="M{_LEFT:g} {at:.1f}H{right:g}" stroke="#888" stroke-opacity=".3"/>')
        parts.append(f'<text x="{_LEFT - 5:g}" y="{at + 3.5:.1f}" text-anchor="end" fill="#808080">{_tick(y)}</text>')
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


def _tick(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 or abs(value) >= 1e6 else f"{value / 1000:.4g}k"
