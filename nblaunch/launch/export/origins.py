"""Where an object of the notebook comes from: the import, the definition, or the call of a function that made it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from nblaunch.launch.export.cell_statements import Statement, inner_codes, is_same_code
from nblaunch.launch.export.script import Imported
from nblaunch.machine.packages import package_of, why_not_ahead
from nblaunch.transfer import definitions


# ------------------------------------------------------------------ imports
def find_import(statements: Iterable[Statement], name: str, value: Any) -> Imported | None:
    """Return the import that binds a name to a value: ``import torch`` rather than ``import torch.utils.data``."""
    found = [
        (alias.name.count(".") * (alias.asname is None), Imported(statement.order, _one_import(node, alias), statement))
        for statement in statements
        for node in statement.nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if _bound_by(node, alias) == name and _is_import_of(node, alias, value)
    ]
    return min(found, key=lambda each: each[0])[1] if found else None


def other_imports(statements: Sequence[Statement], names: Collection[str], text: str) -> list[Imported]:
    """Return imports such as ``import torch.utils.data`` that a text relies on, and those of ``__future__``.

    Args:
        statements: The notebook's.
        names: The names that imports of the script bind.
        text: The script.
    """
    found = {}
    for statement in statements:
        for node in statement.nodes:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                found["__future__"] = Imported(statement.order, ast.unparse(node))
            for alias in node.names if isinstance(node, ast.Import) else ():
                is_used = alias.asname is None and "." in alias.name and f"{alias.name}." in text
                if is_used and alias.name.partition(".")[0] in names:
                    found[alias.name] = Imported(statement.order, f"import {alias.name}")
    return list(found.values())


def _bound_by(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    return alias.asname or (alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name)


def _is_import_of(node: ast.Import | ast.ImportFrom, alias: ast.alias, value: Any) -> bool:
    """Return True if a part of an import binds this value."""
    if isinstance(node, ast.Import):
        return sys.modules.get(alias.name if alias.asname else alias.name.partition(".")[0]) is value
    module = sys.modules.get(node.module or "")
    found = getattr(module, alias.name, sys.modules.get(f"{node.module}.{alias.name}"))
    return node.level == 0 and found is value and module is not None


def _one_import(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
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


def added_methods(statement: Statement, value: Any) -> list[str]:
    """Return the methods that cells have added to a class beside its statement."""
    classes = [node for node in statement.nodes if isinstance(node, ast.ClassDef)]
    if not (isinstance(value, type) and len(classes) == 1 and classes[0].name == value.__name__):
        return []
    bound = {getattr(node, "name", getattr(node, "id", "")) for node in ast.walk(classes[0])}
    return [
        name
        for name, each in vars(value).items()
        if isinstance(each, types.FunctionType) and each.__module__ == "__main__"
        if name not in bound and not name.startswith("__")  # dataclasses write some
    ]


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
