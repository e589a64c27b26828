"""The magics: ``%%distributed`` runs a cell on N ranks; ``%distributed`` controls launches and servers."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    cell_magic,
    line_cell_magic,
    magics_class,
    no_var_expand,
)
from IPython.core.magic_arguments import argument, magic_arguments

from nblaunch.engines import current
from nblaunch.errors import ArgumentError, PayloadError
from nblaunch.launch import api
from nblaunch.launch import payload as payloads
from nblaunch.launch.export.exported import export_cell
from nblaunch.launch.handle import INSIST, Launch, live_launches
from nblaunch.launch.live_sessions import how_to_start, live_sessions
from nblaunch.launch.options import TABLE, Options, taken_by
from nblaunch.machine import timeouts
from nblaunch.machine.segments import in_words
from nblaunch.notebook import session_magics
from nblaunch.notebook.auto_cells import paused
from nblaunch.notebook.cells import make_cell, names_used
from nblaunch.notebook.ipython_versions import output_can_be_silenced
from nblaunch.notebook.magic_line import arguments_of, as_option, option_of, ranks_of, words_of
from nblaunch.transfer.sent_data import sent_data_cache
from nblaunch.wire.messages import Cell, Payload

ACTIONS = ("auto", "debug", "free", "help", "preload", "release", "session", "stacks", "status", "stop", "who")
_USAGE = (
    "write %distributed status, stacks, stop, release, free, who, session, debug, auto on, help or preload NAME, or "
    "put %%distributed on top of a cell"
)
_NO_FRAME = 1 << 20
"""Deeper than any stack: IPython then looks names up in the notebook, not in our frames."""


@magics_class
class RankMagics(Magics):
    """``%%rank`` and ``%%local``, for sessions."""

    @cell_magic
    @no_var_expand
    @output_can_be_silenced
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks of the session: ``%%rank 0`` or ``%%rank 0,2``."""
        __tracebackhide__ = True  # IPython omits this frame
        if session_magics.chosen_session(None) is None:
            raise UsageError(f"%%rank: {how_to_start()}")
        session, note = session_magics.of_cell(None)
        _show(note)
        assert session is not None
        if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", line):
            command = f"%%rank {line}".rstrip()
            raise UsageError(
                f"{command}: write the ranks alone, as in %%rank 0 or %%rank 0,2; %%distributed --ranks 0 takes options"
            )
        ranks = ranks_of("%%rank", line)
        session_magics.check_ranks(f"%%rank {line.strip()}", ranks, session.world_size)
        assert self.shell is not None
        made = make_cell(self.shell, cell, ranks, -1, keeps_value=True)
        session_magics.run_cell(session, made, self.shell.user_ns, "auto", False, {}, option_of)

    @cell_magic
    @no_var_expand
    def local(self, line: str, cell: str) -> None:
        """Run the cell in the notebook, also after ``%distributed auto on``."""
        assert self.shell is not None
        if line.strip():
            raise UsageError(f"%%local {line.strip()}: %%local takes no arguments")
        with paused():
            self.shell.run_cell(cell).raise_error()


