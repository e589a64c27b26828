"""Generates the page's types from the kernel's: ``python -m tests.unit.page_types`` writes the JSDoc module."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from typing import Any

from nblaunch.notebook import page_messages
from nblaunch.notebook.widget import STATIC

TARGET = STATIC / "page_messages.js"
HEAD = """// The messages between the panel and the kernel.
// Generated from nblaunch/notebook/page_messages.py by `python -m tests.unit.page_types`.
"""
PRIMITIVES = {int: "number", float: "number", str: "string", bool: "boolean", type(None): "null"}


def source() -> str:
    """The text of the JSDoc module."""
    classes = [found for found in vars(page_messages).values() if _is_message(found)]
    unions = {name: vars(page_messages)[name] for name in ("ToPage", "FromPage")}
    typedefs = [
        *map(_typedef, classes),
        *(f"/** @typedef {{{_expression(union)}}} {name} */" for name, union in unions.items()),
    ]
    return "\n".join([HEAD, *typedefs, "", "export {};", ""])


def _is_message(found: object) -> bool:
    return inspect.isclass(found) and found.__module__ == page_messages.__name__


def _typedef(cls: Any) -> str:
    hints = typing.get_type_hints(cls)
    if issubclass(cls, tuple):
        items = ", ".join(f"{name}: {_expression(hints[name])}" for name in cls._fields)
        return f"/** {cls.__doc__}\n * @typedef {{[{items}]}} {cls.__name__} */"
    properties = "\n".join(f" * @property {line}" for line in _properties(cls, hints))
    return f"/** {cls.__doc__}\n * @typedef {{object}} {cls.__name__}\n{properties} */"


def _properties(cls: Any, hints: dict[str, Any]) -> Iterator[str]:
    for field in dataclasses.fields(cls):
        if field.default is None:  # `to_content` leaves it out
            kinds = [kind for kind in typing.get_args(hints[field.name]) if kind is not type(None)]
            yield f"{{{' | '.join(map(_expression, kinds))}}} [{field.name}]"
        else:
            yield f"{{{_expression(hints[field.name])}}} {field.name}"


def _expression(kind: Any) -> str:
    if kind in PRIMITIVES:
        return PRIMITIVES[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " | ".join(map(json.dumps, args))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_expression, args))
    if origin is SequenceABC:
        return f"{_expression(args[0])}[]"
    assert _is_message(kind), kind
    return str(kind.__name__)


if __name__ == "__main__":
    TARGET.write_text(source(), encoding="utf-8")
