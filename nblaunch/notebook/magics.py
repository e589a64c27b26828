"""The magics: ``%%distributed`` runs a cell on N ranks; ``%distributed`` controls launches, sessions and servers."""

from __future__ import annotations

import re
from typing import Any

from IPython.core import magic
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from nblaunch.errors import ArgumentError, PayloadError
from nblaunch.launch import api
from nblaunch.launch import payload as payloads
from nblaunch.launch.export import export_cell
from nblaunch.launch.options import Options, flag_of, taken_by
from nblaunch.launch.session import Session, how_to_start
from nblaunch.notebook import actions
from nblaunch.notebook.actions import (
    COMMANDS,
    LineParser,
    argument,
    check_ranks,
    chosen_session,
    in_flags,
    parsing_of,
    python_name,
    ranks,
    session_of_cell,
    show,
    words_of,
)
from nblaunch.notebook.cells import make_cell, names_used, paused
from nblaunch.wire.messages import Cell, Payload

_ABOUT = """\
Run the cell on every rank. It can use the notebook's variables, and rank, world_size, local_rank and device.

    %%distributed -n 2 -o sums
    import torch, torch.distributed as dist
    t = torch.ones(1) * rank
    dist.all_reduce(t)  # the default process group is initialized
    t.item()

Each rank returns the value of the last expression. Variables that the cell assigns exist only in the ranks.
"""
_OWN: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "output": argument(
        "-o",
        "--output",
        type=python_name,
        metavar="NAME",
        help="store the result: NAME[1] is rank 1's return value; default: display all return values",
    ),
    "session": argument("--session", metavar="NAME", help="run in this session; default: the most recently used one"),
    "fresh": argument("--fresh", action="store_true", help="start new ranks for this cell, even if a session exists"),
    "ranks": argument(
        "--ranks",
        type=ranks,
        help="run only on these ranks, as in 0,2; the others return None, but belong to the process group",
    ),
    "export": argument(
        "--export", metavar="FILE", help="write a torchrun script instead of running the cell; see nblaunch.export?"
    ),
    "sbatch": argument(
        "--sbatch", action="store_true", help="with --export: also write a job script for --engine 'slurm ...'"
    ),
    "force": argument("--force", action="store_true", help="with --export: overwrite existing files"),
}
"""Options of cells alone."""
_GROUPS = {
    "common options": ("num_processes", "output", "device", "timeout", "block", "detach"),
    "sessions": ("session", "fresh", "ranks"),
    "where ranks run": ("engine", "num_nodes", "backend", "start_method", "threads_per_rank", "preload"),
    "what is shown": ("view", "profile", "metric_patterns"),
    "failing and stopping": ("stop_grace", "max_restarts", "on_error", "on_breakpoint", "checks"),
    "scripts": ("export", "sbatch", "force"),
}
output_can_be_silenced: Any = getattr(magic, "output_can_be_silenced", lambda function: function)
"""Lets a semicolon at the end of the cell hide a magic's value; IPython has it from 8.10 on."""
_distributed: Any = line_magic("distributed")  # IPython annotates only the decorator without a name
_NO_FRAME = 1 << 20
"""Deeper than any stack: IPython then looks names up in the notebook, not in our frames."""


def _cell_parser() -> LineParser:
    parser = LineParser("distributed", _ABOUT, "%%distributed [OPTION ...]")
    for title, names in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            flags, settings = _OWN.get(name) or parsing_of(name)
            group.add_argument(*flags, **settings)
    return parser


CELL = _cell_parser()


@actions.command("help")
def _help(shell: Any) -> str:
    """Show this help."""
    return f"{DistributedMagics.command.__doc__}\n\n{DistributedMagics.distributed.__doc__}"


