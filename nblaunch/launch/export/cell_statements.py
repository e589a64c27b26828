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
_SHELL = "get_ipython"
"""What IPython's translation of ``%magic``, ``!command`` and ``name?`` calls."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


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
    """A statement at the top level of a cell; several, if they share a line.

    Attributes:
        cell: Its cell.
        order: The number of the cell in the order of execution, and of the line.
        text: Its lines, with the comment above.
        nodes: Its syntax.
    """

    cell: CellSource
    order: tuple[int, int]
    text: str
    nodes: tuple[ast.stmt, ...]

    @functools.cached_property
    def binds(self) -> frozenset[str]:
        """The names that it assigns, defines or imports."""
        symbols = self._table.get_symbols()
        return frozenset(each.get_name() for each in symbols if each.is_assigned() or each.is_imported())

    @functools.cached_property
    def sets(self) -> frozenset[str]:
        """The names that it binds, and the globals that functions in it assign."""
        return self.binds.union(global_names(self._table, reads=False))

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The names that it, and the functions in it, look up globally."""
        return frozenset((*global_names(self._table, reads=True), *changed_names(self.tree, self._table)))

    @functools.cached_property
    def reads_at_once(self) -> frozenset[str]:
        """The names that it looks up when it runs, not when a function in it is called."""
        return frozenset(_names_at_once(self._table))

    @property
    def tree(self) -> ast.Module:
        return ast.Module([*self.nodes], [])

    @property
    def is_import(self) -> bool:
        return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in self.nodes)

    def defines(self, name: str, value: Any) -> bool:
        """Return True unless a function or class of the notebook has another source than this statement."""
        nodes = [node for node in self.nodes if isinstance(node, _DEFINITIONS) and node.name == name]
        if not nodes:
            return name not in self.reads  # such as `f = compiled(f)`, which is half of the definition
        members = vars(value).values() if isinstance(value, type) else [value]
        functions = [each for each in map(inspect.unwrap, filter(callable, members)) if _is_of_main(each)]
        return any(node.decorator_list for node in nodes) or not functions or any(map(self._has, functions))

    def _has(self, function: types.FunctionType) -> bool:
        try:
            return inspect.getsource(function).strip() in self.text
        except OSError:  # such as of a cell under %%time
            return True

    def shell_line(self) -> str:
        """Return its first line in IPython's syntax, with its number; empty if it has none."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node.id == _SHELL:
                typed, python = self.cell.typed.splitlines(), self.cell.python.splitlines()
                lines = typed if len(typed) == len(python) else python
                return f"{self.cell.label}, line {node.lineno}: `{lines[node.lineno - 1].strip()}`"
        return ""

    @functools.cached_property
    def _table(self) -> symtable.SymbolTable:
        return symtable.symtable(ast.unparse(self.tree), "", "exec")


def _is_of_main(thing: Any) -> bool:
    return isinstance(thing, types.FunctionType) and thing.__module__ == "__main__"


def statements_of(cells: Sequence[CellSource]) -> list[Statement]:
    """Return the statements of all cells, in the order in which they ran. Cells that are no Python have none.

    Statements that await at the top level are left out: a script cannot have them.
    """
    found = []
    for number, cell in enumerate(cells):
        try:
            tree = ast.parse(cell.python)
        except (SyntaxError, ValueError):
            continue
        lines = cell.python.splitlines()
        end = 0
        for nodes in _groups(tree.body):
            first = min(_first_line(node) for node in nodes)
            last = max(node.end_lineno or node.lineno for node in nodes)
            while first - 1 > end and lines[first - 2].startswith("#"):
                first -= 1
            statement = Statement(cell, (number, first), "\n".join(lines[first - 1 : last]), tuple(nodes))
            end = last
            if not awaits(statement.tree):
                found.append(statement)
    return found


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, _FUNCTIONS):
        for child in ast.iter_child_nodes(node):
            yield from _outside_functions(child)


def awaits(tree: ast.AST) -> int:
    """Return the line of the first ``await`` outside functions; 0 if there is none."""
    for node in _outside_functions(tree):
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            return node.lineno
    return 0


def _groups(nodes: Sequence[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield the statements, those that share a line together."""
    group: list[ast.stmt] = []
    for node in nodes:
        if group and _first_line(node) > (group[-1].end_lineno or 0):
            yield group
            group = []
        group.append(node)
    if group:
        yield group


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
