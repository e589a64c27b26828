"""The state of a launch as the panel and the record show it, and what of it has changed since the last message.

Pure: no thread, widget or clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nblaunch.launch.output.metric_names import Chart, ChartPlan, family
from nblaunch.launch.output.terminal_lines import without_colours
from nblaunch.launch.views import Failure, LaunchInfo, Outcome, RankState, RankStatus, Stuck
from nblaunch.machine.usage import Usage
from nblaunch.notebook.charts import Point, downsampled
from nblaunch.notebook.page_messages import (
    BestEntry,
    Changes,
    ChartEntry,
    ChartLine,
    FailureEntry,
    NoteEntry,
    OutputsEntry,
    PointEntry,
    ProfileEntry,
    ProgressEntry,
    RankEntry,
    ResourceEntry,
    StackEntry,
    StacksEntry,
    StateEntry,
    StuckEntry,
    UsageValue,
)

_MAX_SERIES_POINTS = 1000
"""A longer series is downsampled, repeatedly."""
_MAX_MESSAGE_POINTS = 300
_MAX_QUEUED_MESSAGES = 10
"""Messages that the unsent points of a series may fill; more points are downsampled."""
_MAX_SNAPSHOT_POINTS = 2000
"""Points of all series together in a snapshot."""
_MAX_METRICS = 100
_MAX_NOTES = 200
_MAX_BARS = 3
"""Progress bars of one rank: the latest."""
_MAX_TEXT_LENGTH = 20_000
"""Characters of a traceback or a note."""
_MAX_LINE_LENGTH = 400
_MAX_OTHERS = 16


_Reported = tuple[float, float, int]
"""A point (x, y), and the number of its report, counted from 0: steps may go back, numbers do not."""


class Series:
    """One metric of one rank: points (x, y), downsampled once there are too many."""

    def __init__(self) -> None:
        self.reported: list[_Reported] = []
        self.count = 0
        self.unsent: list[_Reported] = []

    def points(self, *, numbered: bool = False) -> list[Point]:
        """Return the kept points, in order of arrival; numbered: with the number of the report as x."""
        return [(float(number) if numbered else x, y) for x, y, number in self.reported]

    def extend(self, points: Sequence[tuple[float | None, float]]) -> list[float]:
        """Append points and return their x, by default the numbers of the reports."""
        new = [(float(number) if x is None else x, y, number) for number, (x, y) in enumerate(points, self.count)]
        self.count += len(new)
        thin = downsampled(new, _MAX_SERIES_POINTS // 2)
        for kept in (self.reported, self.unsent):
            kept += thin
            if len(kept) > _MAX_SERIES_POINTS:
                kept[:] = downsampled(kept, _MAX_SERIES_POINTS // 2)
        return [x for x, _, _ in new]


class PanelState:
    def __init__(self, world_size: int) -> None:
        self.state = StateEntry("starting", countdown="", attempt=0, log_dir="", seconds=None, message="")
        self.ranks: dict[int, RankState] = dict.fromkeys(range(world_size), "starting")
        self.pids: dict[int, int] = {}
        self.progress: dict[int, dict[str, ProgressEntry]] = {}
        self.series: dict[str, dict[int, Series]] = {}
        self.plan = ChartPlan()
        self.best: dict[str, tuple[int, BestEntry]] = {}
        """The best point of each metric for which one is marked, with the lowest rank that has marked it."""
        self.resources: dict[int, ResourceEntry] = {}
        self.outputs: dict[int, OutputsEntry] = {}
        self.notes: list[NoteEntry] = []
        self.failure: Failure | None = None
        self.stacks: StacksEntry | None = None
        self.profile: ProfileEntry | None = None
        self.stuck = StuckEntry((), ())
        self._has_noted_limit = False
        self._changed: dict[str, set[int]] = {}
        """Changed fields of `Changes`, each with its changed ranks (notes: indices)."""

    # -------------------------------------------------------------- taking in
    def start(self, info: LaunchInfo) -> None:
        self.ranks = dict.fromkeys(range(info.world_size), "starting")
        self.progress.clear()
        self._mark("ranks", self.ranks)
        self.set_stuck(0.0, Stuck())
        self._set(name="starting", attempt=info.attempt, log_dir=str(info.log_dir))

    def set_ranks(self, changed: Iterable[RankStatus]) -> None:
        for status in changed:
            self.ranks[status.rank] = status.state
            self.pids[status.rank] = status.pid
            if status.state in ("returned", "failed", "ended"):
                self.pids.pop(status.rank, None)
            self._mark("ranks", [status.rank])
        if self.state.name == "starting" and not {"running", "waiting"}.isdisjoint(self.ranks.values()):
            self._set(name="running")

    def add_reports(self, rank: int, records: Sequence[Mapping[str, Any]]) -> None:
        points: dict[str, list[tuple[float | None, float]]] = {}
        for record in records:
            if "metrics" in record:
                step = record.get("step")
                if not self.plan.leads(record["metrics"]):  # how far the others are then counts
                    self._add_all(rank, points)
                for name, value in record["metrics"].items():
                    points.setdefault(name, []).append((step, value))
            elif "progress" in record:
                self._set_bar(rank, record)
        self._add_all(rank, points)
        for record in records:
            if "best" in record and self.best.get(record["best"], (rank,))[0] >= rank:
                name, step, value = record["best"], record["step"], record["value"]
                if value is None and rank in self.series.get(name, {}):
                    value = dict(self.series[name][rank].points()).get(step)
                self.best[name] = rank, BestEntry(name, step, _finite(value))
                self._mark("best")

    def _set_bar(self, rank: int, record: Mapping[str, Any]) -> None:
        bars, name = self.progress.setdefault(rank, {}), record["progress"]
        total = record.get("total") or None
        first, level = record.get("first", 0), record.get("level", 0)
        if name not in bars and level:
            inner = [bar for bar in bars.values() if bar.level >= level]
            for ended in [bar.name for bar in inner if bar.done == bar.total or bar.seconds is None]:
                del bars[ended]  # such as that of the epoch before
        bars[name] = ProgressEntry(rank, name, record.get("done"), total, record.get("seconds"), first, level)
        if len(bars) > _MAX_BARS:  # keep outer bars, and those that still run
            others = [bar for bar in bars.values() if bar.name != name]
            del bars[min(others, key=lambda bar: (bar.done != bar.total, -bar.level)).name]
        self._mark("progress", [rank])

    def _add_all(self, rank: int, points: dict[str, list[tuple[float | None, float]]]) -> None:
        for name, found in points.items():
            self._add_points(name, rank, found)
        points.clear()

    def _add_points(self, name: str, rank: int, points: Sequence[tuple[float | None, float]]) -> None:
        if name in self.series or len(self.series) < _MAX_METRICS:
            xs = self.series.setdefault(name, {}).setdefault(rank, Series()).extend(points)
            self._mark("metrics", [rank])
            if self.plan.extend(name, xs, rank):
                self._mark("charts")
        elif not self._has_noted_limit:
            self._has_noted_limit = True
            self.add_note(0.0, f"only the first {_MAX_METRICS} metrics are shown; see result.metrics for the others")

    def set_resources(self, usages: Iterable[Usage]) -> None:
        for usage in usages:
            entry = ResourceEntry(usage.rank, [UsageValue(*value) for value in usage.values()])
            if usage.memory and self.resources.get(usage.rank) != entry:  # 0: the rank has just ended
                self.resources[usage.rank] = entry
                self._mark("resources", [usage.rank])

    def set_outputs(self, entry: OutputsEntry) -> None:
        self.outputs[entry.rank] = entry
        self._mark("outputs", [entry.rank])

    def add_note(self, now: float, text: str) -> None:
        self.notes.append(NoteEntry(round(now, 2), text.replace("`", "")[:_MAX_TEXT_LENGTH]))
        self._mark("notes", [len(self.notes) - 1])

    def set_stuck(self, now: float, stuck: Stuck) -> None:
        entry = StuckEntry([line[:_MAX_TEXT_LENGTH] for line in stuck.lines], stuck.ranks)
        if entry != self.stuck:
            self.stuck = entry
            self._mark("stuck")
        for line in stuck.lines:  # the banner goes with the wait, and these stay
            self.add_note(now, line)

    def set_countdown(self, text: str) -> None:
        if self.state.name not in ("starting", "running", "stopping"):
            return
        if text and (text != self.state.countdown or self.state.name != "stopping"):
            self._set(countdown=text, name="stopping")

    def set_stacks(self, now: float, texts: Mapping[int, str]) -> None:
        entries = [StackEntry(rank, text[:_MAX_TEXT_LENGTH]) for rank, text in texts.items()]
        self.stacks = StacksEntry(round(now, 2), entries)
        self._mark("stacks")

    def set_profile(self, now: float, html: str, *, has_trace: bool) -> None:
        self.profile = ProfileEntry(round(now, 2), html, has_trace)
        self._mark("profile")

    def end(self, outcome: Outcome) -> None:
        self.pids.clear()
        self.set_stuck(0.0, Stuck())
        self.failure = outcome.failure
        for rank, state in self.ranks.items():
            if state not in ("returned", "failed", "ended"):
                self.ranks[rank] = "ended" if outcome.state != "finished" else "returned"
        if outcome.failure is not None and outcome.failure.rank in self.ranks:
            self.ranks[outcome.failure.rank] = "failed"
        self._mark("ranks", self.ranks)
        self._mark("failure")
        self._set(name=outcome.state, seconds=round(outcome.seconds, 3), message=outcome.message, countdown="")

    def _set(self, **parts: Any) -> None:
        self.state = dataclasses.replace(self.state, **parts)
        self._mark("state")

    def _mark(self, part: str, ranks: Iterable[int] = ()) -> None:
        self._changed.setdefault(part, set()).update(ranks)

    # -------------------------------------------------------------- giving out
    @property
    def is_changed(self) -> bool:
        return bool(self._changed)

    def delta(self) -> Changes | None:
        """Return what has changed since the last `delta` or `snapshot`; None if nothing has."""
        changed, self._changed = self._changed, {}
        return Changes(**{part: self._part(part, sorted(of)) for part, of in changed.items()}) if changed else None

    def snapshot(self) -> Changes:
        self._changed = {}
        return Changes(**{field.name: self._part(field.name, None) for field in dataclasses.fields(Changes)})

    def _part(self, part: str, of: Sequence[int] | None) -> Any:
        """Return a field of `Changes`; `of`: its changed ranks (notes: indices), None: all of it."""
        match part:
            case "ranks":
                return [RankEntry(rank, self.ranks[rank]) for rank in (sorted(self.ranks) if of is None else of)]
            case "progress":
                bars = [self.progress.get(rank, {}).values() for rank in (sorted(self.progress) if of is None else of)]
                return [bar for each in bars for bar in sorted(each, key=lambda bar: bar.level)]
            case "resources" | "outputs":
                found: Mapping[int, Any] = getattr(self, part)
                return [found[rank] for rank in (sorted(found) if of is None else of)]
            case "notes":
                return (self.notes if of is None else [self.notes[at] for at in of])[-_MAX_NOTES:]
            case "metrics":
                return self._all_points() if of is None else self._new_points()
            case "charts":
                return [self._chart_entry(chart) for chart in self.plan.charts]
            case "best":
                return [entry for _, entry in self.best.values()]
            case "failure":
                return _failure_entry(self.failure)
            case _:
                return getattr(self, part)

    def _chart_entry(self, chart: Chart) -> ChartEntry:
        lines = [ChartLine(name, family(name)[1], name in self.plan.numbered) for name in chart.names]
        return ChartEntry(lines, chart.direction, chart.kind)

    def _new_points(self) -> list[PointEntry]:
        """Return some unsent points of each series. Downsample long queues first."""
        new = [(name, rank, s) for name, ranks in self.series.items() for rank, s in ranks.items() if s.unsent]
        each = max(1, _MAX_MESSAGE_POINTS // max(1, len(new)))
        points = []
        for name, rank, series in new:
            waiting = downsampled(series.unsent, each * _MAX_QUEUED_MESSAGES)
            points += _point_entries(name, rank, waiting[:each])
            series.unsent = waiting[each:]
            if series.unsent:
                self._mark("metrics", [rank])
        return points

    def _all_points(self) -> list[PointEntry]:
        count = sum(len(ranks) for ranks in self.series.values())
        points = []
        for name, ranks in self.series.items():
            for rank, series in ranks.items():
                points += _point_entries(
                    name, rank, downsampled(series.reported, max(5, _MAX_SNAPSHOT_POINTS // count))
                )
                series.unsent = []
        return points


def _point_entries(name: str, rank: int, points: Iterable[_Reported]) -> list[PointEntry]:
    return [PointEntry(name, rank, x, _finite(y), number) for x, y, number in points]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _failure_entry(failure: Failure | None) -> FailureEntry | None:
    if failure is None:
        return None
    return FailureEntry(
        rank=failure.rank,
        headline=failure.headline,
        details=without_colours(failure.details)[:_MAX_TEXT_LENGTH],
        where=failure.where,
        source=failure.source[:_MAX_LINE_LENGTH],
        traceback=without_colours(failure.traceback)[-_MAX_TEXT_LENGTH:],
        others=[other[:_MAX_LINE_LENGTH] for other in failure.others[:_MAX_OTHERS]],
    )
