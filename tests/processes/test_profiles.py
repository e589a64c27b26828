"""Profiles of running ranks: known loads give known answers, and nothing is left behind."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import nblaunch
from nblaunch import Launch, LaunchResult, notebook_launcher
from nblaunch.errors import ArgumentError, LaunchStoppedError, NblaunchError, RankDiedError, RankLostError
from nblaunch.launch import run_folders
from nblaunch.launch.frontend import Frontend
from nblaunch.launch.views import ProfileShown
from nblaunch.notebook.run_table import record_of
from nblaunch.profiles.profile import PARTS, Part, Profile
from nblaunch.profiles.spans import minus, total, within
from nblaunch.ranks import profiler
from tests.conftest import LONG, eventually, parent_of
from tests.processes.test_stacks import begin, lock_twice_with_the_gil, pid_of, ready
from tests.processes.test_stuck import Remembers, _without_hook  # noqa: F401  # a fixture that pytest finds by name

NAP_S = 0.04
"""Much longer than what a busy machine adds to a step."""
NEAR = 0.1
"""How far a share may be from what the code does by construction."""
BIG = 16 << 20
"""Numbers in a tensor of 64 MB."""


# ------------------------------------------------------------------ what ranks run
class Compute(torch.autograd.Function):
    """An operation of torch that takes a given time, whatever the processors do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        return x.clone()


class Samples(Dataset[torch.Tensor]):
    def __init__(self, nap: float) -> None:
        self.nap = nap

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.nap)
        return torch.ones(8)


def train(
    rank: int,
    folder: Path,
    loads: float = 0.0,
    computes: float = 0.0,
    thinks: float = 0.0,
    late: tuple[str, float] = ("", 1.0),
    numbers: int = 1,
    steps: int = 1_000_000,
) -> list[tuple[Part, int, int]]:
    """Take steps of known parts until the file "enough" is there. Return when each part began and ended, in ns.

    `late`: a part that takes rank 1 longer, and how many times as long.
    """
    naps = {"data": loads, "compute": computes, "other": thinks}
    if rank == 1 and late[0]:
        naps[late[0]] *= late[1]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(8))], lr=0.1)
    summed, spans = torch.zeros(numbers), list[tuple[Part, int, int]]()
    samples = iter(DataLoader(Samples(naps["data"])))

    @contextmanager
    def timed(part: Part) -> Iterator[None]:
        begun = time.time_ns()
        yield
        spans.append((part, begun, time.time_ns()))

    for step in range(steps):
        if naps["data"]:
            with timed("data"):
                next(samples)
        if naps["compute"]:
            with timed("compute"):
                Compute.apply(summed[:1], naps["compute"])
        time.sleep(naps["other"])
        summed[0] = (folder / "enough").exists()
        with timed("communication"):
            dist.all_reduce(summed)
        with timed("optimizer"):
            optimizer.step()
        if step == 2:  # all ranks have started
            ready(folder, rank)
        if summed[0]:
            break
    return spans


def train_late(rank: int, folder: Path) -> list[tuple[Part, int, int]]:
    time.sleep(1.0)  # as long as its data are read, and its model is built
    return train(rank, folder, computes=NAP_S / 2, steps=120)


def take_no_step(rank: int) -> int:
    return rank


def step_alone(rank: int, folder: Path) -> None:
    """Step in rank 0 alone."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(8))], lr=0.1)
    ready(folder, rank)
    while not (folder / "enough").exists():
        time.sleep(NAP_S)
        if rank == 0:
            optimizer.step()


def get_stuck(rank: int, folder: Path) -> None:
    """Hold the GIL in C in rank 1, and train alone in rank 0."""
    ready(folder, rank)
    if rank == 1:
        lock_twice_with_the_gil()
    while True:
        Compute.apply(torch.zeros(1), NAP_S)


def wait_for_ever(rank: int, folder: Path) -> None:
    """Wait in rank 0 for a collective that rank 1, which loads data, does not call."""
    ready(folder, rank)
    if rank == 0:
        dist.barrier()
    next(iter(DataLoader(Samples(LONG))))


def fail_once(rank: int, folder: Path) -> int:
    """Fail in the first attempt, once the file "fail" is there."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"attempt{attempt}").mkdir(exist_ok=True)
    ready(folder / f"attempt{attempt}", rank)
    eventually((folder / ("enough" if attempt else "fail")).exists)
    assert attempt, "the first attempt fails"
    return rank


