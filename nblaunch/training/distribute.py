"""`Accelerator.distribute`: a function that runs over ranks when a notebook calls it.

The states of rank 0's modules, optimizers and schedulers come back and are loaded into the notebook's objects.
"""

from __future__ import annotations

import functools
import inspect
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nblaunch.errors import ArgumentError, LaunchStoppedError, LaunchTimeoutError, warn
from nblaunch.machine.inventory import this_machine
from nblaunch.ranks.report import Interrupted, current
from nblaunch.training.parallelism import gathered
from nblaunch.training.pytree import children, is_container
from nblaunch.training.topology import has_group, world
from nblaunch.transfer import definitions, parameters, pickling

_DEVICES = {"auto": "auto", "cpu": "cpu", "gpu": "cuda"}
_MAX_ELEMENTS = 1_000
"""Elements searched per container; 100 times as many objects in all."""
_MAX_OBJECT_DEPTH = 2
"""Nesting of plain objects that is searched, each an attribute of the one before."""
_ATOMIC_TYPES = (str, bytes, int, float, types.NoneType)
_is_in_place: ContextVar[bool] = ContextVar("nblaunch_in_place", default=False)

Path = tuple[Any, ...]
"""The keys from a call to one of its parts: the same in the notebook and in a rank."""
_Visit = tuple[Path, Any, int]


class Settings(Protocol):
    nprocs: int | None
    compute_setup: str
    backend: str | None

    @property
    def device(self) -> torch.device: ...
    @property
    def mixed_precision(self) -> str: ...


def distributed(
    settings: Settings,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    name: str = "",
    trains: bool = True,
) -> Callable[..., Any]:
    if not callable(function):
        raise ArgumentError(f"fun={function!r:.80}: must be a function")
    if not options.get("block", True):
        raise ArgumentError("block=False is not supported: distribute waits for the ranks, to load their states")
    if options.get("detach"):
        raise ArgumentError(
            f"detach={options['detach']!r} is not supported: distribute and Trainer.fit wait for the ranks, to load "
            "their states. Call them in a function, and launch that function with detach"
        )
    if not is_elsewhere(options):
        check_gpu(settings.compute_setup)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out
        if is_rank():
            return function(*args, **kwargs)
        try:
            parameters.check(function, args, kwargs, settings.nprocs)
        except TypeError as error:
            raise ArgumentError(f"the arguments do not fit {_name_of(function)}: {error}") from None
        if runs_in_place(settings, options):
            return _run_in_place(settings, function, args, kwargs)
        return _launch(settings, _Call(function, args, kwargs, name, trains), options)

    return call


def is_elsewhere(options: Mapping[str, Any]) -> bool:
    return options.get("engine", "auto") not in ("auto", "local")


def check_gpu(setup: str) -> None:
    if setup == "gpu" and not is_rank() and this_machine().gpus == 0:
        raise ArgumentError(
            'compute_setup="gpu", but no GPU is visible: use "auto", which takes a GPU where a rank has one, or "cpu"'
        )


def runs_in_place(settings: Settings, options: Mapping[str, Any]) -> bool:
    """Return True if a call runs in this process: one rank without options of a launch, or a call within such a one."""
    return _is_in_place.get() or (settings.nprocs == 1 and not options.keys() - {"view"})


@contextmanager
def in_place() -> Iterator[None]:
    """A context in which nothing is launched, as in a rank."""
    token = _is_in_place.set(True)
    try:
        yield
    finally:
        _is_in_place.reset(token)


