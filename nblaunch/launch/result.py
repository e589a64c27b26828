"""The result of a launch: return values, metrics, logs, and what was sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from nblaunch.launch.output.log_directory import RankLogs
from nblaunch.launch.output.metric_names import number_of
from nblaunch.launch.output.reports import Best, Report, ReportList
from nblaunch.machine.arguments import ranks_in_words
from nblaunch.machine.segments import in_words
from nblaunch.profiles.profile import Profile
from nblaunch.wire.tables import Dropped

if TYPE_CHECKING:
    import pandas

NOTED_BYTES = 10**9
"""Bytes that are copied for the ranks from which a note names the parts."""
_MAX_PARTS = 20
"""The largest parts that `Sent` lists."""
_MAX_SHOWN = 6
"""Metrics or parts in a repr."""


class Metrics(Sequence[Report]):
    """Every report of a launch, sorted by time.

    Attributes:
        dropped: True if reports were lost because the log disk was full.
    """

    def __init__(self, reports: Sequence[Report], dropped: bool = False) -> None:
        self.dropped = dropped
        self._reports = reports if isinstance(reports, ReportList) else ReportList(reports)
        self._by_time = sorted(self._reports, key=lambda report: report.time)

    @overload
    def __getitem__(self, index: int) -> Report: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Report]: ...
    def __getitem__(self, index: int | slice) -> Report | Sequence[Report]:
        return self._by_time[index]

    def __len__(self) -> int:
        return len(self._by_time)

    @property
    def last(self) -> dict[str, float]:
        """The latest value of each metric, averaged over the ranks that reported it, each at its own last step.

        If ranks end at different steps, the panel and `nblaunch.compare` show the mean of a step that most ranks have.
        """
        return self._reports.last

    def _in_words(self, lead: str) -> str:
        """Return `lead` and the latest values, or an empty string if there are none."""
        last, differing = self.last, self._reports.differing
        shown = [
            f"{name} {number_of(name, value)}" + (f" (mean of {differing[name]} ranks)" if name in differing else "")
            for name, value in itertools.islice(last.items(), _MAX_SHOWN)
        ]
        return lead + ", ".join([*shown, *(["…"] if len(last) > _MAX_SHOWN else [])]) if last else ""

    @property
    def best(self) -> dict[str, Best]:
        """The best step and value of each metric, as marked by `nblaunch.ranks.report.mark_best`."""
        return self._reports.best

    def to_pandas(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per report: columns rank, time, step, and one per metric.

        ``time`` is in seconds since the epoch. Missing values are NaN. A metric named rank or time becomes the column
        reported_rank or reported_time.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas

        fixed = ("rank", "time", "step")
        rows: list[dict[str, float | None]] = []
        for report in self:
            values = {f"reported_{name}" if name in fixed else name: value for name, value in report.values.items()}
            rows.append({"rank": report.rank, "time": report.time, "step": report.step, **values})
        return pandas.DataFrame(rows, columns=None if rows else fixed)

    def __repr__(self) -> str:
        return f"Metrics({len(self)} report{'' if len(self) == 1 else 's'}{self._in_words(': ')})"


@dataclass(frozen=True, slots=True)
class Sent:
    """The data that a launch sent to its ranks, which share one copy: its pages are copied on write."""

    size: int
    """Total bytes."""
    parts: tuple[tuple[str, int], ...]
    """The largest parts: their names in the function or cell, and their bytes."""
    copied: int
    """Bytes of tensors and arrays that were copied. The rest is unchanged since an earlier launch, or mapped from your
    files."""

    def __repr__(self) -> str:
        parts = f": {named(dict(self.parts))}" if self.parts else ""
        return f"<Sent {in_words(self.size)}{parts}; {in_words(self.copied)} copied>"


def largest(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    parts = sorted(((name, size) for name, size in sizes.items() if name), key=lambda part: -part[1])
    return tuple(parts[:_MAX_PARTS])


def named(sizes: Mapping[str, int]) -> str:
    """Describe the largest parts: ``data 1.1 GB, model 90 MB``."""
    parts = largest(sizes)
    shown = [f"{name} {in_words(size)}" for name, size in parts[:_MAX_SHOWN]]
    return ", ".join([*shown, *(["…"] if len(parts) > _MAX_SHOWN else [])])


NOTHING_SENT = Sent(0, (), 0)


class LaunchResult(Sequence[Any]):
    """The return values of the ranks, with their metrics and logs.

    ``result[rank]`` is the return value of a rank, ``len(result)`` is the world size, and iteration yields the return
    values in rank order. Displaying the result in a later cell shows the record of the launch.

    Attributes:
        name: The name of the function or cell.
        metrics: Every ``nblaunch.report``, with its rank and time; see `Metrics`.
        logs: The logs of each rank: ``result.logs[1].out`` and ``.err`` are paths, ``.text()`` is all of stdout. Logs
            are kept while this result refers to them, and for the last 50 launches or 1 GB.
        duration: Seconds from the call until the last rank exited, and its profile was read.
        payload: What was sent to the ranks; see `Sent`.
        profiles: The profiles that were made; see `Launch.profile`.
    """

    def __init__(
        self,
        name: str,
        values: Sequence[Any],
        metrics: Metrics | None = None,
        logs: Sequence[RankLogs] = (),
        duration: float = 0.0,
        payload: Sent = NOTHING_SENT,
        record_html: Callable[[], str | None] | None = None,
    ) -> None:
        self.name = name
        self.metrics = Metrics(()) if metrics is None else metrics
        self.logs = tuple(logs)
        self.duration = duration
        self.payload = payload
        self.profiles: tuple[Profile, ...] = ()
        self._values = tuple(values)
        self._record_html = record_html

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        try:
            return self._values[index]
        except IndexError:
            raise IndexError(f"result[{index}]: {ranks_in_words(len(self))}") from None

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_record_html": None}  # the view stays in its notebook

    def _repr_html_(self) -> str | None:
        return self._record_html() if self._record_html is not None else None

    def __repr__(self) -> str:
        count = f"{len(self)} rank{'' if len(self) == 1 else 's'}"
        dropped = Dropped(any(rank.dropped for rank in self.logs), self.metrics.dropped)
        more = f"; {dropped.what} dropped" if dropped else ""
        more += "; every rank returned None" if all(value is None for value in self) else ""
        return f"<LaunchResult of {self.name}: {count}, {self.duration:.2f} s{self.metrics._in_words(', ')}{more}>"


def notes_on(sent: Sent, noted: set[str]) -> Iterator[str]:
    """Yield what to note of sent data: values that are large and not `noted` yet."""
    largest = next((name for name, _ in sent.parts), "")
    if sent.copied > NOTED_BYTES and (key := f"{largest} is large") not in noted:
        noted.add(key)
        yield f"sending {in_words(sent.copied)} to the ranks, which share one copy: {named(dict(sent.parts))}"
