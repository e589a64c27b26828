"""The messages between a panel and its page, over the widget's comm.

Dataclasses travel as JSON objects, named tuples as arrays. ``static/page_messages.js`` holds the same types for the
page; ``python -m tests.unit.page_types`` generates it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from nblaunch.launch.output.metric_names import Direction, Kind, Part
from nblaunch.launch.views import RankState, Stream
from nblaunch.machine.usage import Unit

LaunchState = Literal["starting", "running", "stopping", "finished", "failed", "stopped"]


# ------------------------------------------------------------------ parts of messages
class RankEntry(NamedTuple):
    """The state of one rank."""

    rank: int
    state: RankState


class ProgressEntry(NamedTuple):
    """One progress bar of a rank. The steps after `first` took `seconds`; a bar within another has a higher level."""

    rank: int
    name: str
    done: float | None
    total: float | None
    seconds: float | None
    first: float
    level: int


class PointEntry(NamedTuple):
    """One point of a metric, with the number of the report in its rank; y is null if it is not finite."""

    metric: str
    rank: int
    x: float
    y: float | None
    number: int


class ChartLine(NamedTuple):
    """A metric in a chart, and the data that it is of. Numbered: its x are the numbers of the reports."""

    metric: str
    part: Part
    numbered: bool


class ChartEntry(NamedTuple):
    """What is drawn in one chart: metrics, training first, with the better direction and how to write their values."""

    lines: Sequence[ChartLine]
    direction: Direction
    kind: Kind


class BestEntry(NamedTuple):
    """The point that a rank has marked as the best one of a metric; y is null if it is not known."""

    metric: str
    x: float
    y: float | None


class UsageValue(NamedTuple):
    """What a rank uses of something: a share (1 is one whole core or GPU), or bytes."""

    label: str
    value: float
    unit: Unit


class ResourceEntry(NamedTuple):
    """What a rank uses."""

    rank: int
    values: Sequence[UsageValue]


class NoteEntry(NamedTuple):
    """A message of nblaunch, and its time in seconds since the launch began."""

    time: float
    text: str


class StackEntry(NamedTuple):
    """The stack of one rank."""

    rank: int
    text: str


class OutputsEntry(NamedTuple):
    """The numbers of the outputs that a rank shows, in order, and how many are left out."""

    rank: int
    numbers: Sequence[int]
    left_out: int


class OutputPart(NamedTuple):
    """Bytes of one output's JSON, in the message's buffer, one part after the other; total is the size of the whole."""

    number: int
    offset: int
    size: int
    total: int


class LogEnd(NamedTuple):
    """The number of the line after those that the page has of one log."""

    attempt: int
    rank: int
    stream: Stream
    end: int


class LineEntry(NamedTuple):
    """A line as a terminal would show it, with its own colours; its time in seconds since the launch began."""

    time: float
    text: str


@dataclass(frozen=True, slots=True)
class StateEntry:
    """The state of the launch."""

    name: LaunchState
    countdown: str
    attempt: int
    log_dir: str
    seconds: float | None
    message: str


@dataclass(frozen=True, slots=True)
class FailureEntry:
    """The root cause of a failed launch; rank is -1 if no rank failed."""

    rank: int
    headline: str
    details: str
    where: str
    source: str
    traceback: str
    others: Sequence[str]


@dataclass(frozen=True, slots=True)
class StacksEntry:
    """The stacks of all live ranks, and their time in seconds since the launch began."""

    time: float
    ranks: Sequence[StackEntry]


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    """The last profile, as safe HTML, its time in seconds since the launch began, and whether there is a trace."""

    time: float
    html: str
    has_trace: bool


@dataclass(frozen=True, slots=True)
class StuckEntry:
    """Why ranks wait in a collective, and the ranks to debug; no lines: they have gone on."""

    lines: Sequence[str]
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class OutputContent:
    """One output: safe HTML, the source of an image, or text; with the text that stands for it."""

    kind: Literal["html", "image", "text"]
    body: str
    text: str
    width: int | None
    height: int | None


@dataclass(frozen=True, slots=True)
class LogPart:
    """Lines of one log: they replace what the page has from number `first` on, and the unfinished lines."""

    attempt: int
    rank: int
    stream: Stream
    first: int
    lines: Sequence[LineEntry]
    open: Sequence[str]


# ------------------------------------------------------------------ to the page
@dataclass(frozen=True, slots=True)
class PanelInfo:
    """The widget's `info`: what does not change during the launch."""

    launch: str
    name: str
    world_size: int
    ranks: str
    device: str
    blocking: bool
    is_session: bool
    hosts: Sequence[str] = ()
    """The node of each rank; none if all are on the notebook's own machine."""
    cell: str = ""
    """The id of the notebook's cell; empty if the page has not said it."""
    run: str = ""
    """The name of a detached run, which outlives the kernel; empty for other launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The parts of a panel that have changed; an absent part has not."""

    state: StateEntry | None = None
    ranks: Sequence[RankEntry] | None = None
    progress: Sequence[ProgressEntry] | None = None
    metrics: Sequence[PointEntry] | None = None
    charts: Sequence[ChartEntry] | None = None
    best: Sequence[BestEntry] | None = None
    resources: Sequence[ResourceEntry] | None = None
    outputs: Sequence[OutputsEntry] | None = None
    notes: Sequence[NoteEntry] | None = None
    failure: FailureEntry | None = None
    stacks: StacksEntry | None = None
    profile: ProfileEntry | None = None
    stuck: StuckEntry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What has changed. Without content it is a heartbeat; last if the launch has ended, and nothing else follows."""

    kind: Literal["delta"] = "delta"
    seq: int = 0
    now: float
    changes: Changes | None = None
    logs: Sequence[LogPart] | None = None
    outputs: Sequence[OutputPart] | None = None
    last: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything but the logs, in answer to these requests. What the pages lack of the last lines follows."""

    kind: Literal["snapshot"] = "snapshot"
    seq: int = 0
    now: float
    changes: Changes
    requests: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """A click has arrived; done if the launch had already ended."""

    kind: Literal["acknowledged"] = "acknowledged"
    action: Literal["stop", "kill", "profile", "done"]
    launch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordText:
    """The record as it is now: what the notebook's output holds."""

    kind: Literal["record"] = "record"
    html: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """The trace of the last profile, in the message's buffer; empty: it is gone."""

    kind: Literal["trace"] = "trace"
    name: str


