"""A task over a group, on an engine without processes: verdicts, stopping, failures, logs, metrics, timeouts."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nblaunch.engines.protocol import Descriptors, Received
from nblaunch.errors import StartError
from nblaunch.launch.commands import Commands
from nblaunch.launch.debug_console import DebugConsole
from nblaunch.launch.group import WorkerGroup
from nblaunch.launch.options import Options
from nblaunch.launch.output.follower import OutputFollower
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.payload import share
from nblaunch.launch.plan import make_plan
from nblaunch.launch.run import Job, Run
from nblaunch.launch.stopping import TimedOut
from nblaunch.launch.task import Task
from nblaunch.launch.views import Event as ShownEvent
from nblaunch.launch.views import Logs, Note, NullView, RanksChanged, View
from nblaunch.machine import timeouts
from nblaunch.machine.inventory import Machine, this_process
from nblaunch.wire.messages import Done, Payload, Running, Settings, Source, World
from tests.unit.fake_engine import FAKE_PID, FakeEngine, FakeStackDumps, FakeWorker, FakeWorkers

GRACE_S = 30.0
WORLD = World("127.0.0.1", 1, "gloo", "cpu", 1)
IN_PYTHON = 'Thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 7 in train\n'


class Clock:
    """Stands for the module `time`: it goes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Recorder(NullView):
    """Keeps what it is shown."""

    shows_notes = True

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.states: dict[int, str] = {}
        self.pids: dict[int, int] = {}
        self.printed: dict[tuple[int, str], list[str]] = {}

    def on(self, event: ShownEvent) -> None:
        match event:
            case Note(text):
                self.notes.append(text)
            case RanksChanged(changed):
                for status in changed:
                    self.states[status.rank], self.pids[status.rank] = status.state, status.pid
            case Logs(logs):
                for log in logs:
                    self.printed.setdefault((log.rank, log.stream), []).extend(log.lines)


class Scene:
    """A group of scripted ranks that runs one task."""

    def __init__(self, clock: Clock, world_size: int = 2, number: int = 1, deadline: float = math.inf) -> None:
        self.clock, self.view, self.commands = clock, Recorder(), Commands()
        self.workers = FakeWorkers(world_size, clock.monotonic)
        self.group = WorkerGroup(self.workers, lambda text: self.view.on(Note(text)))
        self.group.start(lambda rank: {})
        sources = {"/cell.py": Source("x = 1\n", "Cell In[3]")}
        self.task = Task(number, self.group, self.view, self.commands, sources, GRACE_S, deadline)
        self.task.send(lambda rank: WORLD, (), last=True)
        self.step()

    def __getitem__(self, rank: int) -> FakeWorker:
        return self.workers.ranks[rank]

    def run_all(self) -> None:
        for worker in self.workers.ranks:
            worker.runs()
        self.step()

    def step(self, seconds: float = 0.0) -> None:
        """Let time pass, and handle what has happened."""
        self.clock.now += seconds
        for event in self.group.wait(0.0):
            self.task.take(event)
        self.task.step()

    @property
    def cause(self) -> tuple[str, str, int]:
        verdict = self.task.verdict()
        cause = verdict.cause
        return verdict.state, "" if cause is None else cause.kind, -1 if cause is None else cause.rank

    def is_over(self) -> bool:
        return self.task.is_over

    def signals(self) -> list[list[int]]:
        return [worker.signals for worker in self.workers.ranks]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("task", "group", "run"):
        monkeypatch.setattr(f"nblaunch.launch.{module}.time", clock)
    return clock


@pytest.fixture
def begin(clock: Clock) -> Iterator[Callable[..., Scene]]:
    """Begins a scene, with the arguments of `Scene`."""
    with contextlib.ExitStack() as opened:

        def begin(**options: Any) -> Scene:
            scene = Scene(clock, **options)
            opened.callback(scene.commands.close)
            opened.callback(scene.task.close)
            return scene

        yield begin


@pytest.fixture
def scene(begin: Callable[..., Scene]) -> Scene:
    return begin()


# ------------------------------------------------------------------ verdicts and phases
def test_a_task_whose_ranks_all_return_has_finished(scene: Scene) -> None:
    scene.run_all()
    assert scene.view.states == {0: "running", 1: "running"}
    assert scene.view.pids == {0: FAKE_PID, 1: FAKE_PID + 1}
    for worker in scene.workers.ranks:
        worker.returns_and_exits()
    scene.step()
    scene.workers.sweeps()
    scene.step()
    assert scene.group.is_over
    assert scene.task.finish().state == "finished"
    assert scene.view.states == {0: "returned", 1: "returned"}
    assert scene.signals() == [[], []]