def record_little(rank: int, folder: Path) -> None:
    """Compute in a rank whose trace may have no more than a byte, and in others."""
    profiler._PROBE_S = 1.0
    if rank == 0:
        profiler._MAX_TRACE_BYTES = 1
    ready(folder, rank)
    while not (folder / "enough").exists():
        Compute.apply(torch.zeros(1), NAP_S / 4)


def profile_itself(rank: int, folder: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        ready(folder, rank)
        eventually((folder / "enough").exists)


def profile_itself_by_schedule(rank: int, folder: Path) -> int:
    """Prepare a profiler, record once the file "enough" is there, and return the number of events."""
    activities, schedule = [torch.profiler.ProfilerActivity.CPU], torch.profiler.schedule(wait=1, warmup=1, active=1)
    with torch.profiler.profile(activities=activities, schedule=schedule) as own:
        own.step()  # it warms up from now on
        ready(folder, rank)
        eventually((folder / "enough").exists)
        own.step()
        Compute.apply(torch.zeros(1), 0.0)
    return len(own.events())


def start_workers_often(rank: int, folder: Path) -> None:
    """Read four samples at a time with new workers."""
    few = torch.utils.data.Subset(Samples(0.0), range(4))
    while not (folder / "enough").exists():
        for _ in DataLoader(few, num_workers=2):
            pass
        ready(folder, rank)


def begin_to_profile_itself(rank: int, folder: Path, profiler: str) -> list[str]:
    """Profile itself once the kernel has begun to. Return some of what it finds."""
    backend: Any = sys.modules["torch.autograd.profiler"]
    module: Any = torch.profiler if profiler == "torch.profiler" else backend
    with module.profile():  # what it imports may take longer than the kernel's recording
        pass
    ready(folder, rank)
    eventually(lambda: backend._is_profiler_enabled)
    with module.profile() as own:
        for _ in range(1000):
            Compute.apply(torch.zeros(1), 0.0)
    eventually((folder / "enough").exists)
    return [event.key for event in own.key_averages()]


def drop_tensors(rank: int, folder: Path) -> int:
    """Return how many tensors of functions that have returned were still there."""
    kept = 0
    ready(folder, rank)
    while not (folder / "enough").exists():
        reference = a_tensor_of(0.003)
        kept += reference() is not None
    return kept


def a_tensor_of(seconds: float) -> weakref.ref[torch.Tensor]:
    own = torch.zeros(10)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return weakref.ref(own)


def have_an_older_torch(rank: int, folder: Path) -> None:
    def refuse(**options: Any) -> None:
        raise TypeError(f"unknown: {options}")

    torch._C._profiler._ExperimentalConfig = refuse  # type: ignore[assignment, misc]
    ready(folder, rank)
    eventually((folder / "enough").exists)


def fork_while_recorded(rank: int, folder: Path) -> int:
    """Return by how many KB a forked child has grown, which computes like a DataLoader's worker."""
    ready(folder, rank)
    eventually((folder / "recording").exists)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        x = torch.zeros(2)
        for _ in range(1000):
            x = x + 1
        before = memory_of(os.getpid())
        for _ in range(200_000):
            x = x + 1
        os.write(theirs, str(memory_of(os.getpid()) - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    grown = int(os.read(ours, 100))
    os.close(ours)
    os.close(theirs)
    return grown


def memory_of(pid: int) -> int:
    """Return the resident KB of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


# ------------------------------------------------------------------ how they are asked
def begun(function: Callable[..., Any], folder: Path, ranks: int = 2, **arguments: Any) -> Launch:
    """Launch a function in the background, with every rank where it is to be profiled."""
    kwargs = {"folder": folder, **arguments}
    launch = notebook_launcher(function, kwargs=kwargs, num_processes=ranks, block=False, view="none")
    assert isinstance(launch, Launch)
    eventually(lambda: all((folder / f"pid{rank}").exists() for rank in range(ranks)) or launch.done)
    return launch


def ended(launch: Launch, folder: Path) -> LaunchResult:
    (folder / "enough").touch()
    return launch.result()


def profiled(folder: Path, ranks: int = 2, seconds: float = 1.0, **load: Any) -> tuple[Profile, LaunchResult]:
    launch = begun(train, folder, ranks, **load)
    profile = launch.profile(seconds)
    return profile, ended(launch, folder)


def trace_of(profile: Profile) -> Any:
    assert profile.trace is not None
    return json.loads(gzip.decompress(profile.trace.read_bytes()))


def check_shares(profile: Profile, result: LaunchResult) -> list[dict[Part, float]]:
    """Assert that each rank's shares are near those of what it did in the recorded steps, which are returned.

    The ranks of `train` have measured that themselves: on a busy machine nothing takes as long as its code says.
    """
    trace = trace_of(profile)
    begins = [[begin for part, begin, _ in spans if part == "communication"] for spans in result]
    joined = [max(each) for each in zip(*begins, strict=True)]
    found = []
    for each, spans, own_begins in zip(profile.ranks, result, begins, strict=True):
        last = dict(zip(own_begins, joined, strict=True))
        ends = sorted(
            trace["baseTimeNanoseconds"] + 1000 * (event["ts"] + event["dur"])
            for event in trace["traceEvents"]
            if event["pid"] // 1000 == each.rank and event["name"].startswith("Optimizer.step#")
        )
        window = next(
            pair for pair in combinations(ends, 2) if pair[1] - pair[0] == pytest.approx(each.seconds * 1e9, abs=2000)
        )
        own = dict.fromkeys(PARTS, 0.0)
        for part, start, end in spans:
            waits = [(start, min(end, last[start]))] if part == "communication" else []
            own["waiting"] += total(within(waits, *window)) / (window[1] - window[0])
            own[part] += total(minus(within([(start, end)], *window), waits)) / (window[1] - window[0])
        own["other"] = 1 - sum(own.values())
        assert {part: each.share(part) for part in PARTS} == pytest.approx(own, abs=NEAR), each.rank
        found.append(own)
    return found


# ------------------------------------------------------------------ known loads
@pytest.mark.parametrize(
    ("load", "sentence"),
    [
        (
            {"loads": NAP_S, "late": ("data", 3.0)},
            r"Rank 0 waits \d+% of the time for rank 1, whose data loading takes (\d\.\d) times as long as the "
            r"other's \(.*time\.sleep\(self\.nap\)\)\.",
        ),
        (
            {"computes": NAP_S, "late": ("compute", 2.0)},
            r"Rank 0 waits \d+% of the time for rank 1, whose computation takes (\d\.\d) times as long",
        ),
        (
            {"thinks": NAP_S, "late": ("other", 2.0)},
            r"Rank 0 waits \d+% of the time for rank 1, whose code outside of torch takes (\d\.\d) times as "
            r'long .*time\.sleep\(naps\["other"\]\)',
        ),
        (
            {"computes": 0.005, "numbers": BIG, "seconds": 6.0},
            r"Communication is \d+% of a step: 1 × all_reduce of 67 MB\.",
        ),
        ({"computes": 2 * NAP_S}, r"The 2 ranks are even: computation is \d+% of a step\."),
    ],
    ids=["data", "compute", "python", "network", "even"],
)
def test_a_known_load_gives_a_known_answer(load: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    for number in range(5):  # while a busy machine stalls a rank, that is the answer
        (folder := tmp_path / str(number)).mkdir()
        profile, result = profiled(folder, **load)
        own = check_shares(profile, result)
        said = re.match(sentence, profile.sentence)
        if said:
            break
    assert said, profile
    assert all(each.steps >= 3 for each in profile.ranks)
    if "late" in load:
        part = load["late"][0]
        assert float(said[1]) == pytest.approx(own[1][part] / own[0][part], rel=0.2), own


def test_a_trace_that_is_too_large_is_of_the_same_time_as_the_others(tmp_path: Path) -> None:
    launch = begun(record_little, tmp_path)
    profile = launch.profile(4.0)
    assert all(0.1 < each.seconds < 3.0 for each in profile.ranks), profile
    ended(launch, tmp_path)


@pytest.mark.usefixtures("_without_hook")
def test_a_torch_without_hooks_numbers_its_collectives(tmp_path: Path) -> None:
    own = check_shares(*profiled(tmp_path, computes=NAP_S, late=("compute", 4.0)))
    assert own[0]["waiting"] > 0.3, own


def test_eight_ranks_are_compared(tmp_path: Path) -> None:
    profile, result = profiled(tmp_path, ranks=8, seconds=8.0, computes=4 * NAP_S, late=("compute", 3.0))
    assert re.match(r"Ranks wait \d+% of the time for rank 1, whose computation takes", profile.sentence), profile
    check_shares(profile, result)
    names = {event["args"]["name"] for event in trace_of(profile)["traceEvents"] if event["name"] == "process_name"}
    assert names == {f"rank {rank}" for rank in range(8)}


def test_the_option_profiles_the_first_steps(tmp_path: Path) -> None:
    kwargs = {"folder": tmp_path}
    result = notebook_launcher(train_late, kwargs=kwargs, num_processes=2, profile=10.0, view="none")
    assert isinstance(result, LaunchResult)
    (profile,) = result.profiles
    assert profile.trace is not None
    assert profile.trace.parent == result.logs[0].out.parent
    check_shares(profile, result)  # without the second before the first step
    assert all(20 <= each.steps < 120 for each in profile.ranks)
    assert [log.err.read_text() for log in result.logs] == ["", ""]  # torch's profiler would write there


def test_code_without_an_optimizer_has_no_first_step() -> None:
    result = notebook_launcher(take_no_step, num_processes=2, profile=1.0, view="none")
    assert isinstance(result, LaunchResult)
    assert result.profiles[0].missing == dict.fromkeys((0, 1), "no optimizer has made a step")
    assert result.profiles[0].sentence == "No rank could be profiled."


def test_the_option_waits_for_the_other_ranks_a_moment(tmp_path: Path) -> None:
    kwargs = {"folder": tmp_path}
    launch = notebook_launcher(step_alone, kwargs=kwargs, num_processes=2, profile=0.2, block=False, view="none")
    assert isinstance(launch, Launch)
    eventually(lambda: list(tmp_path.glob("state/*/profile1.json.gz")))
    result = ended(launch, tmp_path)
    assert [each.rank for each in result.profiles[0].ranks] == [0, 1]


# ------------------------------------------------------------------ ranks that wait, or cannot be recorded
def test_a_rank_that_holds_the_gil_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    launch = begun(get_stuck, tmp_path)
    eventually(lambda: "lock_twice_with_the_gil" in launch.stacks().get(1, ""), LONG, launch.stacks)
    profile = launch.profile(0.5)
    assert [each.rank for each in profile.ranks] == [0]
    assert profile.ranks[0].share("compute") > 0.5
    assert re.match("no answer within 5 s: it runs C code that holds the GIL", profile.missing[1])
    os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
    with pytest.raises(RankDiedError):
        launch.result()


def test_waits_that_began_before_are_known(tmp_path: Path) -> None:
    launch = begun(wait_for_ever, tmp_path)
    profile = launch.profile(0.5)
    assert profile.sentence.startswith("Rank 0 waits 100% of the time for rank 1, whose data loading takes"), profile
    assert profile.ranks[1].share("data") > 1 - NEAR
    launch.kill()
    launch.wait()
    assert launch.profiles == (profile,)


def test_the_start_of_workers_is_data_loading(tmp_path: Path) -> None:
    launch = begun(start_workers_often, tmp_path, ranks=1)
    assert launch.profile(1.0).ranks[0].share("data") > 0.5
    ended(launch, tmp_path)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (profile_itself, "its own code uses torch.profiler"),
        (profile_itself_by_schedule, "its own code uses torch.profiler"),
        (have_an_older_torch, rf"torch {re.escape(torch.__version__)} cannot profile other threads"),
    ],
)
def test_a_rank_that_cannot_be_recorded_says_why(function: Callable[..., Any], reason: str, tmp_path: Path) -> None:
    launch = begun(function, tmp_path, ranks=1)
    profile = launch.profile(0.2)
    assert re.match(reason, profile.missing[0])
    assert profile.trace is None
    ended(launch, tmp_path)


def test_a_child_that_is_forked_meanwhile_records_nothing(tmp_path: Path) -> None:
    launch = begun(fork_while_recorded, tmp_path, ranks=1)
    launch.ask_profile(10.0)
    scratch = Path(os.environ["TMPDIR"])
    eventually(lambda: list(scratch.glob("nbl-*/rank0.trace.json")))  # of the probe, which is over
    (tmp_path / "recording").touch()
    assert launch.result()[0] < 10_000


@pytest.mark.parametrize("profiler", ["torch.profiler", "torch.autograd.profiler"])
def test_a_rank_that_begins_to_profile_itself_comes_first(profiler: str, tmp_path: Path) -> None:
    launch = begun(begin_to_profile_itself, tmp_path, ranks=1, profiler=profiler)
    profile = launch.profile(10.0)
    assert profile.missing == {}
    assert profile.ranks[0].seconds < 9.0
    assert "Compute" in ended(launch, tmp_path)[0]


def test_tensors_of_functions_that_have_returned_are_not_kept(tmp_path: Path) -> None:
    launch = begun(drop_tensors, tmp_path, ranks=1)
    launch.profile(1.0)
    assert ended(launch, tmp_path)[0] <= 20  # of some 300; a thread that holds the GIL when it is suspended keeps one


def test_ranks_that_are_lost_end_a_profile(tmp_path: Path) -> None:
    launch = begun(train, tmp_path, computes=NAP_S)
    launch.ask_profile(10.0)
    os.kill(parent_of(pid_of(tmp_path, 0)), signal.SIGKILL)  # their reaper
    with pytest.raises(RankLostError):
        launch.result()


def test_a_profile_that_no_thread_can_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = begun(train, tmp_path)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "nblaunch-profile":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    why = "its recording could not be read: can't start new thread"
    assert launch.profile(0.2).missing == {0: why, 1: why}
    ended(launch, tmp_path)


def test_calls_at_the_same_time_share_one_recording(tmp_path: Path) -> None:
    launch = begun(train, tmp_path, computes=NAP_S)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(launch.profile, (2.0, 1.0))
    assert first is second
    assert len(ended(launch, tmp_path).profiles) == 1


def step_for(seconds: float) -> float:
    optimizer, end = torch.optim.SGD([torch.zeros(8)], lr=0.1), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(NAP_S)
        optimizer.step()
    return seconds


def test_a_time_limit_waits_while_ranks_are_recorded() -> None:
    with nblaunch.session(2) as session:
        session.run(step_for, 0.0, view="none")  # imports what an optimizer needs
        launch = session.run(step_for, 6.0, view="none", timeout=4.0, block=False)
        launch.ask_profile(9.0)
        assert list(launch.result()) == [6.0, 6.0]
        assert [each.missing for each in launch.profiles] == [{}]


def test_the_end_of_a_launch_replaces_no_profile_by_half_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = Remembers(ProfileShown)
    monkeypatch.setattr(Frontend, "view", lambda self, choice: view)
    launch = begun(train, tmp_path, computes=NAP_S)
    found = launch.profile(0.2)
    launch.ask_profile(10.0)
    launch.stop()
    launch.wait()
    assert view.shown == [ProfileShown(found)]
    assert len(launch.profiles) == 2


def test_a_launch_that_is_queued_is_not_waited_for(tmp_path: Path) -> None:
    with nblaunch.session(1) as kept:
        first = kept.run(time.sleep, LONG, block=False, view="none")
        second = kept.run(time.sleep, 0.0, block=False, view="none")
        with pytest.raises(NblaunchError, match=r"^sleep cannot be profiled now: it is queued, or its ranks start"):
            second.profile(0.1)
        first.stop()
        first.wait()
        second.result()


def test_a_launch_can_be_stopped_while_it_is_profiled(tmp_path: Path) -> None:
    launch = begun(train, tmp_path, computes=NAP_S)
    launch.ask_profile(10.0)
    launch.stop()
    with pytest.raises(LaunchStoppedError):
        launch.result()
    with pytest.raises(NblaunchError, match=r"^train has ended: only running ranks can be profiled$"):
        launch.profile()


@pytest.mark.parametrize(("seconds", "why"), [(0, "must be a positive number"), (11, "at most 10 s")])
def test_a_wrong_length_is_refused(seconds: float, why: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"^profile={seconds}: {why}"):
        notebook_launcher(take_no_step, num_processes=1, profile=seconds)
    launch = begin(profile_itself, tmp_path, ranks=1)
    with pytest.raises(ArgumentError, match=f"^seconds={seconds}: {why}"):
        launch.profile(seconds)
    ended(launch, tmp_path)


# ------------------------------------------------------------------ what is left
def test_fifty_profiles_in_a_row_leave_nothing(tmp_path: Path) -> None:
    launch = begun(train, tmp_path, computes=0.002)
    pids = [pid_of(tmp_path, rank) for rank in range(2)]

    def held() -> list[tuple[int, int]]:
        return [(len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))) for pid in pids]

    profiles = [launch.profile(0.05) for _ in range(5)]
    before, memory = held(), [max(map(memory_of, pids))]
    for _ in range(2):
        profiles += [launch.profile(0.05) for _ in range(25)]
        memory.append(max(map(memory_of, pids)))
    assert not any(profile.missing for profile in profiles)
    eventually(lambda: held() == before, LONG, held)
    assert min(now - then for then, now in pairwise(memory)) < 5_000, memory  # a leak grows both times
    assert profiles[0].trace is not None
    files = [path.name for path in profiles[0].trace.parent.glob("profile*")]
    assert sorted(files) == sorted(f"profile{number}.json.gz" for number in range(1, 56))
    assert len(ended(launch, tmp_path).profiles) == 55


def test_a_run_is_profiled_by_another_process(tmp_path: Path) -> None:
    run = notebook_launcher(
        train, kwargs={"folder": tmp_path, "computes": 5 * NAP_S}, num_processes=2, detach="profiled", view="none"
    )
    assert isinstance(run, Launch)
    eventually(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(2)))
    profile = run.profile(2.0)
    assert profile.ranks[1].share("compute") > 0.5
    (tmp_path / "enough").touch()
    result = run.result()
    assert [each.to_json() for each in result.profiles] == [profile.to_json()]
    assert profile.trace is not None
    assert profile.trace.exists()
    assert profile.sentence in record_of(run_folders.find_run("profiled"))
    run_folders.remove("profiled")


def test_a_run_whose_profile_is_of_an_earlier_attempt_is_attached_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"num_processes": 2, "max_restarts": 1, "detach": "restarted", "view": "none"}
    run = notebook_launcher(fail_once, kwargs={"folder": tmp_path}, **options)
    assert isinstance(run, Launch)
    eventually(lambda: len(list(tmp_path.glob("attempt0/pid?"))) == 2)
    assert [each.rank for each in run.profile(0.2).ranks] == [0, 1]
    monkeypatch.setattr(run, "world_size", 0)  # as while a run waits for nodes
    monkeypatch.setattr("nblaunch.launch.attached.RUNNING_TIMEOUT_S", 0.0)
    with pytest.raises(NblaunchError, match=r"^fail_once cannot be profiled now: it is queued, or its ranks start"):
        run.profile()
    (tmp_path / "fail").touch()
    eventually(lambda: len(list(tmp_path.glob("attempt1/pid?"))) == 2)
    again = nblaunch.attach("restarted")
    (tmp_path / "enough").touch()
    assert list(again.result()) == [0, 1]
    assert again.profiles == ()
    run.wait()
    run_folders.remove("restarted")
