"""Reading a ``%%distributed`` cell: which of the notebook's names it uses, and where its lines stand."""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import re
import symtable
from collections.abc import Iterator, Mapping
from typing import Any

from IPython.core.error import UsageError

from nblaunch.wire.messages import Cell

_PROVIDED = {
    "get_ipython",
    "display",
    "exit",
    "quit",
    "open",
    "In",
    "Out",
    "rank",
    "world_size",
    "local_rank",
    "device",
}
"""Names that a rank has of its own."""


def make_cell(shell: Any, body: str, ranks: tuple[int, ...] | None) -> Cell:
    """The cell as ranks are to run it: notebook syntax translated, lines counted from the magic's own.

    Raises:
        SyntaxError: As for any cell.
        UsageError: It awaits at the top level.
    """
    count = len(shell.history_manager.input_hist_raw) - 1  # execution_count may be the next cell's already
    filename, label = f"<distributed cell {count}>", f"Cell In[{count}]"
    leading = sum(1 for _ in itertools.takewhile(str.isspace, body.splitlines(keepends=True)))  # IPython drops them
    source = "\n" * (1 + leading) + shell.transform_cell(body)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # for a SyntaxError
    code = compile(source, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        raise UsageError(
            "`await` at the top of a %%distributed cell: a rank has no event loop; use asyncio.run(...) in the cell"
        )
    return Cell(source, filename, label, ranks)


def names_used(cell: Cell, namespace: Mapping[str, Any]) -> list[str]:
    """The notebook's names that the cell reads; names that it only assigns, or assigns first, stay in the ranks."""
    used: set[str] = set()
    bound: set[str] = set()
    for statement in ast.parse(cell.source).body:
        table = symtable.symtable(ast.unparse(statement), cell.filename, "exec")
        reads = {*_global_names(table, reads=True), *_in_notebook_syntax(statement)}
        reads |= _changed(statement).intersection(_global_names(table, reads=False))
        used |= reads - bound
        if isinstance(statement, _BINDS) and getattr(statement, "value", ...) is not None:  # x: int binds nothing
            bound |= {symbol.get_name() for symbol in table.get_symbols() if _is_bound(symbol)}
    return sorted(name for name in used if name in namespace and name not in _PROVIDED and not name.startswith("__"))


_BINDS = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
"""Statements after which a name is the cell's own, whatever happens; after an ``if`` or ``for`` it may not be."""


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported()


def _global_names(table: symtable.SymbolTable, reads: bool) -> Iterator[str]:
    """Names that are read (else: assigned or deleted) as globals, or as what may be one: the body of a class."""
    maybe = table.get_type() in ("module", "class")
    for symbol in table.get_symbols():
        if (symbol.is_referenced() if reads else symbol.is_assigned()) and (maybe or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _global_names(child, reads)


def _changed(tree: ast.AST) -> set[str]:
    """Targets of ``x += 1`` and ``del x``, which need the name and do not count as reads."""
    targets = [node.target for node in ast.walk(tree) if isinstance(node, ast.AugAssign)]
    deleted = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del)]
    return {target.id for target in (*targets, *deleted) if isinstance(target, ast.Name)}


def _in_notebook_syntax(tree: ast.AST) -> Iterator[str]:
    """Names in ``%time f(x)`` and ``!echo {x} $y``, which are strings in calls of get_ipython() by now."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and (function := ast.unparse(call.func)).startswith("get_ipython()."):
            for text in call.args[function.endswith("magic") :]:  # without the magic's own name
                pattern = ".+" if function.endswith("magic") else r"\{[^{}]+\}|\$\w+"
                for piece in re.findall(pattern, ast.unparse(text)):
                    yield from re.findall(r"[^\W\d]\w*", piece)
