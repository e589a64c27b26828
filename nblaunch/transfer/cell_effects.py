"""What the notebook's cells do to modules: imports for their effect, and attributes that statements set.

A function names neither, so nothing else sends them. A rank imports before the function what statements of cells have
imported, in their order: the user's own modules, and submodules of installed packages that the rank uses. It leaves out
other installed packages, which can take seconds to import, and those of `EFFECT_FREE`. Then it sets the attributes:
options such as ``ImageFile.LOAD_TRUNCATED_IMAGES = True``, and methods that cells give a library's class.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import sys
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from nblaunch.machine.own_code import is_users
from nblaunch.machine.packages import KNOWN_SAFE, is_installed, package_of
from nblaunch.transfer import definitions, pickling

_NOTEBOOKS_OWN = {"IPython", "__main__", "google", "ipykernel", "ipywidgets", "nblaunch"}
EFFECT_FREE = KNOWN_SAFE | sys.stdlib_module_names | {"numpy", "torch"} | _NOTEBOOKS_OWN
"""Top-level packages whose modules do not change other modules."""
_VALUES = (bool, int, float, str, bytes, type(None), type, types.FunctionType, classmethod, staticmethod, property)
"""Types of attributes that are sent: others, such as streams and caches, are the notebook's."""

Attribute = tuple[str, str, str]
"""A module, the qualified name of a class in it or an empty string, and an attribute of that."""

_last: dict[Attribute, Any] = {}
"""What was set in this rank. A kept one gets all attributes with each task."""


def imported_in(cells: Iterable[str]) -> dict[str, bool]:
    """Return the modules that these cells have imported and that may have an effect; called in the notebook.

    Args:
        cells: The code of cells, in the order in which they ran.

    Returns:
        By name, in order of import: whether the module is the user's own, to be imported in any case.
    """
    names = dict.fromkeys(name for cell in cells for name in _effects_of(cell).imports)
    return {name: _is_own(name) for name in names if name in sys.modules and package_of(name) not in EFFECT_FREE}


def attributes_set_in(cells: Iterable[str], namespace: Mapping[str, Any]) -> dict[Attribute, Any]:
    """Return the attributes of modules and their classes that these cells have set, with their values of now.

    Args:
        cells: The code of cells.
        namespace: The notebook's names.
    """
    found = {}
    for target in dict.fromkeys(target for cell in cells for target in _effects_of(cell).attributes):
        root, *between, name = target.split(".")
        owner: Any = namespace.get(root)
        for part in between:
            owner = getattr(owner, part, None) if isinstance(owner, (types.ModuleType, type)) else None
        place = _place_of(owner)
        value = vars(owner).get(name, ...) if place else ...
        if place and isinstance(value, _VALUES) and pickling.explain(value, name) is None:
            found[(*place, name)] = value
    return found


def _place_of(owner: Any) -> tuple[str, str] | None:
    """Return where ranks find a module or class, if they do: its module, and its qualified name there."""
    module = owner.__module__ if isinstance(owner, type) else getattr(owner, "__name__", "")
    name = owner.__qualname__ if isinstance(owner, type) else ""
    if not isinstance(owner, (types.ModuleType, type)) or package_of(module) in _NOTEBOOKS_OWN:
        return None
    return (module, name) if definitions.look_up(module, name) is owner else None


def set_here(attributes: Mapping[Attribute, Any]) -> None:
    """Set attributes as the notebook's cells did; called in ranks. One that fails is reported in the rank's log."""
    for place, value in attributes.items():
        module, owner, name = place
        if place in _last and _essence(_last[place]) == _essence(value):
            continue  # a cell may have set it here since
        with _reporting(f"set {'.'.join(filter(None, place))}"):
            importlib.import_module(module)
            setattr(definitions.look_up(module, owner), name, value)
            _last[place] = value


def _essence(value: Any) -> Any:
    return getattr(getattr(value, "__func__", value), "__code__", value)


@contextlib.contextmanager
def _reporting(action: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit):  # noqa: BLE001  # whatever a module raises: the function may do without it
        reason = traceback.format_exc(limit=0).strip().splitlines()[-1]
        sys.stderr.write(f"nblaunch: this rank cannot {action}, as a cell of the notebook did: {reason}\n")


def import_here(modules: Mapping[str, bool]) -> None:
    """Import modules as the notebook's cells did; called in ranks. One that fails is reported in the rank's log."""
    for name, is_own in modules.items():
        if name not in sys.modules and (is_own or package_of(name) in sys.modules):
            with _reporting(f"import {name}"):
                importlib.import_module(name)


def _is_own(name: str) -> bool:
    """Return True for a module whose file is not in an installed package."""
    file = getattr(sys.modules[name], "__file__", None)
    return isinstance(file, str) and is_users(file) and not is_installed(os.path.dirname(os.path.abspath(file)))


class _Effects(NamedTuple):
    """What a cell does when it runs, without what its functions do when they are called."""

    imports: tuple[str, ...] = ()
    """Modules, and perhaps other names."""
    attributes: tuple[str, ...] = ()
    """What it assigns to and that is an attribute of a name: ``a.b.c``."""


@functools.lru_cache(maxsize=4096)
def _effects_of(cell: str) -> _Effects:
    try:
        nodes = list(_executed(ast.parse(cell)))
    except SyntaxError:  # a cell that did not run
        return _Effects()
    set_to = [ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    chains = (each for each in set_to if all(map(str.isidentifier, each.split("."))))
    return _Effects(tuple(name for node in nodes for name in _imports_of(node)), tuple(chains))


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _executed(child)


def _imports_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""
        yield from (f"{node.module}.{alias.name}" for alias in node.names)  # it may be a module
