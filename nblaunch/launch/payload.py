"""The payload of a launch: the function or cell, its arguments, and the settings of the kernel."""

from __future__ import annotations

import errno
import functools
import linecache
import logging
import multiprocessing
import random
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nblaunch.errors import ArgumentError, PayloadError
from nblaunch.launch.frontend import host
from nblaunch.launch.result import NOTHING_SENT, Sent, largest, named
from nblaunch.machine.segments import NoRoomError
from nblaunch.transfer import cell_effects, definitions, parameters, pickling, reducers
from nblaunch.transfer.cell_effects import read_flags
from nblaunch.transfer.parcel import Parcel, pack
from nblaunch.wire.messages import Cell, Payload, Question, RootLogger, Settings, Source, WarningFilter

_FIX = "create it in the ranks, or send the data to create it from"


def for_function(function: Any, args: Any, kwargs: Any, world_size: int | None = None) -> Payload:
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ArgumentError(f"args={_begin_of(args)}: must be a tuple; for one argument write args=(value,)")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise ArgumentError(f"kwargs={_begin_of(kwargs)}: must be a dict with string keys")
    args, kwargs = tuple(args), dict(kwargs or {})
    by_name = arguments_of(function, args, kwargs, world_size)
    watched = {name: value for name, value in {**_globals_of(function), **by_name}.items() if _is_watched(value)}
    namespace = namespace_of_notebook()
    needed = _unseen([(name_of(function), function), *by_name.items()], namespace)
    anchor = _anchor(namespace, sorted(needed))
    return Payload(function, args, kwargs, anchor, settings(), watched, **effects_of_cells())


def arguments_of(function: Any, args: Any, kwargs: Any, world_size: int | None) -> dict[str, Any]:
    """Return the arguments by the names of a function's parameters; raise ArgumentError if they do not fit."""
    if not callable(function):
        cell = "; %%distributed runs a cell" if isinstance(function, str) else ""
        raise ArgumentError(f"function={function!r:.80}: must be a function, not {pickling.describe(function)}{cell}")
    try:
        return parameters.check(function, args, kwargs, world_size)
    except TypeError as error:
        raise ArgumentError(f"{parameters.summary(args, kwargs)} do not fit {name_of(function)}: {error}") from None


def _begin_of(value: Any) -> str:
    """Return the first line of a value: a module's has many."""
    return next(iter(repr(value).splitlines()), "")[:80]


def for_cell(cell: Cell, names: Sequence[str]) -> Payload:
    namespace = namespace_of_notebook()
    watched = {name: namespace[name] for name in names if _is_watched(namespace[name])}
    needed = _unseen([(name, namespace[name]) for name in names], namespace)
    anchor = _anchor(namespace, sorted(needed.union(names)))
    return Payload(cell, (), {}, anchor, settings(), watched, **effects_of_cells())


def effects_of_cells() -> dict[str, Any]:
    """Return what the notebook's cells have done to modules and ranks are to repeat: fields of a payload."""
    cells = [cell.python for cell in host().cells() if not cell.is_of_ranks]
    attributes = cell_effects.attributes_set_in(cells, namespace_of_notebook())
    return {"imports": cell_effects.imported_in(cells), "attributes": attributes}


@dataclass(frozen=True, slots=True)
class Shipment:
    payload: Payload
    parcel: Parcel | None
    """None if the ranks share the kernel's memory."""
    sources: Mapping[str, Source]
    """The cells that define its functions."""
    sent: Sent

    @property
    def fds(self) -> Sequence[int]:
        return () if self.parcel is None else self.parcel.fds


def ship(payload: Payload, is_here: bool = True) -> Shipment:
    """Pack a payload, or raise a PayloadError that names the part that cannot be sent."""
    try:
        return packed(payload, parts_of(payload), None, is_here=is_here)
    except ArgumentError:
        raise
    except Exception as error:  # noqa: BLE001  # a user's __reduce__; its frames are nblaunch's own
        raise not_sent(name_of(payload.function), _suspects(payload), error) from None


def packed(payload: Payload, parts: Mapping[str, Any], home: pickling.Home | None, *, is_here: bool) -> Shipment:
    """Pack a payload with the sources and the names in ``__main__`` that pickling finds. It may raise anything."""
    sources = sources_in(payload) if isinstance(payload.function, Cell) else {}  # pickling finds those of functions

    def note(files: set[str]) -> dict[str, Source]:
        sources.update(sources_of(files))
        return sources

    def build(found: pickling.Found) -> Payload:
        return replace(
            payload, sources=pickling.Late(lambda: note(found.files)), main=pickling.Late(lambda: found.main)
        )

    parcel = pack(build, parts, home, is_cached=True, is_here=is_here)
    sent = Sent(sum(parcel.sizes.values()), largest(parcel.sizes), parcel.copied)
    return Shipment(payload, parcel, sources, sent)


