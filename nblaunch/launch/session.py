"""Sessions: ranks that stay between cells, with their variables; and those of this kernel, and which cells run in."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from nblaunch.engines.protocol import Engine
from nblaunch.errors import ArgumentError, NblaunchError, StartError, warn
from nblaunch.launch import payload as payloads
from nblaunch.launch import questions
from nblaunch.launch.api import refuse_nested
from nblaunch.launch.frontend import host
from nblaunch.launch.handle import Launch, OwnLaunch, live_launches
from nblaunch.launch.machines import planned, with_usable_method
from nblaunch.launch.options import Options, taken_by
from nblaunch.launch.payload import Shipment, name_of, namespace_of_notebook
from nblaunch.launch.plan import Plan
from nblaunch.launch.questions import checked_expression, line_of
from nblaunch.launch.result import LaunchResult
from nblaunch.launch.run import stale_names
from nblaunch.launch.session_ranks import SessionRanks, Ticket
from nblaunch.launch.session_state import DEFAULT_NAME, RankHolding, SessionState, command, no_group, restart_command
from nblaunch.launch.views import preparing
from nblaunch.machine import arguments, timeouts
from nblaunch.machine.arguments import named_arguments, seconds
from nblaunch.transfer import pickling
from nblaunch.transfer.parameters import PROVIDED
from nblaunch.transfer.pickling import OfNotebookError
from nblaunch.wire.messages import Bound, Cell, Payload, Question, Settings


class Session:
    """Persistent ranks: each `run` and each ``%%distributed`` cell sees the variables of earlier ones.

    ``session[rank]["model"]`` is the repr of a rank's value. Used as a context manager, the session stops at the end.

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
        given: Mapping[str, Any],
    ) -> None:
        self.name, self.world_size = name, plan.world_size
        self.given = given
        self._engine, self._idle_timeout = engine, idle
        self._ranks = SessionRanks(name, plan, names, engine)
        self.was_idle = False
        """It was stopped because it had been idle for its timeout."""

    def start(self) -> None:
        """Start the ranks, and wait until each has answered.

        Raises:
            StartError: A rank could not be started; none is left.
        """
        try:
            self._ranks.start()
            questions.ask(self._ranks, Question("names"))
            _register(self, True)
            host().show_session(self.state)
            if self._idle_timeout is not None:
                threading.Thread(target=self._stop_when_idle, name=f"nblaunch-session-{self.name}", daemon=True).start()
        except BaseException:  # an interrupt, too: the user gets no session
            _register(self, False)
            self._ranks.end()
            raise

    # -------------------------------------------------------------- running
    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        block: bool = True,
        view: str = "auto",
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a function on every rank, and return the return values.

        The function can use the notebook's names, and names that earlier tasks bound in the ranks. If a rank has bound
        a name, the rank's value is used. Other names are sent if the ranks do not have them, or if they have changed.

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

        def pack(ticket: Ticket) -> Shipment:
            arguments = payloads.arguments_of(function, args, kwargs, self.world_size)
            return self._pack(self._payload(function, args, kwargs), (), (function, args, kwargs), ticket, arguments)

        return self._submit(name_of(function), pack, view, block, timeout=timeout)

    def run_cell(
        self, cell: Cell, used: Sequence[str], *, view: str = "auto", block: bool = True, **changes: Any
    ) -> LaunchResult | Launch:
        """Run a cell that uses these names of the notebook; for the magics.

        `changes` are ``timeout``, ``stop_grace`` and ``metric_patterns`` of this task.
        """
        __tracebackhide__ = True  # IPython omits this frame
        return self._submit(
            cell.label, lambda ticket: self._pack(self._payload(cell), used, (), ticket), view, block, **changes
        )

    def _submit(
        self, label: str, pack: Callable[[Ticket], Shipment], view: str, block: bool, **changes: Any
    ) -> LaunchResult | Launch:
        __tracebackhide__ = True  # IPython omits this frame
        refuse_nested()
        self._check_open()
        plan = self._ranks.plan
        given = {name: value for name, value in changes.items() if value is not None}
        plan = replace(plan, options=replace(plan.options, **given))
        shown = host().view(view)
        queue, ticket, launch = self._ranks.queue, Ticket(self._ranks, label), None
        try:
            queue.enqueue(ticket)  # before packing, which may take long: the session is not idle
            with preparing(shown, label):
                shipment = pack(ticket)
            launch = OwnLaunch(plan, shipment, shown, self._engine, ticket)
            if not queue.is_closed:
                _register(self, True)
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

    def _payload(self, function: Any, args: Any = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> Payload:
        """Return a payload, with the notebook's random states and defaults for each rank's first task."""
        ranks = tuple(sorted(self._ranks.unset))  # later it goes on with its own
        settings = replace(payloads.settings(), ranks=ranks) if ranks else Settings()
        return Payload(function, args, dict(kwargs), None, settings, {}, **payloads.effects_of_cells())

    def _pack(
        self,
        payload: Payload,
        used: Iterable[str],
        code: Sequence[Any],
        ticket: Ticket,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> Shipment:
        ranks, name = self._ranks, name_of(payload.function)
        bound = {each.name for names in ranks.bound for each in names}
        try:
            sent = [*code, *payload.attributes.values()]
            gathered = ranks.sent.gather(used, sent, ranks.present, bound, is_idle=ranks.queue.is_first(ticket))
            parts = {name: each.value for name, each in gathered.names.items()}
            parts |= {each if each not in parts else f"{each} of {name}": value for each, value in arguments.items()}
            payload = replace(payload, names=gathered.names)
            return payloads.packed(payload, parts, gathered.home, is_here=ranks.sent.is_here)
        except Exception as error:  # noqa: BLE001  # a user's __reduce__; its frames are nblaunch's own
            if code and isinstance(code[0], types.FunctionType):
                used = [*used, *pickling.globals_used(code[0])]
            suspects = {f"`{each}`": ranks.sent.names[each] for each in used if each in ranks.sent.names}
            suspects |= {f"`args of {name}`": code[1:]} if code else {}
            raise payloads.not_sent(name, suspects.items(), error) from None

    # -------------------------------------------------------------- names
    def push(self, /, *unnamed: Any, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Bind names in the ranks, replacing their values.

        Args:
            unnamed: Not allowed: each value needs a name, as in ``push(lr=0.1)`` or ``push(**{"lr": 0.1})``.
            ranks: The ranks. Default: all.
            values: The values by name.

        Raises:
            ArgumentError: A value has no name, or a name such as ``rank``, which each rank defines.
            PayloadError: A value cannot be sent.
        """
        self._check_open()
        only = self._checked(ranks)
        if unnamed:
            raise ArgumentError(f"push({unnamed[0]!r:.80}): use keywords, as in push(a=1) or push(**{{'a': 1}})")
        provided = min(PROVIDED.intersection(values), default="")
        if provided:
            raise ArgumentError(
                f"{provided}={values[provided]!r:.80}: each rank has its own value of this name; use another name"
                + "; ranks=[0] selects ranks" * (provided == "rank")
            )
        try:
            gathered = self._ranks.sent.gather_pushed(values, self._ranks.present)
        except Exception as error:  # noqa: BLE001  # a user's __reduce__; its frames are nblaunch's own
            suspects = [(f"`{name}`", value) for name, value in values.items()]
            raise payloads.not_sent("push", suspects, error) from None
        pushed = {name: replace(gathered.names[name], ranks=only) for name in values}
        questions.ask(self._ranks, Question("push"), {**gathered.names, **pushed}, home=gathered.home)

    def pull(self, expression: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """Return the value of an expression from each rank.

        Args:
            expression: A name, or an expression of names in the ranks, such as ``"model.state_dict()"``.
            ranks: The ranks to ask, in the order of the result. Default: all.

        Raises:
            NameError: A rank has no such name. Any other exception of the expression is raised as well.
            ArgumentError: One of the ranks is dead, or the expression is invalid.
            ResultError: A value cannot be sent, or cannot be rebuilt in the notebook.
        """
        __tracebackhide__ = True  # IPython omits this frame
        self._check_open()
        wanted = self._checked(ranks) or tuple(range(self.world_size))
        questions.look(self._ranks)
        dead = [rank for rank in wanted if rank in self._ranks.absent]
        if dead and self._ranks.present:
            raise ArgumentError(
                f"pull({expression!r:.80}): rank {dead[0]} is dead; use ranks={self._ranks.present}, or "
                f"restart it: {restart_command(self.name, dead)}"
            )
        answers = questions.ask(self._ranks, Question("value", checked_expression(expression), wanted))
        return [answers[rank] for rank in wanted]

    def __getitem__(self, rank: int) -> RankNames:
        self._check_open()
        if not arguments.is_rank(rank, self.world_size):
            known = arguments.ranks_in_words(self.world_size)
            raise ArgumentError(f"session[{rank!r:.80}]: must be a rank, as in session[0]['name']; {known}")
        return RankNames(int(rank), self)

    def lines_of(self, rank: int) -> list[str]:
        """Return a line for each name that a rank has bound; for a dead rank, how to restart it."""
        self._check_open()
        questions.look(self._ranks)
        if rank in self._ranks.absent:
            return [self.state().dead_line(rank)]
        return [line_of(each) for each in sorted(self._ranks.bound[rank], key=lambda each: each.name)]

    def who(self) -> list[tuple[Bound, ...]]:
        """Return the name, type, shape and memory of each variable of each rank, as of the end of its last task."""
        return self._ranks.bound

    def complete(self, text: str) -> list[str]:
        """Return the names that complete `text` in the ranks; while they are busy, those known from their last task."""
        known = sorted({each.name for names in self.who() for each in names if each.name.startswith(text)})
        if self._ranks.queue:
            return known
        try:
            answers = questions.ask(self._ranks, Question("complete", text), within=timeouts.QUESTION_TIMEOUT_S)
        except NblaunchError:  # busy or dead
            return known
        except Exception:  # noqa: BLE001  # a property of the user's raised
            return []
        return sorted({name for names in answers.values() for name in names})

    def debug(self, rank: int | None = None) -> None:
        """Open the debugger on the exception of the last task. Its frames are kept until the next task begins.

        Args:
            rank: The rank. Default: the one that failed first.

        Raises:
            ArgumentError: There is no such exception, or input is not possible.
        """
        self._check_open()
        chosen = self._ranks.failed_first if rank is None else rank
        if chosen is None:
            raise ArgumentError(f"session {self.name}: the last task raised no exception to debug")
        self._checked([chosen])
        if not host().can_type():
            raise ArgumentError("debug: input is not possible here; use pull('x', ranks=[0]) to inspect values")
        question = Question("debug", "%distributed debug", (chosen,))

        def pack(ticket: Ticket) -> Shipment:
            packed = self._pack(Payload(question, (), {}, None, Settings(), {}), (), (), ticket)
            return replace(packed, sources=self._ranks.last_sources)

        if not self._submit(question.text, pack, "auto", True)[chosen]:  # type: ignore[index]  # it is a LaunchResult
            raise ArgumentError(f"rank={chosen}: this rank raised no exception in the last task")

    # -------------------------------------------------------------- life
    def restart(self, ranks: Sequence[int] | None = None, *, keep: bool = False) -> None:
        """Start ranks again, dead or alive, and replace the process group.

        Args:
            ranks: The ranks. Default: all, which also adopts the notebook's current working directory.
            keep: Give each new rank the variables of the old rank, if that is alive. Default: False. A warning names
                variables that cannot be sent. Shared tensors and modules stay shared; other shared objects are copied.
                Of a DistributedDataParallel, only the module is kept.

        Raises:
            StartError: A rank cannot be started, or does not respond.
        """
        self._check_open()
        lost: list[str] = []
        try:
            questions.restart(self._ranks, self._checked(ranks) or range(self.world_size), keep, lost)
        finally:
            if lost:
                warn("the restart could not keep these names: " + "; ".join(lost), each_time=True)

    def regroup(self) -> None:
        """Replace the process group with the next task: objects of the old group are stale."""
        self._check_open()
        self._ranks.disturb()

    def stale_names(self) -> str:
        """Return a text with the names that belong to a replaced process group; empty if there are none."""
        return stale_names(self._ranks)

    def stop(self) -> None:
        """Stop the running task, then end the ranks. An interrupt meanwhile kills the ranks. Idempotent."""
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
            _register(self, False)
        if interrupt is not None:
            raise interrupt

    @property
    def is_open(self) -> bool:
        """Return True until the session is stopped."""
        return not self._ranks.is_ended

    def status(self) -> str:
        """Return the state of each rank, and the number and size of its variables, as text."""
        questions.look(self._ranks)
        return self.state().text()

    def state(self) -> SessionState:
        ranks = self._ranks
        running, *queued = [each.label or "a question" for each in ranks.queue.tickets] or [""]
        of_ranks = []
        for rank, names in enumerate(ranks.bound):
            pid = ranks.group.members[rank].pid if ranks.has_process(rank) else 0  # it may have died meanwhile
            size, host = sum(each.size for each in names), ranks.plan.places[rank].host
            of_ranks.append(RankHolding(rank, pid, len(names), size, host))
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
        while self.is_open and self._idle_timeout is not None:
            is_due = time.monotonic() - self._ranks.idle_since >= self._idle_timeout
            if is_due and self._ranks.queue.close_if_empty():  # a cell that begins now is not interrupted
                self.was_idle = True
                self.stop()
            time.sleep(min(timeouts.SESSION_POLL_S, self._idle_timeout))


class RankNames:
    """The names of one rank of a session: ``session[0]["model"]`` is the repr of its value there."""

    def __init__(self, rank: int, session: Session) -> None:
        self._rank, self._session = rank, session

    def __getitem__(self, expression: str) -> Shown:
        __tracebackhide__ = True  # IPython omits this frame
        self._session._check_open()
        question = Question("repr", checked_expression(expression), (self._rank,))
        text = str(questions.ask(self._session._ranks, question)[self._rank])
        return Shown(text, expression.strip(), self._rank)

    def __setitem__(self, name: str, value: object) -> NoReturn:
        raise ArgumentError(
            f"session[{self._rank}][{name!r}] = ...: use session.push({name}=..., ranks=[{self._rank}])"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copy and pickle look for
            raise AttributeError(name)
        raise AttributeError(f"session[{self._rank}].{name}: use session[{self._rank}][{name!r}]")

    def __repr__(self) -> str:
        return "\n".join(self._session.lines_of(self._rank)) or "(no names)"

    def _ipython_key_completions_(self) -> list[str]:
        return [each.name for each in self._session.who()[self._rank]]


class Shown(str):
    """The repr of a rank's value. A notebook shows it without quotes, and how to get the value."""

    _expression: str
    _rank: int

    def __new__(cls, text: str, expression: str, rank: int) -> Shown:
        shown = super().__new__(cls, text)
        shown._expression, shown._rank = expression, rank
        return shown

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def __repr__(self) -> str:
        return f"{self}\n# repr only; session.pull({self._expression!r}, ranks=[{self._rank}]) returns the value"


# ------------------------------------------------------------------ the sessions of this kernel
class Ended(NamedTuple):
    """What cells are told of a session that has ended. The session itself holds descriptors."""

    name: str
    start_again: str
    was_idle: bool


_sessions: dict[str, Session] = {}
_active: str = ""
"""The session that was started or used last."""
_ended: Ended | None = None
"""The session that cells ran in before it ended, until they run in another."""
_is_unreported = False
"""No cell has asked for `_ended` yet."""


@partial(named_arguments, more=taken_by("session"))
def session(
    num_processes: int | None = None,
    *,
    name: str = DEFAULT_NAME,
    idle_timeout: float | None = None,
    **options: Any,
) -> Session:
    """Start persistent ranks, which keep their variables until the session is stopped or the kernel ends.

    While a session is active, ``%%distributed`` cells run in it.

    Args:
        num_processes: The number of ranks per node. Default: as for `nblaunch.notebook_launcher`.
        name: The name of the session; several sessions can run at once. Default: ``"main"``. If a session of this name
            is running, it is returned; arguments that are given must be those that it was started with.
        idle_timeout: Stop the session after this many seconds without a task. Default: None, never.
        options: ``engine``, ``num_nodes``, ``device``, ``backend``, ``start_method`` (``"forkserver"`` or ``"spawn"``),
            ``threads_per_rank``, ``env``, ``mixed_precision``, ``stop_grace`` and ``metric_patterns``, as for
            `nblaunch.notebook_launcher`.

    Raises:
        ArgumentError: An argument is invalid, or a session of this name has other arguments. Nothing was started.
        StartError: The ranks could not be started.

    Example:
        >>> with nblaunch.session(2) as s:  # doctest: +SKIP
        ...     s.push(lr=0.1)
        ...     list(s.run(lambda rank: rank * lr))
    """
    refuse_nested()
    if not str(name).isidentifier():
        raise ArgumentError(f"name={name!r}: must be a valid identifier")
    given = {"num_processes": num_processes, "idle_timeout": idle_timeout, **options}
    given = {option: value for option, value in given.items() if value is not None}
    while (running := find(name)) is not None and running._ranks.queue.is_closed:  # it is about to end
        time.sleep(timeouts.LOG_POLL_S)
    if running is not None:
        running._ranks.idle_since = time.monotonic()
        return _same(running, given)
    timeout = None if idle_timeout is None else seconds("idle_timeout", idle_timeout)
    checked = Options(num_processes=num_processes, **options)
    shown = host().view("auto")
    engine, plan = planned(checked, shown)
    if plan.method == "fork":  # with the kernel's memory as it was then
        raise ArgumentError(f"start_method={plan.method!r}: not available in sessions; use 'forkserver' or 'spawn'")
    plan = with_usable_method(plan, engine, shown)
    made = Session(name, plan, namespace_of_notebook(), engine, timeout, given)
    made.start()
    return made


def _same(running: Session, given: Mapping[str, Any]) -> Session:
    for option in sorted(given):
        has, wanted = running.given.get(option, "default"), given[option]
        if has != wanted:
            raise ArgumentError(
                f"{option}={wanted!r:.80}: session {running.name} is already running with {option}={has!r:.80}. "
                f"{command(running.name, 'stop')} ends it; another name= starts a second session"
            )
    ranks = f"{running.world_size} rank{'s' * (running.world_size != 1)}"
    said = f"is running: {ranks}, with the variables of earlier cells"
    questions.look(running._ranks)
    while running._ranks.are_dead and running._ranks.queue:  # a restart may bring some
        time.sleep(timeouts.LOG_POLL_S)
    if running._ranks.are_dead:
        running.restart()
        said = f"had lost its ranks and their variables: started {ranks} again"
    elif dead := no_group(running.name, running._ranks.absent):
        said = f"is running, but {dead}"
    host().writer()(f"session {running.name} {said}\n", "out")
    _register(running, True)
    return running


def _register(session: Session, is_live: bool) -> None:
    """Note a session that cells run in from now on, or one that was stopped."""
    global _active, _ended, _is_unreported
    if is_live:
        _sessions.pop(session.name, None)  # the one used last is the last
        _sessions[session.name] = session
        _active, _ended, _is_unreported = session.name, None, False
        return
    if _sessions.get(session.name) is not session:  # it was stopped before; another may have its name
        return
    del _sessions[session.name]
    if _active == session.name:
        _active, _is_unreported = next(reversed(_sessions), ""), True
        _ended = Ended(session.name, session._ranks.start_again, session.was_idle)


def find(name: str | None = None) -> Session | None:
    """Return a session by name, or the one that cells run in; None if there is none."""
    return _sessions.get(_active if name is None else name)


def take_ended() -> Ended | None:
    """Return the session that cells ran in before it ended; once, then None."""
    global _is_unreported
    ended, _is_unreported = _ended if _is_unreported else None, False
    return ended


def how_to_start() -> str:
    """Say that there is no session for cells, and how to start one."""
    if _ended is not None:
        return f"session {_ended.name} has ended: {_ended.start_again}"
    return f"there is no session: start one with {command(DEFAULT_NAME, '-n 2')}"


def live_sessions() -> Mapping[str, Session]:
    return dict(_sessions)
