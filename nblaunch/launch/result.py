"""What a launch gives back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from nblaunch.launch.output.log_directory import RankLogs
from nblaunch.launch.output.report_columns import Report, ReportColumns
from nblaunch.machine.segments import in_words
from nblaunch.transfer.parcel import Parcel
from nblaunch.wire.drops import Dropped

if TYPE_CHECKING:
    import pandas

_MOST_PARTS = 20
"""Parts of what was sent that are kept, the largest."""
_MOST_SHOWN = 6
"""Metrics in a repr."""


class Metrics(Sequence[Report]):
    """Every report of a launch, in the order of time.

    Attributes:
        dropped: How many are missing, as the disk of the logs was full.
    """

    def __init__(self, reports: Sequence[Report], dropped: int = 0) -> None:
        self.dropped = dropped
        self._reports = reports if isinstance(reports, ReportColumns) else ReportColumns(reports)
        self._order = self._reports.by_time

    @overload
    def __getitem__(self, index: int) -> Report: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Report]: ...
    def __getitem__(self, index: int | slice) -> Report | Sequence[Report]:
        if isinstance(index, slice):
            return [self._reports[at] for at in self._order[index]]
        return self._reports[self._order[index]]

    def __iter__(self) -> Iterator[Report]:
        return map(self._reports.__getitem__, self._order)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def last(self) -> dict[str, float]:
        """The latest value of each metric: of the lowest rank that reported it."""
        return self._reports.last

    def to_pandas(self) -> pandas.DataFrame:
        """A DataFrame with columns rank, time, step and one per metric; a row per report.

        A metric that is itself called rank or time has the column reported_rank or reported_time.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas

        fixed = ("rank", "time", "step")
        columns: dict[str, list[float | None]] = {name: [] for name in fixed}
        for number, report in enumerate(self):
            columns["rank"].append(report.rank)
            columns["time"].append(report.time)
            columns["step"].append(report.step)
            for name, value in report.values.items():
                column = columns.setdefault(f"reported_{name}" if name in fixed else name, [])
                column += [math.nan] * (number - len(column))
                column.append(value)
        for column in columns.values():
            column += [math.nan] * (len(self) - len(column))
        return pandas.DataFrame(columns)

    def __repr__(self) -> str:
        return f"Metrics({len(self)} report{'' if len(self) == 1 else 's'}{_values(self.last, ': ')})"


@dataclass(frozen=True, slots=True)
class Sent:
    """What a launch sent to its ranks.

    All ranks map one copy of it; what they write is their own.
    """

    size: int
    """Bytes in all."""
    parts: tuple[tuple[str, int], ...]
    """The largest, by the names that the function or cell uses, and their bytes."""
    copied: int
    """Bytes of tensors, arrays and the like that had to be copied: the rest was as the last launches had sent it, or is
    mapped from a file of yours."""
    from_gpu: int
    """Bytes that were copied from a GPU first."""

    @classmethod
    def of(cls, parcel: Parcel) -> Sent:
        """What is in a parcel."""
        return cls(sum(parcel.sizes.values()), _largest(parcel.sizes), parcel.copied, parcel.from_gpu)

    def __repr__(self) -> str:
        parts = f": {named(dict(self.parts))}" if self.parts else ""
        return f"<Sent {in_words(self.size)}{parts}; {in_words(self.copied)} copied>"


def _largest(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The largest parts that have a name."""
    parts = sorted(((name, size) for name, size in sizes.items() if name), key=lambda part: -part[1])
    return tuple(parts[:_MOST_PARTS])


def named(sizes: Mapping[str, int]) -> str:
    """The largest parts in words: ``data 1.1 GB, model 90 MB``."""
    largest = _largest(sizes)
    shown = [f"{name} {in_words(size)}" for name, size in largest[:_MOST_SHOWN]]
    return ", ".join([*shown, *(["…"] if len(largest) > _MOST_SHOWN else [])])


NOTHING_SENT = Sent(0, (), 0, 0)


class LaunchResult(Sequence[Any]):
    """What the ranks returned, with what they reported and printed.

    ``result[rank]`` is the return value of a rank, ``len(result)`` the number of ranks, and iterating goes through
    the return values in the order of ranks.

    Attributes:
        metrics: Every ``nblaunch.report``, with its rank and time.
        logs: For each rank the paths of what it printed (``result.logs[1].out``, ``.err``), which stay as
            long as something refers to them, and for the last 50 launches or 1 GB.
        duration: Seconds from the call to the last rank's end.
        payload: What was sent to the ranks, and how large it was.
    """

    def __init__(
        self,
        name: str,
        values: Sequence[Any],
        metrics: Metrics,
        logs: Sequence[RankLogs],
        duration: float,
        payload: Sent = NOTHING_SENT,
    ) -> None:
        self.name = name
        self.metrics = metrics
        self.logs = tuple(logs)
        self.duration = duration
        self.payload = payload
        self._values = tuple(values)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __repr__(self) -> str:
        count = f"{len(self)} rank{'' if len(self) == 1 else 's'}"
        dropped = Dropped(sum(rank.dropped for rank in self.logs), self.metrics.dropped)
        lost = f"; {dropped.amount} dropped" if dropped else ""
        return f"<LaunchResult of {self.name}: {count}, {self.duration:.2f} s{_values(self.metrics.last, ', ')}{lost}>"


def _values(values: Mapping[str, float], lead: str) -> str:
    shown = [f"{name} {value:.4g}" for name, value in itertools.islice(values.items(), _MOST_SHOWN)]
    more = ["…"] if len(values) > _MOST_SHOWN else []
    return lead + ", ".join(shown + more) if values else ""
