"""What cells have changed outside the notebook: registries and classes of modules, which ranks import themselves."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from nblaunch.launch.cell_statements import CellSource
from nblaunch.transfer import cell_effects
from nblaunch.wire.messages import Failed

_REGISTERS = re.compile(r"regist|patch|setattr|\.(define|impl)\b", re.IGNORECASE)
"""In the name of a function or decorator that changes a module."""
_WORD = re.compile(r"[^\W\d]\w*")
_MAX_SEARCHED_CHARS = 2000


def explain(failed: Failed, cells: Iterable[CellSource], namespace: Mapping[str, Any]) -> str:
    """Return a note if an error names what a cell has added to a module; empty if none does.

    Args:
        failed: A rank's exception.
        cells: The cells that the notebook has run.
        namespace: The notebook's names.
    """
    words = set(_WORD.findall(failed.text[:_MAX_SEARCHED_CHARS]))
    words = {word for word in words if not isinstance(namespace.get(word), ModuleType)}
    cells = [*cells]
    sent = cell_effects.attributes_set_in([cell.python for cell in cells], namespace)
    words -= {name for (_, _, name), value in sent.items() if value is not cell_effects.AS_IMPORTED}
    for cell in reversed(cells):
        set_to = (path.split(".") for path in cell_effects.effects_of(cell.python).attributes)
        for word, owner in (*((path[-1], path[0]) for path in set_to), *_changes_of(cell.python)):
            if word in words and (owner is None or _is_of_module(namespace.get(owner))):
                return (
                    f"{cell.label} adds `{word}` to a module or class of the notebook. Ranks import modules "
                    "themselves, without it: add it in the function, too, or in a file that the notebook imports."
                )
    return ""


def _is_of_module(value: Any) -> bool:
    is_code = isinstance(value, (type, FunctionType)) and value.__module__ != "__main__"
    return is_code or isinstance(value, ModuleType)


@functools.lru_cache(maxsize=4096)
def _changes_of(cell: str) -> tuple[tuple[str, str | None], ...]:
    try:
        return tuple(_changes_in(ast.parse(cell).body))
    except SyntaxError:  # a cell that did not run
        return ()


def _changes_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str | None]]:
    """Yield the words that code adds somewhere when it runs, and the name of the object; None: a function adds it."""
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Subscript) and (owner := _root(target)):
                    yield from ((word, owner) for word in _words(target.slice))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for decorator in filter(_registers, node.decorator_list):
                yield node.name, None
                yield from _registered(decorator)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if _registers(node.value.func):
                yield from _registered(node.value)
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            yield from _changes_in(ast.iter_child_nodes(node))


def _registers(node: ast.AST) -> bool:
    return bool(_REGISTERS.search(ast.unparse(node)))


def _registered(call: ast.AST) -> Iterator[tuple[str, None]]:
    """Yield what a call registers: names, and the first words of strings such as ``"ns::op(Tensor x) -> Tensor"``."""
    for each in call.args if isinstance(call, ast.Call) else []:
        if not isinstance(each, ast.Lambda):
            yield from ((part, None) for word in _words(each) for part in (word, *word.split("(")[0].split("::")))


def _words(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def _root(node: ast.AST) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
