"""One turn of a session: a task that runs on kept ranks, for a launch. Runs in a thread of the kernel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nblaunch.launch.commands import Commands
from nblaunch.launch.frontend import host
from nblaunch.launch.output.follower import OutputFollower
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.session_ranks import SessionRanks
from nblaunch.launch.session_state import debug_command, no_group, restart_command
from nblaunch.launch.stuck import in_words, place_of
from nblaunch.launch.supervisor import supervise
from nblaunch.launch.task import Task
from nblaunch.launch.turn_queue import Ticket
from nblaunch.launch.verdict import Verdict
from nblaunch.launch.views import Note, RanksPlaced, View
from nblaunch.wire.session_messages import CollectivesBegun, Question, SentName

if TYPE_CHECKING:
    from nblaunch.launch.attempt import Job
    from nblaunch.launch.group import WorkerGroup

_MAX_NAMED = 6
_MAX_PUSHED = 3
"""Names in one note."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a launch runs, if it does not start ranks of its own."""

    session: str
    """The session's name."""
    ranks: SessionRanks
    ticket: Ticket
    """Its place in the queue."""
    names: Mapping[str, SentName]
    """The notebook's names that the payload binds."""


class Turn:
    """See the module. Has the attributes of an `Attempt`.

    Args:
        job: What to run.
        place: Where.
        files: Where the ranks write meanwhile.
        view: Shows the launch.
        commands: Requests of other threads.
    """

    task: Task
    output: OutputFollower

    def __init__(
        self,
        job: Job,
        place: Place,
        files: LaunchFiles,
        view: View,
        commands: Commands,
    ) -> None:
        self.job, self.files, self.view, self.commands = job, files, view, commands
        self.results: dict[int, list[int]] = {}
        self.hint = ""
        """What to do about a missing process group; empty if there is one."""
        self._ranks, self._ticket, self._names = place.ranks, place.ticket, place.names
        self.session = place.ranks.name
        self._has_noted_taken = False

    @property
    def group(self) -> WorkerGroup:
        """The processes of the ranks."""
        return self._ranks.group

    def run(self) -> Verdict:
        """Wait for the turn, and run the task to its end.

        Raises:
            BusyError: The launch was stopped before its turn.
            StartError: The session has ended.
            RankError: The ranks are lost.
        """
        ranks = self._ranks
        first, *_ = ranks.queue.labels or [""]
        if not ranks.queue.is_first(self._ticket):
            self.view.on(Note(f"queued: the session runs {first or 'a question'}"))
        with contextlib.ExitStack() as opened:
            opened.enter_context(ranks.claimed(self._ticket, lambda: self.commands.stop, self.commands.ask))
            self.group.raise_refusal()  # of a restart that was interrupted
            self.group.workers.listen_to(self.commands)
            self.view.on(RanksPlaced(self.group.workers))
            absent = ranks.absent
            options = self.job.plan.options
            timeout = options.timeout
            deadline = float("inf") if timeout is None else time.monotonic() + timeout  # without the time in the queue
            limits = options.stop_grace, deadline
            self.task = ranks.new_task(self.view, self.commands, self.job.sources, *limits, self.job.console)
            opened.callback(self.task.close)
            self.hint = no_group(ranks.name, absent)
            if self.hint:
                self.view.on(Note(self.hint))
            if ranks.leaving:
                self.view.on(Note(f"{ranks.leaving}: save what you need, as with pull; the ranks there end soon"))
                ranks.leaving = ""
            ranks.late_output.show(self.view)
            function = self.job.payload.function
            wanted = function.ranks if isinstance(function, Question) else None
            log_dir = str(self.files.directory)
            self.task.send(ranks.world, self.job.parcel, log_dir=log_dir, path=ranks.path, wanted=wanted)
            present = [rank.member.worker for rank in self.task.present]
            patterns = options.metric_patterns
            is_own = patterns != ranks.plan.options.metric_patterns  # those of the session concern few of its cells
            self.output = OutputFollower(present, patterns or (), self.view, notes_unmatched=is_own)
            opened.callback(self.output.close)
            opened.callback(ranks.late_output.follow, self.output)
            generation = ranks.generation
            try:
                supervise(self.task, self.output, self.view, self._is_over)
            except BaseException:
                ranks.give_up(self.task)
                raise
            verdict = self.task.finish()
            self.output.finish()
            ranks.finish(self.task, self._names, self.job.payload.settings)
            self._note_end(absent, generation)
            if not isinstance(function, Question):
                self._note_error(verdict)
            self.results = self.task.take_results()
            return verdict

    def _is_over(self) -> bool:
        is_over = self.task.is_over or self.group.is_over
        if not self._has_noted_taken and (
            is_over or all(rank.is_running or rank.is_over for rank in self.task.present)
        ):
            self._has_noted_taken = True
            self._ranks.late_output.show(self.view)  # what came before they turned to the new logs
            self._note_taken()
        return is_over

    # -------------------------------------------------------------- notes
    def _note_taken(self) -> None:
        """Note what the ranks have made of these names, before they work with them for hours."""
        taken = [(rank.rank, rank.taken) for rank in self.task.present]
        kept: dict[tuple[int, ...], list[str]] = {}
        for name in sorted({name for _, each in taken for name in each.kept}):
            kept.setdefault(tuple(rank for rank, each in taken if name in each.kept), []).append(name)
        sent = sorted({*self._names}.difference(*(names for ranks, names in kept.items() if len(ranks) == len(taken))))
        if sent:
            self.view.on(Note(f"sent: {_listed(sent)}"))
        for ranks, names in kept.items():
            whose = "the ranks'" if len(ranks) == len(taken) else f"{_in_words(ranks)}'s"
            value = "values" if len(names) > 1 else "value"
            push = f"{self._session_variable()}.push({', '.join(f'{name}={name}' for name in names[:_MAX_PUSHED])})"
            replaces = "replaces them" if len(names) > 1 else "replaces it"
            said = f"this cell used {whose} own {value}, not the notebook's. {push} {replaces}"
            self.view.on(Note(f"{_listed(names)}: {said}"))
        replaced = sorted({name for _, each in taken for name in each.replaced})
        if replaced:
            self.view.on(
                Note(f"{_listed(replaced)}: the ranks had changed it, and the notebook's new value has replaced it")
            )
        for name, owner in sorted({pair for _, each in taken for pair in each.apart}):
            self.view.on(
                Note(
                    f"{name}: holds tensors of the notebook's {owner}, not of the ranks' own {owner}, which it does "
                    "not change"
                )
            )

    def _session_variable(self) -> str:
        """Return a variable of the notebook that holds the session, else a word for it."""
        for name, value in list((host().notebook_names() or {}).items()):
            is_ours = type(value).__module__.startswith("nblaunch.") and not name.startswith("_")
            if is_ours and getattr(value, "_ranks", None) is self._ranks:
                return name
        return "session"

    def _note_desync(self) -> None:
        """Replace the group, with a note, if ranks have left the task with different numbers of collectives."""
        begun = {rank.rank: rank.names.begun for rank in self.task.present if rank.names is not None}
        if self.task.ladder is not None or len({each.last.count for each in begun.values()}) < 2:
            return
        self._ranks.generation += 1
        said = "; ".join(f"rank {rank} {self._last_of(each)}" for rank, each in begun.items())
        self.view.on(
            Note(
                f"the ranks have not called the same collectives: {said}. The next collective would have paired "
                "different calls, so the process group is replaced"
            )
        )

    def _last_of(self, begun: CollectivesBegun) -> str:
        last = begun.last
        if not last.count:
            return "called none"
        place = place_of(last, self.job.sources)
        return f"called {last.count} in this group, the last {in_words(last, place)}"

    def _note_error(self, verdict: Verdict) -> None:
        """Note how to debug the exception that has ended the task."""
        ranks, console, cause = self._ranks, self.job.console, verdict.cause
        has_raised = cause is not None and cause.kind in ("exception", "collective")
        ranks.failed_first = cause.rank if cause is not None and has_raised else None
        ranks.last_sources = self.job.sources
        if has_raised and console.debugging.can_type and not console.has_examined:
            self.view.on(Note(f"{debug_command(ranks.name)} opens the debugger on this error"))

    def _note_end(self, absent_before: list[int], generation_before: int) -> None:
        """Note what the task has cost: ranks, values, and the process group."""
        ranks = self._ranks
        for rank in [rank for rank in ranks.absent if rank not in absent_before]:
            self.view.on(
                Note(
                    f"rank {rank} is dead, and its variables are lost. The other ranks keep theirs, and run cells "
                    f"without collectives. {restart_command(ranks.name, [rank])} restarts it"
                )
            )
        self._note_desync()
        stale = stale_names(ranks)
        if ranks.generation != generation_before and stale:
            self.view.on(Note(stale))


_CREATE_AGAIN = {
    "DistributedDataParallel": "{0} = torch.nn.parallel.DistributedDataParallel({0}.module)",
    "DeviceMesh": '{0} = torch.distributed.init_device_mesh("cpu", (world_size,))',
    "ProcessGroup": "{0} = torch.distributed.new_group()",
}
"""By type, how to create a stale object again, with its name for ``{0}``."""


def stale_names(ranks: SessionRanks) -> str:
    """Return which names are useless now that the process group is replaced, and how to create them; empty if none."""
    stale = {each.name: each.of_group for each in ranks.stale}
    if not stale:
        return ""
    first = {kind: name for name, kind in sorted(stale.items(), reverse=True)}
    examples = [_CREATE_AGAIN[kind].format(name) for kind, name in first.items() if kind in _CREATE_AGAIN]
    like = f", as in {'; '.join(examples)}" if examples else ""
    return f"{_listed(sorted(stale))}: made for the process group that was replaced. Create it again{like}"


def _in_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _listed(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{more}"
