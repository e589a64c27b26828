"""Checks of single arguments. Each returns the value as its type, or raises an ArgumentError that names both."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
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


def ranks_in_words(world_size: int) -> str:
    """Return which ranks a group of this size has, in words."""
    if world_size == 1:
        return "the only rank is 0"
    return f"the ranks are 0 {'and' if world_size == 2 else 'to'} {world_size - 1}"


def is_rank(value: Any, world_size: int) -> bool:
    """Return True for a whole number that is a rank of a group of this size."""
    return not isinstance(value, bool) and hasattr(value, "__index__") and 0 <= operator.index(value) < world_size


def distinct_ranks(name: str, value: Any, world_size: int) -> tuple[int, ...]:
    """Return `value` as different ranks of a group of this size, at least one."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentError(f"{name}={value!r:.80}: must be a list of ranks, as in {name}=[0]")
    chosen = list(value)
    if not all(is_rank(rank, world_size) for rank in chosen):
        raise ArgumentError(f"{name}={chosen!r:.80}: {ranks_in_words(world_size)}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise ArgumentError(f"{name}={chosen!r:.80}: must name {'each rank once' if chosen else 'a rank'}")
    return tuple(map(operator.index, chosen))


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
