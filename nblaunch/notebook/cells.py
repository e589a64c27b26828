"""``%%distributed`` cells: their source, their line numbers, and the notebook names that they use."""

from __future__ import annotations

import ast
import io
import itertools
import re
import symtable
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any

from IPython.core.getipython import get_ipython

from nblaunch.launch.export.cell_statements import changed_names, global_names
from nblaunch.notebook.auto_cells import goes_to_session, paused
from nblaunch.transfer import text_names
from nblaunch.transfer.parameters import PROVIDED
from nblaunch.wire.messages import Cell


class CellSyntaxError(Exception):
    """The SyntaxError of a cell for the ranks. IPython would show our frames with a subclass of SyntaxError.

    Attributes:
        shown: The error itself.
    """

    def __init__(self, shown: SyntaxError) -> None:
        super().__init__(str(shown))
        self.shown = shown

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows for such an error in any cell. Called by IPython."""
        renderer: Any = get_ipython().SyntaxTB  # type: ignore[union-attr]  # which has called this
        return list(renderer.structured_traceback(type(self.shown), self.shown, []))


CellSyntaxError.__name__ = SyntaxError.__name__  # which the kernel reports


def make_cell(
    shell: Any, body: str, ranks: tuple[int, ...] | None, value_rank: int | None = None, keeps_value: bool = False
) -> Cell:
    """Return the cell for the ranks: notebook syntax translated, lines counted as the user sees them.

    Args:
        shell: The notebook's shell.
        body: The cell without the magic's line.
        ranks: The ranks that run it; None: all.
        value_rank: Ranks display the value of the last expression, except this one (-1: all do). Default: none do.

    Raises:
        CellSyntaxError: As for any cell.
    """
    raw = shell.history_manager.input_hist_raw
    count = len(raw) - 1  # execution_count may already be the next cell's
    filename, label = f"<distributed cell {count}>", f"Cell In[{count}]"
    leading = sum(1 for _ in itertools.takewhile(str.isspace, body.splitlines(keepends=True)))  # IPython drops them
    with paused():
        above = 0 if goes_to_session(shell, raw[-1]) else 1 + leading  # the user has typed no magic's line
        source = "\n" * above + shell.transform_cell(body)
    try:
        compile(source, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        error.filename = shell.compile.cache(source, count)  # IPython shows it as ``Cell In[3]``
        raise CellSyntaxError(error) from None
    if value_rank is None or _ends_with_semicolon(source):
        return Cell(source, filename, label, ranks, keeps_value=keeps_value)
    return Cell(source, filename, label, ranks, True, value_rank, keeps_value)


def _ends_with_semicolon(source: str) -> bool:
    """Return True if the last token is a semicolon, which suppresses the display of the value."""
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type not in blank][-1:] == [";"]


def names_used(cell: Cell, namespace: Mapping[str, Any]) -> list[str]:
    """Return the notebook's names that the cell reads, without those that it assigns first."""
    used: set[str] = set()
    bound: set[str] = set()
    tree, flags = ast.parse(cell.source), ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    hinted = text_names.names_in_annotations(tree) | text_names.names_in_strings(compile(tree, "", "exec", flags))
    for statement in map(_Synchronous().visit, tree.body):
        table = symtable.symtable(ast.unparse(statement), cell.filename, "exec")
        reads = {*global_names(table, reads=True), *_in_notebook_syntax(statement)}
        reads |= changed_names(statement, table)
        used |= reads - bound
        if isinstance(statement, _BINDS) and getattr(statement, "value", ...) is not None:  # x: int binds nothing
            bound |= {
                symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()
            }
    used |= text_names.sendable(hinted - used - bound, namespace)
    return sorted(name for name in used if name in namespace and name not in PROVIDED and not name.startswith("__"))


class _Synchronous(ast.NodeTransformer):
    """Removes ``await`` and ``async`` outside functions: symtable refuses them there."""

    def visit_Await(self, node: ast.Await) -> ast.AST:  # ast's name for it
        return self.visit(node.value)  # type: ignore[no-any-return]  # an expression stays one

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        return self.generic_visit(ast.copy_location(ast.For(**dict(ast.iter_fields(node))), node))

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        return self.generic_visit(ast.copy_location(ast.With(**dict(ast.iter_fields(node))), node))

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        node.is_async = 0
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node


_BINDS = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
"""Statements that bind their names unconditionally, unlike ``if`` or ``for``."""


def _in_notebook_syntax(tree: ast.AST) -> Iterator[str]:
    """Yield names in ``%time f(x)`` and ``!echo {x} $y``: after translation, strings in get_ipython() calls."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and (function := ast.unparse(call.func)).startswith("get_ipython()."):
            for text in call.args[function.endswith("magic") :]:  # without the magic's own name
                pattern = ".+" if function.endswith("magic") else r"\{[^{}]+\}|\$\w+"
                for piece in re.findall(pattern, ast.unparse(text)):
                    yield from re.findall(r"[^\W\d]\w*", piece)
