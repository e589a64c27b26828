"""A profile: what each rank did with its time, and what one sentence says of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from nblaunch.machine.segments import in_words

if TYPE_CHECKING:
    import pandas

Part = Literal["compute", "communication", "waiting", "data", "optimizer", "other"]
PARTS: tuple[Part, ...] = get_args(Part)
_WORDS: dict[Part, str] = {
    "compute": "computation",
    "data": "data loading",
    "optimizer": "optimizer",
    "other": "code outside of torch",
}
IDLE_GPU = "idle GPU"
"""What ``other`` is called on a GPU."""
_MIN_WAITING = 0.1
_MIN_COMMUNICATION = _MIN_DATA = 0.25
_MIN_OTHER = 0.4
"""Shares from which the sentence is about it."""
_MIN_LATE = 0.6
"""Share of the waiting that one rank has caused, from which it is the cause."""
_MAX_PLACE = 100


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's."""

    file: str
    line: int
    text: str = ""
    """As the notebook names it, such as ``Cell In[3], line 7: loss.backward()``."""

    def __str__(self) -> str:
        text = self.text or f"{self.file}, line {self.line}"
        return text if len(text) <= _MAX_PLACE else text[:_MAX_PLACE] + "…"


@dataclass(frozen=True, slots=True)
class RankProfile:
    """What one rank did.

    Attributes:
        seconds: Length of the window: from the end of the first recorded step to that of the last, or all that was
            recorded.
        steps: Optimizer steps in the window.
        parts: The seconds of each part, by name.
        late: Seconds that other ranks waited in collectives for this rank, which came last.
        has_gpu: The parts are those of its GPU; ``other`` is the time in which the GPU was idle.
        places: The user's line that was executed most in each part, where it is known.
    """

    rank: int
    seconds: float
    steps: int
    parts: Mapping[Part, float]
    late: float = 0.0
    has_gpu: bool = False
    places: Mapping[Part, Place] = field(default_factory=dict)

    def share(self, part: Part) -> float:
        return self.parts[part] / self.seconds if self.seconds else 0.0

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of torch, a kernel of the GPU, or a collective.

    Attributes:
        seconds: By rank, 0 where it is not called: the time in it, without the operations that it calls; of a
            collective, without the time in which the rank computes meanwhile.
        calls: By rank.
        place: The user's line that calls it most often; None if unknown.
    """

    name: str
    seconds: Mapping[int, float]
    calls: Mapping[int, int]
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """The kind of collective that took the most time: its bytes in each rank, and its calls in one step or second."""

    call: str
    size: int
    calls: float


class Summary(list[dict[str, float]]):
    """The table of a profile: a row for each rank, with its rate and the share of each part."""

    def to_pandas(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per rank: rank, seconds, steps_per_second, and the share of each part (0..1).

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(self)

    def __repr__(self) -> str:
        lines = ["rank  steps/s  " + "  ".join(PARTS)]
        for row in self:
            rate = number_text(row["steps_per_second"]) if row["steps_per_second"] else "-"
            shares = (f"{row[part]:.0%}".rjust(len(part)) for part in PARTS)
            lines.append(f"{row['rank']:>4}  {rate:>7}  " + "  ".join(shares))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Profile:
    """What the ranks of a launch did with their time, as `Launch.profile` returns it.

    Attributes:
        ranks: What each rank did.
        operations: The ten operations that took the ranks the most time, the most expensive first.
        missing: Why a rank is not in the profile, by rank.
        trace: The merged trace of all ranks on one clock, for https://ui.perfetto.dev; None: there is none.
    """

    ranks: Sequence[RankProfile]
    operations: Sequence[Operation] = ()
    traffic: Traffic | None = None
    missing: Mapping[int, str] = field(default_factory=dict)
    trace: Path | None = None

    @property
    def summary(self) -> Summary:
        """The shares of each rank, as a table with ``to_pandas()``."""
        return Summary(
            {
                "rank": each.rank,
                "seconds": each.seconds,
                "steps_per_second": each.steps_per_second,
                **{part: each.share(part) for part in PARTS},
            }
            for each in self.ranks
        )

    @property
    def sentence(self) -> str:
        """What takes the time, in one sentence."""
        return sentence_of(self)

    @property
    def missing_text(self) -> list[str]:
        by_reason: dict[str, list[int]] = {}
        for rank, reason in self.missing.items():
            by_reason.setdefault(reason, []).append(rank)
        return [f"Not in this profile: {_named(ranks)}: {reason}" for reason, ranks in by_reason.items()]

    @property
    def length_text(self) -> str:
        """How much was recorded; fewer than three steps say little."""
        shortest = min(self.ranks, key=lambda each: each.steps)
        steps = f"{shortest.steps} step{'s' * (shortest.steps != 1)} of an optimizer"
        return f"Recorded: {shortest.seconds:.1f} s, {steps}"

    def __repr__(self) -> str:
        lines = [self.sentence, *self.missing_text]
        if self.ranks:
            lines += [self.length_text, repr(self.summary)]
        lines += [f"{_cost(each)}  {each.name}{f'  {each.place}' if each.place else ''}" for each in self.operations]
        return "\n".join([*lines, *([f"Trace: {self.trace}"] if self.trace else [])])

    # -------------------------------------------------------------- files
    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "trace": str(self.trace) if self.trace else None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Profile:
        """Return the profile of `to_json`, also after JSON has made its keys strings."""
        return cls(
            [
                RankProfile(**{**each, "places": {part: Place(**place) for part, place in each["places"].items()}})
                for each in content["ranks"]
            ],
            [
                Operation(
                    each["name"],
                    _by_rank(each["seconds"]),
                    _by_rank(each["calls"]),
                    Place(**each["place"]) if each["place"] else None,
                )
                for each in content["operations"]
            ],
            Traffic(**content["traffic"]) if content["traffic"] else None,
            _by_rank(content["missing"]),
            Path(content["trace"]) if content["trace"] else None,
        )


def _by_rank(content: Mapping[Any, Any]) -> dict[int, Any]:
    return {int(rank): value for rank, value in content.items()}


def number_text(value: float) -> str:
    """Write a rate or time with about three digits, and never with an exponent."""
    return f"{value:,.0f}" if value >= 100 or value < 0.001 else f"{value:.3g}"


def _cost(operation: Operation) -> str:
    return f"{1000 * statistics.mean(operation.seconds.values()):7.1f} ms"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# ------------------------------------------------------------------ the sentence
def sentence_of(profile: Profile) -> str:
    """Return what takes the time: waiting first, then communication, data, and other code, if it takes much."""
    ranks = profile.ranks
    if not ranks:
        return "No rank could be profiled."
    latest = max(ranks, key=lambda each: each.late)
    others = [each for each in ranks if each is not latest]
    waiting = [each for each in others if each.share("waiting") >= _MIN_WAITING]
    if waiting and latest.late >= _MIN_LATE * sum(each.late for each in ranks):
        if len(waiting) == len(others) > 1:
            who = "Ranks wait"
        else:
            who = f"{_named([each.rank for each in waiting]).capitalize()} wait{'s' * (len(waiting) == 1)}"
        share = statistics.mean(each.share("waiting") for each in waiting)
        return f"{who} {share:.0%} of the time for rank {latest.rank}{_why_late(latest, waiting, share)}."
    share = statistics.mean(each.share("waiting") for each in ranks)
    if share >= _MIN_WAITING:
        return f"Ranks wait {share:.0%} of the time for each other: no single rank is to blame."
    means = {part: statistics.mean(each.share(part) for each in ranks) for part in PARTS}
    if means["communication"] >= _MIN_COMMUNICATION:
        said = f"Communication is {means['communication']:.0%} of {_step(ranks)}{_traffic(profile.traffic, ranks)}"
        unknown = f", including waits for {_named(list(profile.missing))}, not recorded" if profile.missing else ""
        return f"{said}{unknown}."
    if means["data"] >= _MIN_DATA:
        return f"Data loading is {means['data']:.0%} of {_step(ranks)}{_at(ranks, 'data')}."
    if means["other"] >= _MIN_OTHER or means["other"] > max(means["compute"], means["optimizer"]):
        what = "The GPU is idle for" if any(each.has_gpu for each in ranks) else "Code outside of torch takes"
        return f"{what} {means['other']:.0%} of {_step(ranks)}{_at(ranks, 'other')}."
    if means["optimizer"] > means["compute"]:
        return f"The optimizer takes {means['optimizer']:.0%} of {_step(ranks)}{_at(ranks, 'optimizer')}."
    even = f"The {len(ranks)} ranks are even: computation" if len(ranks) > 1 else "Computation"
    return f"{even} is {means['compute']:.0%} of {_step(ranks)}."


def _step(ranks: Sequence[RankProfile]) -> str:
    return "a step" if all(each.steps for each in ranks) else "the time"


def _at(ranks: Sequence[RankProfile], part: Part) -> str:
    place = next((each.places[part] for each in ranks if part in each.places), None)
    return f", most of it in {place}" if place else ""


def _why_late(latest: RankProfile, others: Sequence[RankProfile], waiting: float) -> str:
    """Return the part that takes the latest rank longer, if that explains at least half of the waiting."""
    more = {part: latest.share(part) - statistics.mean(each.share(part) for each in others) for part in _WORDS}
    part = max(_WORDS, key=lambda part: more[part])
    own, usual = latest.share(part), latest.share(part) - more[part]
    if more[part] < waiting / 2:
        return ", which comes last to the collectives"
    whose = "the other's" if len(others) == 1 else "the others'"
    if own < 20 * usual:
        takes = f"takes {own / usual:.1f} times as long as {whose}"
    else:
        per, ms = ("a step", 1000 * latest.seconds / latest.steps) if latest.steps else ("each second", 1000.0)
        takes = f"takes {number_text(own * ms)} ms of {per}, {whose} {number_text(usual * ms)} ms"
    place = latest.places.get(part)
    what = f"{IDLE_GPU} time" if part == "other" and latest.has_gpu else _WORDS[part]
    return f", whose {what} {takes}{f' ({place})' if place else ''}"


def _traffic(traffic: Traffic | None, ranks: Sequence[RankProfile]) -> str:
    if traffic is None:
        return ""
    per = "" if all(each.steps for each in ranks) else " each second"
    return f": {number_text(traffic.calls)} × {traffic.call}{f' of {in_words(traffic.size)}' * bool(traffic.size)}{per}"
