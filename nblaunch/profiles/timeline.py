"""The timeline of one rank: what its recording says of each moment.

A recording is JSON from `nblaunch.ranks.profiler`, and a trace in Kineto's format. A moment belongs to one part. On
CPUs it is what the main thread does, with those of autograd: communication counts where nothing is computed meanwhile.
On a GPU it is what the GPU does: communication counts where no other kernel runs, and the rest is what keeps the GPU
idle. Times are in microseconds since an origin that all ranks share.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nblaunch.profiles.profile import IDLE_GPU, Part, Place
from nblaunch.profiles.spans import Span, minus, overlap, total, union, within
from nblaunch.wire.tables import name_of_call

_AUTOGRAD = "autograd::engine::evaluate_function"
_DATA = "enumerate(DataLoader)"
_OPTIMIZER, _STEP = "Optimizer.", "Optimizer.step#"
_PARAMETERS = "record_param_comms"
"""An operation of the CPU that has the number of a collective, which NCCL's kernels refer to."""
_COLLECTIVE_OPS = (_PARAMETERS, "c10d::", "_c10d_functional::", "c10d_functional::")
_IN_FLIGHT = ("gloo:", "mpi:", "ucc:")
"""Annotations of collectives on CPUs, from their begin in this rank to their end."""
_GLOO = {"reduce_scatter": "all_reduce"}
"""What gloo's annotation has in place of the operation."""
_NCCL = ("ncclDevKernel", "ncclKernel")
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_MIN_STEPS = 3
"""Steps whose ends bound the time that is looked at: of fewer, all that was recorded."""
_BYTES_OF_C = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "short": 2}
"""Of one element, by a name of C that NCCL uses; others have the bits in their names."""
OUTSIDE = "outside of torch"


class Collective(NamedTuple):
    """One collective in one rank."""

    key: tuple[str, str, int] | None
    """Its process group, with the members, and its number there: the same in all ranks. None: unknown."""
    begin: float
    end: float
    call: str
    size: int
    """Bytes of the rank's input."""
    place: Place | None
    is_open: bool = False
    """It has not ended in the recording."""


@dataclass(slots=True)
class Costs:
    """What a rank has spent on one operation."""

    calls: int = 0
    seconds: float = 0.0
    places: Counter[Place] = field(default_factory=Counter)

    def add(self, microseconds: float, *places: Place | None, calls: int = 0) -> None:
        self.seconds += microseconds / 1e6
        self.calls += calls
        for place in places:
            if place is not None:
                self.places[place] += 1


@dataclass(slots=True)
class Timeline:
    """What one rank did in a window of time."""

    rank: int
    host: str
    window: Span
    steps: int
    has_gpu: bool
    parts: dict[Part, list[Span]]
    """Waiting is still in communication."""
    collectives: list[Collective]
    operations: dict[str, Costs]
    places: dict[Part, Place]
    """The user's line that was executed most in each part."""


def shift_of(trace: Mapping[str, Any], origin: float) -> float:
    """Return what to add to the times of a trace."""
    return int(trace.get("baseTimeNanoseconds", 0)) / 1e3 - origin


class _Events:
    """The events of a trace by their meaning."""

    def __init__(self, about: Mapping[str, Any], trace: Mapping[str, Any], origin: float) -> None:
        main, shift = str(about["main"]), shift_of(trace, origin)
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
        numbered = {event["args"].get("External id"): event["args"] for event in events if event["name"] == _PARAMETERS}
        threads = {str(event["tid"]) for event in events if event["name"].startswith(_AUTOGRAD)} | {main}
        self.data: list[Span] = []
        self.optimizer: list[Span] = []
        self.steps: list[Span] = []
        self.calls: list[Span] = []
        """Of collectives, which may wait."""
        self.computing: list[Span] = []
        self.in_flight: list[tuple[Span, str, Mapping[str, Any]]] = []
        self.kernels: list[tuple[Span, str, Any]] = []
        """With the number that ties them to their launch."""
        self.gpu_optimizer: list[Span] = []
        self.launches: dict[Any, float] = {}
        self.nested: dict[str, list[tuple[float, float, str]]] = {}
        """What may be within one another, by thread; collectives without their names."""
        for event in events:
            name, category, thread, args = event["name"], event.get("cat"), str(event["tid"]), event.get("args", {})
            span = (event["ts"] + shift, event["ts"] + shift + event["dur"])
            if category == "cpu_op" and thread in threads:
                is_collective = name.startswith(_COLLECTIVE_OPS)
                (self.calls if is_collective else self.computing).append(span)
                self.nested.setdefault(thread, []).append((*span, "" if is_collective else name))
            elif category == "user_annotation" and name.startswith(_IN_FLIGHT):
                self.in_flight.append((span, name.partition(":")[2], args))
            elif category == "user_annotation" and thread == main:
                self._annotate(name, span)
                self.nested.setdefault(thread, []).append((*span, _short(name)))
            elif category == "kernel" and name.startswith(_NCCL):
                args = {**numbered.get(args.get("External id"), {}), **args}
                self.in_flight.append((span, args.get("Collective name", name), args))
            elif category in _GPU_WORK:
                self.kernels.append((span, name, args.get("correlation")))
            elif category == "gpu_user_annotation" and name.startswith(_OPTIMIZER):
                self.gpu_optimizer.append(span)
            elif category in ("cuda_runtime", "cuda_driver"):
                self.launches[args.get("correlation")] = span[0]

    def _annotate(self, name: str, span: Span) -> None:
        if name.startswith(_DATA):
            self.data.append(span)
        elif name.startswith(_OPTIMIZER):
            self.optimizer.append(span)
            if name.startswith(_STEP):
                self.steps.append(span)


