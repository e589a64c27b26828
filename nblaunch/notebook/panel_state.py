"""How a launch stands, as the panel and the record show it; what has changed since the page was told last.

Pure: plain values, and no thread, widget or clock. The names of the parts are those of the messages to the page; see
`nblaunch.notebook.panel`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from nblaunch.launch.views.view import Failure, LaunchInfo, Outcome, RankStatus
from nblaunch.machine.usage import Usage
from nblaunch.notebook.charts import Point

_MOST_POINTS = 2000
"""Points of one series; a longer one is thinned, again and again."""
_POINTS_AT_ONCE = 300
_BEHIND = 10
"""So many messages the points may be behind."""
_POINTS_ANEW = 2000
"""Points of all series together that a page gets which has missed some."""
_MOST_METRICS = 100
_MOST_NOTES = 200
_BARS = 3
"""Progress bars of one rank: the latest."""
_LONGEST = 20_000
"""Characters of a text that is sent whole: a traceback, a note."""


class Series:
    """One metric of one rank: points (x, y), thinned once there are too many."""

    def __init__(self) -> None:
        self._xs = array("d")
        self._ys = array("d")
        self.count = 0
        self.unsent: list[Point] = []

    @property
    def points(self) -> list[Point]:
        """What is kept, in the order in which it came."""
        return list(zip(self._xs, self._ys, strict=True))

    def add(self, x: float | None, y: float) -> None:
        """One more point; without x it is the number of the report."""
        point = (float(self.count) if x is None else x, y)
        self._xs.append(point[0])
        self._ys.append(point[1])
        self.unsent.append(point)
        self.count += 1
        if len(self._xs) > _MOST_POINTS:
            kept = thinned(self.points, _MOST_POINTS // 2)
            self._xs, self._ys = array("d", [x for x, _ in kept]), array("d", [y for _, y in kept])
        if len(self.unsent) > _MOST_POINTS:
            self.unsent = thinned(self.unsent, _MOST_POINTS // 2)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many of the points: the last, and where there is room the lowest and the highest of each stretch."""
    if len(points) <= most:
        return list(points)
    stretches = (most - 1) // 2
    if stretches < 1:
        return list(points[-most:])
    width = -(-len(points) // stretches)
    kept = [point for at in range(0, len(points), width) for point in _extremes(points[at : at + width])]
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def _extremes(stretch: Sequence[Point]) -> list[Point]:
    finite = [point for point in stretch if math.isfinite(point[1])]
    if not finite:
        return [stretch[0]]
    low, high = min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))
    return [point for point in finite if point is low or point is high]