def test_results_are_the_takers_to_close(scene: Scene) -> None:
    kept, left = os.pipe()
    scene.run_all()
    scene[0].returns(kept)
    scene[1].returns(left)
    scene.step()
    assert scene.task.take_results() == {0: [kept], 1: [left]}
    assert scene.task.take_results() == {}
    for fd in (kept, left):
        os.close(fd)


def test_results_that_are_not_taken_are_closed(scene: Scene) -> None:
    read, write = os.pipe()
    os.close(write)
    scene[0].returns(read)
    scene.step()
    scene.task.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)


def test_messages_of_an_earlier_task_change_nothing(begin: Callable[..., Scene]) -> None:
    scene = begin(number=2)
    read, write = os.pipe()
    os.close(write)
    scene[0].sends(Running(0, 1))
    scene[0].sends(Done(0, 1, 5), read)
    scene.step()
    assert scene.task.ranks[0].done is None
    assert scene.view.states[0] == "starting"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    assert [task.task for task in scene.workers.tasks] == [2, 2]


def test_a_result_without_its_descriptors_is_a_failure(scene: Scene) -> None:
    lost = "too many open files (ulimit -n) to receive 50 more"
    scene.workers.events.append(Received(1, Done(1, 1, 5), Descriptors(), lost))
    scene.step()
    failed = scene.task.ranks[1].failed
    assert failed is not None
    assert failed.kind == "result"
    assert lost in failed.text


# ------------------------------------------------------------------ failures
def test_a_failure_stops_the_others_after_a_moment(scene: Scene) -> None:
    scene.run_all()
    scene[1].raises()
    scene.step()
    assert scene.signals() == [[], []]
    scene.step(timeouts.PEER_FAILURE_WAIT_S)
    assert scene[0].signals == [signal.SIGINT]
    assert scene.cause == ("failed", "exception", 1)
    assert scene.view.states == {0: "stopping", 1: "failed"}


def test_a_result_that_cannot_be_sent_lets_the_others_return(scene: Scene) -> None:
    scene.run_all()
    scene[1].raises(kind="result")
    scene.step(timeouts.RESULT_FAILURE_WAIT_S - 0.1)
    assert scene[0].signals == []
    scene.step(0.2)
    assert scene[0].signals == []
    scene.step(timeouts.RESULT_FAILURE_WAIT_S)
    assert scene[0].signals == [signal.SIGINT]


def test_a_rank_that_cannot_be_started_stops_the_others(scene: Scene) -> None:
    scene[0].runs()
    scene.workers.refuses(1, "no memory")
    scene.step()
    scene.step(timeouts.PEER_FAILURE_WAIT_S)
    assert scene.group.refusal == "rank 1 could not be started: no memory"
    assert scene[0].signals == [signal.SIGINT]


