"""The kept ranks of a session: their processes, their rendezvous, and what they have of the notebook's names.

One task at a time has the ranks; the others queue in the order of their calls.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil

from nblaunch.engines.protocol import Engine, NodeLeaving, Received
from nblaunch.errors import RankError, RankLostError, StartError
from nblaunch.launch.commands import Commands
from nblaunch.launch.group import WorkerGroup
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.plan import Plan, moved
from nblaunch.launch.session_state import command, no_group, restart_command
from nblaunch.launch.stopping import EXPRESSION, QUESTION, SESSION
from nblaunch.launch.task import Task
from nblaunch.launch.views import NullView
from nblaunch.machine import timeouts
from nblaunch.machine.inventory import this_process
from nblaunch.transfer.sent_names import SentNames
from nblaunch.wire.messages import Bound, RankExited, SentName, Settings, Source, World

_EXIT_REPORT_TIMEOUT_S = 2.0
"""For a rank's exit to be reported after its process has gone."""


class BusyError(StartError):
    """The ranks run something else, or do not answer."""


@dataclass(slots=True, eq=False)
class Ticket:
    """The place of a task or question in the queue of its ranks."""

    ranks: SessionRanks
    label: str = ""
    """Of the task, such as ``Cell In[3]``; empty for a question."""
    stop: Callable[[], None] = lambda: None
    """Stops the task when the queue is closed."""


class TurnQueue:
    """The tasks that want the same ranks: one has them at a time, in the order of the calls. Thread-safe."""

    def __init__(self) -> None:
        self.is_closed = False
        """No further task gets a turn."""
        self._tickets: deque[Ticket] = deque()
        """The first has the ranks."""
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def tickets(self) -> list[Ticket]:
        with self._changed:
            return list(self._tickets)

    def enqueue(self, ticket: Ticket) -> None:
        """Append a ticket. Whatever happens, the caller discards it."""
        with self._changed:
            self._tickets.append(ticket)

    def is_first(self, ticket: Ticket) -> bool:
        with self._changed:
            return bool(self._tickets) and self._tickets[0] is ticket

    def discard(self, ticket: Ticket) -> None:
        """End the turn of a ticket, or give it up. Idempotent."""
        with self._changed:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            self._changed.notify_all()

    def wait_for(self, ticket: Ticket, give_up: Callable[[], bool], stop: Callable[[], None]) -> None:
        """Wait for the turn of an enqueued ticket, or until the queue is closed.

        Raise BusyError if `give_up` returns True first, or the ticket was discarded.
        """
        with self._changed:
            ticket.stop = stop
            while not (self.is_closed or self.is_first(ticket)):
                if give_up() or ticket not in self._tickets:
                    raise BusyError
                self._changed.wait(timeouts.LOG_POLL_S)

    def close_if_empty(self) -> bool:
        """Let nothing have a turn, unless a task runs or waits. Return True if no task gets a turn from now on."""
        with self._changed:
            self.is_closed = self.is_closed or not self._tickets
            return self.is_closed

    def close(self) -> None:
        """Stop what has its turn, let nothing else have one, and wait until the queue is empty."""
        self.is_closed = True
        with self._changed:
            self._changed.notify_all()
            while self._tickets:
                for ticket in list(self._tickets):
                    ticket.stop()
                self._changed.wait(timeouts.LOG_POLL_S)


