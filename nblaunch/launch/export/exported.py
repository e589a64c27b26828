"""`export`: write a function or cell of the notebook as a script for torchrun."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import os
import re
import shlex
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nblaunch.engines import current
from nblaunch.errors import ArgumentError, PayloadError
from nblaunch.launch import live_sessions
from nblaunch.launch import payload as payloads
from nblaunch.launch.export import job_file, marked_files, notebook_settings, origins, script
from nblaunch.launch.export.cell_statements import SHELL, CellSource, Statement, awaits, statements_of
from nblaunch.launch.export.exported_names import ExportedNames
from nblaunch.launch.export.job_file import Start
from nblaunch.launch.export.script import Main
from nblaunch.launch.frontend import host
from nblaunch.machine.segments import in_words
from nblaunch.transfer import parameters
from nblaunch.transfer.parameters import FILLED_IN, PROVIDED
from nblaunch.wire.messages import Cell

_SAVED, _OBJECTS = "_saved", "_objects"
_DROPPED = ("autoreload", "config", "load_ext", "matplotlib", "reload_ext", "pinfo", "pinfo2")
"""Line magics that a script can do without; the last two are ``name?``."""


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
        names = ", ".join(f"{path} ({in_words(path.stat().st_size)})" for path in self.files if path.exists())
        return "\n".join([f"wrote {names}", *(f"note: {note}" for note in self.notes), f"run it: {self.command}"])


def export(
    function: Callable[..., Any],
    path: str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_processes: int | None = None,
    num_nodes: int | None = None,
    engine: str = "auto",
    device: str = "auto",
    backend: str | None = None,
    threads_per_rank: int | None = None,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    timeout: float | None = None,
    checks: bool = False,
    sbatch: bool = False,
    force: bool = False,
) -> Exported:
    """Write a function of the notebook, with all that it uses, as a script that ``torchrun`` runs.

    The script has the statements of the cells that define what the function uses, as you wrote them, then the setup of
    the process group and the call. Parameters named ``rank``, ``world_size``, ``local_rank`` and ``device`` are filled
    in as by `notebook_launcher`, and ranks start from the notebook's random state if it was seeded.

    Values become literals if they are short, plain data. A value that its statement gives again, such as
    ``nn.CrossEntropyLoss()``, keeps the statement. Export evaluates it once more to compare, if it only creates
    modules, dataclasses, and objects of common classes of PyTorch, NumPy and others: the ``__init__`` of your own
    modules runs again. Tensors, arrays and weights go to ``train.data.pt`` beside the script, and what only pickle can
    load to ``train.objects.pt``, up to 500 MB. Definitions are as the cells have them: what was assigned to a class or
    function later is left out.

    The script needs nblaunch only if your code uses it. It prints and saves nothing itself, and the return value is
    dropped: save what you want to keep in the function.

    Args:
        function: A function that cells define, or that a module has.
        path: The script, as in ``"train.py"``.
        args: The function's positional arguments, as a tuple.
        kwargs: Its keyword arguments, as a dict.
        num_processes: The number of ranks in the command; on a cluster, of each node. Default: as for a launch, with
            the GPUs that the options of ``engine="slurm ..."`` ask for.
        num_nodes: The number of nodes in the job file. Default: as for a launch.
        engine: As for a launch. Options of ``"slurm --partition=gpu"`` that sbatch has go into the job file; other
            engines are not part of the script. Default: ``"auto"``.
        device: ``"cuda"``, ``"cpu"``, or ``"auto"`` (default): the script uses GPUs where it finds them.
        backend: The backend of the process group. Default: gloo on CPUs; on GPUs nccl, and gloo for CPU tensors.
        threads_per_rank: ``OMP_NUM_THREADS`` in the command. Default: torchrun's choice.
        env: Environment variables in the command or job file.
        max_restarts: torchrun's ``--max-restarts``. Default: 0.
        timeout: Seconds that the job may take, for the job file. Default: None, the cluster's limit.
        checks: Have torch compare every collective of the ranks. Default: False.
        sbatch: Also write a job file for Slurm beside the script, as ``train.sbatch``. Default: False.
        force: Replace files that no earlier export has written, or that were edited since. Default: False.

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
    target = _target(path)
    asked = current.job_request(engine, num_nodes)
    start = job_file.start_of(
        asked, num_processes, device, backend, threads_per_rank, env, max_restarts, timeout, checks
    )
    names = ExportedNames(host().cells(), notebook, PROVIDED.difference(FILLED_IN))
    filled = parameters.left_out(function, payload.args, payload.kwargs)
    call = _call(function, payload.args, payload.kwargs, names)
    _check_missing(names, frozenset())
    name = next(name for name in ("main", "run_rank", "_main") if name not in notebook)
    names.notes += job_file.notes(asked, sbatch)
    main = Main(call, frozenset(filled), name, None, device, backend, False, False, False)
    return _write(target, names, main, start, sbatch, force)


