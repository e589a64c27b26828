"""One attempt of a launch: a worker group that runs one task and ends. Runs in a thread of the kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nblaunch.engines.protocol import Engine
from nblaunch.errors import StartError
from nblaunch.launch.commands import Commands
from nblaunch.launch.debug_console import DebugConsole
from nblaunch.launch.group import WorkerGroup
from nblaunch.launch.output.follower import OutputFollower
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.plan import Plan, moved
from nblaunch.launch.supervisor import supervise
from nblaunch.launch.task import Task
from nblaunch.launch.verdict import Verdict
from nblaunch.launch.views import Note, RanksPlaced, View
from nblaunch.machine.inventory import Process
from nblaunch.wire.messages import Order, Payload, Source


@dataclass(frozen=True, slots=True)
class Job:
    """What the attempts of a launch share."""

    plan: Plan
    launch_id: str
    process: Process
    """The state of the notebook's process that ranks start from."""
    payload: Payload
    parcel: Sequence[int]
    """The payload's descriptors; none if ranks share the notebook's memory."""
    sources: Mapping[str, Source]
    """The cells that define the function."""
    deadline: float
    """When to stop it, by the monotonic clock."""
    console: DebugConsole
    """What the user types for the ranks."""


def on_nodes_of_now(job: Job, engine: Engine, view: View, commands: Commands) -> Job:
    """Return the job of the next attempt: nodes that are lost have been replaced.

    Raises:
        StartError: They could not be.
    """
    if engine.is_local:
        return job
    machines = engine.machines(lambda text: view.on(Note(text)), lambda: commands.stop)
    return replace(job, plan=moved(job.plan, machines))


class Attempt:
    """See the module.

    Args:
        job: What to run.
        number: The number of restarts before this attempt.
        files: The logs of the ranks.
        view: Shows the launch.
        commands: Requests of other threads.

    Attributes:
        group: The ranks, once placed.
        task: What they run, once started.
        output: What they have printed and reported.
        results: The parcels of the ranks that have returned, set by `run`; the caller closes them.
        hint: See `failures.Account`; empty, as every rank has begun.
        session: See `failures.Account`.
    """

    hint = ""
    session = ""

    group: WorkerGroup
    task: Task
    output: OutputFollower

    def __init__(self, job: Job, number: int, files: LaunchFiles, view: View, commands: Commands) -> None:
        self.job, self.number, self.files, self.view, self.commands = job, number, files, view, commands
        self.results: dict[int, list[int]] = {}

    def run(self, engine: Engine) -> Verdict:
        """Start the ranks, run the task, and wait until every rank has exited.

        Raises:
            StartError: A rank could not be started; none is left.
        """
        job, plan = self.job, self.job.plan
        order = Order(
            job.launch_id,
            plan.world_size,
            plan.ranks,
            plan.method,
            job.process,
            plan.envs,
            plan.named,
            str(self.files.directory),
            job.payload,
        )
        with contextlib.ExitStack() as opened:
            self.group = WorkerGroup(engine.place(order, self.commands), lambda text: self.view.on(Note(text)))
            opened.callback(self.group.close)
            self._start(opened)
            supervise(self.task, self.output, self.view, lambda: self.group.is_over)
            for event in self.group.drain():
                self.task.take(event)
            verdict = self.task.finish()
            self.output.finish()
            if self.group.stuck:
                pids = ", ".join(map(str, self.group.stuck))
                self.view.on(Note(f"processes {pids} survived SIGKILL: they wait in the operating system"))
            if self.group.refusal:
                raise StartError(self.group.refusal)
            self.results = self.task.take_results()
            return verdict

    def _start(self, opened: contextlib.ExitStack) -> None:
        job, plan = self.job, self.job.plan
        store = self.group.workers.open_store(lambda: self.commands.stop)
        for note in self.group.workers.notes:
            self.view.on(Note(note))
        self.group.start(lambda rank: plan.environment(rank, store, job.launch_id, self.number))
        self.view.on(RanksPlaced(self.group.workers))
        limits = plan.options.stop_grace, job.deadline
        self.task = Task(1, self.group, self.view, self.commands, job.sources, *limits, console=job.console)
        opened.callback(self.task.close)
        self.task.send(lambda rank: plan.world(rank, store), job.parcel, last=True)
        workers = [member.worker for member in self.group.members]
        self.output = OutputFollower(workers, plan.options.metric_patterns or (), self.view)
        opened.callback(self.output.close)
