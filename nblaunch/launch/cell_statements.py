"""The statements of the notebook's cells: their text, the names that they bind, and the names that they read."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL")


@dataclass(frozen=True, slots=True)
class CellSource:
    """A cell that the notebook has run, with its label, such as ``Cell In[3]``."""

    label: str
    typed: str
    python: str
    """The same, with IPython's syntax translated."""
    is_of_ranks: bool = False
    """The session's ranks ran it: ``%distributed auto`` was on."""


@dataclass(frozen=True, eq=False)
class Statement:
    cell: CellSource
    order: tuple[int, int]
    """The number of the cell in the order of execution, and of the line."""
    text: str
    """Its lines, with the comment above; without what else stands on its line."""
    node: ast.stmt

    @functools.cached_property
    def binds(self) -> frozenset[str]:
        return frozenset(names_bound(self.code))

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The names that it, and the functions in it, look up globally."""
        return frozenset(names_read(self.code))

    @functools.cached_property
    def reads_at_once(self) -> frozenset[str]:
        """The names that it looks up when it runs, not when a function in it is called."""
        return frozenset(names_read(self.code, at_once=True))

    @functools.cached_property
    def code(self) -> types.CodeType:
        return code_of([self.node])

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
        unwrapped = map(inspect.unwrap, filter(callable, members))
        found = [each for each in unwrapped if isinstance(each, types.FunctionType)]
        functions = [each for each in found if each.__module__ == "__main__"]
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
            statement = Statement(cell, (number, first), text, node)
            with contextlib.suppress(SyntaxError):  # such as `return`: the cell has failed
                if not statement.code.co_flags & inspect.CO_COROUTINE:
                    found.append(statement)
    return found


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(int(each.lineno) for each in getattr(node, "decorator_list", ()))])


def code_of(statements: Sequence[ast.stmt]) -> types.CodeType:
    """Compile statements, which may await at the top level."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cell's own compilation has shown them
        tree = ast.Module([*statements], [])
        code: types.CodeType = compile(tree, "", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        return code


def names_bound(code: types.CodeType) -> Iterator[str]:
    return (each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_NAME", "STORE_GLOBAL"))


def names_read(code: types.CodeType, *, at_once: bool = False) -> Iterator[str]:
    """Yield the globals that code needs, as ``x += 1`` and ``del x`` do; at once: not those of functions in it."""
    stored = None
    for each in dis.get_instructions(code):
        if each.opname in _READS and each.argval != stored:  # `except E as x` deletes what it has stored
            yield each.argval
        stored = each.argval if each.opname.startswith("STORE_") else None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType) and not (at_once and _is_function(inner)):
            yield from names_read(inner, at_once=at_once)


def _is_function(code: types.CodeType) -> bool:
    """Return True unless code runs where it stands, as that of a class or comprehension does."""
    is_comprehension = code.co_name.startswith("<") and code.co_name != "<lambda>"
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not is_comprehension