class PanelState:
    """How a launch stands.

    Args:
        world_size: The number of its ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.state: dict[str, Any] = {
            "name": "starting",
            "countdown": "",
            "attempt": 0,
            "log_dir": "",
            "seconds": None,
            "message": "",
        }
        self.ranks: dict[int, str] = dict.fromkeys(range(world_size), "starting")
        self.pids: dict[int, int] = {}
        """The ranks that live, and their processes."""
        self.progress: dict[int, dict[str, list[Any]]] = {}
        self.series: dict[str, dict[int, Series]] = {}
        self.resources: dict[int, list[Any]] = {}
        self.notes: list[tuple[float, str]] = []
        self.failure: Failure | None = None
        self.stacks: dict[str, Any] | None = None
        self._left_out = False
        self._changed: dict[str, set[int]] = {}
        """Parts that have changed, with the ranks where the part has them."""

    # -------------------------------------------------------------- taking in
    def started(self, info: LaunchInfo) -> None:
        """An attempt has begun."""
        self.ranks = dict.fromkeys(range(info.world_size), "starting")
        self.progress.clear()
        self._mark("ranks", self.ranks)
        self._set(name="starting", attempt=info.attempt, log_dir=str(info.log_dir))

    def ranks_stand(self, changed: Sequence[RankStatus]) -> None:
        """Ranks stand elsewhere."""
        for status in changed:
            self.ranks[status.rank] = status.state
            self.pids[status.rank] = status.pid
            if status.state in ("returned", "failed", "ended"):
                self.pids.pop(status.rank, None)
        self._mark("ranks", (status.rank for status in changed))
        if self.state["name"] == "starting" and "running" in self.ranks.values():
            self._set(name="running")

    def reported(self, rank: int, records: Sequence[Mapping[str, Any]]) -> None:
        """A rank has reported metrics or progress."""
        for record in records:
            if "metrics" in record:
                for name, value in record["metrics"].items():
                    self._add_point(name, rank, record.get("step"), value)
            elif "progress" in record:
                bars = self.progress.setdefault(rank, {})
                bars.pop(record["progress"], None)  # the latest are last
                bars[record["progress"]] = [record.get("done"), _total(record.get("total")), record.get("seconds")]
                while len(bars) > _BARS:
                    del bars[next(iter(bars))]
                self._mark("progress", [rank])

    def _add_point(self, name: str, rank: int, step: int | None, value: float) -> None:
        if name in self.series or len(self.series) < _MOST_METRICS:
            self.series.setdefault(name, {}).setdefault(rank, Series()).add(step, value)
            self._mark("metrics", [rank])
        elif not self._left_out:
            self._left_out = True
            self.noted(0.0, f"more than {_MOST_METRICS} metrics: the others are in the result's metrics alone")

    def used(self, usages: Iterable[Usage]) -> None:
        """What ranks use of the machine."""
        for usage in usages:
            values = [round(usage.cpu, 2), usage.memory, usage.gpu, usage.gpu_memory]
            if usage.memory and self.resources.get(usage.rank) != values:  # none: it has just ended
                self.resources[usage.rank] = values
                self._mark("resources", [usage.rank])

    def noted(self, now: float, text: str) -> None:
        """What nblaunch itself says."""
        self.notes.append((round(now, 2), text[:_LONGEST]))
        self._mark("notes", [len(self.notes) - 1])

    def counts_down(self, text: str) -> None:
        """Where the stopping stands."""
        if self.state["name"] not in ("starting", "running", "stopping"):
            return
        if text and (text != self.state["countdown"] or self.state["name"] != "stopping"):
            self._set(countdown=text, name="stopping")

    def stacks_are(self, now: float, texts: Mapping[int, str]) -> None:
        """What ranks are doing."""
        self.stacks = {"t": round(now, 2), "ranks": [[rank, text[:_LONGEST]] for rank, text in texts.items()]}
        self._mark("stacks", [])

    def ended(self, outcome: Outcome) -> None:
        """The launch is over."""
        self.pids.clear()
        self.failure = outcome.failure
        for rank, state in self.ranks.items():
            if state not in ("returned", "failed", "ended"):
                self.ranks[rank] = "ended" if outcome.state != "finished" else "returned"
        if outcome.failure is not None and outcome.failure.rank in self.ranks:
            self.ranks[outcome.failure.rank] = "failed"
        self._mark("ranks", self.ranks)
        self._mark("failure", [])
        self._set(name=outcome.state, seconds=round(outcome.seconds, 3), message=outcome.message, countdown="")

    def _set(self, **parts: Any) -> None:
        self.state.update(parts)
        self._mark("state", [])

    def _mark(self, part: str, ranks: Iterable[int]) -> None:
        self._changed.setdefault(part, set()).update(ranks)

    # -------------------------------------------------------------- giving out
    @property
    def is_changed(self) -> bool:
        """Whether the page does not know all."""
        return bool(self._changed)

    def delta(self) -> dict[str, Any]:
        """What has changed since the last call."""
        changed, self._changed = self._changed, {}
        return {part: value for part, ranks in changed.items() if (value := self._part(part, ranks)) is not None}

    def snapshot(self) -> dict[str, Any]:
        """All of it, for a page that has missed some."""
        self._changed = {}
        everything = {
            "state": (),
            "ranks": self.ranks,
            "progress": self.progress,
            "resources": self.resources,
            "notes": range(len(self.notes)),
            "failure": (),
            "stacks": (),
        }
        parts = {part: self._part(part, ranks) for part, ranks in everything.items()}
        parts["metrics"] = self._all_points()
        return parts

    def _part(self, part: str, keys: Iterable[int]) -> Any:
        keys = sorted(keys)
        if part == "ranks":
            return [[rank, self.ranks[rank]] for rank in keys]
        if part == "progress":
            return [[rank, desc, *bar] for rank in keys for desc, bar in self.progress.get(rank, {}).items()]
        if part == "resources":
            return [[rank, *self.resources[rank]] for rank in keys]
        if part == "notes":
            return [self.notes[index] for index in keys[-_MOST_NOTES:]]
        if part == "metrics":
            return self._new_points()
        if part == "failure":
            return _failure_parts(self.failure)
        return self.stacks if part == "stacks" else dict(self.state)

    def _new_points(self) -> list[list[Any]]:
        """Points that have not been told, some of each series; where very many wait, they are thinned first."""
        new = [(name, rank, s) for name, ranks in self.series.items() for rank, s in ranks.items() if s.unsent]
        each = max(1, _POINTS_AT_ONCE // max(1, len(new)))
        points = []
        for name, rank, series in new:
            waiting = thinned(series.unsent, each * _BEHIND)
            points += _points(name, rank, waiting[:each])
            series.unsent = waiting[each:]
            if series.unsent:
                self._mark("metrics", [rank])
        return points

    def _all_points(self) -> list[list[Any]]:
        count = sum(len(ranks) for ranks in self.series.values())
        points = []
        for name, ranks in self.series.items():
            for rank, series in ranks.items():
                points += _points(name, rank, thinned(series.points, max(4, _POINTS_ANEW // count)))
                series.unsent = []
        return points


def _points(name: str, rank: int, points: Iterable[Point]) -> list[list[Any]]:
    return [[name, rank, x, y if math.isfinite(y) else None] for x, y in points]


def _total(total: Any) -> int | float | None:
    """The end of a progress bar, where it has one: users may give anything."""
    fits = isinstance(total, (int, float)) and math.isfinite(total) and total > 0
    return total if fits else None


def _failure_parts(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {
        "rank": failure.rank,
        "type": failure.type_name,
        "message": failure.message[:_LONGEST],
        "where": failure.where,
        "source": failure.source[:400],
        "traceback": failure.traceback[-_LONGEST:],
        "others": [other[:400] for other in failure.others[:16]],
        "log": failure.log,
    }
