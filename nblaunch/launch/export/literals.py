"""Values as Python source: literals, and the expressions of the notebook that give the same value again."""

from __future__ import annotations

import ast
import builtins
import cmath
import contextlib
import copy
import dataclasses
import enum
import os
import pathlib
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nblaunch.launch.export import saved_values
from nblaunch.transfer import definitions, pickling

MAX_LITERAL_CHARS = 2000
_MAX_SEARCHED = 100_000
"""Elements in which containers are searched for."""
_PLAIN = (type(None), bool, int, bytes, type(...), range)
_SIZED = (str, bytes, list, tuple, set, frozenset, dict)
_BUILTINS = frozenset({"abs", "len", "max", "min", "round", "sorted", "sum"})
_OF_CUDA = ("is_available", "device_count")
_TYPES = frozenset(
    {*(object, bool, int, float, complex, str, bytes, bytearray, range, slice)}
    | {*(list, tuple, set, frozenset, dict, zip, enumerate, reversed)}  # map and filter call a function
)
_MODULES = frozenset(
    {*("argparse", "collections", "datetime", "decimal", "fractions", "functools", "random", "types")}
    | {"nblaunch.training.trainer.train_config"}
)
_PACKAGES = (
    *("nblaunch.training.data.", "numpy.dtypes.", "numpy.random.", "sklearn.", "torch.distributions."),
    *("torch.utils.data.", "torchvision.datasets.", "torchvision.transforms.", "transformers.models."),
)
"""Modules and packages whose classes only keep their arguments or read files: creating an object changes nothing."""
_OF_PANDAS = ("DataFrame", "Series", "Index", "Timestamp", "Timedelta")  # an ExcelWriter empties its file
_KEEPING = "torch.nn.modules."
"""Its modules leave those that they are given as they are."""
_METHODS = frozenset({"parameters", "named_parameters"})
"""Methods of a module that change nothing."""
_METHODS_OF_NEW = frozenset({"to", "cuda", "cpu", "eval", "train", "float", "double", "half"})
"""Methods that change the module and return it: only called on one that the expression has just made."""
_EXPRESSIONS = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.keyword, ast.Starred, ast.expr_context),
    *(ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Subscript, ast.Slice, ast.JoinedStr, ast.FormattedValue),
    *(ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp),
    *(ast.unaryop, ast.operator, ast.boolop, ast.cmpop),
)


def literal(value: Any, need: Callable[[str, Any], bool]) -> str | None:
    """Return an expression for plain data; None if the value is something else.

    Args:
        value: The value.
        need: Called with each name that the expression uses and what it stands for; returns whether it is available.
    """
    kind = type(value)
    if kind in _SIZED and len(value) > MAX_LITERAL_CHARS:
        return None
    if kind is str:
        return quoted(value)
    if kind is complex:
        return f"complex({value.real!r}, {value.imag!r})" if cmath.isfinite(value) else None
    if kind in _PLAIN:
        return repr(value)
    if kind is float:
        return repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
    if kind in (list, tuple, set, frozenset):
        parts = [literal(each, need) for each in value]
        if any(part is None for part in parts):
            return None
        text = ", ".join(part for part in parts if part is not None)
        if kind is tuple:
            return f"({text}{',' if len(parts) == 1 else ''})"
        if kind is list:
            return f"[{text}]"
        text = f"{{{text}}}" if parts else ""
        return f"frozenset({text})" if kind is frozenset else text or "set()"
    if kind is dict:
        pairs = [(literal(key, need), literal(each, need)) for key, each in value.items()]
        if any(key is None or each is None for key, each in pairs):
            return None
        return f"{{{', '.join(f'{key}: {each}' for key, each in pairs)}}}"
    return _named(value, need)


def quoted(text: str) -> str:
    """Return a string as source, in double quotes unless it has some."""
    return repr(text) if '"' in text else f'"{repr(text + chr(34))[1:-2]}"'


def _named(value: Any, need: Callable[[str, Any], bool]) -> str | None:
    """Return an expression for what a class or module has under a name, and for objects of plain fields."""
    kind = type(value)
    torch = sys.modules.get("torch")
    if torch is not None and kind in (torch.device, torch.dtype):
        return f"torch.device({quoted(str(value))})" if kind is torch.device else repr(value)
    if isinstance(value, pathlib.PurePath) and kind.__module__.startswith("pathlib"):
        return f"pathlib.Path({quoted(str(value))})" if need("pathlib", pathlib) else None
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.number, numpy.bool_)) and need("numpy", numpy):
        return f"numpy.{kind.__name__}({literal(value.item(), need)})"
    if numpy is not None and kind is numpy.memmap and need("numpy", numpy):
        return _map(value)
    if isinstance(value, enum.Enum) and not isinstance(value, enum.Flag) and need(kind.__name__, kind):
        return f"{kind.__name__}.{value.name}"
    if isinstance(value, tuple) and hasattr(kind, "_fields") and need(kind.__name__, kind):
        parts = {name: literal(getattr(value, name), need) for name in kind._fields}
        return None if None in parts.values() else _call(kind, parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: literal(getattr(value, field.name), need) for field in dataclasses.fields(value)}
        has_no_more = fields.keys() == getattr(value, "__dict__", fields).keys() and None not in fields.values()
        if _is_plain_dataclass(kind) and has_no_more and need(kind.__name__, kind):
            return _call(kind, fields)
    return None