def not_sent(name: str, suspects: Iterable[tuple[str, Any]], error: Exception) -> PayloadError:
    """Return the error for what could not be packed, which names one of the suspects if it is the cause."""
    if isinstance(error, NoRoomError):
        return PayloadError(f"{name} cannot be sent to the ranks ({named(error.sizes)}): {error.strerror}")
    for suspect, value in suspects:
        if (reason := pickling.explain(value, suspect)) is not None:
            return PayloadError(f"{reason}: {reason.advice or _FIX}")
    is_full = isinstance(error, OSError) and error.errno == errno.EMFILE
    advice = " (ulimit -n; each tensor in shared memory uses a file descriptor)" if is_full else ""
    return PayloadError(f"{name} cannot be sent to the ranks: {error}{advice}")


def share(payload: Payload) -> Shipment:
    return Shipment(payload, None, sources_in(payload), NOTHING_SENT)


def sources_in(payload: Payload) -> dict[str, Source]:
    function = payload.function
    if isinstance(function, Cell):
        return {function.filename: Source(function.source, function.label)}
    code = getattr(function, "__code__", None)
    return {} if code is None else sources_of({code.co_filename})


def sources_of(files: set[str]) -> dict[str, Source]:
    found = {}
    for filename in files:
        lines = linecache.getlines(filename)
        if lines:
            found[filename] = Source("".join(lines), host().cell_label(filename))
    return found


def name_of(function: Any) -> str:
    if isinstance(function, Cell):
        return function.label or "the cell"
    if isinstance(function, Question):
        return function.text
    return (
        getattr(function, "__qualname__", "")
        or getattr(getattr(function, "func", None), "__qualname__", "")
        or type(function).__name__
    )


def _suspects(payload: Payload) -> Iterator[tuple[str, Any]]:
    function, names = payload.function, payload.anchor.__code__.co_names
    if not isinstance(function, Cell):
        yield f"`{name_of(function)}`", function
        yield from ((f"args[{i}]", value) for i, value in enumerate(payload.args))
        yield from ((f"kwargs[{name!r}]", value) for name, value in payload.kwargs.items())
    for name in names:
        uses = f"the cell uses `{name}`" if isinstance(function, Cell) else f"`{name}`, used by a class in it"
        yield uses, payload.anchor.__globals__[name]


def parts_of(payload: Payload) -> dict[str, Any]:
    """Return the data in a payload by the user's names for it: arguments, and names that the code uses."""
    function = payload.function
    if isinstance(function, Cell):
        roots = [(name, payload.anchor.__globals__[name]) for name in payload.anchor.__code__.co_names]
    else:
        roots = [(name_of(function), function), *parameters.check(function, payload.args, payload.kwargs).items()]
    parts: dict[str, Any] = {}
    for name, value in _walk(roots):
        if _inside(value) is None and not name.startswith("__"):
            parts[name if name not in parts else f"{name} ({len(parts)})"] = value
    return parts


