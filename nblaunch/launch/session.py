"""Sessions: ranks that stay between cells, with their variables."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, overload

from nblaunch.engines.protocol import Engine
from nblaunch.errors import ArgumentError, StartError, warn
from nblaunch.launch import session_payload
from nblaunch.launch.api import refuse_nested
from nblaunch.launch.frontend import host
from nblaunch.launch.handle import Launch, live_launches
from nblaunch.launch.payload import name_of
from nblaunch.launch.plan import Plan
from nblaunch.launch.questions import Questions, checked_expression
from nblaunch.launch.rank_names import RankNames, line_of
from nblaunch.launch.result import LaunchResult
from nblaunch.launch.session_payload import SessionTask
from nblaunch.launch.session_ranks import SessionRanks
from nblaunch.launch.session_restart import Restart
from nblaunch.launch.session_state import RankHolding, SessionState, restart_command
from nblaunch.launch.session_turn import Place, stale_names
from nblaunch.launch.turn_queue import Ticket
from nblaunch.launch.views import preparing
from nblaunch.machine import arguments, timeouts
from nblaunch.transfer.parameters import PROVIDED
from nblaunch.transfer.pickling import OfNotebookError
from nblaunch.wire.messages import Cell
from nblaunch.wire.session_messages import Bound, Question

Register = Callable[["Session", bool], None]
"""Called when a session starts or a task begins in it (True), and when it has stopped (False)."""


class Session:
    """Ranks that stay: each `run` and each ``%%distributed`` cell finds the variables of the ones before.

    ``session[rank]["model"]`` is the repr of a rank's value. As a context manager, the session stops at the end.

    Attributes:
        name: Its name.
        world_size: The number of ranks.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        names: dict[str, Any],
        engine: Engine,
        idle: float | None,
        register: Register,
        given: Mapping[str, Any],
    ) -> None:
        self.name, self.world_size = name, plan.world_size
        self.given = given
        """The arguments that it was started with."""
        self._engine, self._idle_timeout, self._register = engine, idle, register
        self._ranks = SessionRanks(name, plan, names, engine)
        self._questions = Questions(self._ranks)
        self.was_idle = False
        """It was stopped because it had been idle for its timeout."""

    def start(self) -> None:
        """Start the ranks, and wait until each has answered.

        Raises:
            StartError: A rank could not be started; none is left.
        """
        try:
            self._ranks.start()
            self._questions.ask(Question("names"))
            self._register(self, True)
            host().show_session(self.state, self._ranks.plan.env, lambda: self._ranks.group.workers)
            if self._idle_timeout is not None:
                threading.Thread(target=self._stop_when_idle, name=f"nblaunch-session-{self.name}", daemon=True).start()
        except BaseException:  # an interrupt, too: the user gets no session
            self._register(self, False)
            self._ranks.end()
            raise

    # -------------------------------------------------------------- running
    @overload
    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        block: Literal[True] = True,
        view: str = "auto",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> LaunchResult: ...
    @overload
    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        block: Literal[False],
        view: str = "auto",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Launch: ...
    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        block: bool = True,
        view: str = "auto",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> LaunchResult | Launch:
        """Run a function on every rank, and return what each returns.

        The function may use any name of the notebook, and any name that earlier tasks have bound in the ranks. What a
        rank has bound stays the rank's; names of the notebook are sent if the ranks lack them, or if they have changed.

        Args:
            function: The function. Parameters named ``rank``, ``world_size``, ``local_rank`` and ``device`` are
                filled in unless they are given.
            args: Its positional arguments; see `notebook_launcher`.
            block: True (default): wait for the ranks. False: return a `Launch` at once; tasks queue.
            view: See `nblaunch.notebook_launcher`.
            timeout: Seconds after which the task is stopped. Default: None, no limit.
            kwargs: Its keyword arguments.

        Raises:
            ArgumentError: An argument is invalid. Nothing has run.
            PayloadError: The function or an object that it uses cannot be sent. Nothing has run.
            Exception: The exception of the rank that failed first. The ranks keep their variables.
            KeyboardInterrupt: The cell was interrupted. The ranks keep their variables.
        """
        __tracebackhide__ = True  # IPython omits this frame
        return self._submit(
            name_of(function),
            lambda ticket: session_payload.pack_call(function, args, kwargs, self._ranks, ticket),
            view,
            block,
            timeout=timeout,
        )

    def run_cell(
        self, cell: Cell, used: Sequence[str], *, view: str = "auto", block: bool = True, **changes: Any
    ) -> LaunchResult | Launch:
        """Run a cell on the ranks; for the magics.

        Args:
            cell: The cell.
            used: The names of the notebook that it uses.
            view: See `nblaunch.notebook_launcher`.
            block: See `run`.
            changes: ``timeout``, ``stop_grace`` and ``metric_patterns`` of this task.
        """
        __tracebackhide__ = True  # IPython omits this frame
        return self._submit(
            cell.label,
            lambda ticket: session_payload.pack_cell(cell, used, self._ranks, ticket),
            view,
            block,
            **changes,
        )

    def _submit(
        self, label: str, pack: Callable[[Ticket], SessionTask], view: str, block: bool, **changes: Any
    ) -> LaunchResult | Launch:
        __tracebackhide__ = True  # IPython omits this frame
        refuse_nested()
        self._check_open()
        plan = self._ranks.plan
        given = {name: value for name, value in changes.items() if value is not None}
        plan = replace(plan, options=replace(plan.options, **given))
        shown = host().view(view)
        queue, ticket, launch = self._ranks.queue, Ticket(label), None
        try:
            queue.enqueue(ticket)  # before packing, which may take long: the session is not idle
            with preparing(shown, label):
                task = pack(ticket)
            place = Place(self.name, self._ranks, ticket, task.names)
            launch = Launch(plan, task.payload, task.shipment, shown, self._engine, place)
            if not queue.is_closed:
                self._register(self, True)
            if block:
                return launch.join()
            launch.begin()
            return launch
        except BaseException:  # an interrupt, too
            if launch is None:
                queue.discard(ticket)
            else:
                launch.discard()
            raise

    # -------------------------------------------------------------- names
    def push(self, /, *unnamed: Any, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Bind names in the ranks, whatever these have bound before.

        Args:
            unnamed: Refused: each value needs a name, as in ``push(lr=0.1)`` or ``push(**{"lr": 0.1})``.
            ranks: The ranks. Default: all.
            values: The values by name.

        Raises:
            ArgumentError: A value has no name, or one that each rank defines itself.
            PayloadError: A value cannot be sent.
        """
        self._check_open()
        only = self._checked(ranks)
        if unnamed:
            raise ArgumentError(f"push({unnamed[0]!r:.80}): names are keywords, as in push(a=1), or push(**{{'a': 1}})")
        provided = min(PROVIDED.intersection(values), default="")
        if provided:
            raise ArgumentError(
                f"{provided}={values[provided]!r:.80}: each rank defines this name itself; choose another"
                + "; ranks=[0] chooses ranks" * (provided == "rank")
            )
        gathered = session_payload.gather_values(values, self._ranks, only)
        self._questions.ask(Question("push"), gathered.names, home=gathered.home)

    def pull(self, expression: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """Return the value of an expression from each rank.

        Args:
            expression: A name, or any expression in terms of the ranks' names, such as ``"model.state_dict()"``.
            ranks: The ranks to ask, in the order of the result. Default: all.

        Raises:
            NameError: A rank has no such name; any other exception of the expression is raised as well.
            ArgumentError: A rank to ask is dead, or the expression is none.
            ResultError: A value cannot be sent, or not be rebuilt in the notebook.
        """
        __tracebackhide__ = True  # IPython omits this frame
        self._check_open()
        wanted = self._checked(ranks) or tuple(range(self.world_size))
        self._questions.look()
        dead = [rank for rank in wanted if rank in self._ranks.absent]
        if dead and self._ranks.present:
            raise ArgumentError(
                f"pull({expression!r:.80}): rank {dead[0]} is dead; use ranks={self._ranks.present}, or "
                f"restart it: {restart_command(self.name, dead)}"
            )
        answers = self._questions.ask(Question("value", checked_expression(expression), wanted))
        return [answers[rank] for rank in wanted]

    def __getitem__(self, rank: int) -> RankNames:
        self._check_open()
        if not arguments.is_rank(rank, self.world_size):
            known = arguments.ranks_in_words(self.world_size)
            raise ArgumentError(f"session[{rank!r:.80}]: must be a rank, as in session[0]['name']; {known}")
        return RankNames(int(rank), self.who, self.repr_of, self.lines_of)

    def lines_of(self, rank: int) -> list[str]:
        """Return what a rank has bound, a line for each name; of a dead rank, how to restart it."""
        self._check_open()
        self._questions.look()
        if rank in self._ranks.absent:
            return [self.state().dead_line(rank)]
        return [line_of(each) for each in sorted(self._ranks.bound[rank], key=lambda each: each.name)]

    def who(self) -> list[tuple[Bound, ...]]:
        """Return what each rank has bound: name, type, shape and memory, as of the end of its last task."""
        return self._ranks.bound

    def repr_of(self, rank: int, expression: str) -> str:
        """Return the repr of an expression's value in one rank."""
        __tracebackhide__ = True  # IPython omits this frame
        self._check_open()
        return str(self._questions.ask(Question("repr", checked_expression(expression), (rank,)))[rank])

    def complete(self, text: str) -> list[str]:
        """Return the names that complete `text` in the ranks; while they are busy, those known from their last task."""
        return self._questions.complete(text)

    def inspect(self, expression: str) -> str:
        """Return signature, type and documentation of an expression's value in the lowest rank; empty if unknown."""
        return self._questions.inspect(expression)

    def debug(self, rank: int | None = None) -> None:
        """Open the debugger on the exception of the last task, with its frames, which live until the next begins.

        Args:
            rank: The rank. Default: the one that failed first.

        Raises:
            ArgumentError: There is no such exception, or no one can type here.
        """
        self._check_open()
        chosen = self._ranks.failed_first if rank is None else rank
        if chosen is None:
            raise ArgumentError(f"session {self.name}: no exception has ended its last task, so there is none to debug")
        self._checked([chosen])
        if not host().can_type():
            raise ArgumentError("debug: no one can type here; pull what you need, as in pull('x', ranks=[0])")
        question = Question("debug", "%distributed debug", (chosen,))
        pack = partial(session_payload.pack_question, question, self._ranks)
        if not self._submit(question.text, pack, "auto", True)[chosen]:  # type: ignore[index]  # it is a LaunchResult
            raise ArgumentError(f"rank={chosen}: it has raised no exception in the last task")

    # -------------------------------------------------------------- life
    @property
    def start_again(self) -> str:
        """What to do once the session has ended."""
        return self._ranks.start_again

    def restart(self, ranks: Sequence[int] | None = None, *, keep: bool = False) -> None:
        """Start ranks again, dead or alive, and replace the process group.

        Args:
            ranks: The ranks. Default: all, which then have the notebook's present working directory.
            keep: Give each new rank the variables of the old one, if it lives and they can be sent. Default: False.
                A warning names those that cannot. Variables may share tensors and modules; of other objects that they
                share, each gets a copy. Of a DistributedDataParallel the module is kept.

        Raises:
            StartError: The system refuses.
        """
        self._check_open()
        restart = Restart(self._ranks, self._questions)
        try:
            restart.run(self._checked(ranks) or range(self.world_size), keep)
        finally:
            if restart.unwrapped:
                warn(f"{', '.join(restart.unwrapped)}: kept as the module it wraps; wrap it again", each_time=True)
            if restart.lost:
                warn("the restart could not keep these names: " + "; ".join(restart.lost), each_time=True)

    def regroup(self) -> None:
        """Replace the process group with the next task: objects of the old group are stale."""
        self._check_open()
        self._ranks.generation += 1

    def stale_names(self) -> str:
        """Return which names are useless since the process group was replaced, in words; empty if none."""
        return stale_names(self._ranks)

    def stop(self) -> None:
        """End the ranks. A task that runs is stopped first; an interrupt meanwhile kills the ranks. Idempotent."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self._ranks.queue.close()
                break
            except KeyboardInterrupt as another:
                interrupt = another
                for launch in live_launches():
                    if launch.runs_in(self._ranks):
                        launch.kill()
        try:
            self._ranks.end()
        finally:
            self._register(self, False)
        if interrupt is not None:
            raise interrupt

    @property
    def is_open(self) -> bool:
        """Return True until the session is stopped."""
        return not self._ranks.is_ended

    def status(self) -> str:
        """Return the state of each rank, and what it holds, as text."""
        self._questions.look()
        return self.state().text()

    def state(self) -> SessionState:
        """Return what the session is doing now."""
        ranks = self._ranks
        running, *queued = [label or "a question" for label in ranks.queue.labels] or [""]
        of_ranks = [
            RankHolding(
                rank,
                0 if rank in ranks.absent else ranks.group.members[rank].pid,
                len(names),
                sum(each.size for each in names),
                ranks.plan.places[rank].host,
            )
            for rank, names in enumerate(ranks.bound)
        ]
        idle = 0.0 if ranks.queue else time.monotonic() - ranks.idle_since
        return SessionState(self.name, self._ranks.plan.device, running, queued, idle, of_ranks, is_open=self.is_open)

    def _checked(self, ranks: Sequence[int] | None) -> tuple[int, ...] | None:
        return None if ranks is None else arguments.distinct_ranks("ranks", ranks, self.world_size)

    def _check_open(self) -> None:
        if not self.is_open:
            why = f" after {self._idle_timeout:g} s without a task" if self.was_idle else ""
            raise StartError(f"session {self.name} has ended{why}: {self._ranks.start_again}")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __reduce__(self) -> NoReturn:
        raise OfNotebookError(self, "a session")

    def __repr__(self) -> str:
        return self.status() if self.is_open else f"<Session {self.name}: stopped>"

    # -------------------------------------------------------------- idle
    def _stop_when_idle(self) -> None:
        """Stop the session once it has been idle for its timeout. Runs in a thread."""
        while self.is_open and self._idle_timeout is not None:
            is_due = time.monotonic() - self._ranks.idle_since >= self._idle_timeout
            if is_due and self._ranks.queue.close_if_empty():  # a cell that begins now is not interrupted
                self.was_idle = True
                self.stop()
            time.sleep(min(timeouts.SESSION_POLL_S, self._idle_timeout))
