"""What the names of modules and classes are bound to, and which of them an import has bound anew: a monkeypatch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from operator import is_not
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

_class_names: Any = type.__dict__["__dict__"].__get__
"""The names of a class, without asking its metaclass: that may be anybody's code."""


class _Names(NamedTuple):
    """The names of a module or a class."""

    owner: str
    now: Mapping[str, object]
    before: dict[str, object]


class Bindings:
    """What all functions, classes and methods of a process are, to be looked at after each import.

    New names are not looked at: submodules and lazy modules fill them in. Nor are plain values, which modules count and
    remember with.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._noted = list(_names_of_new(self._seen))

    def changed(self) -> str:
        """A name that is bound to something else than when it was first seen, such as ``json.dumps``; empty for none.

        What has been imported since the last look is seen from now on.
        """
        for names in self._noted:
            # at the speed of C: there are 200,000
            if len(names.now) < len(names.before) or any(map(is_not, names.before.values(), names.now.values())):
                for name, value in names.before.items():
                    if names.now.get(name) is not value and _counts(names, value, names.now.get(name)):
                        return f"{names.owner}.{name}"
        self._noted += _names_of_new(self._seen)
        return ""


def _names_of_new(seen: set[int]) -> Iterator[_Names]:
    """Those of modules that have not been seen, and of their classes."""
    for owner, module in list(sys.modules.items()):
        if id(module) in seen or not issubclass(type(module), ModuleType):
            continue
        seen.add(id(module))
        names = _Names(owner, now := object.__getattribute__(module, "__dict__"), now.copy())
        yield names
        for name, value in names.before.items():
            if issubclass(type(value), type) and id(value) not in seen:
                seen.add(id(value))
                now = _class_names(value)
                home = now.get("__module__")
                yield _Names(f"{home if type(home) is str else owner}.{name}", now, now.copy())


def _counts(names: _Names, before: object, now: object) -> bool:
    """Whether code has been replaced by another package's: torch's own modules replace some of torch's."""
    if callable(before) or type(before) in (property, classmethod):
        return _package(now) != names.owner.partition(".")[0]
    return False


def _package(value: Any) -> str:
    """The package of a function or class; empty where that is not certain: ``__module__`` may have been copied."""
    if type(value) is property:
        value = value.fget
    elif type(value) in (staticmethod, classmethod):
        value = value.__func__
    if type(value) is FunctionType:
        return str(value.__globals__.get("__name__", "")).partition(".")[0]
    if issubclass(type(value), type):
        return str(_class_names(value).get("__module__", "")).partition(".")[0]
    return ""
