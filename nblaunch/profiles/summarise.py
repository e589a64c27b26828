"""The process that reads the recordings of all ranks, writes one trace, and prints the profile as JSON.

A process of its own: to read the trace of a busy GPU takes seconds, in which neither a rank nor the kernel may stall.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nblaunch.machine.processes import die_with_parent
from nblaunch.profiles.profile import PARTS, Operation, Place, Profile, RankProfile, Traffic
from nblaunch.profiles.spans import Span, minus, overlap, total, union, within
from nblaunch.profiles.timeline import Collective, Costs, Timeline, shift_of, timeline
from nblaunch.wire.tables import Begun, members_of

_MAX_OPERATIONS = 10
_NICENESS = 5
"""The ranks come first."""
_PIDS_PER_RANK = 1000
"""A rank has a pid for its process and one for each device in a merged trace."""


Recordings = Sequence[tuple[int, tuple[int, int]]]
"""Of each rank: the descriptors of its two files."""


def main(parent: int, trace: str, recordings: Recordings) -> None:
    """Print the profile of recordings, and write their merged trace."""
    die_with_parent(parent)
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # a session of its own shares the CPUs equally with others, however nice it is
        Path("/proc/self/autogroup").write_text(str(_NICENESS))
    gc.disable()  # a million objects that stay would be visited again and again
    print(json.dumps(summarise(recordings, Path(trace)).to_json()))  # noqa: T201  # the answer


def summarise(recordings: Recordings, trace: Path) -> Profile:
    """Return the profile of these recordings, and write their merged trace if there is room; close the descriptors."""
    timelines: list[Timeline] = []
    texts = _texts(recordings, timelines)
    path: Path | None = trace
    try:
        with gzip.open(trace, "wt", compresslevel=3) as file:
            file.writelines(texts)
    except OSError:
        path = None
        with contextlib.suppress(OSError):
            trace.unlink()
    for _ in texts:  # the rest, without a trace
        pass
    if len(timelines) < len(recordings):
        raise RuntimeError("a file of the ranks could not be read")
    return replace(compare(timelines), trace=path)


def _texts(recordings: Recordings, timelines: list[Timeline]) -> Iterator[str]:
    """Add the timeline of each rank, and yield the parts of the merged trace."""
    abouts = [_read(fds[0]) for _, fds in recordings]
    windows = common_windows(abouts)
    origin = abouts[0]["begin"] / 1e3
    yield f'{{"displayTimeUnit": "ms", "baseTimeNanoseconds": {abouts[0]["begin"]}, "traceEvents": ['
    for (rank, fds), about in zip(recordings, abouts, strict=True):
        recorded = _read(fds[1])
        about |= windows[about["host"]]
        own_origin, own = origin, timeline(rank, about, recorded, origin)
        if timelines and own.host != timelines[0].host:  # their clocks differ
            own_origin = origin + _lag(own, timelines[0])
            own = timeline(rank, about, recorded, own_origin)
        yield ", " * bool(timelines) + _events_text(rank, recorded, shift_of(recorded, own_origin))
        timelines.append(own)
    yield "]}"


def common_windows(abouts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the time that all ranks have recorded, by the clock of each host; nothing if there is none.

    Ranks begin at the same moment, and busy ones end earlier. What one rank has not seen cannot be compared.
    """
    begins: dict[str, int] = {}
    for about in abouts:
        begins[about["host"]] = max(begins.get(about["host"], 0), about["begin"])
    length = min(about["end"] - begins[about["host"]] for about in abouts)
    return {host: {"begin": begin, "end": begin + length} if length > 0 else {} for host, begin in begins.items()}


def _read(fd: int) -> Any:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return json.loads(file.read().decode(errors="replace"), strict=False)


def _events_text(rank: int, recorded: Mapping[str, Any], shift: float) -> str:
    """Return the events of a rank, without the brackets, with pids and ids that no other rank has."""
    pids: dict[Any, int] = {}
    events = [event for event in recorded["traceEvents"] if not isinstance(event.get("pid"), str)]  # of Kineto itself
    for event in events:
        if "pid" in event:
            number = pids.setdefault(event["pid"], len(pids))
            event["pid"] = rank * _PIDS_PER_RANK + number
            if event.get("name") == "process_name":
                event["args"] = {"name": f"rank {rank}"}
            elif event.get("name") == "process_sort_index":
                event["args"] = {"sort_index": event["pid"]}
        if "id" in event:
            event["id"] = f"{rank}.{event['id']}"
        if "ts" in event:
            event["ts"] += shift
    return json.dumps(events)[1:-1]