class _Samples:
    """The user's lines at many moments of the main thread."""

    def __init__(self, about: Mapping[str, Any], origin: float) -> None:
        self._places = [Place(file, line) for file, line in about["places"]]
        self._taken = [(at / 1e3 - origin, place, waits) for at, place, waits in about["samples"]]
        self._times = [at for at, _, _ in self._taken]

    def within(self, gaps: list[Span], doing: str) -> list[Span]:
        """Return the part of these gaps in which the main thread did this, as far as samples were taken in them."""
        found = []
        for begin, end in gaps:
            taken = self._taken[bisect.bisect_left(self._times, begin) : bisect.bisect_left(self._times, end)]
            edges = [begin, *((one[0] + other[0]) / 2 for one, other in itertools.pairwise(taken)), end]
            found += [span for span, each in zip(itertools.pairwise(edges), taken, strict=False) if each[2] == doing]
        return union(found)

    def at(self, moment: float | None) -> Place | None:
        number = -1 if moment is None else bisect.bisect(self._times, moment) - 1
        place = self._taken[number][1] if number >= 0 else -1
        return self._places[place] if place >= 0 else None

    def places(self, begin: float, end: float) -> Iterator[Place]:
        for number in range(bisect.bisect_left(self._times, begin), bisect.bisect_left(self._times, end)):
            if (place := self._taken[number][1]) >= 0:
                yield self._places[place]


def timeline(rank: int, about: Mapping[str, Any], trace: Mapping[str, Any], origin: float) -> Timeline:
    """Return the timeline of a recording: its two files as JSON has them."""
    events, samples = _Events(about, trace, origin), _Samples(about, origin)
    recorded = window = (about["begin"] / 1e3 - origin, about["end"] / 1e3 - origin)
    ends = [end for _, end in union(events.steps) if window[0] <= end <= window[1]]
    steps = len(ends)
    if steps >= _MIN_STEPS:
        window, steps = (ends[0], ends[-1]), steps - 1
    collectives = _collectives(about, events, origin)
    has_gpu = bool(events.kernels)
    parts = (_on_gpu if has_gpu else _on_cpu)(events, union((each.begin, each.end) for each in collectives), [window])
    if not has_gpu:  # a collective's annotation may end late, once its thread gets the GIL
        python = samples.within(parts["communication"], "python")
        parts["communication"], parts["other"] = (
            minus(parts["communication"], python),
            union([*parts["other"], *python]),
        )
    data = samples.within(parts["other"], "data")  # workers that start and end, and calls that began before
    parts["data"], parts["other"] = union([*parts["data"], *data]), minus(parts["other"], data)
    before = samples.within([gap for gap in parts["other"] if gap[0] == recorded[0]], "communication")
    parts["communication"], parts["other"] = union([*parts["communication"], *before]), minus(parts["other"], before)
    if before and about["before"][3]:
        collectives.insert(0, _counted(about["before"], before[0][0], before[-1][1], before[-1][1] >= recorded[1]))
    seen = {part: Counter(it for span in spans for it in samples.places(*span)) for part, spans in parts.items()}
    places = {part: counted.most_common(1)[0][0] for part, counted in seen.items() if counted}
    costs = _costs(events, samples, window, is_gpu=has_gpu)
    until = recorded[0]
    for each in collectives:  # some are in flight at the same time
        exposed = within(parts["communication"], max(each.begin, until), each.end)
        until = max(until, each.end)
        if exposed:
            costs[each.call].add(total(exposed), each.place, calls=1)
    if parts["other"]:
        name = IDLE_GPU if has_gpu else OUTSIDE
        costs[name].add(total(parts["other"]))
        costs[name].places.update(seen["other"])
    return Timeline(rank, about["host"], window, steps, has_gpu, parts, collectives, costs, places)


def _on_cpu(events: _Events, in_flight: list[Span], window: list[Span]) -> dict[Part, list[Span]]:
    data = overlap(union(events.data), window)
    calls = minus(overlap(union(events.calls), window), data)
    busy = minus(overlap(union(events.computing), window), data, calls)
    flight = minus(overlap(in_flight, window), data, busy)
    communication = union([*calls, *flight])
    annotated = minus(overlap(union(events.optimizer), window), data, communication)
    return {
        "compute": minus(busy, annotated),
        "communication": communication,
        "waiting": [],
        "data": data,
        "optimizer": annotated,
        "other": minus(window, data, communication, busy, annotated),
    }


