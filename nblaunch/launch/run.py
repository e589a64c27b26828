"""One run of a task over ranks: new ones, which end with it, or kept ones of a session, whose turn it is.

Runs in a thread of the kernel.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nblaunch.engines.protocol import Engine
from nblaunch.errors import StartError
from nblaunch.launch.commands import Commands
from nblaunch.launch.debug_console import DebugConsole
from nblaunch.launch.group import WorkerGroup
from nblaunch.launch.output.follower import OutputFollower
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.payload import Shipment
from nblaunch.launch.plan import Plan
from nblaunch.launch.profiling import Profiling
from nblaunch.launch.session_ranks import SessionRanks, Ticket
from nblaunch.launch.session_state import debug_command, no_group, restart_command
from nblaunch.launch.stopping import SESSION
from nblaunch.launch.stuck import in_words, place_of
from nblaunch.launch.task import Task
from nblaunch.launch.verdict import Verdict
from nblaunch.launch.views import Note, ProfileShown, RanksPlaced, Tick, View
from nblaunch.machine import timeouts
from nblaunch.machine.inventory import Process
from nblaunch.profiles.profile import Profile
from nblaunch.wire.messages import Question

_MAX_NAMED = 6
_MAX_PUSHED = 3
"""Names in one note."""


@dataclass(frozen=True, slots=True)
class Job:
    plan: Plan
    launch_id: str
    process: Process
    shipment: Shipment
    deadline: float
    console: DebugConsole


class Run:
    """See the module. `number` is that of the restarts before.

    Attributes:
        results: The parcels of the ranks that have returned; the caller closes them.
        hint: What to do about a missing process group; empty if there is one.
    """

    group: WorkerGroup
    task: Task
    output: OutputFollower

    def __init__(
        self,
        job: Job,
        number: int,
        files: LaunchFiles,
        view: View,
        commands: Commands,
        *,
        lists_reports: bool = True,
    ) -> None:
        self._lists_reports = lists_reports
        self.job, self.number, self.files, self.view, self.commands = job, number, files, view, commands
        self.results: dict[int, list[int]] = {}
        self.hint = ""
        self._has_noted_taken = False
        self.note: Callable[[str], None] = lambda text: view.on(Note(text))
        """Not a method: the group keeps it, and what a launch holds must not wait for the collector."""

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return tuple(self.task.profiling.finished) if self.task.profiling is not None else ()

    # -------------------------------------------------------------- new ranks
    def start(self, engine: Engine) -> Verdict:
        """Start ranks, run the task, and wait until every rank has exited, also if one could not start (StartError)."""
        job, plan = self.job, self.job.plan
        order = plan.order(job.launch_id, job.process, self.files.directory, payload=job.shipment.payload)
        with contextlib.ExitStack() as opened:
            self.group = group = WorkerGroup(engine.place(order, self.commands), self.note)
            opened.callback(group.close)
            store = group.workers.open_store(lambda: self.commands.stop)
            for note in group.workers.notes:
                self.note(note)
            group.start(lambda rank: plan.environment(rank, store, job.launch_id, self.number))
            self.view.on(RanksPlaced(group.workers))
            limits = plan.options.stop_grace, job.deadline
            self.task = Task(1, group, self.view, self.commands, job.shipment.sources, *limits, console=job.console)
            opened.callback(self.task.close)
            self.task.profiling = self._profiling()
            profiles = plan.options.profile is not None
            self.task.send(lambda rank: plan.world(rank, store), job.shipment.fds, last=True, reports_step=profiles)
            workers = [member.worker for member in group.members]
            patterns = plan.options.metric_patterns or ()
            self.output = OutputFollower(workers, patterns, self.view, lists_reports=self._lists_reports)
            supervise(self.task, self.output, self.view, lambda: group.is_over)
            for event in group.drain():
                self.task.take(event)
            verdict = self.task.finish()
            self.output.finish()
            if group.stuck:
                pids = ", ".join(map(str, group.stuck))
                self.note(f"processes {pids} survived SIGKILL: they are in uninterruptible sleep")
            if group.refusal:
                raise StartError(group.refusal)
            self.results = self.task.take_results()
            return verdict

    # -------------------------------------------------------------- kept ranks
    def take_turn(self, ticket: Ticket) -> Verdict:
        """Wait for the turn of a session's ranks, and run the task to its end."""
        ranks, job = ticket.ranks, self.job
        if queued := ranks.said_of_queue(ticket):
            self.note(queued)
        with contextlib.ExitStack() as opened:
            opened.enter_context(ranks.claimed(ticket, lambda: self.commands.stop, self.commands.ask))
            self.group = group = ranks.group
            group.raise_refusal()  # of a restart that was interrupted
            group.workers.listen_to(self.commands)
            self.view.on(RanksPlaced(group.workers))
            absent, generation = ranks.absent, ranks.generation
            options = job.plan.options
            timeout = options.timeout
            deadline = float("inf") if timeout is None else time.monotonic() + timeout  # without the time in the queue
            about = self.view, self.commands, job.shipment.sources, options.stop_grace, deadline
            self.task = Task(next(ranks.numbers), group, *about, policy=SESSION, console=job.console)
            opened.callback(self.task.close)
            self.task.profiling = self._profiling()
            self.hint = no_group(ranks.name, absent)
            if self.hint:
                self.note(self.hint)
            if ranks.leaving:
                self.note(f"{ranks.leaving}: its ranks will end soon. Save your results, for example with session.pull")
                ranks.leaving = ""
            payload = job.shipment.payload
            wanted = payload.function.ranks if isinstance(payload.function, Question) else None
            log_dir = str(self.files.directory)
            self.task.send(
                ranks.world,
                job.shipment.fds,
                log_dir=log_dir,
                path=ranks.path,
                wanted=wanted,
                reports_step=options.profile is not None,
            )
            present = [rank.member.worker for rank in self.task.present]
            patterns = options.metric_patterns
            is_own = patterns != ranks.plan.options.metric_patterns  # those of the session concern few of its cells
            self.output = OutputFollower(present, patterns or (), self.view, notes_unmatched=is_own)
            try:
                supervise(self.task, self.output, self.view, self._turn_is_over)
            except BaseException:
                ranks.give_up(self.task)
                raise
            verdict = self.task.finish()
            self.output.finish()
            ranks.finish(self.task, payload.names, payload.settings)
            self._note_end(ranks, absent, generation)
            if not isinstance(payload.function, Question):
                self._note_error(ranks, verdict)
            self.results = self.task.take_results()
            return verdict

    def _profiling(self) -> Profiling:
        job, task, view = self.job, self.task, self.view  # without `self`: a circle would keep the task and its results
        about = task.present, task.number, self.commands, job.shipment.sources, self.files.directory
        return Profiling(*about, lambda profile: view.on(ProfileShown(profile)), job.plan.options.profile)

    def _turn_is_over(self) -> bool:
        """Return True once the task is over. Meanwhile note what the ranks have taken, before they work for hours."""
        task = self.task
        is_over = task.is_over or task.group.is_over
        if not self._has_noted_taken and (is_over or all(rank.is_running or rank.is_over for rank in task.present)):
            self._has_noted_taken = True
            self._note_taken()
        return is_over

    def _note_taken(self) -> None:
        names_sent = self.job.shipment.payload.names
        taken = [(rank.rank, rank.taken) for rank in self.task.present]
        kept: dict[tuple[int, ...], list[str]] = {}
        for name in sorted({name for _, each in taken for name in each.kept}):
            kept.setdefault(tuple(rank for rank, each in taken if name in each.kept), []).append(name)
        sent = sorted({*names_sent}.difference(*(names for ranks, names in kept.items() if len(ranks) == len(taken))))
        if sent:
            self.note(f"sent: {_listed(sent)}")
        for ranks, names in kept.items():
            one_or_more = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            whose = "the ranks'" if len(ranks) == len(taken) else f"{one_or_more}'s"
            value = "values" if len(names) > 1 else "value"
            push = f"session.push({', '.join(f'{name}={name}' for name in names[:_MAX_PUSHED])})"
            replaces = "replaces them" if len(names) > 1 else "replaces it"
            said = f"this cell used {whose} own {value}, not the notebook's. {push} {replaces}"
            self.note(f"{_listed(names)}: {said}")
        replaced = sorted({name for _, each in taken for name in each.replaced})
        if replaced:
            self.note(
                f"{_listed(replaced)}: the notebook's new value replaced the value that ranks had modified in place"
            )
        for name, owner in sorted({pair for _, each in taken for pair in each.apart}):
            other = f"the ranks' {owner} is another object and will not be updated"
            self.note(f"{name}: uses the notebook's {owner}; {other}")

    def _note_end(self, ranks: SessionRanks, absent_before: list[int], generation_before: int) -> None:
        """Note what the task has cost: ranks, values, and the process group."""
        dead = [rank for rank in ranks.absent if rank not in absent_before]
        if dead and not ranks.present:
            self.note(f"every rank is dead, and all variables are lost. {restart_command(ranks.name)} restarts them")
            return
        for rank in dead:
            self.note(
                f"rank {rank} is dead, and its variables are lost. The other ranks keep theirs, and can run cells "
                f"without collectives. {restart_command(ranks.name, [rank])} restarts it"
            )
        self._note_desync(ranks)
        stale = stale_names(ranks)
        if ranks.generation != generation_before and stale:
            self.note(stale)

    def _note_desync(self, ranks: SessionRanks) -> None:
        """Replace the group, with a note, if ranks have left the task with different numbers of collectives."""
        begun = {rank.rank: rank.names.begun.last for rank in self.task.present if rank.names is not None}
        if self.task.ladder is not None or len({last.count for last in begun.values()}) < 2:
            return
        ranks.disturb()
        said = []
        for rank, last in begun.items():
            call = in_words(last, place_of(last, self.job.shipment.sources))
            called = f"{last.count} in this group, the last {call}" if last.count else "none"
            said.append(f"rank {rank} called {called}")
        self.note(
            f"the ranks did not call the same collectives: {'; '.join(said)}. A new process group was created, so "
            "that the next collective is the same call on every rank"
        )

    def _note_error(self, ranks: SessionRanks, verdict: Verdict) -> None:
        console, cause = self.job.console, verdict.cause
        has_raised = cause is not None and cause.kind in ("exception", "collective")
        ranks.failed_first = cause.rank if cause is not None and has_raised else None
        ranks.last_sources = self.job.shipment.sources
        if has_raised and console.debugging.can_type and not console.has_examined:
            self.note(f"{debug_command(ranks.name)} opens the debugger on this error")


def supervise(task: Task, output: OutputFollower, view: View, until: Callable[[], bool]) -> None:
    """Pass events on to a task until it is over, and poll the logs, which have no events."""
    poll_at = 0.0
    while not until():
        for event in task.group.wait(max(0.0, poll_at - time.monotonic())):
            task.take(event)
        task.step()
        if time.monotonic() >= poll_at:  # and not after each of the messages that many ranks send
            poll_at = time.monotonic() + timeouts.LOG_POLL_S
            output.poll()
            view.on(Tick())


def stale_names(ranks: SessionRanks) -> str:
    """Return which names are useless now that the process group is replaced; empty if none."""
    stale = {each.name for rank in ranks.present for each in ranks.bound[rank] if each.of_group}
    return f"{_listed(sorted(stale))}: made for the old process group; create again" if stale else ""


def _listed(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{more}"