def export_cell(
    cell: Cell,
    used: Sequence[str],
    typed: str,
    path: str,
    *,
    num_processes: int | None = None,
    num_nodes: int | None = None,
    engine: str | None = None,
    device: str | None = None,
    backend: str | None = None,
    threads_per_rank: int | None = None,
    max_restarts: int | None = None,
    timeout: float | None = None,
    checks: bool = False,
    sbatch: bool = False,
    force: bool = False,
) -> Exported:
    """Write a cell as a script; see `export`.

    Args:
        cell: The cell.
        used: The names of the notebook that it uses.
        typed: The cell as the user wrote it, with the magic's line.
        path: See `export`, with all other arguments. None of them: the default.
    """
    notebook = host().notebook_names() or {}
    target = _target(path)
    device, restarts = device or "auto", max_restarts or 0
    asked = current.job_request(engine or "auto", num_nodes)
    start = job_file.start_of(asked, num_processes, device, backend, threads_per_rank, None, restarts, timeout, checks)
    names = ExportedNames(host().cells(), notebook, PROVIDED)
    text, statements = _body(CellSource(cell.label, typed, cell.source), names)
    reads = frozenset[str]().union(*(each.reads for each in statements))
    binds = frozenset[str]().union(*(each.binds for each in statements))
    for name in sorted(reads - binds - PROVIDED - notebook.keys() - vars(builtins).keys()):
        raise PayloadError(f"`{name}`: the notebook has no such name{_of_session()}: assign it in the cell")
    names.need(used)
    _check_missing(names, binds)
    names.notes += job_file.notes(asked, sbatch)
    main = Main(text, reads & set(FILLED_IN), "", cell.ranks, start.device, backend, False, False, False)
    return _write(target, names, main, start, sbatch, force)


def _of_session() -> str:
    return "" if live_sessions.find() is None else " (a script starts without the names of a session's ranks)"


def _check_missing(names: ExportedNames, bound: frozenset[str]) -> None:
    """Note names that functions use and neither the notebook nor the cell has; with a session, refuse them."""
    for name, user in sorted(names.missing().items()):
        if name not in bound and live_sessions.find() is not None:
            raise PayloadError(f"`{user}` uses `{name}`: the notebook has no such name{_of_session()}")
        if name not in bound:
            names.notes.append(f"`{user}` uses `{name}`, which the notebook does not have")


# ------------------------------------------------------------------ arguments
def _target(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix != ".py" or not target.stem:
        raise ArgumentError(f"path={str(path)!r}: must end with .py, as in train.py")
    if not target.parent.is_dir():
        raise ArgumentError(f"path={str(path)!r}: there is no folder {target.parent}")
    return target


def _call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: ExportedNames) -> str:
    """Return the call of a function as source. What it needs is added to `names`."""
    try:
        own = list(inspect.signature(function).parameters)
    except ValueError:
        own = []
    filled = {name: _FilledIn(name) for name in FILLED_IN}
    args, kwargs = parameters.complete(function, args, kwargs, filled)
    labels = [own[i] if i < len(own) else f"argument{i}" for i in range(len(args))]
    texts = [_argument(label, value, names) for label, value in zip(labels, args, strict=True)]
    texts += [f"{name}={_argument(name, value, names)}" for name, value in kwargs.items()]
    return f"{_named(function, names)}({', '.join(texts)})"


class _FilledIn(str):
    """The name of a parameter that the script fills in."""

    __slots__ = ()


def _argument(label: str, value: Any, names: ExportedNames) -> str:
    if isinstance(value, _FilledIn):
        return value
    text = names.literal_of(value)
    if text is not None:
        return text
    known = _name_of(value, names)
    if known:
        names.need([known])
        return known
    label = next(name for name in (label, f"{label}_argument", f"_{label}") if name not in names.names)
    names.add(label, value)
    return label


def _named(function: Any, names: ExportedNames) -> str:
    """Return an expression for a function.

    Raises:
        PayloadError: It has no name in the notebook.
    """
    if isinstance(function, types.MethodType):
        return f"{_named(function.__self__, names)}.{function.__func__.__name__}"
    known = _name_of(function, names)
    if known:
        names.need([known])
        return known
    plain = function.func if isinstance(function, functools.partial) else function
    name = payloads.name_of(plain)
    if plain is function and (text := origins.import_of(name, function)):
        names.imports[name] = script.Imported((0, 0), text)
        return name
    raise PayloadError(f"`{name}` has no name in the notebook: write name = ... in a cell first, and export `name`")


def _name_of(value: Any, names: ExportedNames) -> str:
    own = getattr(value, "__name__", "")
    found = [own] if names.names.get(own) is value else [n for n, each in names.names.items() if each is value]
    return next((name for name in found if not name.startswith("_")), "")


