"""The parameters of a launched function that each rank fills in itself.

The kernel checks a call before anything starts; the ranks make it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

FILLED_IN = ("rank", "world_size", "local_rank", "device")
"""Parameters that a call may leave out; each rank passes its own value. Cells have the same names."""
PROVIDED = frozenset((*FILLED_IN, "get_ipython", "display", "In", "Out", "exit", "quit", "open"))
"""Names that each rank defines itself; the notebook's are not sent."""

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def left_out(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parameters in FILLED_IN that `function` has and the call leaves out.

    Raises:
        TypeError: The function does not accept an argument.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ()  # a builtin without a signature
    given = {*signature.bind_partial(*args, **kwargs).arguments}
    if isinstance(function, functools.partial):  # its signature shows its keywords as defaults
        given |= function.keywords.keys()
    parameters = signature.parameters.values()
    return tuple(p.name for p in parameters if p.name in FILLED_IN and p.name not in given and p.kind in _BY_NAME)


def _taken_by(function: Any, args: Sequence[Any]) -> list[str]:
    """Return the parameters in FILLED_IN that positional arguments take."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[: len(args)]
    except ValueError:
        return []  # a builtin without a signature
    return [p.name for p in parameters if p.name in FILLED_IN and p.kind in _BY_POSITION]


def check(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call's arguments by parameter name, without those that the ranks fill in.

    Raises:
        TypeError: The function cannot be called with them; the message is Python's, and names the parameters of
            FILLED_IN that `args` has taken.
    """
    filled = dict.fromkeys(left_out(function, args, kwargs))
    try:
        signature = inspect.signature(function)
    except ValueError:
        return {}
    try:
        signature.bind(*args, **kwargs, **filled)
    except TypeError as error:
        taken = _taken_by(function, args)
        if not taken:
            raise
        hint = f"args gives {' and '.join(f'`{name}`' for name in taken)} a value, which each rank has: use kwargs"
        raise TypeError(f"{error} ({hint})") from None
    return dict(signature.bind_partial(*args, **kwargs).arguments)