class SessionRanks:
    """See the module. Thread-safe through `claimed`.

    Attributes:
        unset: The ranks that have not got the notebook's random states and defaults.
        failed_first: The rank whose exception has ended the last task, if one has.
        last_sources: The cells that define what the last task ran.
        idle_since: When the last task ended, by the monotonic clock.
        leaving: Why a node is being taken back, if its agent has said so between two tasks; empty if none is.
    """

    group: WorkerGroup

    def __init__(self, name: str, plan: Plan, names: dict[str, Any], engine: Engine) -> None:
        self.id, self.name, self.plan = f"{os.getpid()}-{name}-{secrets.token_hex(3)}", name, plan
        self.sent = SentNames(names, plan.world_size, engine.is_local)
        self._bound: list[tuple[Bound, ...]] = [()] * plan.world_size
        self.generation = 1
        self.unset = set(range(plan.world_size))
        self.queue = TurnQueue()
        self.is_ended = False
        self.failed_first: int | None = None
        self.last_sources: Mapping[str, Source] = {}
        self.idle_since = time.monotonic()
        self.leaving = ""
        self.own_path: list[str] = []
        """The ``sys.path`` of ranks that were restarted with their names, which may need it."""
        self._engine = engine
        self.numbers = itertools.count(1)
        """Of its tasks."""
        self._commands = Commands()
        self._opened = contextlib.ExitStack()

    # -------------------------------------------------------------- life
    def start(self) -> None:
        """Start the ranks. They may not have answered yet. If the system refuses (StartError), none is left."""
        with contextlib.ExitStack() as opened:
            opened.callback(self._commands.close)
            self.files = LaunchFiles.create(self.id)
            opened.callback(self.files.close)
            order = self.plan.order(self.id, this_process(), self.files.directory, is_kept=True)
            self.group = WorkerGroup(self._engine.place(order, self._commands), lambda text: None, is_kept=True)
            opened.callback(self.group.close)
            self._store = self.group.workers.open_store()
            self.group.start(self._environment)
            self._opened = opened.pop_all()

    def _environment(self, rank: int) -> Mapping[str, str]:
        variables = self.plan.environment(rank, self._store, self.id, 0)
        if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in self.plan.env:
            variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"  # abort the communicator, not the process
        return variables

    def end(self) -> None:
        """Let the ranks exit, kill those that do not in time, and release everything. Idempotent."""
        if self.is_ended:
            return
        self.is_ended = True
        try:
            if hasattr(self, "group"):  # else the start was interrupted before
                self._end_group()
        finally:
            self._opened.close()  # the reaper kills what is left

    def _end_group(self) -> None:
        if not self.group.is_over:
            self.group.end()
        self._await_exits(lambda: self.group.is_over, range(self.plan.world_size))

    def _await_exits(self, until: Callable[[], bool], ranks: Collection[int]) -> None:
        """Wait for ranks that were told to exit; kill those that do not in time."""
        deadline = time.monotonic() + timeouts.KEPT_EXIT_TIMEOUT_S
        while not until():
            self._drain(timeouts.LOG_POLL_S)
            if time.monotonic() > deadline:
                deadline += timeouts.KEPT_EXIT_TIMEOUT_S
                for rank in set(ranks).intersection(self.present):
                    self.group.kill(rank)

    def disturb(self) -> None:
        """Replace the process group with the next task: a collective of it may not have ended on every rank."""
        self.generation += 1

    def _drain(self, seconds: float) -> None:
        """Read events between two tasks: exits count, late messages do not."""
        for event in self.group.wait(seconds):
            if isinstance(event, Received):
                event.parcel.close()
            elif isinstance(event, RankExited):  # the others may have waited for it
                self.disturb()
            elif isinstance(event, NodeLeaving):
                self.leaving = event.reason

    def _note_exits(self) -> None:
        """Read what has come since the last task. A local rank's exit is reported just after its process has gone."""
        deadline, seconds = time.monotonic() + _EXIT_REPORT_TIMEOUT_S, 0.0
        while not self.group.is_over:
            self._drain(seconds)
            here = [rank for rank in self.present if not self.plan.places[rank].host]
            if all(map(self.has_process, here)) or time.monotonic() > deadline:
                return
            seconds = timeouts.LOG_POLL_S

    # -------------------------------------------------------------- turns
    @contextlib.contextmanager
    def claimed(
        self,
        ticket: Ticket,
        give_up: Callable[[], bool] = lambda: False,
        stop: Callable[[], None] = lambda: None,
        *,
        needs_ranks: bool = True,
        is_task: bool = True,
    ) -> Iterator[None]:
        """Wait for the turn of an enqueued ticket, and have the ranks until the end of the block.

        `give_up` returns True to wait no longer, which raises BusyError. `stop` is called when the session is to end
        meanwhile. `needs_ranks`: the reaper and a rank must be alive. `is_task`: the session counts as used.
        """
        has_turn = False
        try:
            self.queue.wait_for(ticket, give_up, stop)
            if self.queue.is_closed:
                raise StartError(f"session {self.name} has ended: {self.start_again}")
            has_turn = True
            self._note_exits()
            if needs_ranks:
                self.check_group()
                if not self.present:
                    restarts = f"{restart_command(self.name)} restarts them"
                    raise RankError(f"every rank of session {self.name} is dead: {restarts}")
            yield
        finally:
            try:
                if has_turn and not self.group.is_over:
                    self.group.workers.listen_to(self._commands)  # those of the task are about to be closed
            finally:
                if is_task:
                    self.idle_since = time.monotonic()
                self.queue.discard(ticket)

    def said_of_queue(self, ticket: Ticket) -> str:
        tickets = self.queue.tickets
        ahead = tickets[: tickets.index(ticket)] if ticket in tickets else []
        first, *others = [each.label or "a question" for each in ahead] or [""]
        more = f", with {len(others)} more ahead" if others else ""
        return f"queued: session {self.name} is running {first}{more}" if first else ""

    def check_group(self) -> None:
        if self.group.is_over:
            raise RankLostError(
                f"the ranks of session {self.name} are lost: {restart_command(self.name)} restarts them"
            )

    # -------------------------------------------------------------- the ranks
    @property
    def present(self) -> list[int]:
        return [] if self.group.is_over else self.group.live

    @property
    def absent(self) -> list[int]:
        return [rank for rank in range(self.plan.world_size) if rank not in self.present]

    def has_process(self, rank: int) -> bool:
        """Return False for a rank that is dead, even if its exit is not reported yet."""
        if self.group.is_over or rank >= len(self.group.members):  # they could not be started again
            return False
        member = self.group.members[rank]
        if member.exited is not None or self.plan.places[rank].host:
            return member.listens
        return not member.pid or psutil.pid_exists(member.pid)  # it starts, or the reaper has not waited for it

    @property
    def are_dead(self) -> bool:
        return not any(map(self.has_process, range(self.plan.world_size)))

    @property
    def bound(self) -> list[tuple[Bound, ...]]:
        """What each rank has bound, at the end of its last task; nothing for a dead rank."""
        live = self.present
        return [names if rank in live else () for rank, names in enumerate(self._bound)]

    @property
    def start_again(self) -> str:
        return f"start it again with {command(self.name, f'-n {self.plan.world_size}')}"

    @property
    def path(self) -> tuple[str, ...]:
        """The entries that the ranks' ``sys.path`` must have: the notebook's of now, and those of earlier ranks."""
        return (*map(str, sys.path), *self.own_path)

    def world(self, rank: int) -> World:
        """Return the rendezvous of a rank's next task; without a process group while a rank is dead."""
        world = self.plan.world(rank, self._store)
        return replace(world, generation=self.generation, no_group=no_group(self.name, self.absent))

    def new_question(self, is_code: bool, joins: bool) -> Task:
        """Return a task that asks claimed ranks. `is_code`: it runs code of the user; `joins`: in the process group."""
        grace = timeouts.QUESTION_FREE_TIMEOUT_S if is_code else timeouts.QUESTION_STOP_TIMEOUT_S
        policy = EXPRESSION if is_code else QUESTION
        return Task(next(self.numbers), self.group, NullView(), self._commands, {}, grace, policy=policy, joins=joins)

    def finish(self, task: Task, names: Mapping[str, SentName], settings: Settings) -> None:
        """Note what a task has left behind that has sent these names and settings."""
        for rank in task.present:
            if rank.is_running:
                self.sent.arrived(rank.rank, names)
                if rank.rank in (settings.ranks or ()):
                    self.unset.discard(rank.rank)
            if rank.names is not None:
                self._bound[rank.rank] = rank.names.names
                self.sent.has_bound(rank.rank, rank.names)
            if rank.failed is not None and rank.failed.type_name.endswith("LostReferenceError"):
                self.sent.forget(rank.rank)  # the next task sends everything
        has_died = any(rank.member.exited is not None for rank in task.present)
        has_failed = any(rank.done is None for rank in task.present)
        is_disturbed = task.ladder is not None or (has_failed and not _is_in_step(task))
        if task.policy != SESSION:  # most call no collective; an interrupt may come right after one has begun
            is_disturbed = len(_counts(task)) > 1 or (task.ladder is not None and bool(task.ladder.freed))
        if has_died or is_disturbed:
            self.disturb()

    def give_up(self, task: Task) -> None:
        """End a task whose turn failed on the kernel's side, such as for want of descriptors: it must not run on."""
        deadline = time.monotonic() + timeouts.QUESTION_FREE_TIMEOUT_S
        self.disturb()
        for rank in task.present:
            if not rank.is_over:
                rank.member.worker.interrupt(task.number)
                rank.member.worker.free(task.number)
        with contextlib.suppress(OSError):
            while not (task.is_over or self.group.is_over or time.monotonic() > deadline):
                for event in self.group.wait(timeouts.LOG_POLL_S):
                    task.take(event)
        self.finish(task, {}, Settings())

    # -------------------------------------------------------------- other ranks in their place
    def replace_ranks(self, ranks: Collection[int]) -> None:
        """Start ranks again, and replace the process group with the next task. Call it within `claimed`."""
        self.group.workers.let_go(ranks)
        self._await_exits(lambda: not set(ranks).intersection(self.present), ranks)
        self.check_group()
        for rank in ranks:
            self.group.restart(rank, self._environment(rank))
            self._forget(rank)
        self.disturb()

    def renew(self) -> None:
        """Start all ranks again, with another reaper and the notebook's present folder. Call it within `claimed`.

        After a StartError another attempt may succeed.
        """
        self._end_group()
        self._opened.close()
        self._commands = Commands()
        for rank in range(self.plan.world_size):
            self._forget(rank)
        self.disturb()
        if not self._engine.is_local:
            self.plan = moved(self.plan, self._engine.machines(lambda text: None))
        self.start()

    def _forget(self, rank: int) -> None:
        self.sent.forget(rank)
        self._bound[rank] = ()
        self.unset.add(rank)


def _counts(task: Task) -> set[int]:
    begun = [rank.names.begun for rank in task.present if rank.names is not None]
    return {each.last.count for each in begun if each.is_counted}


def _is_in_step(task: Task) -> bool:
    """Return True if the ranks have left a failed task with the same collectives behind them: the group is intact."""
    if any(rank.failed is not None and rank.failed.collective for rank in task.present):
        return False
    begun = [rank.names.begun for rank in task.present if rank.names is not None]
    is_known = len(begun) == len(task.present) and all(each.is_counted and not each.uncertain for each in begun)
    return is_known and len(_counts(task)) == 1