# ------------------------------------------------------------------ a cell's body
def _body(cell: CellSource, names: ExportedNames) -> tuple[str, list[Statement]]:
    """Return the text of a cell without lines that a script can do without, and its statements.

    Raises:
        ArgumentError: The cell has IPython's syntax, or awaits outside functions.
    """
    line = awaits(ast.parse(cell.python))
    if line:
        raise ArgumentError(f"{cell.label}, line {line}: await outside functions: write asyncio.run(...) for a script")
    lines = cell.python.splitlines()
    kept = []
    for statement in statements_of([cell]):
        found = statement.shell_line()
        if found is None:
            kept.append(statement)
        elif _is_dropped(statement):
            names.notes.append(f"{cell.label}, line {found[0]}: `{found[1]}` is left out")
            for node in statement.nodes:
                lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
        else:
            raise ArgumentError(
                f"{cell.label}, line {found[0]}: `{found[1]}` is IPython's syntax, which a script cannot have: write "
                "it in Python, or move it to another cell"
            )
    return "\n".join(lines).strip("\n") or "pass", kept


def _is_dropped(statement: Statement) -> bool:
    for node in statement.nodes:
        call = node.value if isinstance(node, ast.Expr) else None
        if not (isinstance(call, ast.Call) and ast.unparse(call.func) == f"{SHELL}().run_line_magic"):
            return False
        magic = call.args[0]
        if not (isinstance(magic, ast.Constant) and magic.value in _DROPPED):
            return False
    return True


# ------------------------------------------------------------------ files
def _write(target: Path, names: ExportedNames, main: Main, start: Start, sbatch: bool, force: bool) -> Exported:
    """Write the script and what belongs to it."""
    import torch

    names.settle()
    saved, objects = names.saved(), names.objects()
    entries = names.entries(_SAVED, _OBJECTS)
    settings = payloads.settings()
    body = script.entries_text(entries)
    code = f"{body}\n{main.text}"
    if re.search(r"\bdisplay\(", code) and "display" not in names.names:
        body = f"display = print\n\n\n{body}" if body else "display = print"
        names.notes.append("display() prints")
    words = set(re.findall(r"\w+", code))
    modules = {"torch", *names.modules}
    imported = script.imports_text(names.imports, (), origins.other_imports(names.statements, names.imports, code))
    code = f"{imported}\n{code}"
    states = notebook_settings.random_states(settings, code, _SAVED, saved, modules)
    main = replace(
        main,
        uses=main.uses | (set() if main.name else words & set(FILLED_IN)),
        owns_group="init_process_group" in words,
        owns_address=bool(words & {"MASTER_ADDR", "MASTER_PORT"}),
        uses_accelerate=bool({"accelerate", "transformers"} & notebook_settings.packages_in(code)),
        settings=states,
    )
    dist = next((n for n, each in names.imports.items() if each.text.startswith("import torch.distributed as")), "")
    block = script.main_block(main, dist or "torch.distributed")
    top = notebook_settings.defaults(settings)
    if saved:
        modules.add("pathlib")
        top.append(script.load_saved(_SAVED))
    if "os.environ" in block:
        modules.add("os")
    for name in modules:
        if name in names.names and name not in names.imports and re.search(rf"^{name} = ", body, re.MULTILINE):
            raise PayloadError(f"`{name}` is a value in the notebook, but the script needs the module: rename it")
    imported = script.imports_text(names.imports, modules, origins.other_imports(names.statements, names.imports, code))
    content = "\n\n".join(filter(None, [imported, "\n".join(top)]))
    if body:
        content += f"\n\n\n{body}" if script.is_definition(body) else f"\n\n{body}"
    content += f"\n\n\n{block}"
    compile(content, str(target), "exec")

    here = job_file.command(start, str(target))
    texts = {target: f"# Run it with: {here}\n{content}"}
    job = target.with_suffix(".sbatch")
    command = here
    if sbatch:
        texts[job] = job_file.job_file(start, target.name, job.name)
        folder = f"--chdir={shlex.quote(str(target.parent))} " if str(target.parent) != "." else ""
        command += f"\n    or: sbatch {folder}{shlex.quote(str(job))}"
    data = {target.with_suffix(".data.pt"): saved, target.with_suffix(".objects.pt"): objects}
    data = {path: values for path, values in data.items() if values}
    marked_files.check(target, list(texts), list(data), force)
    for path, values in data.items():
        torch.save(values, path)
    for path, text in texts.items():
        path.write_text(marked_files.marked(text))
    _note_own_files(names, target)
    return Exported(target, (*texts, *data), command, tuple(names.notes))


def _note_own_files(names: ExportedNames, target: Path) -> None:
    """Note the user's own modules that the script imports from elsewhere."""
    for each in names.imports.values():
        found = re.match(r"(?:from|import) ([\w.]+)", each.text)
        module = found[1].partition(".")[0] if found is not None else ""
        file = origins.own_file(module)
        if file and Path(file).resolve().parent != target.parent.resolve():
            note = f"it imports {module} from {file}: copy it to the script's folder, or set PYTHONPATH"
            if note not in names.notes:
                names.notes.append(note)
