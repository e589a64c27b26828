"""The sessions of this kernel that have not been stopped, and which of them cells run in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from nblaunch.engines import current
from nblaunch.errors import ArgumentError
from nblaunch.launch.api import refuse_nested
from nblaunch.launch.frontend import host
from nblaunch.launch.machines import machines_of, with_usable_method
from nblaunch.launch.options import Options, taken_by
from nblaunch.launch.payload import namespace_of_notebook
from nblaunch.launch.plan import ANY_MACHINE, make_plan
from nblaunch.launch.session import Session
from nblaunch.launch.session_state import DEFAULT_NAME, command
from nblaunch.machine.arguments import named_arguments, seconds


class Ended(NamedTuple):
    """What cells are told of a session that has ended. The session itself holds descriptors."""

    name: str
    start_again: str
    was_idle: bool


_sessions: dict[str, Session] = {}
"""By name."""
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
    """Start ranks that stay, with their variables, until the session is stopped or the kernel ends.

    While a session is active, ``%%distributed`` cells run in it.

    Args:
        num_processes: The number of ranks, on each node. Default: one per visible GPU; without a GPU 2, or on several
            nodes 1 each.
        name: Names the session; several may live side by side. Default: ``"main"``. If a session of this name lives
            and was started with the same arguments, it is returned.
        idle_timeout: Stop the session after this many seconds without a task. Default: None, never.
        options: ``engine``, ``num_nodes``, ``device``, ``backend``, ``start_method`` (``"forkserver"`` or ``"spawn"``),
            ``threads_per_rank``, ``env``, ``mixed_precision``, ``stop_grace`` and ``metric_patterns``, as for
            `nblaunch.notebook_launcher`.

    Raises:
        ArgumentError: An argument is invalid, or a session of this name lives that has others. Nothing was started.
        StartError: The ranks could not be started.

    Example:
        >>> with nblaunch.session(2) as s:  # doctest: +SKIP
        ...     s.push(lr=0.1)
        ...     list(s.run(lambda rank: rank * lr))
    """
    refuse_nested()
    if not str(name).isidentifier():
        raise ArgumentError(f"name={name!r}: must be a Python name")
    given = {"num_processes": num_processes, "idle_timeout": idle_timeout, **options}
    given = {option: value for option, value in given.items() if value is not None}
    running = find(name)
    if running is not None:
        return _same(running, given)
    timeout = None if idle_timeout is None else seconds("idle_timeout", idle_timeout)
    checked = Options(num_processes=num_processes, **options)
    engine = current.chosen(checked.engine, checked.num_nodes)
    if not engine.is_local:
        make_plan([ANY_MACHINE], engine, checked)  # before a node is asked for
    shown = host().view("auto")
    plan = make_plan(machines_of(engine, shown), engine, checked)
    if plan.method == "fork":  # with the kernel's memory as it was then
        raise ArgumentError(
            f"start_method={plan.method!r}: a session's ranks are not forks of the notebook; use 'forkserver' or "
            "'spawn'"
        )
    plan = with_usable_method(plan, engine, shown)
    made = Session(name, plan, namespace_of_notebook(), engine, timeout, _register, given)
    made.start()
    return made


def _same(running: Session, given: Mapping[str, Any]) -> Session:
    for option in sorted({*given, *running.given}):
        has, wanted = running.given.get(option, "default"), given.get(option, "default")
        if has != wanted:
            raise ArgumentError(
                f"{option}={wanted!r:.80}: session {running.name} is running, with {option}={has!r:.80}. "
                f"{command(running.name, 'stop')} ends it; another name= starts another session beside it"
            )
    ranks = f"{running.world_size} rank{'s' * (running.world_size != 1)}"
    host().writer()(f"session {running.name} is running: {ranks}, with the variables of earlier cells\n", "out")
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
        _ended = Ended(session.name, session.start_again, session.was_idle)


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
