"""`export`: write a function or cell of the notebook as a script for torchrun. It starts nothing."""

from __future__ import annotations

import ast
import builtins
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nblaunch.engines import current
from nblaunch.errors import ArgumentError, PayloadError
from nblaunch.launch import payload as payloads
from nblaunch.launch.export import job_file, script
from nblaunch.launch.export.cell_statements import CellSource, Statement, awaits, statements_of
from nblaunch.launch.export.exported_names import FIX, ExportedNames, literal_of
from nblaunch.launch.export.script import Main
from nblaunch.launch.frontend import host
from nblaunch.launch.options import Options, taken_by
from nblaunch.machine.arguments import named_arguments
from nblaunch.transfer import parameters, pickling
from nblaunch.transfer.parameters import FILLED_IN, PROVIDED
from nblaunch.wire.messages import Cell


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export` has written.

    Attributes:
        script: The script.
        files: All files, the script first.
        command: The command that runs the script on this machine.
        notes: What to know before running it.
    """

    script: Path
    files: tuple[Path, ...]
    command: str
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return what was written, and how to run it."""
        lines = [f"wrote {', '.join(map(str, self.files))}", *(f"note: {note}" for note in self.notes)]
        return "\n".join([*lines, f"run it: {self.command}"])


@partial(named_arguments, more=taken_by("script"))
def export(
    function: Callable[..., Any],
    path: str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    sbatch: bool = False,
    force: bool = False,
    **options: Any,
) -> Exported:
    """Write a function of the notebook, with the definitions that it uses, as a script that ``torchrun`` runs.

    The script has the statements of the cells that import and define what the function uses, as you wrote them, then
    the setup of the process group and the call. Parameters named ``rank``, ``world_size``, ``local_rank`` and
    ``device`` are filled in as by `notebook_launcher`.

    Values are written as they are now if they are short and plain: numbers, strings, lists, dicts, paths, devices and
    dtypes. Any other value, such as a model or a dataset, is an error: create it in the function, or load it from a
    file. What was assigned to a class or function after its definition is left out, and so is the random state of the
    notebook: seed in the function.

    The script needs nblaunch only if your code uses it. It prints and saves nothing itself, and the return value is
    dropped: save what you want to keep in the function.

    Args:
        function: A function that cells define, or that a module has.
        path: The script, as in ``"train.py"``.
        args: The function's positional arguments, as a tuple.
        kwargs: Its keyword arguments, as a dict.
        sbatch: Also write a job file for Slurm beside the script, as ``train.sbatch``. Default: False.
        force: Replace files that exist. Default: False.
        options: ``num_processes``, ``num_nodes``, ``engine``, ``device``, ``backend``, ``threads_per_rank``, ``env``,
            ``max_restarts``, ``timeout`` and ``checks``, as for `notebook_launcher`. With ``engine="slurm ..."``,
            options that sbatch has go into the job file, and `num_processes` is the number of GPUs that they ask for.
            `threads_per_rank` is ``OMP_NUM_THREADS`` in the command, by default torchrun's choice; `timeout` is the
            job's.

    Returns:
        An `Exported`: the files, the command that runs the script, and notes.

    Raises:
        ArgumentError: An argument is invalid, or a file exists. Nothing was written.
        PayloadError: A name that the function uses cannot be written. Nothing was written.
    """
    notebook = host().notebook_names()
    if notebook is None:
        raise ArgumentError("export: only for notebooks; in a script, torchrun can run the file that you have")
    payload = payloads.for_function(function, args, kwargs)
    names = ExportedNames(host().cells(), notebook, PROVIDED.difference(FILLED_IN))
    filled = parameters.left_out(function, payload.args, payload.kwargs)
    call = _call(function, payload.args, payload.kwargs, names)
    names.note_missing()
    name = next(name for name in ("main", "run_rank", "_main") if name not in notebook)
    checked = Options(**options)
    main = Main(call, frozenset(filled), name, None, checked.device, checked.backend)
    return _write(path, names, main, sbatch, force, checked)


def export_cell(
    cell: Cell,
    used: Sequence[str],
    typed: str,
    path: str,
    *,
    sbatch: bool,
    force: bool,
    options: Options,
) -> Exported:
    """Write a cell as a script; see `export`.

    Args:
        cell: The cell.
        used: The names of the notebook that it uses.
        typed: The cell as the user wrote it, with the magic's line.
        path: See `export`, with all other arguments.
    """
    notebook = host().notebook_names() or {}
    names = ExportedNames(host().cells(), notebook, PROVIDED)
    statements = _statements(CellSource(cell.label, typed, cell.source))
    reads = frozenset[str]().union(*(each.reads for each in statements))
    binds = frozenset[str]().union(*(each.binds for each in statements))
    for name in sorted(reads - binds - PROVIDED - notebook.keys() - vars(builtins).keys()):
        raise PayloadError(f"`{name}`: the notebook has no such name: assign it in the cell")
    names.need(used)
    names.note_missing(binds)
    text = cell.source.strip("\n") or "pass"
    main = Main(text, reads & {*FILLED_IN}, "", cell.ranks, options.device, options.backend)
    return _write(path, names, main, sbatch, force, options)


def _statements(cell: CellSource) -> list[Statement]:
    """Return the statements of a cell.

    Raises:
        ArgumentError: The cell has IPython's syntax, or awaits outside functions.
    """
    line = awaits(ast.parse(cell.python))
    if line:
        raise ArgumentError(f"{cell.label}, line {line}: await outside functions: write asyncio.run(...) for a script")
    statements = statements_of([cell])
    for statement in statements:
        if shell := statement.shell_line():
            raise ArgumentError(
                f"{shell} is IPython's syntax, which a script cannot have: write it in Python, or move it to another "
                "cell"
            )
    return statements


# ------------------------------------------------------------------ the call of a function
class _FilledIn(str):
    """The name of a parameter that the script fills in."""

    __slots__ = ()


def _call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: ExportedNames) -> str:
    """Return the call of a function as source. What it needs is added to `names`."""
    called = names.reference(function)
    if not called:
        own = payloads.name_of(function)
        raise PayloadError(f"`{own}` is no function that a cell defines or a module has: define one that calls it")
    args, kwargs = parameters.complete(function, args, kwargs, {name: _FilledIn(name) for name in FILLED_IN})
    texts = [_argument(f"args[{number}]", value, names) for number, value in enumerate(args)]
    texts += [f"{name}={_argument(f'kwargs[{name!r}]', value, names)}" for name, value in kwargs.items()]
    return f"{called}({', '.join(texts)})"


def _argument(label: str, value: Any, names: ExportedNames) -> str:
    if isinstance(value, _FilledIn):
        return value
    text = literal_of(value) or names.reference(value)
    if not text:
        raise PayloadError(f"`{label}`: {pickling.describe(value)} cannot be written into a script: {FIX}")
    return text


# ------------------------------------------------------------------ files
def _write(
    path: str | os.PathLike[str],
    names: ExportedNames,
    main: Main,
    sbatch: bool,
    force: bool,
    options: Options,
) -> Exported:
    """Write the script, and its job file."""
    target = Path(path)
    if target.suffix != ".py" or not target.stem:
        raise ArgumentError(f"path={str(path)!r}: must end with .py, as in train.py")
    if not target.parent.is_dir():
        raise ArgumentError(f"path={str(path)!r}: there is no folder {target.parent}")
    asked = current.job_request(options.engine, options.num_nodes)
    start = job_file.start_of(asked, options)
    body = script.statements_text(names.in_order())
    if "display" not in names.names and re.search(r"\bdisplay\(", f"{body}\n{main.text}"):
        body = f"{body}\n\n\ndisplay = print".lstrip("\n")
        names.notes.append("display() prints")
    if not main.name:  # definitions may use them, too
        main = replace(main, uses=main.uses | (set(re.findall(r"\w+", body)) & {*FILLED_IN}))
    content = script.script_text(body, main)
    compile(content, str(target), "exec")

    command = job_file.command(start, str(target))
    texts = {target: f"# Run it with: {command}\n{content}"}
    if sbatch:
        job = target.with_suffix(".sbatch")
        texts[job] = job_file.job_file(start, target.name, job.name)
        folder = f"--chdir={shlex.quote(str(target.parent))} " if str(target.parent) != "." else ""
        command += f"\n    or: sbatch {folder}{shlex.quote(str(job))}"
    for file in texts:
        if file.exists() and not force:
            raise ArgumentError(f"path={str(target)!r}: {file} exists: use another name, or force=True")
    for file, text in texts.items():
        file.write_text(text)
    return Exported(target, (*texts,), command, (*names.notes, *job_file.notes(asked, sbatch)))
