"""Sessions in magics: ``%distributed session``, ``who`` and ``auto``, and cells that run in a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.core.error import UsageError

from nblaunch.engines import current
from nblaunch.launch import live_sessions
from nblaunch.launch.frontend import host
from nblaunch.launch.handle import live_launches
from nblaunch.launch.live_sessions import session
from nblaunch.launch.options import taken_by
from nblaunch.launch.session import Session
from nblaunch.launch.session_state import DEFAULT_NAME, command
from nblaunch.machine.arguments import ranks_in_words
from nblaunch.notebook.auto_cells import set_auto
from nblaunch.notebook.cells import names_used
from nblaunch.notebook.notebook_frontend import NotebookFrontend
from nblaunch.wire.messages import Cell

ACTIONS = ("auto", "debug", "session", "who")
SESSION_ACTIONS = ("regroup", "restart", "status", "stop")


def chosen_session(name: str | None, option: str = "--session") -> Session | None:
    """Return the session of this name, or the one that cells run in; None if there is none.

    Args:
        name: The name; None: that of the session used last.
        option: By which the user has named it.

    Raises:
        UsageError: There is no session of this name.
    """
    found = live_sessions.find(name)
    if found is None and name is not None:
        known = ", ".join(live_sessions.live_sessions())
        raise UsageError(
            f"{option} {name}: there is no such session; {f'there are {known}' if known else 'start it with '}"
            f"{'' if known else command(name, '-n 2')}"
        )
    return found


def of_cell(name: str | None) -> tuple[Session | None, str]:
    """Return the session that a cell runs in, if any, and what to show first: its session may have ended.

    Raises:
        UsageError: There is no session of this name, or it has ended unasked.
    """
    found = chosen_session(name)
    ended = live_sessions.take_ended() if name is None else None
    if ended is None:
        return found, ""
    if ended.was_idle:
        where = f"in session {found.name}" if found is not None else "on ranks of its own"
        raise UsageError(
            f"session {ended.name} has ended, with its variables: it was idle for its --idle-timeout. To go on, "
            f"{ended.start_again}, or run the cell again {where}"
        )
    does = f"runs in session {found.name}" if found is not None else "gets ranks of its own"
    return found, f"session {ended.name} has ended, with its variables: this cell {does}; {ended.start_again}"


def check_ranks(typed: str, ranks: Sequence[int] | None, world_size: int) -> None:
    """Raise an error if a rank does not exist.

    Args:
        typed: What the user has typed, such as ``--ranks 7``.
        ranks: The ranks; None: all.
        world_size: The number of ranks.

    Raises:
        UsageError: A rank does not exist.
    """
    if ranks is not None and not set(ranks) <= set(range(world_size)):
        raise UsageError(f"{typed}: {ranks_in_words(world_size)}")


def run_cell(
    session: Session,
    cell: Cell,
    names: Mapping[str, Any],
    view: str,
    background: bool,
    chosen: Mapping[str, Any],
    option_of: Callable[[str], str],
) -> Any:
    """Run a cell in a session; return its result, or a `Launch` for the background.

    Raises:
        UsageError: An option does not fit a session.
    """
    __tracebackhide__ = True  # IPython omits this frame
    for option in chosen:
        if option == "num_processes" and chosen[option] == session.world_size:
            continue
        if option not in taken_by("cell"):
            raise UsageError(
                f"{option_of(option)} {chosen[option]}: session {session.name} has its ranks already; use "
                "--fresh for ranks of the cell's own"
            )
    options = {name: value for name, value in chosen.items() if name in taken_by("cell")}
    return session.run_cell(cell, names_used(cell, names), view=view, block=not background, **options)


def act(shell: Any, action: str, words: Sequence[str], given: dict[str, Any], option_of: Callable[[str], str]) -> str:
    """Do what ``%distributed session``, ``who`` or ``auto`` asks for; return what to show, if anything.

    Args:
        shell: IPython's.
        action: One of `ACTIONS`.
        words: What follows it.
        given: The options, by the names of the parameters.
        option_of: Returns the option of a parameter, as in ``--num-processes``.

    Raises:
        UsageError: The line is wrong.
        ArgumentError: The value of an option is invalid.
    """

    def allow(*options: str) -> None:
        for name in given:
            if name not in options:
                raise UsageError(f"{option_of(name)}: not an option of this action")

    if action == "auto":
        allow()
        return _auto(shell, words)
    if action == "who":
        allow("name", "session")
        if words:
            raise UsageError(f"%distributed who {' '.join(words)}: write --name for the session of a name")
        return _who(_named(given))
    waiting = [each for each in live_launches() if each.console.stopped]
    if action == "debug" and waiting and not (given or words):
        waiting[0].wait()
        return ""
    if action == "debug":
        allow("name", "session", "rank")
        _debug(_named(given), words, given.get("rank") or ())
        return ""
    return _session(shell, words, given, allow)


def _debug(session: Session, words: Sequence[str], ranks: Sequence[int]) -> None:
    if words or len(ranks) > 1:
        raise UsageError("%distributed debug: write --rank 1 for another rank than the first to fail, and nothing else")
    if ranks:
        check_ranks(f"--rank {ranks[0]}", ranks, session.world_size)
    session.debug(*ranks)


def _shows_html() -> bool:
    """Return True if the session's own display shows its state."""
    frontend = host()
    return isinstance(frontend, NotebookFrontend) and frontend.shows_html()