@magics_class
class DistributedMagics(Magics):
    shell: Any

    @cell_magic
    @no_var_expand
    @output_can_be_silenced
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks of the session: ``%%rank 0`` or ``%%rank 0,2``."""
        __tracebackhide__ = True  # IPython omits this frame
        if chosen_session(None) is None:
            raise UsageError(f"%%rank: {how_to_start()}")
        session = session_of_cell(None)
        assert session is not None
        if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", line):
            command = f"%%rank {line}".rstrip()
            raise UsageError(
                f"{command}: give only ranks, as in %%rank 0 or %%rank 0,2; for options, use %%distributed --ranks 0"
            )
        chosen = ranks(line)
        check_ranks("%%rank", chosen, session.world_size)
        made = make_cell(self.shell, cell, chosen, -1, keeps_value=True)
        session.run_cell(made, names_used(made, self.shell.user_ns))

    @cell_magic
    @no_var_expand
    def local(self, line: str, cell: str) -> None:
        """Run the cell in the notebook, even after ``%distributed auto on``."""
        if line.strip():
            raise UsageError(f"%%local {line.strip()}: %%local takes no arguments")
        with paused():
            self.shell.run_cell(cell).raise_error()

    @_distributed
    @no_var_expand
    def command(self, line: str) -> None:
        __tracebackhide__ = True  # IPython omits this frame
        show(actions.run(self.shell, self._words(line)))

    def _words(self, line: str) -> list[str]:
        return words_of(line, lambda text: str(self.shell.var_expand(text, depth=_NO_FRAME)))

    @cell_magic
    @no_var_expand
    @output_can_be_silenced
    def distributed(self, line: str, cell: str) -> Any:
        __tracebackhide__ = True  # IPython omits this frame
        words = self._words(line)
        if words and words[0] in COMMANDS:
            raise UsageError(f"%%distributed {words[0]}: to run this command, write %distributed {words[0]} with one %")
        given = CELL.values(words)
        path, is_job, is_forced = given.pop("export", None), given.pop("sbatch", False), given.pop("force", False)
        if path is None and (is_job or is_forced):
            raise UsageError(f"--{'sbatch' if is_job else 'force'} requires --export, as in --export train.py")
        if path is not None:
            return self._export(cell, path, given, is_job, is_forced)
        return self._run(cell, given)

    def _export(self, body: str, path: str, given: dict[str, Any], sbatch: bool, force: bool) -> None:
        __tracebackhide__ = True  # IPython omits this frame
        cell = make_cell(self.shell, body, given.get("ranks"))
        typed = self.shell.history_manager.input_hist_raw[-1]
        try:
            options = Options(**{name: given[name] for name in taken_by("script") if name in given})
            used = names_used(cell, self.shell.user_ns)
            show(repr(export_cell(cell, used, typed, path, sbatch=sbatch, force=force, options=options)))
        except ArgumentError as error:
            text = str(error).replace("path=", "export=", 1).replace("force=True", "--force")
            raise in_flags(ArgumentError(text)) from None
        except PayloadError as error:
            raise error.with_traceback(None) from None  # the frames below are nblaunch's own

    def _run(self, body: str, given: dict[str, Any]) -> Any:
        __tracebackhide__ = True  # IPython omits this frame
        output, chosen = given.pop("output", None), given.pop("ranks", None)
        name, is_fresh = given.pop("session", None), given.pop("fresh", False)
        if name is not None and is_fresh:
            raise UsageError(f"--session {name} --fresh: use only one of these options")
        session = None if is_fresh else session_of_cell(name)
        try:
            options = Options(**given)
        except ArgumentError as error:
            raise in_flags(error) from None
        waits = options.block and not options.detach
        first = chosen[0] if chosen else 0
        if session is not None:
            self._check_fits(session, given, chosen)
            cell = make_cell(self.shell, body, chosen, None if output else -1, keeps_value=output is None)
            changes = {name: given[name] for name in taken_by("cell") if name in given}
            result: Any = session.run_cell(cell, names_used(cell, self.shell.user_ns), **changes)
        else:
            shown = None if output else first if waits else -1
            result = self._prepare(make_cell(self.shell, body, chosen, shown), options)
            if waits:
                result = result.join()
            elif not options.detach:
                result.begin()
        if output is not None:
            self.shell.user_ns[output] = result
        return result[first] if waits and (session is None or output is not None) else None

    def _check_fits(self, session: Session, given: dict[str, Any], chosen: tuple[int, ...] | None) -> None:
        check_ranks("--ranks", chosen, session.world_size)
        for name, value in given.items():
            if name == "detach":
                raise UsageError(f"--detach: session {session.name} keeps its ranks: add --fresh for new ones")
            if name not in taken_by("cell") and (name, value) != ("num_processes", session.world_size):
                raise UsageError(
                    f"{flag_of(name)} {value}: cannot be changed in session {session.name}; use --fresh for new ranks"
                )

    def _prepare(self, cell: Cell, options: Options) -> Any:
        __tracebackhide__ = True  # IPython omits this frame
        api.refuse_nested()
        used = names_used(cell, self.shell.user_ns)

        def gather(world_size: int | None) -> Payload:
            if world_size is not None:
                check_ranks("--ranks", cell.ranks, world_size)
            return payloads.for_cell(cell, used)

        try:
            return api.detached(gather, options) if options.detach else api.prepare(gather, options)
        except ArgumentError as error:
            raise in_flags(error) from None


DistributedMagics.distributed.__doc__ = CELL.format_help().removeprefix("::\n\n")
DistributedMagics.command.__doc__ = actions.help_text()
