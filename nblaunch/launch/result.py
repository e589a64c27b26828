"""What a launch gives back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from nblaunch.launch.logs import RankLogs
from nblaunch.parcel import Parcel
from nblaunch.segments import in_words

if TYPE_CHECKING:
    import pandas

_MOST_PARTS = 20
"""Parts of what was sent that are kept, the largest."""
_MOST_SHOWN = 6
"""Metrics in a repr."""


@dataclass(frozen=True, slots=True)
class Report:
    """One call of ``nblaunch.report`` in a rank."""

    rank: int
    time: float
    """Seconds since the epoch."""
    step: int | None
    values: Mapping[str, float]


class Metrics(Sequence[Report]):
    """Every report of a launch, in the order of time."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self._reports = sorted(reports, key=lambda report: report.time)

    @classmethod
    def of(cls, records: Mapping[int, Sequence[Mapping[str, Any]]]) -> Metrics:
        """From each rank's spooled records."""
        return cls(
            [
                Report(rank, record["time"], record["step"], record["metrics"])
                for rank, spooled in records.items()
                for record in spooled
            ]
        )

    @overload
    def __getitem__(self, index: int) -> Report: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Report]: ...
    def __getitem__(self, index: int | slice) -> Report | Sequence[Report]:
        return self._reports[index]

    def __len__(self) -> int:
        return len(self._reports)

    @property
    def last(self) -> dict[str, float]:
        """The latest value of each metric: of the lowest rank that reported it."""
        values: dict[str, float] = {}
        by_rank = sorted(self._reports, key=lambda report: -report.rank)  # stable: within a rank, by time
        for report in by_rank:
            values.update(report.values)
        return values

    def to_pandas(self) -> pandas.DataFrame:
        """A DataFrame with columns rank, time, step and one per metric; a row per report.

        A metric that is itself called rank or time has the column reported_rank or reported_time.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas

        fixed = ("rank", "time", "step")
        rows = [
            {"rank": r.rank, "time": r.time, "step": r.step}
            | {f"reported_{name}" if name in fixed else name: value for name, value in r.values.items()}
            for r in self._reports
        ]
        return pandas.DataFrame(rows, columns=None if rows else fixed)

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
        logs: For each rank the paths of what it printed (``result.logs[1].out``, ``.err``). They are kept
            for the last 50 launches or 1 GB.
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
        return f"<LaunchResult of {self.name}: {count}, {self.duration:.2f} s{_values(self.metrics.last, ', ')}>"


def _values(values: Mapping[str, float], lead: str) -> str:
    shown = [f"{name} {value:.4g}" for name, value in itertools.islice(values.items(), _MOST_SHOWN)]
    more = ["…"] if len(values) > _MOST_SHOWN else []
    return lead + ", ".join(shown + more) if values else ""
