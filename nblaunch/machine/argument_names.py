"""Names of keyword arguments: an error for an unknown one, with the name that was probably meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from nblaunch.errors import UnknownArgumentError

F = TypeVar("F", bound=Callable[..., Any])


def named_arguments(target: F, more: Collection[str] = ()) -> F:
    """Decorate a function or class, so that an unknown keyword raises an UnknownArgumentError.

    Its signature and docstring stay as they are. A class is decorated outside of ``@dataclass``, which makes the
    ``__init__``.

    Args:
        target: The function or class.
        more: The names that its ``**`` parameter takes.
    """
    function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]  # this class's own
    parameters = [*inspect.signature(function).parameters.values()][isinstance(target, type) :]  # without self
    known = [each.name for each in parameters if each.kind != each.VAR_KEYWORD] + [*more]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out
        for name, value in kwargs.items():
            if name not in known:
                if "kwargs" in known and _has_parameter(kwargs.get("function", args[0] if args else None), name):
                    shown = repr(value) if isinstance(value, (str, int, float)) and len(repr(value)) < 40 else "..."
                    raise UnknownArgumentError(
                        f"{target.__name__}() has no argument {name!r}, a parameter of your function: "
                        f"pass kwargs={{{name!r}: {shown}}}"
                    )
                raise unknown_argument(target.__name__, name, known)
        return function(*args, **kwargs)

    if isinstance(target, type):
        target.__init__ = call  # type: ignore[misc]  # of this class
        return target
    return call  # type: ignore[return-value]  # it takes and returns the same


def _has_parameter(function: Any, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False  # no function, or a builtin without a signature


def unknown_argument(callee: str, name: str, known: Iterable[str]) -> UnknownArgumentError:
    """Return the error for a keyword argument that a function does not have."""
    return UnknownArgumentError(f"{callee}() {unexpected(name, known)}")


def unexpected(name: str, known: Iterable[str]) -> str:
    """Describe a keyword argument that a function does not have, with the name that was probably meant."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    advice = f"use one of {', '.join(names)}" if names else "it has no parameters"
    if near:
        advice = f"did you mean {near[0]!r}?"
    return f"got an unexpected keyword argument {name!r}: {advice}"
