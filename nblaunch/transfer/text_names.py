"""Names that no bytecode shows: in strings that a function evaluates, and in annotations that are strings.

They are hints: a name in a string may be meant otherwise. So one that cannot be sent never fails a launch.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ForwardRef, Literal, get_origin

from nblaunch.transfer import pickling

_EVALUATES = {"eval", "exec", "globals", "get_type_hints"}
"""Functions that look names up by strings."""
_EVALUATING_METHODS = {"query", "eval"}
"""Methods of tables, which evaluate ``"a > @threshold"``. A module's ``eval`` takes no string."""
_MAX_PARSED_CHARS = 10_000
_NAME = r"[^\W\d]\w*"
_MARKED = re.compile(rf"@({_NAME})")
_IN_TEMPLATE = re.compile(rf"\$\{{?({_NAME})|\{{({_NAME})|@({_NAME})")
_HAS_DOCSTRING = 0x4000000
"""In Python 3.13 and newer, a code object's flag."""


def hinted_names(definition: Any) -> frozenset[str]:
    """Return the names that a function's strings, or the annotations of a function or class, may refer to."""
    found = set[str]()
    if isinstance(definition, types.FunctionType):
        found |= names_in_strings(definition.__code__)
    annotations = vars(definition).get("__annotations__") if isinstance(definition, type) else None
    if isinstance(definition, types.FunctionType) and sys.version_info < (3, 14):  # 3.14 would evaluate them
        annotations = definition.__annotations__
    for text in _strings_in(annotations.values() if isinstance(annotations, dict) else ()):
        found.update(_names_in_type(text))
    return frozenset(name for name in found if not name.startswith("__"))


def sendable(names: Iterable[str], namespace: Mapping[str, Any]) -> set[str]:
    """Return those of these names that the namespace has, and that can be sent."""
    return {name for name in names if name in namespace and pickling.explain(namespace[name], name) is None}


@functools.lru_cache(maxsize=4096)
def names_in_strings(code: types.CodeType) -> frozenset[str]:
    """Return the names in the strings of code that evaluates some: with ``eval``, ``globals()`` or ``df.query``.

    Docstrings are no such strings.
    """
    parts = [code]
    for part in parts:  # it grows meanwhile
        parts += [constant for constant in part.co_consts if isinstance(constant, types.CodeType)]
    texts = {text for part in parts for text in _strings_of(part)}
    names = {name for part in parts for name in part.co_names}
    # the annotations of a class inside the function
    types_of = [text for part in parts if "__annotations__" in part.co_names for text in _strings_of(part)]
    found = {name for text in types_of for name in _names_in_type(text)}
    if pickling.looked_up(code) & _EVALUATES or "__main__" in names | texts:
        found |= names if "__main__" in names else set()  # __main__.lr
        found = found.union(*map(names_in_text, texts))
    elif names & _EVALUATING_METHODS:
        found.update(name for text in texts for name in _MARKED.findall(text))
    return frozenset(found)


def names_in_text(text: str) -> set[str]:
    """Return the names in an expression, statements, or a template such as ``{lr}`` or ``$lr``; none in prose."""
    if len(text) > _MAX_PARSED_CHARS:
        return set()
    try:
        tree = ast.parse(textwrap.dedent(text).strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {name for groups in _IN_TEMPLATE.findall(text) for name in groups if name}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def names_in_annotations(tree: ast.AST) -> set[str]:
    """Return the names in the annotations in source code, and in their strings."""
    sides = [getattr(node, side, None) for node in ast.walk(tree) for side in ("annotation", "returns")]
    return {name for side in sides if isinstance(side, ast.expr) for name in _names_of_type(side)}


def _names_of_type(node: ast.AST) -> Iterator[str]:
    """Yield the names in an annotation, also in strings such as that in ``Optional["Net"]``; none in a Literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _names_in_type(node.value)
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
        yield from _names_of_type(node.value)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _names_of_type(child)


def _names_in_type(text: str) -> Iterator[str]:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        yield from _names_of_type(ast.parse(text.strip(), mode="eval"))


def _strings_of(code: types.CodeType) -> Iterator[str]:
    has_docstring = code.co_flags & (_HAS_DOCSTRING if sys.version_info >= (3, 13) else 1)  # 1: of a function
    for constant in code.co_consts[1 if has_docstring else 0 :]:
        yield from (each for each in (constant if isinstance(constant, tuple) else (constant,)) if type(each) is str)


def _strings_in(annotations: Iterable[Any]) -> Iterator[str]:
    for each in annotations:
        if isinstance(each, str):
            yield each
        elif isinstance(each, ForwardRef):
            yield each.__forward_arg__
        elif get_origin(each) is not Literal and isinstance(arguments := getattr(each, "__args__", ()), tuple):
            yield from _strings_in(arguments)