def _on_gpu(events: _Events, in_flight: list[Span], window: list[Span]) -> dict[Part, list[Span]]:
    busy = overlap(union(span for span, _, _ in events.kernels), window)
    optimizer = overlap(busy, union(events.gpu_optimizer))
    communication = minus(overlap(in_flight, window), busy)
    data = minus(overlap(union(events.data), window), busy, communication)
    return {
        "compute": minus(busy, optimizer),
        "communication": communication,
        "waiting": [],
        "data": data,
        "optimizer": optimizer,
        "other": minus(window, busy, communication, data),
    }


# ------------------------------------------------------------------ collectives
def _collectives(about: Mapping[str, Any], events: _Events, origin: float) -> list[Collective]:
    """Return the collectives with their numbers: those of NCCL's kernels, else those that the rank has counted.

    On CPUs the trace has no numbers. There a collective is the first of its kind that was counted before it began, and
    is not taken yet. One that has not ended is in the trace until the end.
    """
    counted: dict[str, list[list[Any]]] = {}
    for each in about["collectives"]:
        counted.setdefault(_GLOO.get(each[4], name_of_call(each[4])), []).append(each)
    found, recorded = [], about["end"] / 1e3 - origin
    for (begin, end), operation, args in sorted(events.in_flight, key=lambda each: each[0]):
        call = name_of_call(operation)
        own = Collective(None, begin, end, call, 0, None)
        waiting = counted.get(call, [])
        if "Src Rank" in args or "Dst Rank" in args or call in ("send", "recv"):
            pass  # a transfer between two ranks has numbers of its own
        elif "Seq" in args:
            key = (str(args.get("Process Group Name")), str(args.get("Process Group Ranks")), int(args["Seq"]))
            size = int(args.get("In msg nelems", 0)) * _bytes_of(str(args.get("dtype")))
            own = own._replace(key=key, size=size)
        elif waiting and waiting[0][0] / 1e3 - origin <= begin:
            own = _counted(waiting.pop(0), begin, end, is_open=end >= recorded)
        found.append(own)
    last = about["collectives"][-1:]
    is_waiting = any(waiting[-1:] == last for waiting in counted.values())
    if last and is_waiting and not events.kernels:  # a barrier on GPUs has no annotation either
        found.append(_counted(last[0], last[0][0] / 1e3 - origin, recorded, is_open=True))
    return found


def _counted(counted: Sequence[Any], begin: float, end: float, is_open: bool = False) -> Collective:
    """Return a collective that the rank has counted."""
    _, group, members, number, call, detail, file, line = counted
    elements, _, dtype = detail.partition(" ")
    size, place = int(elements or 0) * _bytes_of(dtype), Place(file, line) if line else None
    key = (group, members, number) if number else None
    return Collective(key, begin, end, name_of_call(call), size, place, is_open)


def _bytes_of(dtype: str) -> int:
    """Return the bytes of one element; 1 if they are not known."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else _BYTES_OF_C.get(dtype.lower(), 1)


# ------------------------------------------------------------------ operations
def _costs(events: _Events, samples: _Samples, window: Span, *, is_gpu: bool) -> dict[str, Costs]:
    """Return the time of each operation without what it calls, and the user's lines that call it."""
    costs: dict[str, Costs] = defaultdict(Costs)
    first, last = window
    if is_gpu:
        for (begin, end), name, correlation in events.kernels:
            if first <= begin < last:
                costs[name].add(end - begin, samples.at(events.launches.get(correlation)), calls=1)
    for nested in events.nested.values():
        if not is_gpu:
            for begin, end, name in _segments(nested):
                if name and begin < last and end > first:
                    costs[name].add(min(end, last) - max(begin, first), *samples.places(begin, end))
        for begin, _, name in nested:
            if name in costs and first <= begin < last:
                costs[name].calls += 1
    return costs


def _segments(nested: list[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Yield the time of each event that none of those within it has."""
    stack: list[tuple[float, str]] = []
    now = 0.0
    for begin, end, name in sorted(nested, key=lambda event: (event[0], -event[1])):
        while stack and stack[-1][0] <= begin:
            yield now, stack[-1][0], stack[-1][1]
            now = stack.pop()[0]
        if stack:
            yield now, begin, stack[-1][1]
            end = min(end, stack[-1][0])
        stack.append((end, name))
        now = begin
    while stack:
        yield now, stack[-1][0], stack[-1][1]
        now = stack.pop()[0]


def _short(name: str) -> str:
    """Return the name of an operation as its users know it."""
    if name.startswith(_DATA):
        return "DataLoader"
    return name.partition("#")[2] if name.startswith(_OPTIMIZER) else name
