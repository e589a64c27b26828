"""`export`: write a function or cell of the notebook as a script for torchrun, with a job file for Slurm.

A script has the statements of cells that define what the function uses, and short literals. Nothing is run or started.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import os
import pathlib
import re
import shlex
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nblaunch.engines import current
from nblaunch.engines.current import JobRequest
from nblaunch.errors import ArgumentError, PayloadError
from nblaunch.launch import payload as payloads
from nblaunch.launch.cell_statements import CellSource, Statement, code_of, statements_of
from nblaunch.launch.frontend import host
from nblaunch.launch.options import Options, taken_by
from nblaunch.launch.plan import Plan, make_plan
from nblaunch.machine.arguments import named_arguments
from nblaunch.machine.inventory import this_machine
from nblaunch.transfer import definitions, parameters, pickling, reducers
from nblaunch.transfer.parameters import FILLED_IN, PROVIDED
from nblaunch.wire.messages import Cell

FIX = "create it in the function, or load it from a file"


@dataclass(frozen=True, slots=True)
class Exported:
    """The files that `export` wrote, and how to run them.

    Attributes:
        script: The script.
        files: All files, the script first.
        command: The command that runs the script on this machine.
        notes: Notes to read before running it.
    """

    script: Path
    files: tuple[Path, ...]
    command: str
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        lines = [f"wrote {', '.join(map(str, self.files))}", *(f"note: {note}" for note in self.notes)]
        return "\n".join([*lines, f"run it: {self.command}"])


@functools.partial(named_arguments, more=taken_by("script"))
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
    """Write a notebook function, with the definitions that it uses, as a script for ``torchrun``.

    The script contains the imports and definitions that the function uses, copied from the cells. Then it initializes
    the process group and calls the function. Parameters named ``rank``, ``world_size``, ``local_rank`` and ``device``
    are filled in as by `notebook_launcher`.

    Short, plain values are written as literals: numbers, strings, lists, dicts, paths, devices and dtypes. Any other
    value, such as a model or a dataset, is an error: create it in the function, or load it from a file. Attributes set
    on a class or function after its definition are omitted. So is the notebook's random state: seed in the function.

    The script needs nblaunch only if your code uses it. It drops the return value: save results in the function.

    Args:
        function: A function defined in a cell or a module.
        path: The path of the script, such as ``"train.py"``.
        args: The function's positional arguments, as a tuple.
        kwargs: Its keyword arguments, as a dict.
        sbatch: Also write a job file for Slurm beside the script, as ``train.sbatch``. Default: False.
        force: Replace files that exist. Default: False.
        options: ``num_processes``, ``num_nodes``, ``engine``, ``device``, ``backend``, ``threads_per_rank``, ``env``,
            ``max_restarts``, ``timeout`` and ``checks``, as for `notebook_launcher`. The job file includes the options
            of ``engine="slurm --partition=gpu"`` that sbatch accepts. It starts one rank per allocated GPU by default.
            `threads_per_rank` sets ``OMP_NUM_THREADS``, by default torchrun's choice; `timeout` limits the job.

    Returns:
        An `Exported`: the files, the command that runs the script, and notes.

    Raises:
        ArgumentError: An argument is invalid, or a file already exists. Nothing was written.
        PayloadError: A name that the function uses cannot be written. Nothing was written.
    """
    notebook = host().notebook_names()
    if notebook is None:
        raise ArgumentError("export: works only in a notebook; run a script with torchrun directly")
    payload = payloads.for_function(function, args, kwargs)
    names = ExportedNames(host().cells(), notebook, PROVIDED.difference(FILLED_IN))
    call = _call(function, payload.args, payload.kwargs, names)
    body = statements_text(names.in_order())
    name = next(name for name in ("main", "run_rank", "_main") if name not in notebook)
    checked = Options(**options)
    return _write(path, script_text(body, call, checked, name), checked, sbatch, force)


def export_cell(
    cell: Cell, used: Sequence[str], typed: str, path: str, *, sbatch: bool, force: bool, options: Options
) -> Exported:
    """Write a cell, which uses these names of the notebook and was `typed` so, as a script; see `export`."""
    names = ExportedNames(host().cells(), host().notebook_names() or {}, PROVIDED)
    if code_of(ast.parse(cell.source).body).co_flags & inspect.CO_COROUTINE:
        raise ArgumentError(f"{cell.label}: a script cannot use await outside a function: use asyncio.run(...)")
    for statement in statements_of([CellSource(cell.label, typed, cell.source)]):
        if shell := statement.shell_line():
            raise ArgumentError(f"{shell} is IPython syntax: rewrite it in Python, or move it to another cell")
    names.need(used)
    text = cell.source.strip("\n") or "pass"
    if cell.ranks is not None:
        text = f"if rank in {list(cell.ranks)}:\n{indented(text)}"
    return _write(path, script_text(statements_text(names.in_order()), text, options), options, sbatch, force)


class _FilledIn(str):
    """The name of a parameter that the script fills in."""


def _call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: ExportedNames) -> str:
    called = names.reference(function)
    if not called:
        own = payloads.name_of(function)
        raise PayloadError(f"`{own}` is not a function from a cell or module: define a function that calls it")
    args, kwargs = parameters.complete(function, args, kwargs, {name: _FilledIn(name) for name in FILLED_IN})
    texts = [_argument(f"args[{number}]", value, names) for number, value in enumerate(args)]
    texts += [f"{name}={_argument(f'kwargs[{name!r}]', value, names)}" for name, value in kwargs.items()]
    return f"{called}({', '.join(texts)})"


def _argument(label: str, value: Any, names: ExportedNames) -> str:
    text = value if isinstance(value, _FilledIn) else literal_of(value) or names.reference(value)
    if not text:
        raise PayloadError(f"`{label}`: {pickling.describe(value)} cannot be written into a script: {FIX}")
    return text


def _write(path: str | os.PathLike[str], content: str, options: Options, sbatch: bool, force: bool) -> Exported:
    target = Path(path)
    if target.suffix != ".py" or not target.stem:
        raise ArgumentError(f"path={str(path)!r}: must end in .py, as in train.py")
    if not target.parent.is_dir():
        raise ArgumentError(f"path={str(path)!r}: the directory {target.parent} does not exist")
    compile(content, str(target), "exec")
    asked = current.job_request(options.engine, options.num_nodes)
    plan = plan_of(asked, options)
    command = command_of(plan, str(target))
    texts = {target: f"# Run it with: {command}\n{content}"}
    if sbatch:
        job = target.with_suffix(".sbatch")
        texts[job] = job_file(asked, plan, target.name)
        folder = f"--chdir={shlex.quote(str(target.parent))} " if str(target.parent) != "." else ""
        command += f"\n    or: sbatch {folder}{shlex.quote(str(job))}"
    for file in texts:
        if file.exists() and not force:
            raise ArgumentError(f"path={str(target)!r}: {file} already exists: use another name, or force=True")
    for file, text in texts.items():
        file.write_text(text)
    notes: tuple[str, ...] = ()
    if asked.kind in ("ray", "ssh"):
        notes = (f"the script does not use engine='{asked.kind}': start torchrun on each node yourself",)
    elif asked.kind == "slurm" and not sbatch:
        notes = ("the command runs on this machine: use sbatch=True (--sbatch) for engine='slurm' and its options",)
    return Exported(target, (*texts,), command, notes)


# ------------------------------------------------------------------ the notebook's names
_MAX_LITERAL_CHARS = 2000
_CODE = (types.FunctionType, type, reducers.CACHED)
_IMPORTED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
_PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, set, dict)


@dataclass
class ExportedNames:
    """The statements that a script needs of the notebook's cells: imports, definitions, and short literals.

    `hidden` are names that the script defines itself.
    """

    cells: Sequence[CellSource]
    names: dict[str, Any]
    hidden: frozenset[str]
    _found: dict[str, list[Statement]] = field(default_factory=dict)

    @functools.cached_property
    def _statements(self) -> list[Statement]:
        return statements_of(self.cells)

    def need(self, names: Iterable[str]) -> None:
        """Add names of the notebook, and what their statements need."""
        waiting = [(name, "") for name in sorted(names)]
        for name, user in waiting:
            if name in self._found or name in self.hidden or name not in self.names or name.startswith("__"):
                continue
            self._found[name] = self._statements_for(name, user)
            for statement in self._found[name]:
                if line := statement.shell_line():
                    raise PayloadError(f"{line} is IPython syntax, used to define `{name}`: rewrite it in Python")
                waiting += [(each, name) for each in sorted(statement.reads)]

    def reference(self, value: Any) -> str:
        """Return a name for a module, function or class, which is added; empty if it has none."""
        own = getattr(value, "__name__", "")
        known = [own] if self.names.get(own) is value else [n for n, each in self.names.items() if each is value]
        name = next((name for name in known if not name.startswith("_")), "")
        if name:
            self.need([name])
        elif isinstance(value, _IMPORTED) and (text := _import_of(own, value)):
            name = own
            self._found[name] = [_written(text, (0, 0))]
        return name

    def _statements_for(self, name: str, user: str) -> list[Statement]:
        value = self.names[name]
        binding = [each for each in self._statements if name in each.binds]
        if binding and binding[-1].is_import:  # `import torch` and `import torch.utils.data` both bind torch
            return list({each.text: each for each in reversed(binding) if each.is_import}.values())
        if isinstance(value, _CODE) and definitions.is_sent_by_value(value):
            for statement in reversed(binding):
                if statement.defines(value):
                    return [statement]
            kind = "class" if isinstance(value, type) else "function"
            raise PayloadError(f"`{name}`: no cell has the current definition of this {kind}: define it in a cell")
        if isinstance(value, _IMPORTED) and (text := _import_of(name, value)):
            return [_written(text, (0, 0))]
        literal = literal_of(value)
        if literal is None:
            used = f", which `{user}` uses" if user else ""
            raise PayloadError(f"`{name}`{used}: {pickling.describe(value)} cannot be written into a script: {FIX}")
        written = _written(f"{name} = {literal}", binding[-1].order if binding else (0, 0))
        is_same = bool(binding) and ast.unparse(binding[-1].node) == ast.unparse(written.node)
        return [binding[-1] if is_same else written]

    def in_order(self) -> list[Statement]:
        """Return the statements in the notebook's order, but each after those that it needs to run."""
        placed: dict[str, Statement] = {}
        seen = set[tuple[str, bool]]()

        def place(statement: Statement, is_called: bool) -> None:
            if (statement.text, is_called) not in seen:
                seen.add((statement.text, is_called))
                for name in sorted(statement.reads | statement.reads_at_once if is_called else statement.reads_at_once):
                    for each in self._found.get(name, ()):
                        place(each, True)
                placed.setdefault(statement.text, statement)

        found = [each for statements in self._found.values() for each in statements]
        found += [each for each in self._statements if each.text.startswith("from __future__ ")]
        for statement in sorted(found, key=lambda it: it.order):
            place(statement, False)
        return list(placed.values())


