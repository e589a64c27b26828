"""What the notebook's cells do to modules: imports for their effect, attributes that statements set, and flags.

A function names neither, so nothing else sends them. A rank imports before the function what statements of cells have
imported, in their order: the user's own modules, and submodules of installed packages that the rank uses. It leaves out
other installed packages, which can take seconds to import, and those of `EFFECT_FREE`. Then it sets the attributes:
options such as ``ImageFile.LOAD_TRUNCATED_IMAGES = True``, and methods that a cell's statements give a library's class.
Flags of Python, NumPy and torch it has as a fork would inherit them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from nblaunch.machine.own_code import is_users
from nblaunch.machine.packages import KNOWN_SAFE, is_installed, package_of
from nblaunch.transfer import definitions, pickling

_NOTEBOOKS_OWN = {"IPython", "__main__", "google", "ipykernel", "ipywidgets", "nblaunch"}
EFFECT_FREE = KNOWN_SAFE | sys.stdlib_module_names | {"numpy", "torch"} | _NOTEBOOKS_OWN
"""Top-level packages whose modules do not change other modules."""
Attribute = tuple[str, str, str]
"""A module, the qualified name of a class in it or an empty string, and an attribute of that."""

_PROCESS_OWN = {("os", "", "environ"), ("sys", "", "stdin"), ("sys", "", "stdout"), ("sys", "", "stderr")}
"""Each rank has its own. ``os.environ |= ...`` assigns to the first; a rank gets such variables by other means."""
_ABSENT: Any = ...
_last: dict[Attribute, bytes] = {}
"""Digests of what this rank has set."""


def imported_in(cells: Iterable[str]) -> dict[str, bool]:
    """Return modules that cells have imported and that may have an effect; True: the user's own, for all ranks."""
    names = dict.fromkeys(name for cell in cells for name in effects_of(cell).imports)
    return {name: _is_own(name) for name in names if name in sys.modules and package_of(name) not in EFFECT_FREE}


def attributes_set_in(cells: Iterable[str], namespace: Mapping[str, Any]) -> dict[Attribute, Any]:
    """Return the attributes of modules and their classes that these cells have set, with their values of now.

    What cannot be sent is left out. An error that names it says so: see `nblaunch.launch.failures`.
    """
    found: dict[Attribute, Any] = {}
    for target in dict.fromkeys(target for cell in cells for target in effects_of(cell).attributes):
        path, _, name = target.rpartition(".")
        owner = _found(path, namespace)
        place = _place_of(owner)
        if place is None or (*place, name) in _PROCESS_OWN:
            continue
        value = _own(owner, name)
        own_name = ".".join(filter(None, (place[1], name)))
        is_imports = (getattr(value, "__module__", None), getattr(value, "__qualname__", None)) == (place[0], own_name)
        if value is _ABSENT or (is_imports and not definitions.is_of_main(value)):
            continue  # a cell has taken it back
        if pickling.explain(value, name) is None:
            found[(*place, name)] = value
    return found


def _found(path: str, namespace: Mapping[str, Any]) -> Any:
    root, *more = path.split(".")
    found: Any = namespace.get(root)
    for part in more:
        found = _own(found, part) if isinstance(found, (types.ModuleType, type)) else None
    return found


def _place_of(owner: Any) -> tuple[str, str] | None:
    """Return where ranks find a module or class, if they do: its module, and its qualified name there."""
    if not isinstance(owner, (types.ModuleType, type)):
        return None
    module, name = (owner.__module__, owner.__qualname__) if isinstance(owner, type) else (owner.__name__, "")
    is_there = package_of(module) not in _NOTEBOOKS_OWN and definitions.look_up(module, name) is owner
    return (module, name) if is_there else None


def set_here(attributes: Mapping[Attribute, Any], *, is_kept: bool) -> None:
    """Set attributes as the notebook's cells did; called in ranks. One that fails is reported in the rank's log.

    Its module is imported, however long that takes: who imports it later would find it unchanged.
    A kept rank gets all with each task, and sets those that differ from the last ones: a cell may have set the others.
    What the notebook takes back stays set in a kept rank.
    """
    for place, value in attributes.items():
        module, owner, name = place
        digest = hashlib.sha256(pickling.dump(value)).digest() if is_kept else b""
        if is_kept and _last.get(place) == digest:
            continue
        with _reporting(f"set {'.'.join(filter(None, place))}"):
            importlib.import_module(module)
            setattr(definitions.look_up(module, owner), name, value)
            _last[place] = digest


def _own(owner: Any, name: str) -> Any:
    if isinstance(owner, type):
        return vars(owner).get(name, _ABSENT)  # a staticmethod as such
    with contextlib.suppress(Exception):  # of a module's __getattr__: transformers' raises what an import would
        return getattr(owner, name)  # some modules keep options elsewhere, such as torch._dynamo.config
    return _ABSENT


@contextlib.contextmanager
def _reporting(action: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit):  # noqa: BLE001  # whatever a module raises: the function may do without it
        reason = traceback.format_exc(limit=0).strip().splitlines()[-1]
        sys.stderr.write(f"nblaunch: this rank failed to {action} as the notebook did: {reason}\n")


