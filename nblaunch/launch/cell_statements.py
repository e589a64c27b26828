"""The statements of the notebook's cells: their text, the names that they bind, and the names that they read."""

from __future__ import annotations

import ast
import functools
import inspect
import symtable
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_AT_ONCE = ("listcomp", "setcomp", "dictcomp", "genexpr")
"""Symbol tables of comprehensions, which run where they stand."""


@dataclass(frozen=True, slots=True)
class CellSource:
    """A cell that the notebook has run.

    Attributes:
        label: Such as ``Cell In[3]``.
        typed: The cell as the user wrote it.
        python: The same, with IPython's syntax translated.
        is_of_ranks: The session's ranks ran it, and not the notebook: ``%distributed auto`` was on.
    """

    label: str
    typed: str
    python: str
    is_of_ranks: bool = False


@dataclass(frozen=True, eq=False)
class Statement:
    """A statement at the top level of a cell.

    Attributes:
        cell: Its cell.
        order: The number of the cell in the order of execution, and of the line.
        text: Its lines, with the comment above; without what else stands on its line.
        node: Its syntax.
    """

    cell: CellSource
    order: tuple[int, int]
    text: str
    node: ast.stmt

    @functools.cached_property
    def binds(self) -> frozenset[str]:
        """The names that it assigns, defines or imports."""
        symbols = self._table.get_symbols()
        return frozenset(each.get_name() for each in symbols if each.is_assigned() or each.is_imported())

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The names that it, and the functions in it, look up globally."""
        return frozenset((*global_names(self._table, reads=True), *changed_names(self.node, self._table)))

    @functools.cached_property
    def reads_at_once(self) -> frozenset[str]:
        """The names that it looks up when it runs, not when a function in it is called."""
        return frozenset(_names_at_once(self._table))

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, (ast.Import, ast.ImportFrom))

    @property
    def is_definition(self) -> bool:
        return isinstance(self.node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))

    def defines(self, value: Any) -> bool:
        """Return True unless a function or class of the notebook has another source than this statement."""
        if not self.is_definition:
            return not self.binds & self.reads  # such as `f = compiled(f)`, which is half of the definition
        members = vars(value).values() if isinstance(value, type) else [value]
        functions = [each for each in map(inspect.unwrap, filter(callable, members)) if _is_of_main(each)]
        is_decorated = bool(self.node.decorator_list)  # type: ignore[attr-defined]  # it is a definition
        return is_decorated or not functions or any(map(self._has, functions))

    def _has(self, function: types.FunctionType) -> bool:
        try:
            return inspect.getsource(function).strip() in self.text
        except OSError:  # such as of a cell under %%time
            return True

    def shell_line(self) -> str:
        """Return its first line in IPython's syntax, with its number; empty if it has none."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name) and node.id == "get_ipython":  # which the translation calls
                typed, python = self.cell.typed.splitlines(), self.cell.python.splitlines()
                lines = typed if len(typed) == len(python) else python
                return f"{self.cell.label}, line {node.lineno}: `{lines[node.lineno - 1].strip()}`"
        return ""

    @functools.cached_property
    def _table(self) -> symtable.SymbolTable:
        return symtable.symtable(ast.unparse(self.node), "", "exec")


def _is_of_main(thing: Any) -> bool:
    return isinstance(thing, types.FunctionType) and thing.__module__ == "__main__"


def statements_of(cells: Sequence[CellSource]) -> list[Statement]:
    """Return the statements of all cells, in the order in which they ran. Cells that are no Python have none.

    Statements that await at the top level are left out: a script cannot have them.
    """
    found = []
    for number, cell in enumerate(cells):
        try:
            body = ast.parse(cell.python).body
        except (SyntaxError, ValueError):
            continue
        lines = cell.python.splitlines()
        ends = [0, *(node.end_lineno or node.lineno for node in body)]
        begins = [*map(_first_line, body), len(lines) + 1]
        for i, node in enumerate(body):
            first, last = begins[i], ends[i + 1]
            if first <= ends[i] or begins[i + 1] <= last:
                text = ast.get_source_segment(cell.python, node) or ""
            else:
                while first - 1 > ends[i] and lines[first - 2].startswith("#"):
                    first -= 1
                text = "\n".join(lines[first - 1 : last])
            if not awaits(node):
                found.append(Statement(cell, (number, first), text, node))
    return found


def awaits(node: ast.stmt) -> bool:
    """Return True if a statement has an ``await`` outside functions."""
    try:
        code = compile(ast.Module([node], []), "", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:  # such as `return`: the cell has failed
        return False
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(int(each.lineno) for each in getattr(node, "decorator_list", ()))])


def global_names(table: symtable.SymbolTable, reads: bool) -> Iterator[str]:
    """Yield names that are read (else: assigned or deleted) as globals. A class body may read globals too."""
    maybe = table.get_type() in ("module", "class")
    for symbol in table.get_symbols():
        if (symbol.is_referenced() if reads else symbol.is_assigned()) and (maybe or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from global_names(child, reads)


def _names_at_once(table: symtable.SymbolTable) -> Iterator[str]:
    maybe = table.get_type() in ("module", "class")
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (maybe or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        if child.get_type() == "class" or child.get_name() in _AT_ONCE:
            yield from _names_at_once(child)


def changed_names(tree: ast.AST, table: symtable.SymbolTable) -> set[str]:
    """Return globals that ``x += 1`` and ``del x`` change: they need the name, but symtable counts them as no reads."""
    targets = [node.target for node in ast.walk(tree) if isinstance(node, ast.AugAssign)]
    deleted = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del)]
    names = {target.id for target in (*targets, *deleted) if isinstance(target, ast.Name)}
    return names.intersection(global_names(table, reads=False))