def literal_of(value: Any) -> str | None:
    """Return an expression for short, plain data; None if it is something else."""
    torch = sys.modules.get("torch")
    if isinstance(value, pathlib.PurePath) and type(value).__module__.startswith("pathlib"):
        return f"pathlib.Path({str(value)!r})"
    if torch is not None and isinstance(value, (torch.device, torch.dtype)):
        return repr(value) if isinstance(value, torch.dtype) else f"torch.device({str(value)!r})"
    if type(value) is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    if type(value) not in _PLAIN or (hasattr(value, "__len__") and len(value) > _MAX_LITERAL_CHARS):
        return None
    text = repr(value)
    try:
        return text if len(text) <= _MAX_LITERAL_CHARS and ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError):  # an object, or an infinity in a list
        return None


def _import_of(name: str, value: Any) -> str:
    """Return a statement that imports a module, function or class under a name; empty if it cannot be imported."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
    own, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", None)
    is_found = own.isidentifier() and isinstance(module, str) and definitions.look_up(module, own) is value
    if not is_found or module == "__main__":
        return ""
    return f"from {module} import {own}" + ("" if own == name else f" as {name}")


def _written(text: str, order: tuple[int, int]) -> Statement:
    return Statement(CellSource("", text, text), order, text, ast.parse(text).body[0])


# ------------------------------------------------------------------ the script's text
_FUTURE = re.compile(r"^from __future__ import (?:\([^)]*\)|.+)\n*", re.MULTILINE)
_RANKS = {name: f'int(os.environ["{name.upper()}"])' for name in ("rank", "world_size", "local_rank")}
_DEVICES = {
    "auto": 'torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")',
    "cuda": 'torch.device("cuda", local_rank)',
    "cpu": 'torch.device("cpu")',
}
_BACKENDS = {
    "auto": '"cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"',
    "cuda": '"cpu:gloo,cuda:nccl"',
    "cpu": '"gloo"',
}


def script_text(statements: str, text: str, options: Options, name: str = "") -> str:
    """Return the script: the statements of the notebook, then `text`, which each rank runs.

    `name` is that of the function that holds `text`; empty for a cell, whose statements bind globals.
    """
    words = set(re.findall(r"\w+", f"{statements}\n{text}"))
    uses_gpu, owns_group = options.device != "cpu", "init_process_group" in words
    needed = set(re.findall(r"\w+", text)) if name else words
    needed |= {"device", "local_rank"} if uses_gpu else set()
    values = {**_RANKS, "device": _DEVICES[options.device]}
    lines = [f"{each} = {values[each]}" for each in FILLED_IN if each in needed]
    if uses_gpu:
        lines += ['if device.type == "cuda":', "    torch.cuda.set_device(device)"]
    if words & {"accelerate", "transformers"} and options.device != "cuda":
        line = 'os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else Accelerator() ignores the other CPU ranks'
        lines += ["else:", f"    {line}"] if uses_gpu else [line]
    if words & {"MASTER_ADDR", "MASTER_PORT"}:
        lines.append('os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the code below has its own rendezvous')
    if not owns_group:
        backend = _BACKENDS[options.device] if options.backend is None else f'"{options.backend}"'
        lines.append(f"torch.distributed.init_process_group({backend})")
    lines += [text] if name else ["", text, ""]
    if owns_group:
        lines += ["if torch.distributed.is_initialized():", "    torch.distributed.destroy_process_group()"]
    else:
        lines.append("torch.distributed.destroy_process_group()")
    block = indented("\n".join(lines))
    main = f'if __name__ == "__main__":\n{block}\n'
    if name:
        main = f'def {name}():\n{block}\n\n\nif __name__ == "__main__":\n    {name}()\n'
    future = [match[0].rstrip("\n") for match in _FUTURE.finditer(statements)]
    statements = _FUTURE.sub("", statements)
    if re.search(r"(?<![\w.])display\(", f"{statements}\n{text}"):
        statements = f"display = print\n\n\n{statements}".rstrip("\n")  # first: the user's own may follow
    used = [each for each in ("os", "pathlib", "torch") if re.search(rf"\b{each}\.", f"{statements}\n{block}")]
    imports = [line for each in used if (line := f"import {each}") not in statements.splitlines()]
    return "\n\n\n".join(filter(None, ["\n".join([*future, *imports]), statements, main]))


def indented(text: str) -> str:
    """Indent code by one level; strings over several lines stay as they are."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))):
            inside.update(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    lines = text.split("\n")
    return "\n".join(f"    {line}" if line and i not in inside else line for i, line in enumerate(lines, 1))


def statements_text(statements: Sequence[Statement]) -> str:
    """Return the statements, with two blank lines around definitions."""
    text = ""
    for before, each in zip([None, *statements], statements, strict=False):
        if before is not None:
            text += "\n\n\n" if before.is_definition or each.is_definition else "\n"
        text += each.text
    return text


# ------------------------------------------------------------------ how it is started
_JOB = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{options}#
# Submit it with `sbatch`. Each node runs one torchrun. Add the options that your cluster requires, such as a partition
# and a time limit, and activate your environment.

set -euo pipefail
{exports}
# The first node hosts the rendezvous. Set MASTER_ADDR if its name does not resolve on the other nodes.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [ "${{#nodes[@]}}" = 1 ]; then first=127.0.0.1; else first=${{nodes[0]}}; fi
export MASTER_ADDR=${{MASTER_ADDR:-$first}}
export MASTER_PORT=${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 12768))}}
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-{cpus}}}

