"""Profiles from recordings: written by hand here, in Kineto's format, for CPUs and for GPUs that this machine lacks."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import os
import random
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.launch.events_file import from_line, to_line
from nblaunch.launch.views import ProfileShown
from nblaunch.notebook.record import as_text, profile_html
from nblaunch.profiles import spans, summarise
from nblaunch.profiles.profile import PARTS, Operation, Part, Place, Profile, RankProfile, Traffic
from nblaunch.profiles.timeline import timeline
from nblaunch.ranks import profiler

BASE_NS = 1_790_000_000_000_000_000
"""What the times of a trace are relative to."""
BEGIN_US = 5_000_000_000.0
"""When the recording began, in the trace."""
MAIN, AUTOGRAD, GLOO = 4001, 4002, 4003


class Rank:
    """A recording in the making. Times are in milliseconds since its begin."""

    def __init__(self, rank: int = 0, host: str = "a", length: float = 100.0) -> None:
        self.rank, self.host, self.length = rank, host, length
        self.begin = self.ahead = 0.0
        """When its recording began, and how far its clock is ahead."""
        self.events: list[dict[str, Any]] = []
        self.samples: list[tuple[float, int, str]] = []
        self.collectives: list[Any] = []
        self.before: list[Any] = [0, "", "", 0, "", "", "", 0]
        self.places = [("/cell.py", 3), ("/cell.py", 9)]
        self._ids = 0

    def event(self, category: str, name: str, begin: float, end: float, thread: int = MAIN, **args: Any) -> None:
        times = {"ts": BEGIN_US + 1000 * begin, "dur": 1000 * (end - begin)}
        place = {"pid": 77, "tid": thread}
        self.events.append({"ph": "X", "cat": category, "name": name, **times, **place, "args": args})

    def op(self, name: str, begin: float, end: float, thread: int = MAIN) -> None:
        self.event("cpu_op", name, begin, end, thread)

    def note(self, name: str, begin: float, end: float, thread: int = MAIN) -> None:
        self.event("user_annotation", name, begin, end, thread)

    def step(self, end: float, length: float = 1.0) -> None:
        self.note("Optimizer.step#SGD.step", end - length, end)

    def count(self, at: float, number: int, detail: str = "262144 float32", call: str = "allreduce") -> None:
        """Begin a collective of all ranks."""
        at_ns = BASE_NS + int(1000 * (BEGIN_US + 1000 * at))
        self.collectives.append([at_ns, "0", "", number, call, detail, "/cell.py", 7])

    def all_reduce(self, begin: float, end: float, number: int, call: str = "allreduce") -> None:
        """Of gloo, which the rank has counted just before, perhaps as a call that gloo names otherwise."""
        self.count(begin - 0.005, number, call=call)
        self.note("gloo:all_reduce", begin, end, GLOO)

    def kernel(self, name: str, begin: float, end: float, launched: float = 0.0) -> None:
        self._ids += 1
        self.event("cuda_runtime", "cudaLaunchKernel", launched, launched + 0.01, correlation=self._ids)
        self.event("kernel", name, begin, end, 7, correlation=self._ids, device=0, stream=7)

    def nccl(self, begin: float, end: float, number: int) -> None:
        """Of NCCL: Kineto copies all but the number from the operation of the CPU to the kernel."""
        self._ids += 1
        group: dict[str, Any] = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}
        data: dict[str, Any] = {"Collective name": "allreduce", "In msg nelems": 262144, "dtype": "Float"}
        external: dict[str, Any] = {"External id": 1000 + self._ids}
        self.event("cpu_op", "record_param_comms", 0.0, 0.01, Seq=number, **group, **data, **external)
        self.event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", begin, end, 20, **group, **data, **external)

    def sample(self, begin: float, end: float, place: int, doing: str = "python") -> None:
        """The main thread was at a place, every 2 ms."""
        moment = begin + 1.0
        while moment < end:
            self.samples.append((moment, place, doing))
            moment += 2.0

    @property
    def about(self) -> dict[str, Any]:
        zero = BASE_NS + int(1000 * BEGIN_US + 1e6 * self.ahead)
        samples = [(zero + int(at * 1e6), place, doing) for at, place, doing in sorted(self.samples)]
        collectives = [[each[0] + int(1e6 * self.ahead), *each[1:]] for each in self.collectives]
        recorded = {"begin": zero + int(1e6 * self.begin), "end": zero + int(1e6 * self.length)}
        known = {"main": MAIN, "host": self.host, "before": self.before, **recorded}
        return {**known, "places": self.places, "samples": samples, "collectives": collectives}

    @property
    def trace(self) -> dict[str, Any]:
        named = {"ph": "M", "name": "process_name", "ts": BEGIN_US, "pid": 77, "tid": 0, "args": {"name": "python"}}
        flow = {"ph": "s", "name": "ac2g", "id": 5, "pid": 77, "tid": MAIN, "ts": BEGIN_US, "cat": "ac2g"}
        events = [{**event, "ts": event["ts"] + 1000 * self.ahead} for event in [named, flow, *self.events]]
        return {"baseTimeNanoseconds": BASE_NS, "traceEvents": events}

    def profile(self) -> RankProfile:
        return compared(self).ranks[0]


def compared(*ranks: Rank) -> Profile:
    origin = BASE_NS / 1e3 + BEGIN_US
    abouts = [each.about for each in ranks]
    windows = summarise.common_windows(abouts)
    seen = zip(ranks, abouts, strict=True)
    return summarise.compare([timeline(it.rank, {**own, **windows[it.host]}, it.trace, origin) for it, own in seen])


def shares(rank: RankProfile) -> dict[Part, int]:
    """Return the shares in percent, without those that are 0."""
    return {part: round(100 * rank.share(part)) for part in PARTS if rank.share(part) > 0.004}


# ------------------------------------------------------------------ spans
SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=8).map(
    lambda pairs: [(float(begin), float(begin + length)) for begin, length in pairs]
)


def moments(covered: list[tuple[float, float]]) -> set[int]:
    return {moment for begin, end in covered for moment in range(int(begin), int(end))}


@given(SPANS, SPANS, SPANS)
def test_spans_are_sets_of_moments(first: Any, second: Any, third: Any) -> None:
    a, b = spans.union(first), spans.union(second)
    assert moments(a) == moments(first)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(a))
    assert moments(spans.overlap(a, b)) == moments(first) & moments(second)
    assert moments(spans.minus(a, b, third)) == moments(first) - moments(second) - moments(third)
    assert moments(spans.within(a, 5.0, 20.0)) == moments(first) & set(range(5, 20))
    assert spans.total(a) == len(moments(first))


# ------------------------------------------------------------------ one rank
def test_each_moment_of_a_cpu_belongs_to_one_part() -> None:
    rank = Rank()
    rank.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 20)
    rank.op("aten::stack", 5, 15)  # within the loader
    rank.op("aten::mm", 20, 40)
    rank.op("c10d::allreduce_", 40, 42)
    rank.all_reduce(35, 60, 1)  # communication once nothing is computed
    rank.note("Optimizer.step#SGD.step", 60, 70)
    rank.op("aten::add_", 62, 68)
    rank.op("aten::mm", 70, 75, GLOO)  # another thread
    found = rank.profile()
    assert shares(found) == {"compute": 20, "communication": 20, "data": 20, "optimizer": 10, "other": 30}
    assert sum(found.parts.values()) == pytest.approx(found.seconds) == pytest.approx(0.1)


def test_backward_passes_compute_in_autograds_threads() -> None:
    rank = Rank()
    rank.op("autograd::engine::evaluate_function: AddmmBackward0", 10, 60, AUTOGRAD)
    assert shares(rank.profile()) == {"compute": 50, "other": 50}


def test_the_time_is_that_between_the_ends_of_steps() -> None:
    rank = Rank()
    for end in (10, 40, 70):
        rank.step(end)
    rank.op("aten::mm", 0, 9)  # before the first end
    rank.op("aten::mm", 10, 28)
    rank.op("aten::mm", 75, 100)  # after the last
    found = rank.profile()
    assert found.steps == 2
    assert found.seconds == pytest.approx(0.06)
    assert found.steps_per_second == pytest.approx(2 / 0.06)
    assert found.share("compute") == pytest.approx(0.3)


def test_calls_that_began_before_the_recording_are_known_from_samples() -> None:
    rank = Rank()
    rank.sample(0, 30, 0, "communication")
    rank.sample(30, 70, 0, "data")
    rank.sample(70, 100, 1)
    assert shares(rank.profile()) == {"communication": 30, "data": 40, "other": 30}
    assert rank.profile().places["data"] == Place("/cell.py", 3)
    assert rank.profile().places["other"] == Place("/cell.py", 9)


def test_python_that_runs_while_an_annotation_ends_late_is_no_communication() -> None:
    rank = Rank()
    rank.all_reduce(10, 60, 1)
    rank.sample(10, 20, 0, "communication")
    rank.sample(20, 60, 0)
    assert rank.profile().share("communication") == pytest.approx(0.1)


def test_operations_have_their_own_time_and_the_line_that_calls_them() -> None:
    rank = Rank()
    rank.op("aten::linear", 0, 50)
    rank.op("aten::addmm", 10, 40)
    rank.op("aten::linear", 50, 60)
    rank.sample(0, 60, 1)
    found = {each.name: each for each in compared(rank).operations}
    assert found["aten::linear"].seconds[0] == pytest.approx(0.03)
    assert found["aten::addmm"].seconds[0] == pytest.approx(0.03)
    assert (found["aten::linear"].calls[0], found["aten::addmm"].calls[0]) == (2, 1)
    assert found["aten::addmm"].place == Place("/cell.py", 9)
    assert found["outside of torch"].seconds[0] == pytest.approx(0.04)


def test_an_operation_that_a_rank_does_not_call_takes_it_no_time() -> None:
    other = Rank(1)
    other.op("aten::linear", 0, 50)
    profile = compared(Rank(), other)
    (found,) = [each for each in profile.operations if each.name == "aten::linear"]
    assert found.seconds == {0: 0.0, 1: pytest.approx(0.05)}
    assert found.calls == {0: 0, 1: 1}
    assert "25.0 ms  aten::linear" in repr(profile)
    assert re.search(r"aten::linear\W+–\W+50\xa0ms", as_text(profile_html(profile)))


def test_only_the_ten_dearest_operations_are_kept() -> None:
    rank = Rank()
    for number in range(12):
        rank.op(f"aten::op{number}", number, number + 0.1 + 0.05 * number)
    assert [each.name for each in compared(rank).operations][:3] == ["outside of torch", "aten::op11", "aten::op10"]
    assert len(compared(rank).operations) == 10


def test_a_collective_that_a_rank_does_not_join_is_a_wait_for_it() -> None:
    """Its annotation is in the trace until the end of the recording."""
    first, other = Rank(), Rank(1)
    first.all_reduce(40, 100.5, 1)
    found = compared(first, other).ranks
    assert shares(found[0])["waiting"] == pytest.approx(60)
    assert found[1].late == pytest.approx(0.06)


def test_a_call_that_gloo_names_otherwise_is_compared() -> None:
    ranks = [Rank(), Rank(1)]
    for rank, begin in zip(ranks, (20, 60), strict=True):
        rank.all_reduce(begin, 80, 1, call="reduce_scatter")
    profile = compared(*ranks)
    assert shares(profile.ranks[0])["waiting"] == pytest.approx(40)
    assert profile.traffic is not None
    assert profile.traffic.call == "reduce_scatter"


def test_an_import_is_no_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_torch_distributed.py").write_text("import sys\nseen = sys.look(sys._getframe())\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(profiler, "_activity", lambda file, line: "communication")
    monkeypatch.setattr(profiler, "_is_users", lambda file: file == __file__)
    look = profiler._Recording()._look
    monkeypatch.setattr(sys, "look", look, raising=False)
    assert importlib.import_module("of_torch_distributed").seen == (0, "python")
    assert look(sys._getframe()) == (1, "communication")


# ------------------------------------------------------------------ GPUs
def gpu_rank(rank: int = 0, joins: float = 60.0) -> Rank:
    """100 ms: 40 of kernels, NCCL from `joins` to 80 (10 beside a kernel), a step of 10, and an idle GPU."""
    made = Rank(rank)
    made.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 15)
    made.kernel("void gemm<float>(x)", 10, 50, launched=5)
    made.nccl(joins, 80, 4)
    made.kernel("void multi_tensor_apply_kernel<y>(z)", 80, 90, launched=21)
    made.event("gpu_user_annotation", "Optimizer.step#Adam.step", 79.9, 90.1, 7)
    made.sample(0, 20, 0)
    made.sample(20, 100, 1)
    return made


def test_each_moment_of_a_gpu_belongs_to_one_part() -> None:
    found = gpu_rank(joins=40).profile()
    assert found.has_gpu
    assert shares(found) == {"compute": 40, "communication": 30, "data": 10, "optimizer": 10, "other": 10}
    names = [each.name for each in compared(gpu_rank()).operations]
    assert "idle GPU" in names
    assert "outside of torch" not in names


def test_a_barrier_on_gpus_is_not_in_flight_to_the_end() -> None:
    rank = gpu_rank(joins=40)
    rank.collectives.append([BASE_NS + int(1000 * (BEGIN_US + 1000)), "0", "", 3, "barrier", "", "", 0])
    assert shares(rank.profile()) == {"compute": 40, "communication": 30, "data": 10, "optimizer": 10, "other": 10}


def test_a_kernel_has_the_line_that_launched_it() -> None:
    found = {each.name: each for each in compared(gpu_rank()).operations}
    assert found["void gemm<float>(x)"].place == Place("/cell.py", 3)
    assert found["void multi_tensor_apply_kernel<y>(z)"].place == Place("/cell.py", 9)
    assert found["void gemm<float>(x)"].seconds == {0: pytest.approx(0.04)}


def test_kernels_of_nccl_wait_for_the_last_rank() -> None:
    profile = compared(gpu_rank(0, joins=50), gpu_rank(1, joins=75))
    first, second = profile.ranks
    assert [first.share("waiting"), first.share("communication")] == pytest.approx([0.25, 0.05])
    assert [second.share("waiting"), second.share("communication")] == pytest.approx([0, 0.05])
    assert second.late == pytest.approx(0.025)
    assert profile.traffic == Traffic("all_reduce", 1 << 20, 10.0)


# ------------------------------------------------------------------ ranks together
def pair(late_by: float, length: float = 5.0) -> tuple[Rank, Rank]:
    """Ten steps of two ranks: rank 1 joins each collective late, after its own computation."""
    ranks = Rank(0, length=1000), Rank(1, length=1000)
    for step in range(10):
        begin = 100.0 * step
        for rank, own in zip(ranks, (20.0, 20.0 + late_by), strict=True):
            rank.op("aten::mm", begin, begin + own)
            rank.sample(begin, begin + own, rank.rank)
            rank.all_reduce(begin + own, begin + 20 + late_by + length, step + 1)
            rank.step(begin + 20 + late_by + length + 1)
    return ranks


def test_waiting_ends_when_the_last_rank_joins() -> None:
    first, second = compared(*pair(late_by=30)).ranks
    assert first.parts["waiting"] / first.steps == pytest.approx(0.03, rel=0.01)
    assert first.parts["communication"] / first.steps == pytest.approx(0.005, rel=0.01)
    assert second.parts["waiting"] == 0
    assert second.late == pytest.approx(0.27, rel=0.01)


@pytest.mark.parametrize(("joins", "waits"), [(None, 0.9), (60, 0.5)])
def test_a_rank_waits_for_one_that_joins_late_or_never(joins: float | None, waits: float) -> None:
    first, second = Rank(0), Rank(1)
    first.count(10, 7)
    first.sample(10, 100, 0, "communication")
    if joins is not None:
        second.count(joins, 7)
        second.sample(joins, 100, 0, "communication")
    profile = compared(first, second)
    assert profile.ranks[0].share("waiting") == pytest.approx(waits, rel=1e-3)
    assert profile.sentence.startswith(f"Rank 0 waits {waits:.0%} of the time for rank 1")
    assert profile.length_text == "Recorded: 0.1 s, 0 steps of an optimizer"


def test_a_rank_waits_in_a_collective_that_began_before_the_recording() -> None:
    first, second = Rank(0), Rank(1)
    first.count(-50, 7)
    first.before, first.collectives = first.collectives[0], []
    first.sample(0, 100, 0, "communication")
    assert compared(first, second).ranks[0].share("waiting") == pytest.approx(1.0)
    second.rank = 2
    first.before[2] = "0,3-4"  # of other ranks
    assert compared(first, second).ranks[0].share("communication") == pytest.approx(1.0)


@pytest.mark.parametrize(("begin", "end"), [(0, 300), (300, 1000), (500, 800)])
def test_only_the_time_that_all_ranks_have_recorded_counts(begin: float, end: float) -> None:
    first, second = pair(late_by=30)
    second.begin, second.length = begin, end
    second.events = [each for each in second.events if begin <= (each["ts"] - BEGIN_US) / 1000 < end]
    second.collectives = [each for each in second.collectives if begin < 100 * each[3] < end + 100]
    profile = compared(first, second)
    assert profile.ranks[0].share("waiting") == pytest.approx(0.3, abs=0.05), profile
    assert profile.ranks[0].seconds <= (end - begin) / 1000


def test_a_transfer_between_two_ranks_is_no_collective_of_all() -> None:
    first, second = gpu_rank(0, joins=50), gpu_rank(1, joins=75)
    for event in first.events:
        if "Collective name" in event["args"]:
            event["args"] |= {"Collective name": "send", "Dst Rank": 1}
    assert compared(first, second).ranks[0].share("waiting") == 0


def test_collectives_are_told_apart_by_their_numbers() -> None:
    first, second = pair(late_by=30)
    del second.collectives[0], second.events[1]  # it was recorded one collective later
    assert compared(first, second).ranks[0].parts["waiting"] == pytest.approx(0.27, rel=0.01)
    for each in second.collectives:
        each[1] = "another group"
    assert compared(first, second).ranks[0].parts["waiting"] == 0


def test_ranks_of_other_machines_are_moved_to_one_clock(tmp_path: Path) -> None:
    first, second = pair(late_by=30)
    second.host, second.ahead = "b", 7000.0
    profile = merged(tmp_path / "trace.json.gz", first, second)
    assert profile.ranks[0].parts["waiting"] == pytest.approx(0.27, rel=0.01)
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    ends = [
        [e["ts"] + e["dur"] for e in events if e["name"] == "gloo:all_reduce" and e["pid"] == pid] for pid in (0, 1000)
    ]
    assert ends[0] == pytest.approx(ends[1])


def merged(path: Path, *ranks: Rank) -> Profile:
    """Return what the reading process does with files."""
    recordings = []
    for rank in ranks:
        files = []
        for content in (rank.about, rank.trace):
            with tempfile.TemporaryFile() as file:
                file.write(json.dumps(content).encode())
                file.flush()
                files.append(os.dup(file.fileno()))
        recordings.append((rank.rank, (files[0], files[1])))
    return summarise.summarise(recordings, path)


def test_the_trace_has_all_ranks_on_one_clock(tmp_path: Path) -> None:
    path = tmp_path / "profile1.json.gz"
    assert merged(path, *pair(late_by=30)).trace == path
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1000: "rank 1"}
    assert {event["id"] for event in events if event["ph"] == "s"} == {"0.5", "1.5"}
    first = [event["ts"] for event in events if event["name"] == "aten::mm"]
    assert (min(first), max(first)) == (pytest.approx(0, abs=1), pytest.approx(900_000, abs=1))


def test_a_trace_that_cannot_be_written_does_not_cost_the_profile(tmp_path: Path) -> None:
    profile = merged(tmp_path / "gone" / "profile1.json.gz", *pair(late_by=30))
    assert profile.trace is None
    assert profile.ranks[0].share("waiting") > 0.2


def test_a_recording_that_cannot_be_read_leaves_no_file(tmp_path: Path) -> None:
    rank = Rank()
    rank.events.append({"ph": "X", "dur": 1.0})
    with pytest.raises(KeyError):
        merged(tmp_path / "profile1.json.gz", rank)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ sentences
def rank_of(rank: int = 0, steps: int = 10, late: float = 0.0, **parts: float) -> RankProfile:
    """A rank of ten steps in a second; parts are shares."""
    filled = {part: parts.get(part, 0.0) for part in PARTS}
    filled["compute"] += 1 - sum(filled.values())
    where = {part: Place("/cell.py", 4, "Cell In[2], line 4: work()") for part in PARTS}
    return RankProfile(rank, 1.0, steps, filled, late, places=where)


def on_gpu(rank: RankProfile) -> RankProfile:
    return replace(rank, has_gpu=True)


EVEN = rank_of()


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (Profile([]), "No rank could be profiled."),
        (Profile([EVEN]), "Computation is 100% of a step."),
        (Profile([EVEN, rank_of(1)]), "The 2 ranks are even: computation is 100% of a step."),
        (
            Profile([rank_of(waiting=0.38), rank_of(1, late=0.38, data=0.5)]),
            "Rank 0 waits 38% of the time for rank 1, whose data loading takes 50 ms of a step, the other's 0 ms (",
        ),
        (
            Profile([*(rank_of(rank, waiting=0.4, data=0.1) for rank in (0, 1)), rank_of(2, late=0.8, data=0.41)]),
            "Ranks wait 40% of the time for rank 2, whose data loading takes 4.1 times as long as the others' (",
        ),
        (
            Profile([rank_of(waiting=0.7), rank_of(1, late=0.7, data=0.6), *(rank_of(rank) for rank in (2, 3))]),
            "Rank 0 waits 70% of the time for rank 1, whose data loading takes 60 ms of a step",
        ),
        (
            Profile([rank_of(waiting=0.4, steps=2, data=1e-7), rank_of(1, late=0.4, steps=2, data=0.4)]),
            "Rank 0 waits 40% of the time for rank 1, whose data loading takes 200 ms of a step, the other's 0 ms (",
        ),
        (
            Profile([on_gpu(rank_of(waiting=0.3, other=0.2)), on_gpu(rank_of(1, late=0.3, other=0.5))]),
            "Rank 0 waits 30% of the time for rank 1, whose idle GPU time takes 2.5 times as long as the other's (",
        ),
        (
            Profile([rank_of(waiting=0.37), rank_of(1, late=0.37, communication=0.4, data=0.1)]),
            "Rank 0 waits 37% of the time for rank 1, which comes last to the collectives.",
        ),
        (
            Profile([rank_of(communication=0.5)], traffic=Traffic("all_reduce", 8, 1234.0)),
            "Communication is 50% of a step: 1,234 × all_reduce of 8 bytes.",
        ),
        (Profile([rank_of(optimizer=0.6)]), "The optimizer takes 60% of a step, most of it in Cell In[2], line 4"),
        (
            Profile([rank_of(waiting=0.2, late=0.2), rank_of(1, waiting=0.2, late=0.2)]),
            "Ranks wait 20% of the time for each other: no single rank is to blame.",
        ),
        (
            Profile([rank_of(communication=0.52)], traffic=Traffic("all_reduce", 400_000, 12.0)),
            "Communication is 52% of a step: 12 × all_reduce of 400 KB.",
        ),
        (
            Profile([rank_of(communication=0.5)], missing={0: "it has ended"}),
            "Communication is 50% of a step, including waits for rank 0, not recorded.",
        ),
        (
            Profile([rank_of(communication=0.9, steps=0)], traffic=Traffic("all_reduce", 1 << 26, 5.0)),
            "Communication is 90% of the time: 5 × all_reduce of 67 MB each second.",
        ),
        (Profile([rank_of(data=0.3)]), "Data loading is 30% of a step, most of it in Cell In[2], line 4: work()."),
        (
            Profile([rank_of(other=0.36, data=0.2, communication=0.2)]),
            "Code outside of torch takes 36% of a step, most",
        ),
        (Profile([rank_of(other=0.5)]), "Code outside of torch takes 50% of a step, most of it in Cell In[2], line 4"),
        (
            Profile([on_gpu(rank_of(other=0.6))]),
            "The GPU is idle for 60% of a step, most of it in Cell In[2], line 4",
        ),
    ],
)
def test_one_sentence_says_what_takes_the_time(profile: Profile, expected: str) -> None:
    assert profile.sentence.startswith(expected)


# ------------------------------------------------------------------ tables, files, HTML
def full_profile() -> Profile:
    operation = Operation("aten::<mm>", {0: 0.25, 1: 0.5}, {0: 10, 1: 10}, Place("/c.py", 4, "Cell In[2], line 4: a<b"))
    missing = {3: "no answer within 5 s", 4: "no answer within 5 s"}
    ranks = [rank_of(), rank_of(1, communication=0.25)]
    return Profile(ranks, [operation], Traffic("all_reduce", 8, 1.0), missing, Path("/logs/profile1.json.gz"))


def test_the_summary_is_a_table() -> None:
    table = full_profile().summary.to_pandas()
    assert list(table.columns) == ["rank", "seconds", "steps_per_second", *PARTS]
    assert table["communication"].tolist() == [0.0, 0.25]
    assert table["steps_per_second"].tolist() == [10.0, 10.0]
    assert [row["rank"] for row in full_profile().summary] == [0, 1]


def test_its_text_has_everything() -> None:
    text = repr(full_profile())
    said = [
        "ranks 3, 4: no answer",
        "rank  steps/s  compute",
        "25%",
        "aten::<mm>",
        "Cell In[2], line 4",
        "/logs/profile1",
    ]
    assert [part for part in said if part not in text] == []


@pytest.mark.parametrize("profile", [full_profile(), Profile([], [])])
def test_a_profile_in_a_file_is_the_same(profile: Profile) -> None:
    line = to_line(ProfileShown(profile), 1.5)
    assert line is not None
    found = from_line(line)
    assert found is not None
    assert found[0] == 1.5
    assert isinstance(found[1], ProfileShown)
    assert found[1].profile.to_json() == profile.to_json()
    assert repr(found[1].profile) == repr(profile)


def test_its_html_is_safe_and_reads_as_text() -> None:
    html = profile_html(full_profile())
    assert "<mm>" not in html
    assert "a<b" not in html
    text = as_text(html)
    for part in ("Not in this profile: ranks 3, 4", "rank\xa01", "25%", "aten::<mm>", "250\xa0ms", "profile1.json.gz"):
        assert part in text


@pytest.mark.parametrize("ranks", [1, 64])
def test_the_html_of_many_ranks_is_bounded(ranks: int) -> None:
    random.seed(ranks)
    many = [rank_of(rank, data=random.random() / 2, waiting=random.random() / 2) for rank in range(ranks)]
    operations = [
        Operation("x" * 5000, dict.fromkeys(range(ranks), 0.1), dict.fromkeys(range(ranks), 3), Place("f" * 900, 1))
        for _ in range(10)
    ]
    html = profile_html(Profile(many, operations))
    assert len(html) < 40_000
    assert ("and 48 more ranks" in html) == (ranks == 64)
