"""The text of a script: imports, definitions and data, then what each rank runs."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nblaunch.launch.export.cell_statements import Statement
from nblaunch.launch.export.literals import quoted
from nblaunch.transfer.parameters import FILLED_IN

_DEFINITION = re.compile(r"(#.*\n)*(@|def |async def |class )")


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A part of the script.

    Attributes:
        order: Where the notebook has it.
        text: Its lines.
        binds: The names that it binds.
        reads: The names that it uses.
        reads_at_once: Those that must be bound before.
    """

    order: tuple[int, int]
    text: str
    binds: frozenset[str]
    reads: frozenset[str] = frozenset()
    reads_at_once: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Imported:
    """An import of one name.

    Attributes:
        order: Where the notebook has it.
        text: The statement for this name alone.
        statement: The user's, which may import more.
    """

    order: tuple[int, int]
    text: str
    statement: Statement | None = None


def beside(suffix: str) -> str:
    """Return an expression for the file beside the script with this ending."""
    return f'pathlib.Path(__file__).with_suffix("{suffix}")'


def load_saved(saved: str) -> str:
    """Return the line that loads what `ExportedNames.saved` has returned."""
    return f"{saved} = torch.load({beside('.data.pt')}, weights_only=True)"


def in_order(entries: Sequence[Entry], by_name: Mapping[str, Entry]) -> Iterator[Entry]:
    """Yield the entries, each after those that it needs to run."""
    placed: set[Entry] = set()
    ready: set[Entry] = set()

    def place(entry: Entry) -> Iterator[Entry]:
        if entry not in placed:
            placed.add(entry)
            for name in sorted(entry.reads_at_once & by_name.keys()):
                yield from prepare(by_name[name])
            yield entry

    def prepare(entry: Entry) -> Iterator[Entry]:
        if entry not in ready:
            ready.add(entry)
            for name in sorted((entry.reads | entry.reads_at_once) & by_name.keys()):
                yield from prepare(by_name[name])
            yield from place(entry)

    for entry in entries:
        yield from place(entry)


@dataclass(frozen=True, slots=True)
class Main:
    """What each rank runs.

    Attributes:
        text: The statements.
        uses: The names of `FILLED_IN` that they and the definitions use.
        name: Of the function that calls the user's; empty for a cell, whose statements bind globals.
        ranks: The ranks that run them; None: all.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        backend: Of the process group; None: by the device.
        owns_group: The code initializes the process group itself.
        owns_address: The code sets the address of its rendezvous itself.
        uses_accelerate: The code imports accelerate, or transformers, which uses it.
        settings: Lines that restore the notebook's random states.
    """

    text: str
    uses: frozenset[str]
    name: str
    ranks: tuple[int, ...] | None
    device: str
    backend: str | None
    owns_group: bool
    owns_address: bool
    uses_accelerate: bool
    settings: Sequence[str] = ()


def main_block(main: Main, dist: str) -> str:
    """Return the end of the script.

    Args:
        main: What each rank runs.
        dist: The script's name for ``torch.distributed``.
    """
    uses_gpu = main.device != "cpu"
    needed = main.uses | ({"device", "local_rank"} if uses_gpu else set()) | ({"rank"} if main.ranks else set())
    values = {
        "rank": 'int(os.environ["RANK"])',
        "world_size": 'int(os.environ["WORLD_SIZE"])',
        "local_rank": 'int(os.environ["LOCAL_RANK"])',
        "device": {
            "auto": 'torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")',
            "cuda": 'torch.device("cuda", local_rank)',
            "cpu": 'torch.device("cpu")',
        }[main.device],
    }
    lines = [f"{name} = {values[name]}" for name in FILLED_IN if name in needed]
    if uses_gpu:
        lines += ['if device.type == "cuda":', "    torch.cuda.set_device(device)"]
    if main.uses_accelerate and main.device != "cuda":
        line = 'os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else Accelerator() ignores the other CPU ranks'
        lines += ["else:", f"    {line}"] if uses_gpu else [line]
    if main.owns_address:
        lines.append('os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the code below has its own rendezvous')
    if not main.owns_group:
        backend = {
            "auto": '"cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"',
            "cuda": '"cpu:gloo,cuda:nccl"',
            "cpu": '"gloo"',
        }[main.device]
        lines.append(f"{dist}.init_process_group({quoted(main.backend) if main.backend else backend})")
    lines += main.settings
    text = main.text if main.ranks is None else f"if rank in {list(main.ranks)}:\n{indented(main.text)}"
    lines += [text] if main.name else ["", text, ""]
    if main.owns_group:
        lines += [f"if {dist}.is_initialized():", f"    {dist}.destroy_process_group()"]
    else:
        lines.append(f"{dist}.destroy_process_group()")
    block = indented("\n".join(lines))
    if not main.name:
        return f'if __name__ == "__main__":\n{block}\n'
    return f'def {main.name}():\n{block}\n\n\nif __name__ == "__main__":\n    {main.name}()\n'


