"""Checks of single arguments. Each returns the value as its type, or raises an ArgumentError that names both."""

from __future__ import annotations

import math
import operator
from typing import Any, cast

from nblaunch.errors import ArgumentError


def whole_number(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """Return `value` as an int in this range, ends included. NumPy integers are accepted; ``True``, ``2.0`` are not."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        limits = f", at least {least}" if most is None else f" from {least} to {most}"
        raise ArgumentError(f"{name}={value!r}: must be a whole number{limits}")
    return number


def seconds(name: str, value: Any) -> float:
    """Return `value` as a finite, positive number of seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ArgumentError(f"{name}={value!r}: must be a number of seconds above 0")


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`."""
    if value not in choices:
        raise ArgumentError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")
    return cast("str", value)
