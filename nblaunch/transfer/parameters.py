"""The parameters of a launched function: which of them each rank fills in itself, and which the call's arguments fill.

The kernel checks a call before anything starts; the ranks make it.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nblaunch.machine.arguments import unexpected

FILLED_IN = ("rank", "world_size", "local_rank", "device")
"""Parameters that a call may leave out; each rank passes its own value. Cells have the same names."""
PROVIDED = frozenset((*FILLED_IN, "get_ipython", "display", "In", "Out", "exit", "quit", "open"))
"""Names that each rank defines itself; the notebook's are not sent."""
_PER_RANK = ("rank", "local_rank")
"""Parameters that differ between ranks: positional arguments never fill them."""

_KIND = inspect.Parameter
_BY_POSITION = (_KIND.POSITIONAL_ONLY, _KIND.POSITIONAL_OR_KEYWORD)
_NO_NAME = (_KIND.VAR_POSITIONAL, _KIND.VAR_KEYWORD)


def left_out(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parameters in FILLED_IN that `function` has and the call leaves out."""
    return _fit(function, args, kwargs)[1]


def check(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], world_size: int | None = None
) -> dict[str, Any]:
    """Return the call's arguments by parameter name, without those that the ranks fill in."""
    called = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004  # its code
    if any(map(inspect.iscoroutinefunction, (function, called))):
        raise TypeError("it is an async function, which nothing would await: launch a function that calls asyncio.run")
    return _fit(function, args, kwargs, world_size)[0]


def complete(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a rank's call: those that were given, and the rank's `own` values for the others."""
    arguments, names = _fit(function, args, kwargs, own.get("world_size"))
    filled = {name: own[name] for name in names}
    parameters = _parameters(function)
    needs_order = [p.name for p in parameters[: len(args)]] + [p.name for p in parameters if p.kind == _BY_POSITION[0]]
    if {*filled, *kwargs}.isdisjoint(needs_order):
        return args, {**kwargs, **filled}
    call = inspect.BoundArguments(inspect.signature(function), {**arguments, **filled})
    return call.args, call.kwargs


def summary(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    shown = ", ".join(map(_brief, args)) + "," * (len(args) == 1)
    named = ", ".join(f"{name!r}: {_brief(value)}" for name, value in kwargs.items())
    return f"args=({shown}), kwargs={{{named}}}"


def _brief(value: Any) -> str:
    is_short = isinstance(value, (str, bytes, int, float, type(None))) and len(repr(value)) <= 80
    return repr(value) if is_short else type(value).__name__


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return []  # a builtin without a signature


def _fit(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], world_size: int | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments by parameter name, and the names of the parameters that ranks fill in.

    `args` skip the parameters in FILLED_IN. Where they hold more values, as for ``mp.spawn``, they skip only those of
    `_PER_RANK`.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return {}, ()  # a builtin without a signature
    fixed: Mapping[str, Any] = {}
    if isinstance(function, functools.partial):  # its signature shows its keywords as defaults
        fixed = function.keywords
        _check_partial(function)
    parameters = [p for p in signature.parameters.values() if p.kind not in _NO_NAME]
    if not any(p.kind == _KIND.VAR_KEYWORD for p in signature.parameters.values()):
        known = [p.name for p in parameters if p.kind != _KIND.POSITIONAL_ONLY]
        for name in kwargs:
            if name not in known:
                raise TypeError(unexpected(name, known))
    special = [p.name for p in parameters if p.name in FILLED_IN]
    given = {name: kwargs[name] for name in special if name in kwargs}
    names = [name for name in special if name not in given and name not in fixed]

    def bind(skipped: Collection[str]) -> dict[str, Any]:
        rest = [p for p in signature.parameters.values() if p.name not in skipped and p.name not in given]
        other = {name: value for name, value in kwargs.items() if name not in given}
        return {**signature.replace(parameters=rest).bind(*args, **other).arguments, **given}

    slots = [p.name for p in parameters if p.kind in _BY_POSITION and p.name not in (*_PER_RANK, *given)][: len(args)]
    taken = [name for name in slots if name in names]
    left = tuple(name for name in names if name not in taken)
    usual = as_spawn = None
    try:
        usual = bind(names)
    except TypeError as error:
        reason = str(error)
    if taken:
        try:
            as_spawn = bind(left)
        except TypeError:
            taken = []
    if as_spawn is not None and not _may_be_device(as_spawn.get("device", 0)):
        as_spawn = None
    if as_spawn is not None and "world_size" in taken and not _is_size(as_spawn["world_size"], world_size):
        if usual is None:
            size = _brief(as_spawn["world_size"])
            raise TypeError(f"args has world_size={size}, but the launch has {world_size} ranks: leave world_size out")
        as_spawn = None
    if usual is not None and as_spawn is not None and not isinstance(as_spawn.get("device", 0), int):
        usual = None  # nothing but a device can be meant
    if usual is not None and as_spawn is not None and world_size is not None:
        name = taken[0]
        raise TypeError(f"args is ambiguous: it may include `{name}`, as for mp.spawn, or not; pass `{name}` in kwargs")
    if usual is not None:
        return usual, tuple(names)
    if as_spawn is not None:
        return as_spawn, left
    by_position = [p.name for p in parameters if p.kind in _BY_POSITION]
    if set(names).isdisjoint(by_position):
        raise TypeError(reason)
    others = ", ".join(f"`{name}`" for name in by_position if name not in special) or "no parameter"
    raise TypeError(f"{reason}; args fill {others}, and nblaunch fills in {' and '.join(f'`{n}`' for n in names)}")


def _is_size(value: Any, world_size: int | None) -> bool:
    """Return True if a value may be meant as the world size, which may not be known yet."""
    try:
        return operator.index(value) == (value if world_size is None else world_size)
    except (TypeError, ValueError, RuntimeError):
        return False


def _may_be_device(value: Any) -> bool:
    is_name = isinstance(value, str) and re.fullmatch(r"(cpu|cuda|mps|xpu|hpu|npu)(:\d+)?", value)
    return bool(is_name) or isinstance(value, int) or type(value).__name__ == "device"


def _check_partial(function: functools.partial[Any]) -> None:
    """Refuse a partial that gives all ranks the same rank: mp.spawn's ``args`` in a partial."""
    empty = getattr(functools, "Placeholder", None)  # new in Python 3.14
    for parameter, value in zip(_parameters(function.func), function.args, strict=False):
        if parameter.name in _PER_RANK and parameter.kind in _BY_POSITION and (empty is None or value is not empty):
            raise TypeError(
                f"the partial binds `{parameter.name}` to one value for all ranks: bind its arguments by keyword"
            )