@magics_class
class DistributedMagics(Magics):
    """Parses the magics' lines, and delegates to the launcher."""

    @magic_arguments()
    @argument(
        "action",
        nargs="?",
        help="without a cell: status (live launches, sessions, the fork server, nodes), stacks (of all ranks), stop "
        "(all launches), release (give other machines' nodes back, and end the ranks there), free (data of earlier "
        "launches, cached for the next ones), "
        "preload (import the modules that follow ahead of later launches), session (start ranks that stay; then "
        "status, restart, regroup or stop), who (the names that a session's ranks have), debug (a background "
        "launch whose rank waits for you, else the last error of a session's cell), help (this text) or auto on (every "
        "cell runs in the session; %%%%local does not)",
    )
    @argument("words", nargs="*", help="of preload: names of modules; of session: what to do; of auto: on or off")
    @argument("--session", metavar="NAME", help="run in this session; default: the one used last, if there is one")
    @argument("--fresh", action="store_true", help="start new ranks for this cell, even if there is a session")
    @argument("--name", help="of session: its name; default main")
    @argument("--idle-timeout", type=float, help="of session: stop it after this many seconds without a task")
    @argument(
        "--rank",
        action="append",
        help="of session restart: this rank, or several, as in --rank 0,2; of debug: this rank",
    )
    @argument("--keep", action="store_true", help="of session restart: new ranks get the variables of the old")
    @argument(
        "-n",
        "--num-processes",
        type=int,
        help="ranks on each node; default: one per visible GPU; without GPUs 2, or on several nodes 1 each",
    )
    @argument(
        "--nodes",
        dest="num_nodes",
        type=int,
        help="nodes; default: the hosts of ssh, the nodes of the notebook's own Slurm allocation, else 1",
    )
    @argument(
        "--engine",
        help="where the ranks run: local (this machine), slurm, ray or ssh, with its own options, as in --engine "
        "'slurm --partition=gpu --time=60' (srun's) or --engine 'ssh gpu1 gpu2'; its nodes stay yours until "
        "%%distributed release; default auto: slurm in an allocation of several nodes, else local",
    )
    @argument(
        "-o",
        "--output",
        metavar="NAME",
        help="bind the result to NAME: NAME[1] is the last expression's value of rank 1",
    )
    @argument(
        "--background",
        action="store_true",
        help="return at once; NAME is then a Launch (.done, .wait(), .result(), .stop())",
    )
    @argument("--ranks", help="run the cell on these ranks only, as in 0,2; the others join the group and return None")
    @argument("--device", help=TABLE["device"].help)
    @argument("--backend", help=TABLE["backend"].help)
    @argument(
        "--start-method",
        help=f"one of {', '.join(current.engine.start_methods)}; default auto: forkserver on Linux, spawn elsewhere; "
        "fork copies the kernel, which can hang",
    )
    @argument(
        "--threads-per-rank",
        type=int,
        help="CPU threads of each rank; default: your OMP_NUM_THREADS, else usable CPUs divided by ranks",
    )
    @argument("--max-restarts", type=int, help="start all ranks again after a failure, this many times; default 0")
    @argument("--timeout", type=float, help="seconds that the launch may take; default: no limit")
    @argument("--stop-grace", type=float, help="seconds that interrupted ranks have for checkpoints; default 30")
    @argument(
        "--view",
        help="auto (the panel, or text where no page can show it), text or none; default: NBLAUNCH_VIEW, else auto",
    )
    @argument(
        "--preload",
        action="append",
        metavar="NAME",
        help="import this module of an installed package ahead of later launches on this machine; may be given "
        "several times",
    )
    @argument("--pdb", action="store_const", const="debug", dest="on_error", help="debug the rank that fails first")
    @argument("--on-breakpoint", help="continue (default) or fail: what breakpoint() does where no one can type")
    @argument(
        "--checks",
        action="store_const",
        const=True,
        help="have torch compare every collective of the ranks, which takes 8 ms more for each",
    )
    @argument(
        "--metric",
        action="append",
        dest="metric_patterns",
        metavar="PATTERN",
        help=r"read metrics out of printed lines, as in 'Accuracy: (?P<accuracy>[\d.]+)': a regular expression whose "
        "named groups hold numbers (a group named step: the step); the notebook's process searches, so a slow one "
        "slows it down; may be given several times",
    )
    @argument(
        "--export",
        metavar="FILE",
        help="do not run the cell: write it, with what it uses, as a script for torchrun; see nblaunch.export?",
    )
    @argument(
        "--sbatch",
        action="store_true",
        help="with --export: also write a job file for Slurm, with the options of --engine 'slurm ...'",
    )
    @argument("--force", action="store_true", help="with --export: replace files that exist")
    @line_cell_magic
    @no_var_expand
    @output_can_be_silenced
    def distributed(self, line: str, cell: str | None = None) -> Any:
        """Run the cell on every rank, with the notebook's names in scope.

        The names rank, world_size, local_rank and device are defined in each rank, and the default process group
        is ready. Names that the cell assigns stay in the ranks: return values with the cell's last expression.
        Every rank's value is displayed; -o binds them instead, and displays rank 0's.

            %%distributed -n 2 -o sums
            import torch.distributed as dist
            t = torch.ones(1) * rank
            dist.all_reduce(t)
            t.item()

        On two nodes of a cluster, with two ranks on each: %%distributed -n 2 --nodes 2 --engine slurm

        Without a cell: %distributed status, %distributed stacks, %distributed stop, %distributed release,
        %distributed free, %distributed preload NAME ..., %distributed session -n 2, %distributed who,
        %distributed debug, %distributed auto on, %distributed help
        """
        arguments = arguments_of(self.distributed.parser, words_of(line, self._expand), cell is not None)
        action, words = arguments.pop("action"), arguments.pop("words")
        arguments["rank"] = ranks_of("--rank", arguments["rank"] and ",".join(arguments["rank"]))
        given = {name: value for name, value in arguments.items() if value is not None and value is not False}
        output = given.get("output", "_")
        if not output.isidentifier() or keyword.iskeyword(output):
            raise UsageError(f"-o {output}: must be a valid Python name")
        if cell is None:
            return self._act(action, words, given)
        if action is not None:
            raise UsageError(
                f"%%distributed {action}: a cell takes options, such as -n 2; without a cell: %distributed {action}"
            )
        path = arguments.pop("export")
        sbatch, force = arguments.pop("sbatch"), arguments.pop("force")
        if path is not None:
            return self._export(cell, path, arguments, sbatch, force)
        if sbatch or force:
            raise UsageError(f"--{'sbatch' if sbatch else 'force'}: only with --export, as in --export train.py")
        return self._run(cell, arguments)

    def _export(self, body: str, path: str, arguments: dict[str, Any], sbatch: bool, force: bool) -> None:
        __tracebackhide__ = True  # IPython omits this frame
        ranks = ranks_of("--ranks", arguments.pop("ranks"))
        cell = make_cell(self.shell, body, ranks)
        typed = self.shell.history_manager.input_hist_raw[-1]  # type: ignore[union-attr]  # there is a shell
        chosen = {name: arguments[name] for name in taken_by("script") if arguments.get(name) is not None}
        try:
            used = names_used(cell, self._names())
            _show(repr(export_cell(cell, used, typed, path, sbatch=sbatch, force=force, options=Options(**chosen))))
        except ArgumentError as error:
            text = str(error).replace("path=", "export=", 1).replace("force=True", "--force")
            raise UsageError(as_option(text)) from None
        except PayloadError as error:
            raise error.with_traceback(None) from None  # the frames below are nblaunch's own

    def _run(self, body: str, arguments: dict[str, Any]) -> Any:
        __tracebackhide__ = True  # IPython omits this frame
        output, background = arguments.pop("output"), arguments.pop("background")
        name, is_fresh = arguments.pop("session"), arguments.pop("fresh")
        if name is not None and is_fresh:
            raise UsageError(f"--session {name} --fresh: a cell runs in a session, or on fresh ranks")
        for option in ("name", "idle_timeout", "rank", "keep"):
            typed = arguments.pop(option)
            if typed is not None and typed is not False:  # 0 is a value
                more = {"rank": "; --ranks 0 runs a cell on some ranks", "name": "; --session chooses one for a cell"}
                raise UsageError(f"{option_of(option)}: only for %distributed session{more.get(option, '')}")
        typed = arguments.pop("ranks")
        ranks = ranks_of("--ranks", typed)
        view = arguments.pop("view") or "auto"
        chosen = {name: value for name, value in arguments.items() if value is not None}
        session, note = (None, "") if is_fresh else session_magics.of_cell(name)
        _show(note)
        if session is not None:
            session_magics.check_ranks(f"--ranks {typed}", ranks, session.world_size)
            cell = make_cell(self.shell, body, ranks, None if output is not None else -1, keeps_value=output is None)
            result = session_magics.run_cell(session, cell, self._names(), view, background, chosen, option_of)
            if output is not None:
                self._names()[output] = result
            return result[ranks[0] if ranks else 0] if output is not None and not background else None
        shown = -1 if background else ranks[0] if ranks else 0
        cell = make_cell(self.shell, body, ranks, None if output is not None else shown)
        launch = self._prepare(cell, view, chosen)
        result = launch
        if background:
            launch.begin()
        else:
            result = launch.join()
        if output is not None:
            self._names()[output] = result
        return None if background else result[ranks[0] if ranks else 0]

    def _act(self, action: str | None, words: Sequence[str], given: dict[str, Any]) -> None:
        if action in session_magics.ACTIONS:
            try:
                _show(session_magics.act(self.shell, action, words, given, option_of))
            except ArgumentError as error:
                raise UsageError(as_option(str(error))) from None
            return
        for name in given:
            raise UsageError(f"{option_of(name)}: options need a cell: write them after %%distributed")
        if action == "preload" and not words:
            raise UsageError("%distributed preload NAME ...: names of modules, as in torchvision.transforms")
        if action == "preload":
            try:
                api.preload(words)
            except ArgumentError as error:
                raise UsageError(f"%distributed {str(error).replace('=', ' ', 1)}") from None
        elif words:
            raise UsageError(f"%distributed {action} {' '.join(words)}: {_USAGE}")
        elif action == "stop":
            _stop_all()
        elif action == "status":
            _show_status()
        elif action == "stacks":
            _show_stacks()
        elif action == "release":
            _show(session_magics.release())
        elif action == "help":
            _show(inspect.getdoc(self.distributed) or "")
        elif action == "free":
            _show(f"freed {in_words(sent_data_cache.free())}")
        else:
            raise UsageError(f"%distributed {action or ''}: {_USAGE}")

    def _expand(self, text: str) -> str:
        """Expand ``$name`` and ``{name}`` as IPython does. Not for patterns: they contain ``{2}``."""
        assert self.shell is not None
        return str(self.shell.var_expand(text, depth=_NO_FRAME))

    def _names(self) -> dict[str, Any]:
        assert self.shell is not None
        names: dict[str, Any] = self.shell.user_ns
        return names

    def _prepare(self, cell: Cell, view: str, chosen: dict[str, Any]) -> Launch:
        __tracebackhide__ = True  # IPython omits this frame
        api.refuse_nested()
        ranks, used = cell.ranks, names_used(cell, self._names())

        def gather(world_size: int) -> Payload:
            session_magics.check_ranks(f"--ranks {','.join(map(str, ranks or ()))}", ranks, world_size)
            return payloads.for_cell(cell, used)

        try:
            return api.prepare(gather, Options(view=view, **chosen))
        except ArgumentError as error:
            raise UsageError(as_option(str(error))) from None


