"""How a launched function is called: which of its parameters each rank fills in for itself.

Shared by the kernel, which checks a call before anything starts, and by the ranks, which make it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

FILLED_IN = ("rank", "world_size", "local_rank", "device")
"""Parameters that a call may leave out: each rank gets its own. The same names are defined in cells."""

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def left_out(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters in FILLED_IN that `function` has and the call leaves out.

    Raises:
        TypeError: The call has arguments that the function does not take.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ()  # a builtin that does not tell
    given = {*signature.bind_partial(*args, **kwargs).arguments, *_bound_before(function)}
    parameters = signature.parameters.values()
    return tuple(p.name for p in parameters if p.name in FILLED_IN and p.name not in given and p.kind in _BY_NAME)


def _bound_before(function: Any) -> Mapping[str, Any]:
    """Keywords that a ``functools.partial`` supplies; its signature shows them as defaults."""
    return function.keywords if isinstance(function, functools.partial) else {}


def check(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the call by parameter name, without those that the ranks fill in.

    Raises:
        TypeError: The function cannot be called so; the message is Python's own.
    """
    filled = dict.fromkeys(left_out(function, args, kwargs))
    try:
        signature = inspect.signature(function)
    except ValueError:
        return {}
    signature.bind(*args, **kwargs, **filled)
    return dict(signature.bind_partial(*args, **kwargs).arguments)