def import_here(modules: Mapping[str, bool]) -> None:
    """Import modules as the notebook's cells did; called in ranks. One that fails is reported in the rank's log."""
    for name, is_own in modules.items():
        if name not in sys.modules and (is_own or package_of(name) in sys.modules):
            with _reporting(f"import {name}"):
                importlib.import_module(name)


def _is_own(name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return isinstance(file, str) and is_users(file) and not is_installed(os.path.dirname(os.path.abspath(file)))


class Effects(NamedTuple):
    """What a cell does when it runs, without what its functions do when they are called."""

    imports: tuple[str, ...] = ()
    """Modules, and perhaps other names."""
    attributes: tuple[str, ...] = ()
    """What it assigns to and that is an attribute of a name: ``a.b.c``."""


@functools.lru_cache(maxsize=4096)
def effects_of(cell: str) -> Effects:
    """Return what a cell does to modules when it runs."""
    try:
        nodes = list(_executed(ast.parse(cell)))
    except SyntaxError:  # a cell that did not run
        return Effects()
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    imports = (name for node in nodes for name in _imports_of(node))
    return Effects(tuple(imports), tuple(path for node in stored if "." in (path := _path(node))))


def _path(node: ast.AST) -> str:
    """Return ``a.b.c`` for an attribute of a name, the name for a name, and an empty string for all else."""
    text = ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
    return text if all(map(str.isidentifier, text.split("."))) else ""


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _executed(child)


def _imports_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""
        yield from (f"{node.module}.{alias.name}" for alias in node.names)  # it may be a module


# ------------------------------------------------------------------ flags of Python, NumPy and torch
class _Flag(NamedTuple):
    module: str
    read: Callable[[Any], Any]
    set: Callable[[Any, Any], object]


def _attribute(module: str, name: str) -> _Flag:
    return _Flag(module, lambda m: getattr(m, name), lambda m, v: setattr(m, name, v))


def _kernel_of_attention(name: str) -> _Flag:
    return _Flag(
        "torch.backends.cuda",
        lambda m: getattr(m, f"{name}_sdp_enabled")(),
        lambda m, v: getattr(m, f"enable_{name}_sdp")(v),
    )


FLAGS: dict[str, _Flag] = {
    "recursion limit": _Flag("sys", lambda m: m.getrecursionlimit(), lambda m, v: m.setrecursionlimit(v)),
    "start method": _Flag(
        "multiprocessing", lambda m: m.get_start_method(allow_none=True), lambda m, v: m.set_start_method(v, force=True)
    ),
    "errors": _Flag("numpy", lambda m: m.geterr(), lambda m, v: m.seterr(**v)),
    "default dtype": _Flag("torch", lambda m: m.get_default_dtype(), lambda m, v: m.set_default_dtype(v)),
    "default device": _Flag("torch", lambda m: m.get_default_device().type, lambda m, v: _set_device(m, v)),
    "matmul precision": _Flag(
        "torch", lambda m: m.get_float32_matmul_precision(), lambda m, v: m.set_float32_matmul_precision(v)
    ),
    "deterministic": _Flag(
        "torch",
        lambda m: (m.are_deterministic_algorithms_enabled(), m.is_deterministic_algorithms_warn_only_enabled()),
        lambda m, v: m.use_deterministic_algorithms(v[0], warn_only=v[1]),
    ),
    "gradients": _Flag("torch", lambda m: m.is_grad_enabled(), lambda m, v: m.set_grad_enabled(v)),
    "anomaly detection": _Flag(
        "torch",
        lambda m: (m.is_anomaly_enabled(), m.is_anomaly_check_nan_enabled()),
        lambda m, v: m.autograd.set_detect_anomaly(*v),
    ),
    "mkldnn": _Flag("torch", lambda m: m._C._get_mkldnn_enabled(), lambda m, v: m._C._set_mkldnn_enabled(v)),
    "sharing strategy": _Flag(
        "torch.multiprocessing", lambda m: m.get_sharing_strategy(), lambda m, v: m.set_sharing_strategy(v)
    ),
    **{f"cudnn.{name}": _attribute("torch.backends.cudnn", name) for name in ("enabled", "deterministic", "benchmark")},
    **{f"{name} attention": _kernel_of_attention(name) for name in ("flash", "mem_efficient", "math", "cudnn")},
}
"""To take another flag along, add a row. The value must pickle, and reading it must be cheap."""


def read_flags() -> dict[str, Any]:
    flags = {}
    for name, flag in FLAGS.items():
        module = sys.modules.get(flag.module)
        if module is not None:
            # another torch, or another thread is importing it; or torch refuses, after a change of its newer options
            with contextlib.suppress(AttributeError, RuntimeError):
                flags[name] = flag.read(module)
    return flags


def set_flags(flags: Mapping[str, Any]) -> None:
    """Set the flags that differ: setting some is slow (determinism imports the compiler, which takes 2 s)."""
    for name, value in flags.items():
        module, read, set_flag = FLAGS[name]
        found = importlib.import_module(module)
        if read(found) != value:
            set_flag(found, value)


def _set_device(torch: Any, kind: str) -> None:
    """Set the default device: of GPUs the rank's own. Ranks on CPUs keep the CPU."""
    if kind != "cuda" or torch.cuda.is_available():
        torch.set_default_device(kind)