def _map(array: Any) -> str | None:
    """Return an expression that maps the same part of a file; None if it might differ from what the notebook has."""
    if array._mmap is None or array.filename is None or not os.path.isfile(array.filename):
        return None  # an array computed from a map, or a map of a file that is gone
    origin = array
    while type(origin.base) is type(array):
        origin = origin.base
    is_whole = array.flags.c_contiguous or array.flags.f_contiguous
    if origin.base is not origin._mmap or array.mode == "c" or not is_whole or array.dtype.fields or not array.size:
        return None
    offset = origin.offset + array.__array_interface__["data"][0] - origin.__array_interface__["data"][0]
    mode = "r+" if array.flags.writeable else "r"  # w+ would empty the file
    order = "" if array.flags.c_contiguous else ', order="F"'
    name = quoted(str(array.filename))
    return f'numpy.memmap({name}, "{array.dtype.str}", "{mode}", {offset}, {tuple(map(int, array.shape))}{order})'


def _call(kind: type, arguments: Mapping[str, str | None]) -> str:
    return f"{kind.__name__}({', '.join(f'{name}={text}' for name, text in arguments.items())})"


def _is_plain_dataclass(kind: type) -> bool:
    """Return True for a dataclass that stores its arguments and does nothing else."""
    code = getattr(vars(kind).get("__init__"), "__code__", None)
    return (
        dataclasses.is_dataclass(kind)
        and code is not None
        and code.co_filename == "<string>"  # the decorator has written it
        and not hasattr(kind, "__post_init__")
        and all(field.init for field in dataclasses.fields(kind))
    )


# ------------------------------------------------------------------ the notebook's own expression
def is_repeatable(node: ast.expr, names: Mapping[str, Any], hidden: frozenset[str]) -> bool:
    """Return True if an expression only combines names and plain data, and creates objects of known classes.

    Args:
        node: The expression.
        names: The notebook's names.
        hidden: Those that a script has later or not at all.
    """
    for each in ast.walk(node):
        if not isinstance(each, _EXPRESSIONS):
            return False
        if isinstance(each, ast.Name) and (each.id in hidden or not (each.id in names or each.id in vars(builtins))):
            return False
        held = _held(each, names)
        if isinstance(held, Iterator) or held is os.environ:  # `list` would consume it; a job has other variables
            return False
        if isinstance(each, ast.Call) and not _is_harmless(each, names):
            return False
        if isinstance(each, ast.keyword) and each.arg == "key":  # `sorted` calls it
            return False
    return True


def _is_harmless(call: ast.Call, names: Mapping[str, Any]) -> bool:
    """Return True if a call computes a number, or creates an object and changes nothing by it.

    Of other classes this is not known: ``zipfile.ZipFile(file, "w")`` empties a file, a scheduler of torch changes its
    optimizer. A module of the user's may change one that it is given or finds in a global: replace its last layer.
    """
    torch, function = sys.modules.get("torch"), call.func
    modules: tuple[type, ...] = () if torch is None else (torch.nn.Module,)
    called = _look_up(function, names)
    if isinstance(called, type):
        if torch is not None and issubclass(called, modules):
            is_known = called.__module__.startswith(_KEEPING)
            return is_known or not (_is_given_tensors(call, names) or _uses_weights(called, torch.nn.Parameter))
        return _only_creates(called) or (_is_plain_dataclass(called) and not _calls_factory(called, call))
    if any(called is getattr(builtins, name) for name in _BUILTINS):
        return True
    if torch is not None and any(called is getattr(torch.cuda, name) for name in _OF_CUDA):
        return True
    if isinstance(function, ast.Attribute):
        if isinstance(function.value, ast.Name):
            return function.attr in _METHODS and isinstance(names.get(function.value.id), modules)
        if isinstance(function.value, ast.Call) and function.attr in _METHODS_OF_NEW:
            made = _look_up(function.value.func, names)
            is_new = isinstance(made, type) and issubclass(made, modules)
            return is_new and not _is_given_tensors(function.value, names)
    return False


def _is_given_tensors(call: ast.Call, names: Mapping[str, Any]) -> bool:
    """Return True if arguments of a call hold tensors that the notebook has already; also if that is unknown."""
    try:
        return any(saved_values.Survey(value).tensors for value in _given(call, names))
    except Exception:  # noqa: BLE001  # the user's classes may raise anything
        return True


def _given(node: ast.AST, names: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values that a call's arguments get from the notebook, not those of calls inside them."""
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Call):
        parts = (*node.args, *(keyword.value for keyword in node.keywords))
    for part in parts:
        if any(isinstance(each, ast.Call) for each in ast.walk(part)):
            yield from _given(part, names)
        elif isinstance(part, ast.expr) and not isinstance(part, ast.Constant):
            yield _evaluate(part.value if isinstance(part, ast.Starred) else part, names)


