"""The text of a script: the statements of the notebook, then what each rank runs."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass

from nblaunch.launch.export.cell_statements import Statement
from nblaunch.transfer.parameters import FILLED_IN

_FUTURE = re.compile(r"^from __future__ import (?:\([^)]*\)|.+)", re.MULTILINE)
_DEFINITION = re.compile(r"(#.*\n)*(@|def |async def |class )")


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
    """

    text: str
    uses: frozenset[str]
    name: str
    ranks: tuple[int, ...] | None
    device: str
    backend: str | None


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


def script_text(statements: str, main: Main) -> str:
    """Return the script.

    Args:
        statements: The part before `main`.
        main: What each rank runs.
    """
    words = set(re.findall(r"\w+", f"{statements}\n{main.text}"))
    block = _main_block(main, words)
    future = [match[0] for match in _FUTURE.finditer(statements)]
    statements = re.sub(rf"{_FUTURE.pattern}\n*", "", statements, flags=re.MULTILINE)
    lines = statements.splitlines()
    needed = [name for name in ("os", "pathlib", "torch") if re.search(rf"\b{name}\.", f"{statements}\n{block}")]
    imports = [line for name in needed if (line := f"import {name}") not in lines]
    gap = "\n\n\n" if _DEFINITION.match(statements) else "\n\n"
    head = "\n".join([*future, *imports])
    top = gap.join(filter(None, [head, statements]))
    return "\n\n\n".join(filter(None, [top, block]))


def _main_block(main: Main, words: set[str]) -> str:
    """Return the end of the script, which also has these words above it."""
    uses_gpu = main.device != "cpu"
    owns_group = "init_process_group" in words
    needed = main.uses | ({"device", "local_rank"} if uses_gpu else set()) | ({"rank"} if main.ranks else set())
    values = {**_RANKS, "device": _DEVICES[main.device]}
    lines = [f"{name} = {values[name]}" for name in FILLED_IN if name in needed]
    if uses_gpu:
        lines += ['if device.type == "cuda":', "    torch.cuda.set_device(device)"]
    if words & {"accelerate", "transformers"} and main.device != "cuda":
        line = 'os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else Accelerator() ignores the other CPU ranks'
        lines += ["else:", f"    {line}"] if uses_gpu else [line]
    if words & {"MASTER_ADDR", "MASTER_PORT"}:
        lines.append('os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the code below has its own rendezvous')
    if not owns_group:
        backend = _BACKENDS[main.device] if main.backend is None else f'"{main.backend}"'
        lines.append(f"torch.distributed.init_process_group({backend})")
    text = main.text if main.ranks is None else f"if rank in {list(main.ranks)}:\n{indented(main.text)}"
    lines += [text] if main.name else ["", text, ""]
    if owns_group:
        lines += ["if torch.distributed.is_initialized():", "    torch.distributed.destroy_process_group()"]
    else:
        lines.append("torch.distributed.destroy_process_group()")
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


def statements_text(statements: Sequence[Statement]) -> str:
    """Return the statements: those of one cell together, with two blank lines around definitions."""
    text = ""
    before: Statement | None = None
    for each in statements:
        if before is not None:
            is_near = before.order[0] == each.order[0] or (before.is_import and each.is_import)
            is_apart = _DEFINITION.match(before.text) or _DEFINITION.match(each.text)
            text += "\n\n\n" if is_apart else "\n" if is_near else "\n\n"
        text += each.text
        before = each
    return text
