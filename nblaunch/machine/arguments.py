"""Arguments of calls: checks that return the value as its type, and errors for names that a function does not have."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar, cast

from nblaunch.errors import ArgumentError, UnknownArgumentError

F = TypeVar("F", bound=Callable[..., Any])


# ------------------------------------------------------------------ values
def whole_number(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """Return `value` as an int in this range, ends included. NumPy integers are accepted; ``True``, ``2.0`` are not."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        limits = f", at least {least}" if most is None else f" from {least} to {most}"
        raise ArgumentError(f"{name}={value!r}: must be an integer{limits}")
    return number


def ranks_in_words(world_size: int) -> str:
    if world_size == 1:
        return "the only rank is 0"
    return f"the ranks are 0 {'and' if world_size == 2 else 'to'} {world_size - 1}"


def is_rank(value: Any, world_size: int) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and 0 <= operator.index(value) < world_size


def distinct_ranks(name: str, value: Any, world_size: int) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentError(f"{name}={value!r:.80}: must be a list of ranks, as in {name}=[0]")
    chosen = list(value)
    if not all(is_rank(rank, world_size) for rank in chosen):
        raise ArgumentError(f"{name}={chosen!r:.80}: {ranks_in_words(world_size)}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise ArgumentError(f"{name}={chosen!r:.80}: must name {'each rank once' if chosen else 'a rank'}")
    return tuple(map(operator.index, chosen))


def seconds(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ArgumentError(f"{name}={value!r}: must be a positive number of seconds")


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ArgumentError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")
    return cast("str", value)


# ------------------------------------------------------------------ names
def named_arguments(target: F, more: Collection[str] = ()) -> F:
    """Decorate a function or class, so that an unknown keyword raises an UnknownArgumentError.

    Its signature and docstring stay as they are. A class is decorated outside of ``@dataclass``, which makes the
    ``__init__``. `more` are the names that a ``**`` parameter takes.
    """
    function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]  # this class's own
    parameters = [*inspect.signature(function).parameters.values()][isinstance(target, type) :]  # without self
    own = [each.name for each in parameters if each.kind != each.VAR_KEYWORD]
    known = [*dict.fromkeys([*own, *more])]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out
        for name, value in kwargs.items():
            if name not in known:
                if "kwargs" in known and _has_parameter(kwargs.get("function", args[0] if args else None), name):
                    shown = repr(value) if isinstance(value, (str, int, float)) and len(repr(value)) < 40 else "..."
                    raise UnknownArgumentError(
                        f"{target.__name__}() has no argument {name!r}, but your function does: "
                        f"pass kwargs={{{name!r}: {shown}}}"
                    )
                raise UnknownArgumentError(f"{target.__name__}() {unexpected(name, known)}")
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


def unexpected(name: str, known: Iterable[str]) -> str:
    """Describe a keyword argument that a function does not have, with the name that was probably meant."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    advice = f"use one of {', '.join(names)}" if names else "it has no parameters"
    if near:
        advice = f"did you mean {near[0]!r}?"
    return f"got an unexpected keyword argument {name!r}: {advice}"


FILE_NAME = re.compile(r"\w[\w.-]{0,79}")


def file_name(name: str, value: Any) -> str:
    """Return a string that names a file on every system."""
    if not isinstance(value, str) or not FILE_NAME.fullmatch(value):
        raise ArgumentError(
            f"{name}={value!r:.100}: must be 1 to 80 letters, digits, dashes, dots and underscores, and not begin "
            "with a dash or dot"
        )
    return value