def _run_in_place(
    settings: Settings, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    __tracebackhide__ = True  # IPython leaves this frame out
    from nblaunch import LaunchResult

    values = {"rank": 0, "world_size": 1, "local_rank": 0, "device": settings.device}
    given, named = parameters.complete(function, args, kwargs, values)
    begin = time.monotonic()
    with in_place():
        value = function(*given, **named)
    return LaunchResult(_name_of(function), [value], duration=time.monotonic() - begin)


def is_rank() -> bool:
    """Return True if this process is a rank: of a launch, under torchrun or srun, or of the user's own group."""
    return current() is not None or has_group() or world().is_shared


def _launch(settings: Settings, call: _Call, options: Mapping[str, Any]) -> Any:
    __tracebackhide__ = True  # IPython leaves this frame out
    from nblaunch import LaunchResult, notebook_launcher

    own = dict(call.find_trainable())
    arguments = {
        "num_processes": settings.nprocs,
        "device": _DEVICES[settings.compute_setup],
        "backend": settings.backend,
        "mixed_precision": settings.mixed_precision,
        **options,
    }
    try:
        result: Any = notebook_launcher(call, **arguments)
    except (KeyboardInterrupt, LaunchStoppedError, LaunchTimeoutError) as stopped:
        _take_states(own, stopped)
        raise
    _load_states(own, result[0].states)
    values = [returned.value for returned in result]
    shown = result._record_html  # not a method of `result`, which would keep the states
    return LaunchResult(result.name, values, result.metrics, result.logs, result.duration, result.payload, shown)


def _take_states(own: Mapping[Path, Any], stopped: Any) -> None:
    returned = getattr(stopped, "results", {})
    for rank, part in returned.items():
        if isinstance(part, _Returned):
            returned[rank] = part.value
            _load_states(own, part.states)  # only rank 0 has any
            part.states.clear()  # the notebook keeps the error, and its traceback the launch


def _load_states(own: Mapping[Path, Any], states: Mapping[Path, Any]) -> None:
    """Load rank 0's states; `load_state_dict` moves them to the notebook's devices and types."""
    for path, part in own.items():
        if path not in states:
            continue
        try:
            part.load_state_dict(states[path])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            warn(
                f"the trained state of the {type(part).__name__} does not fit the notebook's object, which was not "
                f"updated: {error}. If the function changes the object's shape, return the new object"
            )


# ------------------------------------------------------------------ in the ranks
class StoppedTogether(KeyboardInterrupt):
    """An interrupt that every rank raises at the same point, where no rank waits for another."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _Returned:
    """A rank's return value, and on rank 0 the trained states."""

    def __init__(self, value: Any, states: dict[Path, Any]) -> None:
        self.value = value
        self.states = states  # on the CPU


class _Unfinished(_Returned, Interrupted):
    """Of a call that was stopped."""


class _Call:
    """A call of the user's function, launched in its place: the ranks send the trained states back."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str = "",
        trains: bool = True,
    ) -> None:
        self.function, self.args, self.kwargs, self.trains = function, args, kwargs, trains
        self.__qualname__ = name or _name_of(function)
        filled = parameters.left_out(function, args, kwargs)
        kind = inspect.Parameter.KEYWORD_ONLY
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in filled])

    @property
    def __code__(self) -> types.CodeType | None:  # the launch reads the function's cell from it
        function = getattr(self.function, "__func__", self.function)
        return getattr(function, "__code__", None)

    def find_trainable(self) -> Iterator[tuple[Path, Any]]:
        return _find_trainable(self.function, self.args, self.kwargs) if self.trains else iter(())

    def __call__(self, **filled: Any) -> _Returned:
        parts = dict(self.find_trainable())  # before the function moves anything
        kind = _Returned
        try:
            args, kwargs = parameters.complete(self.function, self.args, self.kwargs, filled)
            value = self.function(*args, **kwargs)
        except StoppedTogether as stopped:
            value, kind = stopped.value, _Unfinished
        states = {path: gathered(part.state_dict()) for path, part in parts.items()}
        return kind(value, states if world().rank == 0 else {})


def _name_of(function: Callable[..., Any]) -> str:
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__qualname__", type(function).__name__))


# ------------------------------------------------------------------ search
def _find_trainable(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield every module, optimizer and scheduler that a call can reach, once, with its path; nearest first.

    Searched: the arguments, a bound method's object, and the variables that the notebook's functions name; in each,
    pytrees and the attributes of plain objects.
    """
    seen: dict[int, Any] = {}  # holds the objects too: an id may be reused once its object is gone
    queue: deque[_Visit] = deque([(("function",), function, 0), (("args",), args, 0), (("kwargs",), kwargs, 0)])
    while queue and len(seen) < 100 * _MAX_ELEMENTS:
        path, value, depth = queue.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, (nn.Module, Optimizer, LRScheduler)):
            yield path, value
            continue
        is_function = isinstance(value, (types.MethodType, types.FunctionType, functools.partial))
        is_object = not is_function and not is_container(value)
        if not is_object or (depth < _MAX_OBJECT_DEPTH and _is_plain(value)):
            parts = vars(value).items() if is_object else _parts(value)
            queue.extend(
                ((*path, key), part, depth + is_object) for key, part in parts if not isinstance(part, _ATOMIC_TYPES)
            )


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a function or container, with keys that are the same in the notebook and in a rank."""
    if isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        yield from pickling.names_of(value).items() if definitions.is_sent_by_value(value) else ()
    else:
        for index, (key, part) in enumerate(islice(children(value), _MAX_ELEMENTS)):
            yield (key if isinstance(key, (str, int)) else index), part


def _is_plain(value: Any) -> bool:
    if isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "builtins", "functools", "collections")
