"""Pickling of user objects with cloudpickle, and an explanation of what cannot be pickled.

Not for messages between nblaunch's own processes, and not for storage: both ends must run the same Python.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import importlib
import io
import linecache
import os
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from nblaunch.transfer import definitions, reducers, tensors

_MAX_EXPLAINED_DEPTH = 6
_IN_CLASS_BODIES = {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_GLOBAL_LOOKUPS = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", *_IN_CLASS_BODIES}
"""Instructions that look a name up in globals; in a class body, after the body's own names."""


class UnsendableError(Exception):
    """An object cannot be pickled; the message names the part and the reason."""

    def __init__(self, path: str, reason: str, advice: str = "") -> None:
        super().__init__(f"{path}{reason}")
        self.path, self.reason, self.advice = path, reason, advice


class OfNotebookError(reducers.RefusedError):
    """An object is of use in the notebook alone: its ``__reduce__`` raises this."""

    def __init__(self, thing: object, what: str) -> None:
        advice = "write %%local in the first line of the cell to run it in the notebook"
        super().__init__(thing, f"{what}, which works only in the notebook", advice)


@dataclass(slots=True)
class Found:
    main: dict[str, Any] = field(default_factory=dict)
    """Classes and functions of ``__main__``, by qualified name."""
    files: set[str] = field(default_factory=set)
    """Source files of pickled functions that exist in ``linecache`` only."""


class Home:
    """What a pickler must know of kept ranks, which hold the notebook's names already."""

    names: dict[str, Any]
    """The sender's namespace: functions that have it as their globals are sent without it."""

    def note(self, definition: types.FunctionType | type) -> None:
        """Note a function that is sent without its globals, or a class."""

    def alias_of(self, definition: Any) -> str:
        """Return what stands for a function or class in a digest; empty: its content."""
        return ""

    def key_of(self, obj: object) -> tuple[str, bool]:
        """Return an object's key in the receiver, and whether the key alone is sent. Empty: it has none."""
        return "", False


class ByItself:
    """Pickles an object by itself: if it cannot be rebuilt, an `Unbuilt` arrives in its place, and the rest arrives."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True, slots=True)
class Unbuilt:
    reason: str


def _load_by_itself(data: bytes, buffers: list[Any]) -> Any:
    try:
        return pickle.loads(data, buffers=buffers)
    except Exception as error:  # noqa: BLE001  # user code
        return Unbuilt(_brief(error))


class Late(dict[str, Any]):
    """Pickles as a dict whose content is computed when the pickler reaches it; put it last."""

    def __init__(self, content: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self._content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self._content().items()),)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's pickler; it also notes definitions of ``__main__``, and pickles the memory of tensors once.

    Without `home`, definitions are sent with the globals that they use. `take` gets buffers in place of `buffers`.
    """

    def __init__(
        self,
        file: tensors.BufferSink | io.BytesIO,
        buffers: tensors.BufferSink | None = None,
        home: Home | None = None,
        take: Callable[[pickle.PickleBuffer], object] | None = None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=take or (None if buffers is None else buffers.take))
        self.found = Found()
        self._buffers, self._home = buffers, home
        self._rows: dict[type, reducers.Row | None] = {}

    def dump(self, obj: Any) -> None:
        """Pickle an object."""
        with reducers.as_for_child(self._buffers):
            super().dump(obj)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is ByItself:
            file, taken = io.BytesIO(), list[pickle.PickleBuffer]()
            Pickler(file, self._buffers, self._home, taken.append if self._buffers else None).dump(obj.value)
            return _load_by_itself, (file.getvalue(), taken)
        if self._home is not None:
            alias = self._home.alias_of(obj) if isinstance(obj, (type, types.FunctionType)) else ""
            if alias:
                return str, (alias,)
            key, is_alone = self._home.key_of(obj)
            if is_alone:
                return definitions.kept, (key,)
            if key:
                return self._reduce_kept(obj, key)
        return self._reduce(obj)

    def _reduce_kept(self, obj: Any, key: str) -> Any:
        """Reduce an object that the receiver keeps under a key."""
        reduced = self._reduce(obj)
        if reduced is NotImplemented:
            reduced = copyreg.dispatch_table[type(obj)](obj) if type(obj) in copyreg.dispatch_table else None
            reduced = reduced or obj.__reduce_ex__(5)
        if isinstance(reduced, str) or any(part is not None for part in reduced[3:]):
            return reduced
        make, made_of, *state = reduced
        if not state or state[0] is None:
            return definitions.keep, (key, make, made_of)
        return definitions.keep, (key, make, made_of), state[0], None, None, definitions.set_kept_state

    def _reduce(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):  # cloudpickle 3.1.3 drops the file name: tracebacks would lose the cell
            make, parts = self.dispatch_table[types.CodeType](obj)
            return definitions.in_file, (obj.co_filename, make, parts)
        kind = type(obj)
        if kind is not types.ModuleType and isinstance(obj, types.ModuleType) and obj is sys.modules.get(obj.__name__):
            return importlib.import_module, (obj.__name__,)  # cloudpickle sends no module of a subclass
        if tensors.needs_unwrapping(obj):
            return tensors.unwrapped, (obj.module,)
        reduced = tensors.reduce(obj, self._buffers)
        if kind not in self._rows:
            self._rows[kind] = reducers.row_of(kind)
        row = self._rows[kind]
        if reduced is None and row is not None:
            reduced = row(obj, self._buffers)
        if reduced is not None:
            return reduced
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and isinstance(obj, types.FunctionType) and definitions.is_of_main(obj):
            reduced = self._dynamic_function_reduce(obj)  # a module has it by a name of its own
        if isinstance(obj, (type, types.FunctionType)):
            self._note(obj)
            if isinstance(reduced, tuple) and len(reduced) == 6:  # cloudpickle sends it by value
                by_value = definitions.reduce_by_value(obj, reduced)
                if self._home is None:
                    return by_value
                if isinstance(obj, type) or obj.__globals__ is self._home.names:
                    self._home.note(obj)
                return definitions.reduce_at_home(obj, by_value, self._home.names)
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


