r"""The reports of a launch, and those found in printed lines by patterns such as ``loss: (?P<loss>[\d.]+)``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nblaunch.errors import ArgumentError
from nblaunch.launch.output.terminal_lines import without_colours


@dataclass(frozen=True, slots=True)
class Report:
    """One call of ``nblaunch.report`` in a rank."""

    rank: int
    time: float
    """Seconds since the epoch."""
    step: int | None
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Best:
    """The best step by a metric; see `nblaunch.ranks.report.mark_best`."""

    step: int
    value: float | None
    """None if the rank has not reported it."""


class ReportList(list[Report]):
    """The reports of a launch in the order of arrival, with the latest values and the best steps of each rank."""

    def __init__(self, reports: Iterable[Report] = ()) -> None:
        super().__init__()
        self._latest: dict[int, dict[str, tuple[float, float]]] = {}
        self._best: dict[int, dict[str, Best]] = {}
        for report in reports:
            self.add(report.rank, report.time, report.step, report.values)

    def add(self, rank: int, time: float, step: int | None, values: Mapping[str, float]) -> None:
        self.append(Report(rank, time, step, {sys.intern(name): value for name, value in values.items()}))
        latest = self._latest.setdefault(rank, {})
        for name, value in values.items():
            if name not in latest or latest[name][0] <= time:
                latest[name] = time, value

    def mark(self, rank: int, metric: str, step: int, value: float | None) -> Best:
        """Mark a rank's best step by a metric. The value defaults to that of the report."""
        if value is None and metric in self._latest.get(rank, {}):
            known = (each.values for each in reversed(self) if (each.rank, each.step) == (rank, step))
            value = next((values[metric] for values in known if metric in values), None)
        best = self._best.setdefault(rank, {})[metric] = Best(step, value)
        return best

    @property
    def last(self) -> dict[str, float]:
        """Return the latest value of each metric: the mean over the ranks that have reported it."""
        return {
            name: values[0] if len(set(values)) == 1 else sum(value / len(values) for value in values)
            for name, values in self._by_name().items()
        }

    @property
    def differing(self) -> dict[str, int]:
        """Return the metrics whose latest values differ between ranks, with the number of ranks that have them."""
        return {name: len(values) for name, values in self._by_name().items() if len({*map(repr, values)}) > 1}

    def _by_name(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for rank in sorted(self._latest):
            for name, (_, value) in self._latest[rank].items():
                found.setdefault(name, []).append(value)
        return found

    @property
    def best(self) -> dict[str, Best]:
        return {metric: best for rank in sorted(self._best, reverse=True) for metric, best in self._best[rank].items()}


STEP = "step"
_COMMAS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?![\d,])")
_NUMBER = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|nan|inf(?:inity)?)", re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d{1,18}")


def compile_patterns(value: Any) -> tuple[re.Pattern[str], ...]:
    """Compile ``metric_patterns=value``: None, a string, a compiled pattern, or a sequence of them."""
    if value is None:
        return ()
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return tuple(map(_compiled, value if is_list else [value]))


def _compiled(given: Any) -> re.Pattern[str]:
    text = given.pattern if isinstance(given, re.Pattern) else given
    if not isinstance(text, str):
        raise ArgumentError(f"metric_patterns={text!r}: must be a string, a compiled pattern, or a list of them")
    try:
        pattern = re.compile(given)
    except (re.error, OverflowError, RecursionError) as error:
        raise ArgumentError(f"metric_patterns={text!r}: not a regular expression: {error}") from None
    if not pattern.groupindex.keys() - {STEP}:
        raise ArgumentError(f"metric_patterns={text!r}: name the group that holds the number, as in (?P<loss>[\\d.]+)")
    return pattern


# ------------------------------------------------------------------ one line
def search(line: str, patterns: Sequence[re.Pattern[str]]) -> dict[str, Any] | None:
    """Return the ``step`` and ``metrics`` of a line, or None without a metric. For a name, the first pattern wins."""
    metrics: dict[str, float] = {}
    step: int | None = None
    for pattern in patterns:
        match = pattern.search(line)
        for name, text in match.groupdict().items() if match else ():
            if text is None:  # the group did not participate
                continue
            if name == STEP:
                step = _whole(text) if step is None else step
            elif name not in metrics and (value := _number(text)) is not None:
                metrics[name] = value
    return {"step": step, "metrics": metrics} if metrics else None


def _number(text: str) -> float | None:
    text = _bare(text)
    return float(text) if _NUMBER.fullmatch(text) else None


def _whole(text: str) -> int | None:
    text = _bare(text)
    return int(text) if _WHOLE.fullmatch(text) else None


def _bare(text: str) -> str:
    """Strip thousands separators, a trailing percent sign and trailing punctuation."""
    text = text.strip().rstrip(".,;:").removesuffix("%").rstrip(" .")
    commas = _COMMAS.match(text)
    return commas[0].replace(",", "") + text[commas.end() :] if commas else text


class PrintedMetrics:
    r"""Searches printed lines. Counts those that are not empty, and those with a metric.

    Python's ``re`` holds the GIL and cannot be interrupted: a pattern that takes exponential time, such as
    ``(?P<x>\d+)+y``, blocks the kernel.
    """

    def __init__(self, patterns: Sequence[re.Pattern[str]]) -> None:
        self._patterns = patterns
        self.lines = self.matches = 0

    def search(self, lines: Sequence[str], now: float) -> list[dict[str, Any]]:
        """Return records in the format of `nblaunch.report`, with `now` as their time."""
        found = [search(without_colours(line), self._patterns) for line in lines]
        records = [{"time": now, **record} for record in found if record is not None]
        self.lines += sum(map(bool, lines))
        self.matches += len(records)
        return records
