"""Pickling of what users define, in both directions: by cloudpickle, with a word on what would not go.

Not for messages between our own processes (messages.py), and not for data at rest: cloudpickle's streams
are for the same Python on both ends.
"""

from __future__ import annotations

import dis
import functools
import importlib
import io
import linecache
import os
import pickle
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle

from nblaunch.transfer import definitions, tensors

_DEEPEST = 6
"""How far down an object the search for the part that cannot be sent goes."""
_IN_CLASS_BODIES = {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_GLOBAL_LOOKUPS = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", *_IN_CLASS_BODIES}
"""Instructions that look a name up in a function's globals; in the body of a class after its own names."""
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


class UnsendableError(Exception):
    """An object cannot be pickled. ``str`` says which part of it, and why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}{reason}")
        self.path = path
        self.reason = reason


@dataclass(slots=True)
class Found:
    """What a dump came across on its way."""

    main: dict[str, Any] = field(default_factory=dict)
    """Classes and functions of ``__main__``, by qualified name."""
    files: set[str] = field(default_factory=set)
    """Files that shipped functions were defined in, and that exist in ``linecache`` alone."""


class Writable(Protocol):
    """What a pickler writes to."""

    def write(self, data: bytes, /) -> object:
        """Take the next bytes of the pickle, or the large object that follows them."""


class TakesBuffers(tensors.Buffers, Protocol):
    """Takes what leaves a pickle; see `nblaunch.transfer.tensors`."""

    def take(self, buffer: pickle.PickleBuffer, /) -> object:
        """Take a buffer; true to have it in the pickle after all."""


class _LateDict:
    """Stands for a dict in a pickle; its content is asked for only when the pickler reaches it."""

    def __init__(self, content: Callable[[], Mapping[str, Any]]) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self._content().items()),)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's, which also notes what it ships by value and pickles the memory of tensors and arrays once.

    Args:
        file: What to write to.
        buffers: Takes the memory of large ones. Default: it goes into the pickle.
    """

    def __init__(self, file: Writable, buffers: TakesBuffers | None = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=None if buffers is None else buffers.take)
        self.found = Found()
        self._buffers = buffers

    def reducer_override(self, obj: Any) -> Any:
        """Pickle's hook, asked for every object."""
        reduced = tensors.reduce(obj, self._buffers) or _reduce_shell(obj) or _reduce_cached(obj)
        if reduced is not None:
            return reduced
        reduced = super().reducer_override(obj)
        if isinstance(obj, (type, types.FunctionType)):
            self._note(obj)
            if definitions.is_by_value(reduced):
                return definitions.reduce(obj, reduced)
        return reduced

    def _note(self, obj: Any) -> None:
        if getattr(obj, "__module__", None) == "__main__":
            name = getattr(obj, "__qualname__", "")
            if name.isidentifier():
                self.found.main.setdefault(name, obj)
        if isinstance(obj, types.FunctionType):
            filename = obj.__code__.co_filename
            if filename not in self.found.files and filename in linecache.cache and not os.path.exists(filename):
                self.found.files.add(filename)


def late(content: Callable[[], Mapping[str, Any]]) -> Any:
    """A stand-in for a dict that is filled when the pickler reaches it: put it last."""
    return _LateDict(content)


def dump(build: Callable[[Found], Any]) -> bytes:
    """Pickle what `build` returns; it gets the notes that the pickler takes while it works.

    Raises:
        Exception: Whatever pickling raises; `explain` then says why.
    """
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump(build(pickler.found))
    return file.getvalue()


def explain(obj: Any, name: str) -> UnsendableError | None:
    """Why `obj` cannot be pickled: the path to the part at fault. None when it can be.

    Args:
        obj: What failed to be pickled, or may have.
        name: What its user calls it.
    """
    error = _attempt(obj)
    if error is None:
        return None
    path, leaf, error = _culprit(obj, name, error, set(), 0)
    return UnsendableError(path, f", {describe(leaf)}, which cannot be sent to another process ({_brief(error)})")


def describe(obj: Any) -> str:
    """What kind of thing an object is, in its user's words: ``a thread lock``."""
    kind = type(obj)
    known = {"lock": "a thread lock", "RLock": "a thread lock", "_io.TextIOWrapper": "an open file"}
    name = (
        kind.__name__
        if kind.__module__ in ("builtins", "_thread", "__main__")
        else f"{kind.__module__}.{kind.__name__}"
    )
    if name in known:
        return known[name]
    if isinstance(obj, io.IOBase):
        return "an open file"
    if isinstance(obj, types.GeneratorType):
        return "a generator"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


class _Nowhere:
    """Where a pickle goes that is made only to see whether it can be."""

    def write(self, data: object) -> None: ...
    def take(self, buffer: object) -> None: ...
    def hold(self, owner: object) -> None: ...
    def lend(self, owner: object) -> None: ...
    def came_from_gpu(self, size: int) -> None: ...
    def descriptor(self, fd: int, owner: object) -> pickle.PickleBuffer:
        return pickle.PickleBuffer(b"")

    def spread(self, array: object, address: int, size: int, unit: int = 0) -> pickle.PickleBuffer:
        return pickle.PickleBuffer(b"")


def _attempt(obj: Any) -> Exception | None:
    nowhere = _Nowhere()
    try:
        Pickler(nowhere, nowhere).dump(obj)
    except Exception as error:  # noqa: BLE001  # whatever a user's __reduce__ raises
        return error
    return None


def _culprit(obj: Any, path: str, error: Exception, seen: set[int], depth: int) -> tuple[str, Any, Exception]:
    if depth == _DEEPEST or id(obj) in seen:
        return path, obj, error
    seen.add(id(obj))
    for template, part in _parts(obj):
        inner = _attempt(part)
        if inner is not None:
            return _culprit(part, template.format(path), inner, seen, depth + 1)
    return path, obj, error


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object, each with how to write its path, ``{}`` standing for the object's own."""
    if isinstance(obj, types.MethodType):
        yield "{}'s object", obj.__self__
    elif isinstance(obj, types.FunctionType):
        yield from _function_parts(obj)
    elif isinstance(obj, functools.partial):
        yield "{}'s function", obj.func
        yield "{}'s args", obj.args
        yield "{}'s keywords", obj.keywords
    elif isinstance(obj, Mapping):
        for key, value in obj.items():
            yield f"{{}}[{_escaped(key)}]", value
    elif isinstance(obj, (list, tuple, set, frozenset)):
        for index, value in enumerate(obj):
            yield f"{{}}[{index}]", value
    elif isinstance(obj, type):
        for key, value in vars(obj).items():
            if isinstance(value, types.FunctionType):
                yield f"{{}}.{key}", value
    else:
        for key, value in getattr(obj, "__dict__", {}).items():
            yield f"{{}}.{key}", value


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, value in names_of(function).items():
        yield f"{{}} uses `{name}`", value
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "a default value of {}", default


def names_of(function: types.FunctionType) -> dict[str, Any]:
    """The globals, and the variables of enclosing functions, that a function itself uses: their values by name."""
    used = sorted(_global_names(function.__code__))
    names = {name: function.__globals__[name] for name in used if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            names[name] = cell.cell_contents
        except ValueError:
            continue  # a variable of the enclosing function that is not bound yet
    return names


def is_sent_by_value(thing: Any) -> bool:
    """Whether a function or class travels with all that it names; one that ranks import does not."""
    name = getattr(thing, "__qualname__", "")  # what wraps a partial has none
    return thing.__module__ == "__main__" or definitions.look_up(thing.__module__, name) is not thing


@functools.lru_cache(maxsize=4096)  # code does not change, and reading it takes a while
def _global_names(code: types.CodeType) -> frozenset[str]:
    """The names that a function's code, and the functions inside it, look up globally."""
    return frozenset(_lookups(code, _GLOBAL_LOOKUPS))


@functools.lru_cache(maxsize=4096)
def names_in_class_bodies(code: types.CodeType) -> frozenset[str]:
    """The names that bodies of classes inside a function may look up globally: cloudpickle leaves them out."""
    return frozenset(name for name in _lookups(code, _IN_CLASS_BODIES) if not name.startswith("__"))


def _lookups(code: types.CodeType, instructions: Collection[str]) -> Iterator[str]:
    own: set[str] = set()  # what the body of a class has bound itself by then, whichever way it went
    is_straight = not getattr(code, "co_exceptiontable", b"")
    for step in dis.get_instructions(code):
        is_straight = is_straight and step.opcode not in _JUMPS
        if step.opname == "STORE_NAME" and is_straight:
            own.add(step.argval)
        elif step.opname in instructions and not (step.opname in _IN_CLASS_BODIES and step.argval in own):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _lookups(constant, instructions)


def _escaped(key: object) -> str:
    return repr(key).replace("{", "{{").replace("}", "}}")


def _brief(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


# ------------------------------------------------------------------ what functools has wrapped
CACHED: Any = functools._lru_cache_wrapper


def _reduce_cached(obj: Any) -> tuple[Any, ...] | None:
    """A function of a cell with a cache, of which pickle has the name alone; or a property with one, and its lock.

    The cache is empty in the rank.
    """
    if isinstance(obj, CACHED) and is_sent_by_value(obj):
        return _cached, (obj.__wrapped__, obj.cache_parameters())
    if type(obj) is functools.cached_property:
        return _cached_property, (obj.func, obj.attrname)
    return None


def _cached(function: Any, parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cached_property(function: Any, name: str | None) -> Any:
    made = functools.cached_property(function)
    made.attrname = name
    return made


# ------------------------------------------------------------------ the notebook's shell stays in the notebook
def _reduce_shell(obj: Any) -> tuple[Any, ...] | None:
    return (_stand_in, (obj.__name__,)) if is_shells(obj) else None


def is_shells(obj: Any) -> bool:
    """Whether it is ``get_ipython``, which a cell-defined function with a ``!command`` in it refers to."""
    return isinstance(obj, types.MethodType) and obj.__func__.__qualname__ == "InteractiveShell.get_ipython"


def _stand_in(name: str) -> Any:
    return getattr(importlib.import_module("nblaunch.ranks.notebook_stand_ins"), name)


def loads(data: bytes | memoryview) -> Any:
    """Rebuild what `dump` wrote."""
    return pickle.loads(data)