ToPage = Delta | Snapshot | Acknowledged | RecordText | TraceFile


# ------------------------------------------------------------------ from the page
@dataclass(frozen=True, slots=True)
class Request:
    """A click; "record": for the notebook; "look": at a debugger; "seen": a page shows the panel, or its end."""

    kind: Literal["stop", "kill", "stacks", "profile", "trace", "record", "look", "seen"]
    launch: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync:
    """The page may have missed messages: it asks for a snapshot, and for the logs from these ends."""

    kind: Literal["resync"] = "resync"
    request: int
    logs: Sequence[LogEnd]


FromPage = Request | Resync


def to_content(message: Any) -> dict[str, Any]:
    """Return a dataclass of this module as plain values. Leave out fields that are optional and None."""
    fields = {field: getattr(message, field.name) for field in dataclasses.fields(message)}
    return {field.name: _plain(item) for field, item in fields.items() if item is not None or field.default is not None}


def from_content(content: Mapping[str, Any]) -> FromPage | None:
    """Return the message of a page; None if it is malformed or of an unknown kind."""
    try:
        match content["kind"]:
            case "stop" | "kill" | "stacks" | "profile" | "trace" | "record" | "seen" as kind:
                return Request(kind, str(content["launch"]))
            case "look" if (rank := int(content["rank"])) >= 0:
                return Request("look", str(content["launch"]), rank)
            case "resync":
                ends = [
                    LogEnd(int(attempt), int(rank), stream, int(end)) for attempt, rank, stream, end in content["logs"]
                ]
                return Resync(request=int(content["request"]), logs=ends)
    except (KeyError, TypeError, ValueError):
        return None
    return None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_content(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
