"""`Accelerator.distribute`: a function that runs over ranks when it is called from a notebook.

What it trains comes back: the states of rank 0's modules, optimizers and schedules are loaded into the notebook's own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nblaunch.errors import ArgumentError, warn
from nblaunch.ranks.report import current
from nblaunch.training.nests import children, is_container, to_device
from nblaunch.training.world import has_group, world
from nblaunch.transfer import parameters, pickling

if TYPE_CHECKING:
    from nblaunch import LaunchResult
    from nblaunch.training.accelerator import Accelerator

_DEVICES = {"auto": "auto", "cpu": "cpu", "gpu": "cuda"}
_MOST = 1_000
"""Elements of a container that are looked at; a hundred times as many things in all."""
_LEVELS = 2
"""How deep plain objects are gone into, each an attribute of the one before."""
_SIMPLE = (str, bytes, int, float, types.NoneType)

Path = tuple[Any, ...]
"""How to get from a call to one of its parts: the same in the notebook and in a rank."""
_Step = tuple[Path, Any, int]
"""A thing, where it was found, and how many plain objects deep."""


def distributed(accelerator: Accelerator, function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """See `Accelerator.distribute`."""
    if not callable(function):
        raise ArgumentError(f"fun={function!r:.80}: must be a function")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out
        if is_rank():
            return function(*args, **kwargs)
        try:
            parameters.check(function, args, kwargs)
        except TypeError as error:
            raise ArgumentError(f"the arguments do not fit {_name(function)}: {error}") from None
        return _launch(accelerator, _Task(function, args, kwargs), options)

    return call


def is_rank() -> bool:
    """Whether this process is a rank already, of a launch, under torchrun or srun, or of a group of the user's own."""
    return current() is not None or has_group() or world().is_shared


def _launch(accelerator: Accelerator, task: _Task, options: Mapping[str, Any]) -> LaunchResult:
    __tracebackhide__ = True  # IPython leaves this frame out
    from nblaunch import LaunchResult, notebook_launcher

    own = dict(_trained_parts(task.function, task.args, task.kwargs))
    arguments = {
        "num_processes": accelerator.nprocs,
        "device": _DEVICES[accelerator.compute_setup],
        "backend": accelerator.backend,
        "mixed_precision": accelerator.mixed_precision,
        **options,
    }
    result: Any = notebook_launcher(task, **arguments)
    _take_over(own, result[0].states)
    values = [one.value for one in result]
    return LaunchResult(result.name, values, result.metrics, result.logs, result.duration, result.payload)


def _take_over(own: Mapping[Path, Any], states: Mapping[Path, Any]) -> None:
    """Load what rank 0 trained; `load_state_dict` brings it to the notebook's devices and types."""
    for path, part in own.items():
        if path not in states:
            continue
        try:
            part.load_state_dict(states[path])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            warn(
                f"the state of the {type(part).__name__} that was trained does not fit the notebook's own, which stays "
                f"as it was: {error}. Return what the function changed the shape of"
            )


# ------------------------------------------------------------------ in the ranks
class _Brought:
    """What a rank gives back."""

    def __init__(self, value: Any, states: dict[Path, Any]) -> None:
        self.value = value
        self.states = states  # of rank 0; on the CPU


class _Task:
    """A call, which rank by rank is made in place of the function: it brings the trained states along."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.__qualname__ = _name(function)
        filled = parameters.left_out(function, args, kwargs)
        kind = inspect.Parameter.KEYWORD_ONLY
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in filled])

    @property
    def __code__(self) -> types.CodeType | None:  # where the launch looks for the cell that it came from
        function = getattr(self.function, "__func__", self.function)
        return getattr(function, "__code__", None)

    def __call__(self, **filled: Any) -> _Brought:
        parts = dict(_trained_parts(self.function, self.args, self.kwargs))  # before the function rearranges anything
        value = self.function(*self.args, **self.kwargs, **filled)
        if world().rank != 0:
            return _Brought(value, {})
        return _Brought(value, {path: to_device(part.state_dict(), "cpu") for path, part in parts.items()})


def _name(function: Callable[..., Any]) -> str:
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__qualname__", type(function).__name__))


# ------------------------------------------------------------------ what may be trained
def _trained_parts(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Every module, optimizer and schedule that a call can reach, once, with its path; what is nearest comes first.

    That is: in its arguments, in the object that a method is bound to, in the variables that a function of the notebook
    names, and those that the notebook's functions among them name; in nests of them, and in attributes of plain
    objects among them, and of plain objects among those.
    """
    seen: dict[int, Any] = {}  # the things too, or another could come to have an id of theirs
    waiting: deque[_Step] = deque([(("function",), function, 0), (("args",), args, 0), (("kwargs",), kwargs, 0)])
    while waiting and len(seen) < 100 * _MOST:
        path, value, level = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, (nn.Module, Optimizer, LRScheduler)):
            yield path, value
            continue
        is_object = not _is_callable(value) and not is_container(value)
        if not is_object or (level < _LEVELS and _is_plain(value)):
            parts = vars(value).items() if is_object else _parts(value)
            waiting.extend(
                ((*path, key), part, level + is_object) for key, part in parts if not isinstance(part, _SIMPLE)
            )


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """What a function or a nest holds, with keys that are the same in the notebook and in a rank."""
    if isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        yield from pickling.names_of(value).items() if pickling.is_sent_by_value(value) else ()
    else:
        for index, (key, part) in enumerate(islice(children(value), _MOST)):
            yield (key if isinstance(key, (str, int)) else index), part


def _is_callable(value: Any) -> bool:
    return isinstance(value, (types.MethodType, types.FunctionType, functools.partial))


def _is_plain(value: Any) -> bool:
    """Whether it is an object of a class of the user's, or of nblaunch's, with attributes."""
    if isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "builtins", "functools", "collections")