def indented(text: str) -> str:
    """Indent code by one level; strings over several lines stay as they are."""
    inside: set[int] = set()
    starts: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text + "\n").readline):
        kind = tokenize.tok_name[token.type]
        if kind == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
        elif kind == "FSTRING_START":  # from Python 3.12 on
            starts.append(token.start[0])
        elif kind == "FSTRING_END":
            inside.update(range(starts.pop() + 1, token.end[0] + 1))
    lines = text.split("\n")
    return "\n".join(f"    {line}" if line and i not in inside else line for i, line in enumerate(lines, 1))


def imports_text(imports: Mapping[str, Imported], modules: Iterable[str], more: Iterable[Imported]) -> str:
    """Return the import statements: the user's own, without names that the script does not need.

    Args:
        imports: The imports of the notebook, by the name that they bind.
        modules: Modules that the script itself needs.
        more: Imports of submodules.
    """
    own = sorted(f"import {name}" for name in modules if getattr(imports.get(name), "text", "") != f"import {name}")
    parts: dict[object, tuple[tuple[int, int], str]] = {}
    for each in [*imports.values(), *more]:
        if each.statement is None:
            parts[each.text] = each.order, each.text
        else:
            parts[each.statement] = each.order, _needed_part(each.statement, imports)
    lines = [text for _, text in sorted(parts.values(), key=lambda part: part[0])]
    future = [line for line in lines if line.startswith("from __future__")]
    libraries = [line for line in own if line.partition(" ")[2] not in sys.stdlib_module_names]
    standard = "\n".join(dict.fromkeys([*future, *(line for line in own if line not in libraries)]))
    others = "\n".join(dict.fromkeys([*libraries, *(line for line in lines if line not in future)]))
    return "\n\n".join(filter(None, [standard, others]))


def _needed_part(statement: Statement, imports: Mapping[str, Imported]) -> str:
    """Return the part of an import statement that the script needs; the whole as the user wrote it."""
    needed = {name for name, each in imports.items() if each.statement is statement}
    if statement.binds == needed:
        return statement.text
    lines = []
    for node in statement.nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            kept = [a for a in node.names if (a.asname or a.name.partition(".")[0]) in needed]
            if kept:
                part = ast.Import(kept) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, kept, 0)
                lines.append(ast.unparse(part))
    return "\n".join(lines)


def is_definition(text: str) -> bool:
    """Return True if a part begins with a function or class, which stands between two blank lines."""
    return _DEFINITION.match(text) is not None


def entries_text(entries: Sequence[Entry]) -> str:
    """Return the parts of the script: those of one cell together, with two blank lines around definitions."""
    text = ""
    before: Entry | None = None
    for entry in entries:
        if before is not None:
            is_near = before.order[0] == entry.order[0]
            text += "\n\n\n" if is_definition(before.text) or is_definition(entry.text) else "\n" if is_near else "\n\n"
        text += entry.text
        before = entry
    return text
