"""The lines of ``%%distributed`` and ``%distributed``: parsers, sub-commands, and the sessions that cells run in."""

from __future__ import annotations

import difflib
import functools
import keyword
import re
import shlex
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser, MagicHelpFormatter
from IPython.utils.process import arg_split  # type: ignore[attr-defined]  # a name that it imports

from nblaunch.engines import current
from nblaunch.errors import ArgumentError, NblaunchError
from nblaunch.launch import api
from nblaunch.launch import session as live_sessions
from nblaunch.launch.attached import attached
from nblaunch.launch.frontend import host
from nblaunch.launch.handle import INSIST, PROFILE_S, OwnLaunch, live_launches
from nblaunch.launch.options import TABLE, flag_of, profile_seconds, taken_by
from nblaunch.launch.session import Session, session
from nblaunch.launch.session_state import DEFAULT_NAME
from nblaunch.launch.session_state import command as command_line
from nblaunch.machine import timeouts
from nblaunch.machine.arguments import ranks_in_words
from nblaunch.machine.segments import in_words
from nblaunch.notebook.cells import set_auto
from nblaunch.notebook.notebook_frontend import NotebookFrontend
from nblaunch.transfer.parcel import sent_data_cache

_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\]"""
_METRIC = re.compile(rf"(?<!\S)(--metrics?)(?:=|\s+(?!-))((?:{_QUOTED})+)(?!\S)")
"""The option, or what is often written for it, and its pattern: quoted as in a shell, with backslashes kept."""

_METAVARS: dict[Any, dict[str, str]] = {int: {"metavar": "N"}, float: {"metavar": "SECONDS"}}
"""By the type of an option."""


class LineParser(MagicArgumentParser):
    """The parser of a magic's line. Options that are not given have no value."""

    def __init__(self, name: str, about: str, usage: str | None = None) -> None:
        formatter = functools.partial(MagicHelpFormatter, max_help_position=27, width=100)
        super().__init__(name, usage, about, argument_default=SUPPRESS, formatter_class=formatter)
        self.allow_abbrev = False

    def values(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the values of the words by name."""
        parsed, unknown = self.parse_known_args(words)
        if not unknown:
            return vars(parsed)
        said = f"unrecognized arguments: {' '.join(unknown)}"
        if "engine" in parsed:
            quoted = " ".join([parsed.engine, *map(shlex.quote, unknown)])
            raise UsageError(f'{said}; quote the engine and its options: --engine "{quoted}"')
        typed = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(typed, self._option_string_actions, n=1) if typed.startswith("--") else []
        takes_ranks = any(action.dest == "num_processes" for action in self._actions)
        if typed.replace("_", "-") == "--nproc-per-node" and takes_ranks:  # torchrun's
            near = ["-n"]
        if near:
            raise UsageError(f"{said}: did you mean {near[0]}?")
        is_long = self.usage is not None or len(self.usage_line) > 90
        raise UsageError(f"{said}; {'%distributed help lists the options' if is_long else f'usage: {self.usage_line}'}")

    @property
    def usage_line(self) -> str:
        return " ".join(self.format_usage().removeprefix("::").split())


def argument(*flags: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the arguments of one call of ``add_argument``."""
    return flags, settings


def parsing_of(name: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return what ``add_argument`` takes for an option of the table."""
    option = TABLE[name]
    settings = {"dest": name, "help": option.help, **_METAVARS.get(option.parsing.get("type"), {}), **option.parsing}
    return option.flags or (flag_of(name),), settings


def words_of(line: str, expand: Callable[[str], str]) -> list[str]:
    """Return the words of the magic's line: patterns as typed, the rest expanded."""
    first, *parts = _METRIC.split(line)
    try:
        words = arg_split(expand(first), posix=True)  # without the quotes of 'ssh gpu1 gpu2'
        for option, pattern, rest in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            unquoted = "".join(part[1:-1] if part[0] in "'\"" else part for part in re.findall(_QUOTED, pattern))
            words += [f"{option}={unquoted}", *arg_split(expand(rest), posix=True)]
    except ValueError:
        raise UsageError(f"%%distributed {line}: unclosed quote") from None
    return words


def ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text}: must be comma-separated ranks, as in 0,2") from None


def python_name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ArgumentTypeError(f"{text}: must be a valid Python name")
    return text


def in_flags(error: Exception) -> UsageError:
    """Return the error for a user of the magic: ``num_processes=0: …`` becomes ``--num-processes 0: …``."""
    name, equals, rest = str(error).partition("=")
    if not equals or not name.isidentifier():
        return UsageError(str(error))
    if name == "metric_patterns":
        rest = rest.replace(r"\\", "\\")  # cells do not double backslashes
    rest = re.sub(r"\b(\w+)=(?=['\d])", lambda m: f"{flag_of(m[1])} " if m[1] in TABLE else m[0], rest)
    return UsageError(f"{flag_of(name)} {rest}")


# ------------------------------------------------------------------ sub-commands
class Command(NamedTuple):
    """A sub-command: `run` takes the shell and the parser's values, and returns what to show."""

    parser: LineParser
    run: Callable[..., str]


COMMANDS: dict[str, Command] = {}
"""By name, such as ``session restart``."""


def command(
    name: str, *arguments: tuple[tuple[str, ...], dict[str, Any]], options: Sequence[str] = ()
) -> Callable[[Callable[..., str]], Callable[..., str]]:
    def register(run: Callable[..., str]) -> Callable[..., str]:
        parser = LineParser(f"distributed {name}", run.__doc__ or "")
        for flags, settings in arguments:
            parser.add_argument(*flags, **settings)
        for option in options:
            if TABLE[option].help:
                flags, settings = parsing_of(option)
                parser.add_argument(*flags, **settings)
        COMMANDS[name] = Command(parser, run)
        return run

    return register


_NAME = argument("--name", "--session", dest="name", help="the session; default: the most recently used one")
_ABOUT = """\
Control launches and sessions. (%%distributed, with two %, runs a cell on every rank.)

    %distributed session -n 2 -o s   # start ranks that keep running, with their variables
    %distributed session stop        # end them
"""
_RANK = argument("--rank", type=ranks, action="extend", help="restart only this rank, or several, as in --rank 0,2")


def command_of(words: Sequence[str]) -> str:
    """Return the name of the sub-command that words begin with; empty if there is none."""
    return next((name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS), "")


def run(shell: Any, words: Sequence[str]) -> str:
    """Run the sub-command that these words name; return what to show."""
    name = command_of(words)
    if not name:
        typed = f"%distributed {' '.join(words)}".strip()
        first = ", ".join(dict.fromkeys(each.split()[0] for each in COMMANDS))
        raise UsageError(f"{typed}: expected one of {first}; to run a cell, write %%distributed in its first line")
    try:
        return COMMANDS[name].run(shell, **COMMANDS[name].parser.values(words[len(name.split()) :]))
    except ArgumentError as error:
        raise in_flags(error) from None


# ------------------------------------------------------------------ launches
@command("status")
def _status(shell: Any) -> str:
    """List live launches, sessions, the fork server, nodes, and the cached data."""
    kept = f"cached for the next launch: {in_words(sent_data_cache.size)} of data from earlier launches"
    sessions = [session.status() for session in live_sessions.live_sessions().values()]
    return "\n".join(
        [*map(repr, [*live_launches(), *attached()]), *sessions, *current.status(), *[kept][: sent_data_cache.size]]
    )


@command("stacks")
def _stacks(shell: Any) -> str:
    """Show the stacks of all ranks."""
    lines = []
    for launch in live_launches():
        lines.append(repr(launch))
        for rank, text in launch.stacks().items():
            lines += ["", f"rank {rank}", *(f"  {line}".rstrip() for line in text.splitlines())]
    return "\n".join(lines or ["no launch is running"])


_SECONDS = argument("--seconds", type=float, default=PROFILE_S, help="how long to record; default 2")


@command("profile", _SECONDS)
def _profile(shell: Any, seconds: float) -> str:
    """Profile the ranks of all launches: where their time goes."""
    profile_seconds("--seconds", seconds)
    texts = []
    for launch in {each.id: each for each in [*live_launches(), *attached()]}.values():  # a run may have two handles
        try:
            texts.append(f"{launch!r}\n{launch.profile(seconds)!r}")
        except NblaunchError as error:  # it has ended meanwhile, or does not run yet
            texts.append(str(error))
    return "\n\n".join(texts) or "no launch is running"


@command("stop")
def _stop(shell: Any) -> str:
    """Stop all launches."""
    launches = live_launches()
    for launch in launches:
        launch.stop()
    for interrupts in (1, 2):
        try:
            _wait_for(launches)
            break
        except KeyboardInterrupt:
            if interrupts == 1 and any(launch.keeps_ranks for launch in launches):
                show(INSIST)
            for launch in launches:
                if interrupts == 2 or not launch.keeps_ranks:
                    launch.kill()
    _wait_for(launches)
    return f"stopped {len(launches)} launch{'' if len(launches) == 1 else 'es'}"


def _wait_for(launches: list[OwnLaunch]) -> None:
    for launch in launches:
        while not launch.wait(timeouts.SIGNAL_CHECK_INTERVAL_S):
            pass


@command("release")
def _release(shell: Any) -> str:
    """Stop the ranks on other machines, and release their nodes."""
    on_nodes = [each for each in live_sessions.live_sessions().values() if any(r.host for r in each.state().ranks)]
    for each in on_nodes:
        each.stop()
    lines = [f"stopped session {each.name}" for each in on_nodes]
    return "\n".join([*lines, *(f"released {line}" for line in current.release())]) or "no nodes are held"


@command("clear-cache")
def _clear_cache(shell: Any) -> str:
    """Free the cached data of earlier launches."""
    return f"freed {in_words(sent_data_cache.free())}"


@command("preload", argument("modules", nargs="+", metavar="NAME", help="a module, such as torchvision.transforms"))
def _preload(shell: Any, modules: list[str]) -> str:
    """Import modules in advance, so that later launches start faster."""
    try:
        api.preload(modules)
    except ArgumentError as error:
        raise UsageError(f"%distributed {str(error).replace('=', ' ', 1)}") from None
    return ""


# ------------------------------------------------------------------ sessions
def chosen_session(name: str | None, option: str = "--session") -> Session | None:
    """Return the session of this name, or the one used last; None if there is none."""
    found = live_sessions.find(name)
    if found is None and name is not None:
        known = ", ".join(live_sessions.live_sessions())
        there = f"running: {known}" if known else f"start it with {command_line(name, '-n 2')}"
        raise UsageError(f"{option} {name}: no such session; {there}")
    return found


def session_of_cell(name: str | None) -> Session | None:
    """Return the session that a cell runs in, if any; tell the user of one that has ended."""
    found = chosen_session(name)
    ended = live_sessions.take_ended() if name is None else None
    if ended is None:
        return found
    where = f"in session {found.name}" if found is not None else "on new ranks"
    if ended.was_idle:
        raise UsageError(
            f"session {ended.name} ended after its --idle-timeout, and its variables are lost: {ended.start_again}, "
            f"or run the cell again {where}"
        )
    show(f"session {ended.name} has ended, and its variables are lost: this cell runs {where}; {ended.start_again}")
    return found


def check_ranks(typed: str, chosen: Sequence[int] | None, world_size: int) -> None:
    """Raise a UsageError that begins with `typed` if a rank does not exist."""
    if chosen is not None and not set(chosen) <= set(range(world_size)):
        raise UsageError(f"{typed} {','.join(map(str, chosen))}: {ranks_in_words(world_size)}")


def _running(name: str | None) -> Session:
    found = chosen_session(name, "--name")
    if found is None:
        raise UsageError(live_sessions.how_to_start())
    return found


_OUTPUT = argument("-o", "--output", type=python_name, metavar="NAME", help="store the session in this variable")
_IDLE = argument("--idle-timeout", type=float, metavar="SECONDS", help="stop after this long without a task")


@command("session", _NAME, _IDLE, _OUTPUT, options=taken_by("session"))
def _start(shell: Any, name: str = DEFAULT_NAME, output: str | None = None, **options: Any) -> str:
    """Start a session: ranks that keep running between cells, with their variables."""
    started = session(name=name, **options)
    if output is not None:
        shell.user_ns[output] = started
    frontend = host()
    is_shown = isinstance(frontend, NotebookFrontend) and frontend.can_update()
    return "" if is_shown else started.status()


@command("session status", _NAME)
def _session_status(shell: Any, name: str | None = None) -> str:
    """Show a session's current task and its ranks."""
    found = _running(name)
    others = ", ".join(each for each in live_sessions.live_sessions() if each != found.name)
    return found.status() + (f"\nother sessions: {others} (--name chooses one)" if others else "")


_KEEP = argument("--keep", action="store_true", help="copy the variables of the old ranks to the new ones")


@command("session restart", _NAME, _RANK, _KEEP)
def _restart(shell: Any, name: str | None = None, rank: Sequence[int] | None = None, keep: bool = False) -> str:
    """Restart a session's ranks, or one. --keep copies the variables of each old rank to the new one."""
    found = _running(name)
    check_ranks("--rank", rank, found.world_size)
    found.restart(rank, keep=keep)
    return "\n".join(filter(None, [found.status(), found.stale_names()]))


@command("session regroup", _NAME)
def _regroup(shell: Any, name: str | None = None) -> str:
    """Recreate a session's process group; the ranks keep their variables."""
    found = _running(name)
    found.regroup()
    return "\n".join(filter(None, [found.status(), found.stale_names()]))


@command("session stop", _NAME)
def _session_stop(shell: Any, name: str | None = None) -> str:
    """Stop a session."""
    found = _running(name)
    found.stop()
    return f"session {found.name} stopped"


@command("who", _NAME)
def _who(shell: Any, name: str | None = None) -> str:
    """List the variables of a session's ranks."""
    found = _running(name)
    lines = []
    for rank in range(found.world_size):
        lines += [f"rank {rank}", *(f"  {line}" for line in found.lines_of(rank))]
    return "\n".join(lines)


@command("debug", _NAME, argument("--rank", type=int, help="the rank to debug; default: the first that failed"))
def _debug(shell: Any, name: str | None = None, rank: int | None = None) -> str:
    """Debug a background launch that waits in the debugger, else the last error in a session."""
    waiting = [each for each in (*live_launches(), *attached()) if each.console.states]
    if waiting and name is None and rank is None:
        waiting[0].wait()
        return ""
    found, chosen = _running(name), [] if rank is None else [rank]
    check_ranks("--rank", chosen, found.world_size)
    found.debug(*chosen)
    return ""


@command("auto", argument("state", choices=("on", "off")))
def _auto(shell: Any, state: str) -> str:
    """Run every cell in the session (on), or in the notebook (off). %%local runs one cell in the notebook."""
    if state == "on":
        _running(None)
    host().cells()  # those before this one ran here
    set_auto(shell, state == "on")
    if state == "on":
        return "every cell now runs in the session; write %%local in a cell's first line to run it in the notebook"
    return "cells run in the notebook again"


def help_text() -> str:
    return "\n".join([_ABOUT, *(f"{parser.usage_line}\n    {parser.description}" for parser, _ in COMMANDS.values())])


def show(text: str) -> None:
    from IPython.display import display

    if text:
        display({"text/plain": text}, raw=True)
