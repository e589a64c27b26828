"""Fewer points of a series, for the page, the record and its charts: gaps and extremes stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Point = tuple[float, float]
_Row = TypeVar("_Row", bound=tuple[float, ...])
"""A point, and perhaps more numbers."""

MAX_POINTS = 300
"""Points of one series in the record, and of one line in a chart: about one a pixel."""
MAX_DRAWABLE = 1e300
"""The difference of larger numbers may be infinite."""


def downsampled(points: Sequence[_Row], most: int = MAX_POINTS) -> list[_Row]:
    """Return at most `most` points: the first, the last, and of each stretch the extremes and one non-finite point.

    Args:
        points: In the order of x.
        most: At least 5.
    """
    if len(points) <= most:
        return list(points)
    stretches = max(1, (most - 2) // 3)
    kept = {0, len(points) - 1}
    for stretch in range(stretches):
        indices = range(stretch * len(points) // stretches, (stretch + 1) * len(points) // stretches)
        drawable = [i for i in indices if is_drawable(points[i])]
        if drawable:
            kept.add(min(drawable, key=lambda i: points[i][1]))
            kept.add(max(drawable, key=lambda i: points[i][1]))
        kept.update(next(([i] for i in indices if not is_drawable(points[i])), []))
    return [points[i] for i in sorted(kept)]


def is_drawable(point: tuple[float, ...]) -> bool:
    """Return True if both numbers are finite, and small enough to subtract."""
    return abs(point[0]) < MAX_DRAWABLE and abs(point[1]) < MAX_DRAWABLE  # False for NaN
