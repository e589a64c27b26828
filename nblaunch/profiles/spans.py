"""Arithmetic with spans of time: lists of (begin, end), sorted and disjoint unless said otherwise."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from operator import itemgetter

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the time that any of these spans covers; they may be unsorted, and overlap."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def overlap(first: list[Span], second: list[Span]) -> list[Span]:
    """Return the time that both cover."""
    return list(_overlaps(first, second))


def _overlaps(first: list[Span], second: list[Span]) -> Iterator[Span]:
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            yield begin, end
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1


def within(spans: list[Span], begin: float, end: float) -> list[Span]:
    """Return the part of spans from one time to another."""
    first = bisect.bisect_left(spans, begin, key=itemgetter(1))
    last = bisect.bisect_left(spans, end, key=itemgetter(0))
    return [(max(begin, span[0]), min(end, span[1])) for span in spans[first:last] if span[1] > begin]


def minus(first: list[Span], *others: list[Span]) -> list[Span]:
    """Return the time of the first that none of the others covers."""
    covered = union(span for other in others for span in other)
    if not first or not covered:
        return first
    edges = [first[0][0] - 1.0, *(edge for span in covered for edge in span), max(first[-1][1], covered[-1][1]) + 1.0]
    return overlap(first, [gap for gap in zip(edges[::2], edges[1::2], strict=True) if gap[0] < gap[1]])


def total(spans: list[Span]) -> float:
    """Return how long they are together."""
    return sum(end - begin for begin, end in spans)