def _uses_weights(kind: type, parameter: type) -> bool:
    """Return True if the code of a class that a cell defines refers to parameters in globals; also if unknown."""
    seen: dict[int, Any] = {}
    waiting: list[Any] = [kind]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, types.ModuleType):
            continue
        seen[id(value)] = value
        if isinstance(value, (type, types.FunctionType)):
            if not definitions.is_sent_by_value(value):
                continue
            if isinstance(value, type):
                waiting += value.__bases__
                waiting += (getattr(each, "__func__", each) for each in vars(value).values() if callable(each))
            else:
                waiting += pickling.names_of(value).values()
            continue
        try:
            if any(isinstance(each, parameter) for each in saved_values.Survey(value).tensors.values()):
                return True
        except Exception:  # noqa: BLE001  # the user's classes may raise anything
            return True
    return False


def _only_creates(kind: type) -> bool:
    torch, numpy, pandas = (sys.modules.get(name) for name in ("torch", "numpy", "pandas"))
    return (
        kind in _TYPES
        or kind.__module__ in _MODULES
        or f"{kind.__module__}.".startswith(_PACKAGES)
        or issubclass(kind, pathlib.PurePath)
        or (torch is not None and issubclass(kind, (torch.optim.Optimizer, torch.Generator, torch.device, torch.Size)))
        or (numpy is not None and issubclass(kind, (numpy.generic, numpy.dtype)))
        or any(kind is getattr(pandas, name, None) for name in _OF_PANDAS)
    )


def _calls_factory(kind: Any, call: ast.Call) -> bool:
    """Return True if creating a dataclass calls a function of the user's for a field that is not given."""
    given = {keyword.arg for keyword in call.keywords}
    rest = [field for field in dataclasses.fields(kind)[len(call.args) :] if field.name not in given]
    return any(field.default_factory not in (dataclasses.MISSING, *_TYPES) for field in rest)


def _held(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """Return the value of a name, attribute or element, where no code of the user's runs for it; else None."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_held(node.value, names), "__dict__", {}).get(node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = _held(node.value, names)
        with contextlib.suppress(LookupError, TypeError):
            return owner[node.slice.value] if type(owner) in (dict, list, tuple) else None
    return None


def _look_up(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return what a name, or an attribute of a module or class, stands for; None if it is anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, vars(builtins).get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _look_up(node.value, names)
        if isinstance(owner, types.ModuleType) or (isinstance(owner, type) and not isinstance(owner, enum.EnumMeta)):
            return getattr(owner, node.attr, None)
    return None


def repeat(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the expression's value. Random states stay as they are, as do the containers that the expression uses.

    Datasets that the expression downloads are only read, as a download would replace files that have changed.

    Raises:
        Exception: The expression raised it.
    """
    node = copy.deepcopy(node)
    for each in ast.walk(node):
        if isinstance(each, ast.keyword) and each.arg == "download":
            each.value = ast.copy_location(ast.Constant(False), each.value)
    used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    with _own_random_states(), _own_containers([names[name] for name in used if name in names]):
        return _evaluate(node, names)


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "<export>", "eval"), dict(names))


@contextlib.contextmanager
def _own_containers(values: Iterable[Any]) -> Iterator[None]:
    """Undo what happens to containers and attributes: reading a defaultdict adds keys, a user's class may pop some."""
    kept = [(each, _items(each)) for each in _containers(values)]
    try:
        yield
    finally:
        for each, items in kept:
            now = _items(each)
            if len(now) != len(items) or any(one is not other for one, other in zip(now, items, strict=True)):
                each.clear()
                each.extend(items) if isinstance(each, list) else each.update(
                    zip(items[::2], items[1::2], strict=True) if isinstance(each, dict) else items
                )


def _containers(values: Iterable[Any]) -> list[Any]:
    """Return the lists, dicts and sets among values and inside them, and the attributes of the user's objects."""
    found: dict[int, Any] = {}
    waiting = list(values)
    while waiting and len(waiting) < _MAX_SEARCHED:
        value = waiting.pop()
        kind = type(value)
        if kind.__module__ == "__main__" or kind.__module__ in _MODULES:
            waiting.append(getattr(value, "__dict__", None))
        if isinstance(value, (list, dict, set, tuple)) and id(value) not in found:
            found[id(value)] = value
            waiting += _items(value)
    return [each for each in found.values() if not isinstance(each, tuple)]


def _items(container: Any) -> list[Any]:
    """Return the elements of a container; keys and values of a dict in turn."""
    return [part for pair in container.items() for part in pair] if isinstance(container, dict) else list(container)


@contextlib.contextmanager
def _own_random_states() -> Iterator[None]:
    torch, numpy_random = sys.modules.get("torch"), sys.modules.get("numpy.random")
    python_state = random.getstate()
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    torch_state = None if torch is None else torch.get_rng_state()
    has_cuda = torch is not None and torch.cuda.is_initialized()
    cuda_states = torch.cuda.get_rng_state_all() if torch is not None and has_cuda else []
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)
            torch.cuda.set_rng_state_all(cuda_states)