def dump(obj: Any) -> bytes:
    """Pickle an object; `explain` says why that fails."""
    file = io.BytesIO()
    Pickler(file).dump(obj)
    return file.getvalue()


def explain(obj: Any, name: str, home: Home | None = None) -> UnsendableError | None:
    """Return why `obj` cannot be pickled, with the path of the part at fault; None if it can."""
    error = _attempt(obj, home)
    if error is None:
        return None
    path, leaf, error = _culprit(obj, name, error, set(), 0)
    if isinstance(error, reducers.RefusedError):
        return UnsendableError(path, f", {error}", error.advice)
    return UnsendableError(path, f", {describe(leaf)}, which cannot be sent to another process ({_brief(error)})")


def describe(obj: Any) -> str:
    """Return the kind of an object in plain words, such as ``a thread lock``."""
    if isinstance(obj, io.IOBase):
        return "an open file"
    kind = type(obj)
    if kind.__module__ == "_thread":
        return f"a thread {kind.__name__.removeprefix('R').lower()}"
    name = kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _attempt(obj: Any, home: Home | None = None) -> Exception | None:
    try:
        Pickler(sink := tensors.BufferSink(), sink, home).dump(obj)
    except Exception as error:  # noqa: BLE001  # a user's __reduce__ may raise anything
        return error
    return None


def _culprit(obj: Any, path: str, error: Exception, seen: set[int], depth: int) -> tuple[str, Any, Exception]:
    """Return the innermost part that cannot be pickled: its path, the part, and its exception."""
    if depth == _MAX_EXPLAINED_DEPTH or id(obj) in seen:
        return path, obj, error
    if isinstance(error, reducers.RefusedError) and error.thing is obj:
        return path, obj, error
    seen.add(id(obj))
    for template, part in _parts(obj):
        inner = _attempt(part)
        if inner is not None:
            return _culprit(part, template.format(path), inner, seen, depth + 1)
    return path, obj, error


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object, each with a template of its path; ``{}`` stands for the object's own path."""
    if isinstance(obj, types.MethodType):
        yield "{}'s object", obj.__self__
    elif (wrapped := reducers.wrapped_by(obj)) is not None:
        yield from (("{}", function) for function in wrapped)
    elif isinstance(obj, types.FunctionType):
        yield from _function_parts(obj)
    elif isinstance(obj, functools.partial):
        yield "{}'s function", obj.func
        yield "{}'s args", obj.args
        yield "{}'s keywords", obj.keywords
    elif isinstance(obj, Mapping):
        for key, value in obj.items():
            escaped = repr(key).replace("{", "{{").replace("}", "}}")
            yield f"{{}}[{escaped}]", value
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


def globals_used(function: types.FunctionType) -> frozenset[str]:
    """Return the global names that a function's code, and the functions and classes inside it, may use."""
    return looked_up(function.__code__) | names_in_class_bodies(function.__code__)


def names_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals and enclosing variables that a function itself uses: values by name."""
    used = sorted(looked_up(function.__code__))
    names = {name: function.__globals__[name] for name in used if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            names[name] = cell.cell_contents
        except ValueError:
            continue  # an enclosing variable that is not bound yet
    return names


@functools.lru_cache(maxsize=4096)  # disassembling is slow
def looked_up(code: types.CodeType) -> frozenset[str]:
    """Return the names that a function's code, and the functions inside it, look up globally."""
    return frozenset(_lookups(code, _GLOBAL_LOOKUPS))


@functools.lru_cache(maxsize=4096)
def names_in_class_bodies(code: types.CodeType) -> frozenset[str]:
    """Return the names that class bodies inside a function may look up globally; cloudpickle misses them."""
    return frozenset(name for name in _lookups(code, _IN_CLASS_BODIES) if not name.startswith("__"))


def _lookups(code: types.CodeType, instructions: Collection[str]) -> Iterator[str]:
    own: set[str] = set()  # names that a class body has bound by then
    for step in dis.get_instructions(code):
        if step.opname == "STORE_NAME":
            own.add(step.argval)
        elif step.opname in instructions and not (step.opname in _IN_CLASS_BODIES and step.argval in own):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _lookups(constant, instructions)


def _brief(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:400]}" if text else type(error).__name__
