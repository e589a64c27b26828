"""Imports that the notebook's cells make for their effect: a module that patches another, or registers a class.

A function names no such module, so nothing sends it. A rank imports before the function what statements of cells have
imported, in their order: the user's own modules, and submodules of installed packages that the rank uses. It leaves out
other installed packages, which can take seconds to import, and those of `EFFECT_FREE`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping

from nblaunch.machine.own_code import is_users
from nblaunch.machine.packages import KNOWN_SAFE, is_installed, package_of

EFFECT_FREE = KNOWN_SAFE | sys.stdlib_module_names | {"IPython", "google", "nblaunch", "numpy", "torch"}
"""Top-level packages whose modules do not change other modules."""


def imported_in(cells: Iterable[str]) -> dict[str, bool]:
    """Return the modules that these cells have imported and that may have an effect; called in the notebook.

    Args:
        cells: The code of cells, in the order in which they ran.

    Returns:
        By name, in order of import: whether the module is the user's own, to be imported in any case.
    """
    names = dict.fromkeys(name for cell in cells for name in _imports_of(cell))
    return {name: _is_own(name) for name in names if name in sys.modules and package_of(name) not in EFFECT_FREE}


def import_here(modules: Mapping[str, bool]) -> None:
    """Import modules as the notebook's cells did; called in ranks. One that fails is reported in the rank's log."""
    for name, is_own in modules.items():
        if name not in sys.modules and (is_own or package_of(name) in sys.modules):
            try:
                importlib.import_module(name)
            except (Exception, SystemExit):  # noqa: BLE001  # whatever a module raises: the function may do without it
                reason = traceback.format_exc(limit=0).strip().splitlines()[-1]
                sys.stderr.write(f"nblaunch: this rank cannot import {name}, as a cell of the notebook did: {reason}\n")


def _is_own(name: str) -> bool:
    """Return True for a module whose file is not in an installed package."""
    file = getattr(sys.modules[name], "__file__", None)
    return isinstance(file, str) and is_users(file) and not is_installed(os.path.dirname(os.path.abspath(file)))


@functools.lru_cache(maxsize=4096)
def _imports_of(cell: str) -> tuple[str, ...]:
    try:
        return tuple(_imports_in(ast.parse(cell).body))
    except SyntaxError:  # a cell that did not run
        return ()


def _imports_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the modules that code imports when it runs, not when a function in it is called."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # it may be a module
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _imports_in(ast.iter_child_nodes(node))