def _walk(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield each of these values once with its name, then the values that functions and classes among them use."""
    waiting, seen = list(roots), set[int]()
    while waiting:
        name, value = waiting.pop()
        if id(value) not in seen and not isinstance(value, _NO_DATA):
            seen.add(id(value))
            yield name, value
            waiting += _inside(value) or ()


_NO_DATA = (types.ModuleType, types.BuiltinFunctionType, bool, int, float, complex, type(None))


def _inside(value: Any) -> list[tuple[str, Any]] | None:
    """Return the values that a piece of code uses, by name; None if `value` is data."""
    if reducers.is_get_ipython(value):
        return []
    if isinstance(value, types.MethodType):
        return [(f"{type(value.__self__).__name__} object", value.__self__), ("", value.__func__)]
    if isinstance(value, functools.partial):
        arguments = (*((f"args[{i}]", part) for i, part in enumerate(value.args)), *value.keywords.items())
        return [("", value.func), *arguments]
    if (wrapped := reducers.wrapped_by(value)) is not None:
        return [("", function) for function in wrapped]
    if isinstance(value, types.FunctionType):
        return list(pickling.names_of(value).items()) if definitions.is_sent_by_value(value) else []
    if isinstance(value, type):
        parts = [*vars(value).items(), *(("", base) for base in value.__bases__)]
        code = [(name, part) for name, part in parts if isinstance(part, (types.FunctionType, type))]
        return code if definitions.is_sent_by_value(value) else []
    return None


def _unseen(roots: Iterable[tuple[str, Any]], namespace: dict[str, Any]) -> set[str]:
    """Return the notebook's names in class bodies inside functions, which cloudpickle misses."""
    names: set[str] = set()
    waiting = list(roots)
    while waiting:
        found: set[str] = set()
        for _, value in _walk(waiting):
            if isinstance(value, types.FunctionType) and value.__globals__ is namespace:
                found |= pickling.names_in_class_bodies(value.__code__).intersection(namespace)
        waiting = [(name, namespace[name]) for name in found - names]
        names |= found
    return names


def namespace_of_notebook() -> dict[str, Any]:
    """Return the names that ranks share: the notebook's, or those of a script's main module."""
    names = host().notebook_names()
    return vars(sys.modules["__main__"]) if names is None else names


def _anchor(namespace: dict[str, Any], names: Sequence[str]) -> types.FunctionType:
    """Return a function of ``__main__`` that uses `names`: cloudpickle sends them in the shared dict of globals."""
    scratch: dict[str, Any] = {}
    exec(f"def _nblaunch_anchor(): return ({''.join(name + ', ' for name in names)})", scratch)
    anchor = types.FunctionType(scratch["_nblaunch_anchor"].__code__, namespace, "_nblaunch_anchor")
    anchor.__module__ = "__main__"
    return anchor


def _globals_of(function: Any) -> dict[str, Any]:
    """Return the globals and closure variables that a function itself uses; none if ranks import the function."""
    function = getattr(function, "__func__", function)
    names: dict[str, Any] = {}
    for each in reducers.wrapped_by(function) or [function]:
        if isinstance(each, types.FunctionType) and definitions.is_sent_by_value(each):
            names |= pickling.names_of(each)
    return names


def _is_watched(value: Any) -> bool:
    """Return True if a rank's changes to a value deserve a warning: a module, list, dict or set."""
    torch = sys.modules.get("torch")
    return type(value) in (list, dict, set) or (torch is not None and isinstance(value, torch.nn.Module))


def settings() -> Settings:
    numpy_random = sys.modules.get("numpy.random")
    torch = sys.modules.get("torch")
    entries: Any = warnings.filters  # typeshed allows categories that are tuples; Python does not
    return Settings(
        authkey=bytes(multiprocessing.current_process().authkey),
        python_rng=random.getstate(),
        numpy_rng=None if numpy_random is None else numpy_random.get_state(),
        warning_filters=tuple(
            WarningFilter(action, message, (category.__module__, category.__qualname__), module, lineno)
            for action, message, category, module, lineno in entries
        ),
        flags=read_flags(),
        logging=_root_logger(),
        **({} if torch is None else _torch_settings(torch)),
    )


_STYLES: dict[type, Literal["%", "{", "$"]] = {logging.StrFormatStyle: "{", logging.StringTemplateStyle: "$"}


def _root_logger() -> RootLogger | None:
    """Return how the notebook has configured the root logger; None if it has not. Other handlers stay here."""
    root = logging.getLogger()
    handler = next((each for each in root.handlers if type(each) is logging.StreamHandler), None)
    if handler is None:
        return None if root.level == logging.WARNING else RootLogger(root.level)
    formatter = handler.formatter if type(handler.formatter) is logging.Formatter else logging.Formatter("%(message)s")
    style = _STYLES.get(type(formatter._style), "%")
    is_stdout = handler.stream in (sys.stdout, sys.__stdout__)
    return RootLogger(root.level, True, is_stdout, formatter._style._fmt, formatter.datefmt, style)


_DEFAULT_SEED = 67280421310721
"""torch's seed before any call of ``manual_seed``."""


def _torch_settings(torch: Any) -> dict[str, Any]:
    seed, made_for = torch.initial_seed(), torch.accelerator.current_accelerator()
    is_other = made_for is not None and made_for.type != "cuda"
    return {
        "torch_rng": bytes(torch.get_rng_state().tolist()),
        "torch_seed": None if seed == _DEFAULT_SEED else seed,
        "has_gpu": sys.platform == "darwin" or is_other or bool(torch.cuda.device_count()),  # initializes none
    }