def _auto(shell: Any, words: Sequence[str]) -> str:
    if list(words) not in (["on"], ["off"]):
        raise UsageError("%distributed auto: write %distributed auto on, or %distributed auto off")
    is_on = words[0] == "on"
    if is_on:
        _named({})
    host().cells()  # those before this one ran here
    set_auto(shell, is_on)
    return "every cell runs in the session; %%local on top of a cell runs it here" if is_on else "cells run here again"


def _session(shell: Any, words: Sequence[str], given: dict[str, Any], allow: Callable[..., None]) -> str:
    action = words[0] if words else "start"
    if len(words) > 1 or action not in ("start", *SESSION_ACTIONS):
        typed, known = f"%distributed session {' '.join(words)}", ", ".join(SESSION_ACTIONS)
        if len(words) == 2 and action in SESSION_ACTIONS:
            raise UsageError(f"{typed}: write {command(words[1], action)} for the session of this name")
        raise UsageError(f"{typed}: write -n 2 to start one, or {known}")
    if action == "start":
        allow(*taken_by("session"), "name", "session", "idle_timeout", "output")
        given.setdefault("name", given.pop("session", None) or DEFAULT_NAME)
        output = given.pop("output", None)
        started = session(**given)
        if output is not None:
            shell.user_ns[output] = started
        return "" if _shows_html() else started.status()
    allow("name", "session", *(("rank", "keep") if action == "restart" else ()))
    found = _named(given)
    if action == "restart":
        ranks = given.get("rank")
        check_ranks(f"--rank {','.join(map(str, ranks or ()))}", ranks, found.world_size)
        found.restart(ranks, keep=bool(given.get("keep")))
    elif action == "regroup":
        found.regroup()
    elif action == "stop":
        found.stop()
        return f"session {found.name} stopped"
    stale = found.stale_names() if action in ("restart", "regroup") else ""
    others = [name for name in live_sessions.live_sessions() if name != found.name] if action == "status" else []
    more = f"other sessions: {', '.join(others)} (--name chooses one)" if others else ""
    return "\n".join(filter(None, [found.status(), stale, more]))


def _named(given: Mapping[str, Any]) -> Session:
    """Return the session that these options name."""
    option = "session" if "session" in given else "name"
    if given.get("name", given.get(option)) != given.get(option):
        raise UsageError(f"--session {given['session']} --name {given['name']}: both name the session; write one")
    found = chosen_session(given.get(option), f"--{option}")
    if found is None:
        raise UsageError(live_sessions.how_to_start())
    return found


def _who(session: Session) -> str:
    lines = []
    for rank in range(session.world_size):
        lines += [f"rank {rank}", *(f"  {line}" for line in session.lines_of(rank))]
    return "\n".join(lines)


def release() -> str:
    """Give the nodes of other machines back, and end the sessions there; return what was done, as lines."""
    on_nodes = [each for each in live_sessions.live_sessions().values() if any(r.host for r in each.state().ranks)]
    for each in on_nodes:
        each.stop()
    lines = [f"stopped session {each.name}" for each in on_nodes]
    return "\n".join([*lines, *(f"released {line}" for line in current.release())]) or "no nodes are held"