def _lag(own: Timeline, other: Timeline) -> float:
    """Return how far the clock of one rank is ahead of another's: both see the same collectives end together."""
    ends = {each.key: each.end for each in other.collectives if each.key is not None}
    lags = [each.end - ends[each.key] for each in own.collectives if each.key in ends]
    return statistics.median(lags) if lags else 0.0


# ------------------------------------------------------------------ the ranks together
def compare(timelines: Sequence[Timeline]) -> Profile:
    """Return the profile of these ranks. In a collective, a rank waits until the last one has joined it."""
    alike: dict[tuple[str, str, int], list[tuple[int, Collective]]] = {}
    for number, each in enumerate(timelines):
        for collective in each.collectives:
            if collective.key is not None:
                alike.setdefault(collective.key, []).append((number, collective))
    waits: list[list[tuple[Span, int]]] = [[] for _ in timelines]
    """Of each rank, with the number of the rank that it waits for."""
    transfers: list[list[Span]] = [[] for _ in timelines]
    for joined in alike.values():
        last, late = max((collective.begin, number) for number, collective in joined)
        if absent := _absent(joined, timelines):
            last, late = math.inf, absent[0]
        for number, collective in joined:
            begins = min(max(last, collective.begin), collective.end)
            transfers[number].append((begins, collective.end))
            if number != late:
                waits[number].append(((collective.begin, begins), late))
    lateness: defaultdict[int, float] = defaultdict(float)
    for number, each in enumerate(timelines):
        exposed = overlap(union(span for span, _ in waits[number]), each.parts["communication"])
        each.parts["waiting"] = minus(exposed, union(transfers[number]))
        each.parts["communication"] = minus(each.parts["communication"], each.parts["waiting"])
        for span, late in waits[number]:
            lateness[late] += total(within(each.parts["waiting"], *span)) / 1e6
    ranks = []
    for number, each in enumerate(timelines):
        length, seconds = total([each.window]) / 1e6, {part: total(each.parts[part]) / 1e6 for part in PARTS}
        ranks.append(RankProfile(each.rank, length, each.steps, seconds, lateness[number], each.has_gpu, each.places))
    return Profile(ranks, _most_expensive(timelines), _traffic(timelines))


def _absent(joined: Sequence[tuple[int, Collective]], timelines: Sequence[Timeline]) -> list[int]:
    """Return the numbers of the ranks that a collective waits for at the end of the recording."""
    first, numbers = joined[0][1], {number for number, _ in joined}
    if first.key is None or not any(collective.is_open for _, collective in joined):
        return []
    group = members_of(Begun(members=first.key[1]), 1 + max(each.rank for each in timelines)) or ()
    return [number for number, each in enumerate(timelines) if each.rank in group and number not in numbers]


def _most_expensive(timelines: Sequence[Timeline]) -> list[Operation]:
    seconds: Counter[str] = Counter()
    for each in timelines:
        seconds.update({name: costs.seconds for name, costs in each.operations.items()})
    operations = []
    for name, _ in seconds.most_common(_MAX_OPERATIONS):
        own = {each.rank: each.operations.get(name, Costs()) for each in timelines}
        places = sum((costs.places for costs in own.values()), Counter[Place]())
        operations.append(
            Operation(
                name,
                {rank: costs.seconds for rank, costs in own.items()},
                {rank: costs.calls for rank, costs in own.items()},
                places.most_common(1)[0][0] if places else None,
            )
        )
    return operations


def _traffic(timelines: Sequence[Timeline]) -> Traffic | None:
    """Return the collectives of one call and size that take the ranks the most time."""
    seconds: Counter[tuple[str, int]] = Counter()
    calls: Counter[tuple[str, int]] = Counter()
    for each in timelines:
        length = (each.steps or total([each.window]) / 1e6) * len(timelines)
        for collective in each.collectives:
            kind = collective.call, collective.size
            seconds[kind] += total(within([each.window], collective.begin, collective.end))  # type: ignore[assignment]
            calls[kind] += (each.window[0] <= collective.begin < each.window[1]) / length  # type: ignore[assignment]
    if not seconds:
        return None
    (call, size), _ = seconds.most_common(1)[0]
    return Traffic(call, size, float(calls[call, size]))