# Node 0 hosts the rendezvous, whatever its hostname.
srun --kill-on-bad-exit=1 bash -c 'first=$((SLURM_NODEID == 0)); exec torchrun \\
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={nproc} --max-restarts={restarts} \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \\
    --rdzv-conf=is_host="$first" $([ "$first" = 0 ] || echo --local-addr="$MASTER_ADDR") \\
    "$0"' {script}
"""


def plan_of(asked: JobRequest, options: Options) -> Plan:
    """Return the plan of ranks with these options. The GPUs need not be here: the script may run elsewhere."""
    machine = replace(this_machine(), free_descriptors=sys.maxsize)
    if options.device == "cuda" or options.backend == "nccl" or machine.gpus:
        machine = replace(machine, gpus=max(machine.gpus, options.num_processes or 1))
    return make_plan([machine] * asked.nodes, current.engine, options)


def _variables(plan: Plan) -> dict[str, str]:
    threads = plan.options.threads_per_rank
    return {**({} if threads is None else {"OMP_NUM_THREADS": str(threads)}), **plan.options.variables}


def command_of(plan: Plan, script: str) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in _variables(plan).items()]
    restarts = ["--max-restarts", str(plan.options.max_restarts)] if plan.options.max_restarts else []
    nproc = str(plan.places[0].local_world_size)
    return " ".join([*variables, "torchrun", "--nproc-per-node", nproc, *restarts, shlex.quote(script)])


def job_file(asked: JobRequest, plan: Plan, script: str) -> str:
    given = plan.options
    nproc = plan.places[0].local_world_size
    cpus = nproc * (given.threads_per_rank or 1)
    options = [f"--cpus-per-task={cpus}", "--output=%x-%j.out"]  # those below replace these
    options += [] if given.timeout is None else [f"--time={math.ceil(given.timeout / 60)}"]
    words = [word for words in asked.options for word in words]
    if given.device == "cuda" and not any("gpu" in word or word.startswith("-G") for word in words):
        options.append(f"--gpus-per-node={nproc}")
    options += [shlex.join(words) for words in asked.options]
    is_open = given.num_processes is None and given.device != "cpu"
    return _JOB.format(
        name=shlex.quote(script.removesuffix(".py")),
        nodes=asked.nodes,
        options="".join(f"#SBATCH {line}\n" for line in options),
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in _variables(plan).items()),
        cpus=cpus,
        nproc=f'"${{SLURM_GPUS_ON_NODE:-{nproc}}}"' if is_open else nproc,
        restarts=given.max_restarts,
        script=shlex.quote(script),
    )
