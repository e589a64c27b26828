"""The statements that a script needs of the notebook's cells: imports, definitions, and short literals."""

from __future__ import annotations

import ast
import builtins
import functools
import math
import pathlib
import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nblaunch.errors import PayloadError
from nblaunch.launch.export.cell_statements import CellSource, Statement, statements_of
from nblaunch.transfer import definitions, pickling, reducers

FIX = "create it in the function, or load it from a file"
_MAX_LITERAL_CHARS = 2000
_MAX_DEPTH = 5
"""Of containers in a literal."""
_CODE = (types.FunctionType, type, reducers.CACHED)
_IMPORTED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
_SCALARS = (type(None), bool, int, float, str, bytes)
_CONTAINERS = (list, tuple, set, dict)


@dataclass
class ExportedNames:
    """The names that a script needs, with those that they need in turn.

    Args:
        cells: The cells that the notebook has run.
        names: Its names.
        hidden: Names that the script defines itself.

    Attributes:
        notes: What the user should know.
    """

    cells: Sequence[CellSource]
    names: dict[str, Any]
    hidden: frozenset[str]
    notes: list[str] = field(default_factory=list)
    _found: dict[str, list[Statement]] = field(default_factory=dict)

    @functools.cached_property
    def _statements(self) -> list[Statement]:
        return statements_of(self.cells)

    def need(self, names: Iterable[str]) -> None:
        """Add names of the notebook, and what their statements need.

        Raises:
            PayloadError: A value is neither imported nor defined, and no short literal.
        """
        waiting = [(name, "") for name in sorted(names)]
        for name, user in waiting:
            if name in self._found or name in self.hidden or name not in self.names or name.startswith("__"):
                continue
            self._found[name] = self._statements_for(name, user)
            for statement in self._found[name]:
                if line := statement.shell_line():
                    raise PayloadError(
                        f"{line} is IPython's syntax, and a script needs it for `{name}`: write it in Python"
                    )
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
            return [self._definition(name, value, binding)]
        if isinstance(value, _IMPORTED) and (text := _import_of(name, value)):
            return [_written(text, (0, 0))]
        literal = literal_of(value)
        if literal is None:
            used = f", which `{user}` uses" if user else ""
            raise PayloadError(f"`{name}`{used}: {pickling.describe(value)} cannot be written into a script: {FIX}")
        written = _written(f"{name} = {literal}", binding[-1].order if binding else (0, 0))
        is_same = bool(binding) and ast.unparse(binding[-1].tree) == ast.unparse(written.tree)
        return [binding[-1] if is_same else written]

    def _definition(self, name: str, value: Any, binding: Sequence[Statement]) -> Statement:
        for statement in reversed(binding):
            if statement.defines(name, value):
                return statement
        kind = "class" if isinstance(value, type) else "function"
        raise PayloadError(f"`{name}`: no cell of the notebook defines this {kind} as it is now: define it in a cell")

    # -------------------------------------------------------------- the outcome
    def note_missing(self, bound: frozenset[str] = frozenset()) -> None:
        """Note the names that statements of the script use, and that neither the notebook nor the script has.

        Args:
            bound: Names that the script binds besides.
        """
        statements = [(user, each) for user, found in self._found.items() for each in found]
        known = bound | self.hidden | self.names.keys() | vars(builtins).keys()
        known = known.union(*(each.sets for _, each in statements))
        missing = {name: user for user, each in statements for name in each.reads - known}
        self.notes += [f"`{user}` uses `{name}`, which the notebook does not have" for name, user in missing.items()]

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
    if not _is_plain(value, _MAX_DEPTH):
        return None
    text = repr(value)
    try:
        return text if len(text) <= _MAX_LITERAL_CHARS and ast.literal_eval(text) == value else None
    except ValueError:  # an infinity in a list
        return None


def _is_plain(value: Any, depth: int) -> bool:
    if type(value) in _SCALARS:
        return True
    if type(value) not in _CONTAINERS or len(value) > _MAX_LITERAL_CHARS or not depth:
        return False
    parts = (*value, *value.values()) if type(value) is dict else value
    return all(_is_plain(part, depth - 1) for part in parts)


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
    """Return a statement that the notebook does not have."""
    return Statement(CellSource("", text, text), order, text, tuple(ast.parse(text).body))
