"""The process that reads the recordings of all ranks, writes one trace, and prints the profile as JSON.

A process of its own: to read the trace of a busy GPU takes seconds, in which neither a rank nor the kernel may stall.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
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
from nblaunch.profiles.timeline import Collective, Timeline, shift_of, timeline

_MAX_OPERATIONS = 10
_NICENESS = 10
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
    """Return the profile of these recordings, and write their merged trace. Closes the descriptors."""
    timelines: list[Timeline] = []
    abouts = [_read(fds[0]) for _, fds in recordings]
    windows = common_windows(abouts)
    origin = abouts[0]["begin"] / 1e3
    partial = trace.with_name(f"{trace.name}.partial")
    with _removed_on_failure(partial), gzip.open(partial, "wt", compresslevel=3) as merged:
        merged.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for (rank, fds), about in zip(recordings, abouts, strict=True):
            recorded = _read(fds[1])
            about |= windows[about["host"]]
            own_origin, own = origin, timeline(rank, about, recorded, origin)
            if timelines and own.host != timelines[0].host:  # their clocks differ
                own_origin = origin + _lag(own, timelines[0])
                own = timeline(rank, about, recorded, own_origin)
            merged.write(", " * bool(timelines) + _events_text(rank, recorded, shift_of(recorded, own_origin)))
            timelines.append(own)
        merged.write("]}")
    os.replace(partial, trace)
    return replace(compare(timelines), trace=trace)


def common_windows(abouts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the time that all ranks have recorded, by the clock of each host; nothing if there is none.

    Ranks begin at the same moment, and busy ones end earlier. What one rank has not seen cannot be compared.
    """
    begins: dict[str, int] = {}
    for about in abouts:
        begins[about["host"]] = max(begins.get(about["host"], 0), about["begin"])
    length = min(about["end"] - begins[about["host"]] for about in abouts)
    return {host: {"begin": begin, "end": begin + length} if length > 0 else {} for host, begin in begins.items()}


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _read(fd: int) -> Any:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return json.loads(file.read().decode(errors="replace"), strict=False)


def _events_text(rank: int, recorded: Mapping[str, Any], shift: float) -> str:
    """Return the events of a rank, without the brackets, with pids and ids that no other rank has."""
    pids: dict[Any, int] = {}
    for event in recorded["traceEvents"]:
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
    return json.dumps(recorded["traceEvents"])[1:-1]


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
    return Profile(ranks, _most_expensive(timelines), _traffic(timelines[0]))


def _most_expensive(timelines: Sequence[Timeline]) -> list[Operation]:
    seconds: Counter[str] = Counter()
    for each in timelines:
        seconds.update({name: costs.seconds for name, costs in each.operations.items()})
    operations = []
    for name, _ in seconds.most_common(_MAX_OPERATIONS):
        own = {each.rank: each.operations[name] for each in timelines if name in each.operations}
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


def _traffic(first: Timeline) -> Traffic | None:
    """Return the collectives of one call and size that take a rank the most time."""
    alike: dict[tuple[str, int], list[Collective]] = {}
    for each in first.collectives:
        if first.window[0] <= each.begin < first.window[1]:
            alike.setdefault((each.call, each.size), []).append(each)
    if not alike:
        return None
    (call, size), found = max(alike.items(), key=lambda item: sum(each.end - each.begin for each in item[1]))
    length = first.steps or (first.window[1] - first.window[0]) / 1e6
    return Traffic(call, size, len(found) / length)
