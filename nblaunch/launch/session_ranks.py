"""The kept ranks of a session: their processes, their rendezvous, and what they have of the notebook's names.

One task at a time has the ranks; the others queue in the order of their calls.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nblaunch.engines.protocol import Engine, Order
from nblaunch.errors import RankError, RankLostError, StartError
from nblaunch.launch.commands import Commands
from nblaunch.launch.group import WorkerGroup
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.plan import Plan
from nblaunch.launch.rendezvous import Rendezvous
from nblaunch.launch.task import Task
from nblaunch.launch.turn_queue import TurnQueue
from nblaunch.launch.views.base import NullView
from nblaunch.machine import timeouts
from nblaunch.machine.process_state import this_process
from nblaunch.transfer.parcel import UncachedStore, pack, unpack
from nblaunch.transfer.sent_names import SentNames
from nblaunch.wire.messages import Bound, Payload, Question, SentName, Settings, World


class SessionRanks:
    """See the module. Thread-safe through `claimed`.

    Args:
        session_id: Names the session in its ranks' environment and in its log directory.
        plan: The settings of the ranks.
        names: The notebook's namespace.
        engine: Where the ranks run.

    Attributes:
        group: The processes; their numbers are ranks.
        sent: The notebook's names that the ranks have.
        bound: What each rank has bound, at the end of its last task.
        generation: The number of the default process group.
        queue: The tasks that run or wait.
        is_ended: The ranks were let go.
        idle_since: When the last task ended, by the monotonic clock.
    """

    group: WorkerGroup

    def __init__(self, session_id: str, plan: Plan, names: dict[str, Any], engine: Engine) -> None:
        self.id, self.plan = session_id, plan
        self.sent = SentNames(names, plan.world_size)
        self.bound: list[tuple[Bound, ...]] = [()] * plan.world_size
        self.generation = 1
        self.queue = TurnQueue()
        self.is_ended = False
        self.idle_since = time.monotonic()
        self._engine = engine
        self._tasks = 0
        self._commands = Commands()
        self._opened = contextlib.ExitStack()

    # -------------------------------------------------------------- life
    def start(self) -> None:
        """Start the ranks, and wait until each has answered.

        Raises:
            StartError: A rank could not be started; none is left.
        """
        with contextlib.ExitStack() as opened:
            opened.callback(self._commands.close)
            self._files = LaunchFiles.create(self.id)
            opened.callback(self._files.close)
            order = Order(
                self.id,
                self.plan.world_size,
                self.plan.method,
                this_process(),
                self.plan.env,
                self.plan.named,
                str(self._files.directory),
                is_kept=True,
            )
            self.group = WorkerGroup(self._engine.place(order, self._commands), lambda text: None, is_kept=True)
            opened.callback(self.group.close)
            meeting = opened.enter_context(Rendezvous(self.plan.world_size))
            self._port = meeting.port
            self.group.start(self._environment)
            self._opened = opened.pop_all()
        try:
            self.ask(Question("names"))
        except BaseException:
            self.end()
            raise

    def _environment(self, rank: int) -> Mapping[str, str]:
        return self.plan.environment(rank, self._port, self.id, 0, self._files.error(rank))

    def end(self) -> None:
        """Let the ranks exit, kill those that do not, and release everything. Idempotent."""
        if self.is_ended:
            return
        self.is_ended = True
        try:
            self.group.end()
            deadline = time.monotonic() + timeouts.KEPT_EXIT_TIMEOUT_S
            while not self.group.is_over:
                self._drain(timeouts.LOG_POLL_S)
                if time.monotonic() > deadline:
                    deadline += timeouts.KEPT_EXIT_TIMEOUT_S
                    self._kill(self.group.live)
        finally:
            self._opened.close()  # the reaper kills what is left

    def _kill(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self.group.signal(rank, signal.SIGKILL, group=True)

    def _drain(self, seconds: float) -> None:
        """Read events between two tasks: exits count, late messages do not."""
        for event in self.group.wait(seconds):
            Task(0, self.group, NullView(), self._commands, {}, 0.0).take(event)

    # -------------------------------------------------------------- turns
    @contextlib.contextmanager
    def claimed(
        self,
        ticket: object,
        give_up: Callable[[], bool] = lambda: False,
        stop: Callable[[], None] = lambda: None,
        *,
        needs_ranks: bool = True,
    ) -> Iterator[None]:
        """Wait for the turn of a ticket, and have the ranks until the end of the block.

        Args:
            ticket: From `queue.enqueue`.
            give_up: Return True to wait no longer.
            stop: Called when the session is to end meanwhile.
            needs_ranks: Whether a rank must be alive.

        Raises:
            BusyError: `give_up` returned True first.
            StartError: The session has ended.
        """
        try:
            self.queue.wait_for(ticket, give_up, stop)
            if self.queue.is_closed:
                raise StartError("the session has ended: start another with %distributed session")
            self._drain(0.0)  # a rank may have died meanwhile
            if self.group.is_over:
                raise RankLostError("the session's ranks are lost: %distributed session restart starts others")
            if needs_ranks and not self.present:
                raise RankError("every rank of the session is dead: %distributed session restart starts others")
            yield
        finally:
            self.idle_since = time.monotonic()
            self.queue.discard(ticket)

    # -------------------------------------------------------------- the ranks
    @property
    def present(self) -> list[int]:
        """The ranks that are alive."""
        return self.group.live

    @property
    def absent(self) -> list[int]:
        """The ranks that have died."""
        return [rank for rank in range(self.plan.world_size) if rank not in self.group.live]

    def world(self, rank: int) -> World:
        """Return the rendezvous of a rank's next task; without a process group while a rank is dead."""
        world = self.plan.world(rank, self._port)
        return replace(world, generation=self.generation, backend="" if self.absent else world.backend)

    def new_task(
        self, view: Any, commands: Commands, sources: Mapping[str, Any], stop_grace: float, deadline: float
    ) -> Task:
        """Return a task over the ranks, which `claimed` gives to the caller."""
        self._tasks += 1
        return Task(self._tasks, self.group, view, commands, sources, stop_grace, deadline, is_kept=True)

    def finish(self, task: Task, names: Mapping[str, SentName]) -> None:
        """Note what a task has left behind. A disturbed process group is replaced with the next task.

        Args:
            task: The task, which is over.
            names: What it has sent.
        """
        for rank in task.present:
            if rank.is_running:
                self.sent.arrived(rank.rank, names)
            if rank.names is not None:
                self.bound[rank.rank] = rank.names
                self.sent.has_bound(rank.rank, rank.names)
            if rank.failed is not None and rank.failed.type_name.endswith("LostReferenceError"):
                self.sent.forget(rank.rank)  # the next task sends everything
        has_died = any(rank.member.exited is not None for rank in task.present)
        is_disturbed = task.ladder is not None or any(rank.done is None for rank in task.present)
        if has_died or (is_disturbed and not task.is_question):
            self.generation += 1

    # -------------------------------------------------------------- questions
    def ask(
        self,
        question: Question,
        names: Mapping[str, SentName] | None = None,
        *,
        home: Any = None,
        within: float | None = None,
    ) -> dict[int, Any]:
        """Ask the ranks, and return the answer of each.

        Args:
            question: What to ask.
            names: Names to bind first. Default: none.
            home: For the pickler.
            within: Seconds for the ranks to become idle and to answer. Default: no limit.

        Raises:
            BusyError: The ranks were not idle in time.
            Exception: The answer of a rank, if it is an exception.
        """
        parcel = pack(
            lambda found: Payload(question, (), {}, None, Settings(), {}, names=names or {}),
            UncachedStore(self._files.directory),
            home=home,
        )
        try:
            return self._answers(parcel.fds, names or {}, within)
        finally:
            parcel.close()

    def _answers(self, fds: Sequence[int], names: Mapping[str, SentName], within: float | None) -> dict[int, Any]:
        answers = self.raw_answers(fds, names, within)
        values = {}
        try:
            while answers:
                rank, parcel = answers.popitem()
                values[rank] = unpack(parcel)
        finally:
            for parcel in answers.values():
                _close(parcel)
        return values

    def raw_answers(
        self, fds: Sequence[int], names: Mapping[str, SentName], within: float | None = None
    ) -> dict[int, list[int]]:
        """Send a packed question, and return the packed answers; the caller closes their descriptors."""
        deadline = float("inf") if within is None else time.monotonic() + within
        with self.claimed(self.queue.enqueue(), lambda: time.monotonic() > deadline):
            self.group.workers.listen_to(self._commands)
            self._tasks += 1
            task = Task(self._tasks, self.group, NullView(), self._commands, {}, timeouts.STOP_GRACE_S, is_kept=True)
            task.is_question = True
            interrupted = self._run(task, fds, deadline)
            self._commands.stop = False
            self.finish(task, names)
            answers = task.take_results()
            refusal, self.group.refusal = self.group.refusal, ""  # it concerns the rank that was restarted
            failed = next((rank.failed for rank in task.present if rank.failed is not None), None)
        error = KeyboardInterrupt() if interrupted else None if failed is None else _exception(failed)
        if error is None and refusal:
            error = StartError(refusal)
        if error is not None:
            for answer in answers.values():
                _close(answer)
            raise error
        return answers

    def _run(self, task: Task, fds: Sequence[int], deadline: float) -> bool:
        """Run a question to its end, and stop it at its deadline. Return True if the user has interrupted it."""
        interrupted = False
        task.send(self.world, fds)
        while not (task.is_over or self.group.is_over or self.group.refusal):
            try:
                for event in self.group.wait(timeouts.LOG_POLL_S):
                    task.take(event)
                task.step()
                self._commands.stop = self._commands.stop or time.monotonic() > deadline
            except KeyboardInterrupt:
                interrupted = self._commands.stop = True
        return interrupted

    # -------------------------------------------------------------- restarting
    def restart(self, ranks: Collection[int], keep: bool) -> None:
        """Start ranks again, and replace the process group with the next task.

        Args:
            ranks: Those to restart; ranks that are alive are ended first.
            keep: Give each new rank the names of the old one that can be sent.

        Raises:
            StartError: The system refuses.
        """
        try:
            self._restart(ranks, keep)
        except RankLostError:  # the reaper was killed, and every rank with it
            self._renew()

    def _restart(self, ranks: Collection[int], keep: bool) -> None:
        dumps = self._dump([rank for rank in ranks if rank in self.present]) if keep else {}
        try:
            with self.claimed(self.queue.enqueue(), needs_ranks=False):
                self._let_go(ranks)
                for rank in ranks:
                    self.group.restart(rank, self._environment(rank))
                    self.sent.forget(rank)
                    self.bound[rank] = ()
                self.generation += 1
            self.ask(Question("names"))
            while dumps:
                _, fds = dumps.popitem()
                try:
                    for answer in self.raw_answers(fds, {}).values():
                        _close(answer)
                finally:
                    _close(fds)
        finally:
            for fds in dumps.values():
                _close(fds)

    def _renew(self) -> None:
        self._opened.close()
        self._commands = Commands()
        self.bound = [()] * self.plan.world_size
        for rank in range(self.plan.world_size):
            self.sent.forget(rank)
        self.start()

    def _dump(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        parcel = pack(
            lambda found: Payload(Question("dump", ranks=tuple(ranks)), (), {}, None, Settings(), {}),
            UncachedStore(self._files.directory),
        )
        try:
            answers = self.raw_answers(parcel.fds, {})
        finally:
            parcel.close()
        for rank in [rank for rank in answers if rank not in ranks]:
            _close(answers.pop(rank))
        return answers

    def _let_go(self, ranks: Collection[int]) -> None:
        """End these ranks."""
        self.group.workers.let_go(ranks)
        deadline = time.monotonic() + timeouts.KEPT_EXIT_TIMEOUT_S
        while left := [rank for rank in ranks if rank in self.present]:
            self._drain(timeouts.LOG_POLL_S)
            if time.monotonic() > deadline:
                deadline += timeouts.KEPT_EXIT_TIMEOUT_S
                self._kill(left)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _exception(failed: Any) -> BaseException:
    """Return the exception of a rank that could not answer."""
    if failed.pickled:
        with contextlib.suppress(Exception):  # a class that does not unpickle
            error: BaseException = pickle.loads(failed.pickled)
            return error
    return RankError(f"rank {failed.rank} raised {failed.type_name}: {failed.text}", failed.rank)