def _show_status() -> None:
    kept = f"cached for the next launch: {in_words(sent_data_cache.size)} of data from earlier launches"
    sessions = [session.status() for session in live_sessions().values()]
    lines = [*map(repr, live_launches()), *sessions, *current.status(), *([kept] if sent_data_cache.size else [])]
    _show("\n".join(lines))


def _show_stacks() -> None:
    lines = []
    for launch in live_launches():
        lines.append(repr(launch))
        for rank, text in launch.stacks().items():
            lines += ["", f"rank {rank}", *(f"  {line}".rstrip() for line in text.splitlines())]
    _show("\n".join(lines or ["no launch is running"]))


def _stop_all() -> None:
    launches = live_launches()
    for launch in launches:
        launch.stop()
    for interrupts in (1, 2):
        try:
            _wait_for(launches)
            break
        except KeyboardInterrupt:
            if interrupts == 1 and any(launch.keeps_ranks for launch in launches):
                _show(INSIST)
            for launch in launches:
                if interrupts == 2 or not launch.keeps_ranks:
                    launch.kill()
    _wait_for(launches)
    _show(f"stopped {len(launches)} launch{'' if len(launches) == 1 else 'es'}")


def _wait_for(launches: list[Launch]) -> None:
    for launch in launches:
        while not launch.wait(timeouts.SIGNAL_CHECK_INTERVAL_S):
            pass


def _show(text: str) -> None:
    from IPython.display import display

    if text:
        display({"text/plain": text}, raw=True)
