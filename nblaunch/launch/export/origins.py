"""Where an object of the notebook comes from: the import, the definition, or the call of a function that made it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from nblaunch.launch.export.cell_statements import Statement, inner_codes, is_same_code
from nblaunch.machine.packages import package_of, why_not_ahead
from nblaunch.transfer import definitions


# ------------------------------------------------------------------ imports
def bound_by(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return the name that a part of an import binds."""
    return alias.asname or (alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name)


def is_import_of(node: ast.Import | ast.ImportFrom, alias: ast.alias, value: Any) -> bool:
    """Return True if a part of an import binds this value."""
    if isinstance(node, ast.Import):
        return sys.modules.get(alias.name if alias.asname else alias.name.partition(".")[0]) is value
    module = sys.modules.get(node.module or "")
    found = getattr(module, alias.name, sys.modules.get(f"{node.module}.{alias.name}"))
    return node.level == 0 and found is value and module is not None


def one_import(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return the import of this part alone."""
    if isinstance(node, ast.Import):
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        return ast.unparse(ast.Import([ast.alias(name, alias.asname)]))
    return ast.unparse(ast.ImportFrom(node.module, [alias], 0))


def import_of(name: str, value: Any) -> str:
    """Return a statement that imports a module, function or class under a name; empty if it cannot be imported."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
    own, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", None)
    if not own.isidentifier() or not isinstance(module, str) or definitions.look_up(module, own) is not value:
        return ""
    return "" if module == "__main__" else f"from {module} import {own}" + ("" if own == name else f" as {name}")


# ------------------------------------------------------------------ definitions
def has_code(statement: Statement, function: types.FunctionType) -> bool:
    """Return True if a statement has the code of a function."""
    return any(is_same_code(code, function.__code__) for code in statement.codes)


def has_class(statement: Statement, name: str, value: type) -> bool:
    """Return True if a statement has defined this class."""
    functions = [inspect.unwrap(each) for each in vars(value).values() if callable(each)]
    if any(isinstance(each, types.FunctionType) and has_code(statement, each) for each in functions):
        return True
    classes = [node for node in statement.nodes if isinstance(node, ast.ClassDef) and node.name == name]
    if not classes:
        return statement.value is not None
    return not any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in classes[0].body)


def enclosed(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the enclosing variables of a closure and their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # it is not bound yet


def makes(factory: Any, function: Any) -> bool:
    """Return True if the code of a function stands in a function of the notebook."""
    both = isinstance(factory, types.FunctionType) and isinstance(function, types.FunctionType)
    return both and any(is_same_code(code, function.__code__) for code in inner_codes(factory.__code__))


def argument(call: ast.Call, factory: types.FunctionType, parameter: str) -> ast.expr | None:
    """Return what a call gives for a parameter; None if that cannot be seen."""
    names = list(inspect.signature(factory).parameters)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    return (given | dict(zip(names, call.args, strict=False))).get(parameter)


def default(factory: types.FunctionType, parameter: str) -> list[Any]:
    """Return the default of a parameter, in a list; empty if there is none."""
    found = inspect.signature(factory).parameters.get(parameter)
    return [] if found is None or found.default is found.empty else [found.default]


def own_file(module: str) -> str:
    """Return the file of a module that a user can edit; empty for installed ones."""
    package = package_of(module)
    spec = importlib.util.find_spec(package) if package in sys.modules and package != "nblaunch" else None
    return spec.origin or "" if spec is not None and why_not_ahead(package) else ""
