"""Cells for the ranks: their source, lines and names; and ``%distributed auto on``, which makes every cell one."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import re
import tokenize
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from IPython.core.getipython import get_ipython

from nblaunch.launch import session as live_sessions
from nblaunch.launch.cell_statements import code_of, names_bound, names_read
from nblaunch.transfer.parameters import PROVIDED
from nblaunch.wire.messages import Cell


class CellSyntaxError(Exception):
    """Shows the SyntaxError of a cell for the ranks. IPython would show our frames with a subclass of SyntaxError."""

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

    Ranks display the value of the last expression, except `value_rank` (-1: all do; None: none do).
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
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type not in blank][-1:] == [";"]


def names_used(cell: Cell, namespace: Mapping[str, Any]) -> list[str]:
    """Return the notebook's names that the cell reads, without those that it assigns first."""
    used: set[str] = set()
    bound: set[str] = set()
    for statement in ast.parse(cell.source).body:
        code = code_of([statement])
        used |= {*names_read(code), *_in_notebook_syntax(statement)} - bound
        if isinstance(statement, _BINDS):
            bound |= {*names_bound(code)}
    return sorted(name for name in used if name in namespace and name not in PROVIDED and not name.startswith("__"))


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


# ------------------------------------------------------------------ every cell
_OWN = re.compile(
    r"%%(?!(time|timeit|prun)\b)|%(distributed|load_ext|reload_ext|unload_ext|autoreload|pip|conda|mamba|uv)\b"
)
"""The beginning of a cell that runs in the notebook."""
_HELP = re.compile(r"\?{0,2}[\w.%*]+\?{0,2}")
"""``name?`` and its other forms."""
_paused = ContextVar("paused", default=False)
"""Of one thread: another may read the notebook's cells while the user runs one."""


def set_auto(shell: Any, is_on: bool) -> None:
    """Send every cell to the session, or no longer."""
    transformers = shell.input_transformers_cleanup
    if _to_session in transformers:
        transformers.remove(_to_session)
    if is_on:
        transformers.append(_to_session)


def goes_to_session(shell: Any, cell: str) -> bool:
    """Return True if every cell is sent to the session, this one too."""
    first = cell.lstrip().split("\n", 1)[0]
    return _to_session in getattr(shell, "input_transformers_cleanup", ()) and _OWN.match(first) is None


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Leave cells alone for a while: the body of a cell magic is transformed as well."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


def resume() -> None:
    """End a pause that an interrupt has cut short: a cell's context outlives the cell."""
    _paused.set(False)


def _is_of_ranks(help_line: str) -> bool:
    """Return True if the ranks alone have the name that help is wanted on."""
    name, session, shell = help_line.strip("?").partition(".")[0], live_sessions.find(), get_ipython()
    if session is None or shell is None or name in shell.user_ns:
        return False
    return any(bound.name == name for names in session.who() for bound in names)


def _to_session(lines: list[str]) -> list[str]:
    """Put the magic on top of a cell; remove ``%%local``, so that IPython runs the cell as any other."""
    first, *rest = [line.strip() for line in lines if line.strip()] or [""]
    is_help = not rest and "?" in first and _HELP.fullmatch(first) is not None
    if not _paused.get() and first == "%%local":
        below = list(itertools.dropwhile(lambda line: not line.strip(), lines[1:]))
        return below if below and below[0].startswith("%%") else ["\n", *lines[1:]]  # lines are counted as typed
    if _paused.get() or not first or _OWN.match(first) or (is_help and not _is_of_ranks(first)):
        return lines
    if live_sessions.find() is None:
        raise SyntaxError(
            f"%distributed auto is on, but {live_sessions.how_to_start()}, or turn it off with `%distributed auto off`"
        )
    return ["%%distributed\n", *lines]