# ------------------------------------------------------------------ stopping
def test_a_look_at_collectives_that_fails_stops_no_task(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(worker: FakeWorker) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(FakeWorker, "collectives", refuse)
    scene.run_all()
    scene.step(timeouts.STUCK_POLL_S)
    assert (scene.is_over(), scene.task.ladder) == (False, None)


# ------------------------------------------------------------------ timeouts
def test_a_timeout_asks_where_the_ranks_are_and_stops_them(begin: Callable[..., Scene], clock: Clock) -> None:
    scene = begin(deadline=clock.now + 5)
    scene.run_all()
    for worker in scene.workers.ranks:
        worker.stacks = FakeStackDumps(IN_PYTHON)
    scene.step(5)
    assert scene.signals() == [[], []]
    for _ in range(2):
        scene.step()
    assert scene.task.ladder is not None
    assert scene.task.ladder.reason == TimedOut()
    assert scene.task.inspector.said == dict.fromkeys((0, 1), 'was in "/home/me/train.py", line 7')
    assert scene.signals() == [[signal.SIGINT]] * 2


def test_a_timeout_waits_for_silent_ranks_only_so_long(begin: Callable[..., Scene], clock: Clock) -> None:
    scene = begin(deadline=clock.now + 5)
    scene.run_all()
    scene.step(5)
    scene.step(timeouts.TIMEOUT_STACKS_S)
    assert scene.signals() == [[signal.SIGINT]] * 2
    assert scene.task.inspector.said == dict.fromkeys((0, 1), "did not respond")


# ------------------------------------------------------------------ exits
def test_a_returned_rank_may_wait_for_its_threads(scene: Scene) -> None:
    scene.run_all()
    for worker in scene.workers.ranks:
        worker.returns()
    scene.step()
    for _ in range(4):
        scene.step(timeouts.EXIT_TIMEOUT_S)
    assert scene.signals() == [[], []]
    assert scene.view.states == {0: "running", 1: "running"}
    assert scene.view.notes == ["rank 0 returned, but waits for a non-daemon thread to end"]


@pytest.mark.parametrize("stops_first", [True, False])
def test_threads_are_noted_during_a_stop_too(scene: Scene, stops_first: bool) -> None:
    scene.run_all()
    if stops_first:
        scene.commands.ask()
        scene.step()
    for worker in scene.workers.ranks:
        worker.acknowledges()
        worker.returns()
    scene.step()
    scene.commands.ask()
    scene.step()
    scene.step(timeouts.THREADS_NOTE_DELAY_S + 0.1)
    assert scene.view.notes == ["rank 0 returned, but waits for a non-daemon thread to end"]


def test_a_reaper_that_never_ends_is_given_up(scene: Scene) -> None:
    for worker in scene.workers.ranks:
        worker.returns_and_exits()
    scene.step()
    assert not scene.group.is_over
    scene.step(timeouts.GROUP_SWEEP_TIMEOUT_S + 0.1)
    assert scene.group.is_over


@pytest.mark.parametrize(("hint", "is_lost"), [("waiting", False), (None, True)])
def test_an_engine_that_does_not_answer_is_nudged_once(scene: Scene, hint: str | None, is_lost: bool) -> None:
    scene.workers.has_begun, scene.workers.hint = False, hint
    for _ in range(3):
        scene.step(timeouts.GROUP_BEGIN_TIMEOUT_S + 0.1)
    assert scene.group.is_lost == is_lost
    assert scene.view.notes == ([] if hint is None else [hint])


# ------------------------------------------------------------------ logs and metrics
def test_patterns_that_match_no_line_are_noted(scene: Scene) -> None:
    output = OutputFollower(scene.workers.ranks, [re.compile(r"loss: (?P<loss>[\d.]+)")], scene.view)
    scene[0].prints("Loss=0.5\nLoss=0.25")
    output.finish()
    assert scene.view.notes == ["--metric (metric_patterns=) matched none of 2 lines"]


# ------------------------------------------------------------------ one run
class Script(FakeWorkers):
    """Ranks that do their part when the supervisor waits for them."""

    def __init__(self, *acts: Callable[[Script], None]) -> None:
        super().__init__(2)
        self.acts = list(acts)

    def wait(self, seconds: float) -> Any:
        if self.acts and not self.events:
            self.acts.pop(0)(self)
        return super().wait(seconds)


def run_of(workers: FakeWorkers, view: View) -> tuple[Run, FakeEngine]:
    engine = FakeEngine(workers)
    plan = make_plan([Machine(0, 2, "linux", {"HOME": "/root"})], engine, Options(num_processes=2))
    payload = Payload(len, (), {}, hello, Settings(), {})
    job = Job(plan, "1-1-abc", this_process(), share(payload), math.inf, DebugConsole(2, {}))
    return Run(job, 0, LaunchFiles.create("1-1-abc"), view, Commands()), engine


def both(act: Callable[[FakeWorker], None]) -> Callable[[FakeWorkers], None]:
    def acts(workers: FakeWorkers) -> None:
        for worker in workers.ranks:
            act(worker)

    return acts


def hello(*stuck: int) -> Script:
    """Two ranks that print, return and exit; `stuck` are pids that survive."""
    return Script(
        both(FakeWorker.runs),
        both(lambda worker: worker.prints("hello\n")),
        both(FakeWorker.returns_and_exits),
        lambda workers: workers.sweeps(*stuck),
    )


def test_a_run_runs_one_task_and_closes_its_group() -> None:
    view, workers = Recorder(), hello(7)
    run, engine = run_of(workers, view)
    assert run.start(engine).state == "finished"
    assert view.printed == {(0, "out"): ["hello"], (1, "out"): ["hello"]}
    assert view.notes == ["processes 7 survived SIGKILL: they are in uninterruptible sleep"]
    assert workers.is_closed
    assert engine.orders[0].world_size == 2
    run.commands.close()


@pytest.mark.parametrize("step", ["start", "send_tasks", "wait"])
def test_an_attempt_that_cannot_start_closes_its_group(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise StartError("out of descriptors")

    workers = FakeWorkers(2)
    monkeypatch.setattr(workers, step, refuse)
    run, engine = run_of(workers, Recorder())
    with pytest.raises(StartError, match="out of descriptors"):
        run.start(engine)
    assert workers.is_closed
    run.commands.close()


def test_results_of_an_attempt_that_is_refused_are_closed() -> None:
    read, write = os.pipe()
    workers = Script(
        lambda workers: workers.ranks[0].returns(read),
        lambda workers: workers.refuses(1, "no memory"),
        both(FakeWorker.exits),
        lambda workers: workers.sweeps(),
    )
    run, engine = run_of(workers, Recorder())
    with pytest.raises(StartError, match="rank 1 could not be started: no memory"):
        run.start(engine)
    os.close(write)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    run.commands.close()
