"""The rules of the house: public names, import directions, the cost of importing, the error tree."""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import nblaunch
from nblaunch import errors, training

PACKAGE = Path(nblaunch.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
BELOW = {
    "errors": [],
    "machine": [],
    "wire": ["machine"],
    "transfer": ["machine", "wire"],
    "ranks": ["machine", "wire", "transfer"],
    "engines": ["machine", "wire", "transfer"],
    "profiles": ["machine", "wire"],
    "launch": ["machine", "wire", "transfer", "engines", "profiles"],
    "notebook": ["machine", "wire", "transfer", "engines", "launch", "profiles"],
    "training": ["machine", "wire", "transfer"],
    "__main__": ["machine", "launch", "notebook"],
}
"""Each room of the package, and the rooms that it may import."""
NOTEBOOKS_OWN = ("IPython", "ipykernel", "ipywidgets", "anywidget")
RANK_SHELL, RANK_DEBUGGER = "rank_shell.py", "debugger.py"
"""The only module of ranks/ that imports IPython; it is imported by name, where a rank needs it."""
NOTEBOOK_NAMES = "main_module.py"
"""Imports the shell by name."""
_IMPORTERS = ("import_module", "__import__")
TOP_LEVEL = {
    *(".ci", ".gitignore", ".pre-commit-config.yaml", "LICENSE", "README.md"),
    *("binder", "nblaunch", "notebooks", "pyproject.toml", "tests"),
}


class Import(NamedTuple):
    """One import statement's target, and the function that it stands in (empty at the top)."""

    target: str
    function: str


def python(code: str) -> str:
    """Return what a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    return done.stdout.strip()


def room_of(module: Path) -> str:
    """Return ``ranks``, ``launch``, ``notebook``...; ``errors`` is a room of its own."""
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imports_of(module: Path) -> list[Import]:
    """Return every import of a module that runs, those by name included."""
    return list(_imports(nodes_of(module)[0], ""))


@functools.cache
def nodes_of(module: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(module.read_text())))


@functools.cache
def all_imports_of(module: Path) -> frozenset[str]:
    """Return what a module imports of ours anywhere, those for type checkers included."""
    nodes = nodes_of(module)
    stated = {
        _target(node.module or "", alias.name) if isinstance(node, ast.ImportFrom) else alias.name
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    return frozenset(stated.union(filter(None, map(_imported_by_name, nodes))))


def _imports(node: ast.AST, function: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if (name := _imported_by_name(child)) is not None:
            yield Import(name, function)
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from (Import(_target(child.module or "", alias.name), function) for alias in child.names)
        else:
            inside = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
            yield from _imports(child, inside)


def _imported_by_name(node: ast.AST) -> str | None:
    """Return the module that a call of ``import_module`` or ``__import__`` names."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    called, name = node.func, node.args[0]
    is_import = (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in _IMPORTERS
    return name.value if is_import and isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def _target(module: str, name: str) -> str:
    """Return the module that ``from module import name`` reads, if it is one of ours."""
    inner = PACKAGE.parent.joinpath(*module.split("."), name)
    is_module = module.startswith("nblaunch") and (inner.with_suffix(".py").is_file() or inner.is_dir())
    return f"{module}.{name}" if is_module else module


def is_within(target: str, rooms: tuple[str, ...]) -> bool:
    return any(target == room or target.startswith(f"{room}.") for room in rooms)


def modules_in(room: str) -> list[Path]:
    found = [module for module in MODULES if room_of(module) == room and module != PACKAGE / "__init__.py"]
    assert found
    return found


# ------------------------------------------------------------------ the namespace
HOOKS = {"load_ipython_extension", "unload_ipython_extension"}
"""IPython calls them by name."""


@pytest.mark.parametrize("module", [nblaunch, training], ids=lambda module: module.__name__)
def test_all_is_the_namespace(module: ModuleType) -> None:
    assert sorted(module.__all__) == list(module.__all__)
    for name in module.__all__:
        getattr(module, name)  # imported on first access
    submodules = {name for name in vars(module) if f"{module.__name__}.{name}" in sys.modules}
    found = {name for name in vars(module) if name[0] != "_"} - submodules
    assert found - HOOKS == set(module.__all__) - {"__version__"}


def test_dir_lists_all() -> None:
    assert dir(nblaunch) == list(nblaunch.__all__)


@pytest.mark.parametrize("name", nblaunch.__all__)
def test_every_public_name_is_there_and_explains_itself(name: str) -> None:
    thing = getattr(nblaunch, name)
    assert thing is getattr(nblaunch, name)
    assert isinstance(thing, str) or thing.__doc__


@pytest.mark.parametrize("name", training.__all__)
def test_what_the_toolkit_exports_explains_its_members(name: str) -> None:
    thing = getattr(training, name)
    own = vars(thing).items() if isinstance(thing, type) else ()
    members = [value for key, value in own if key[0] != "_" and (callable(value) or isinstance(value, property))]
    assert all(member.__doc__ for member in (thing, *members))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'nblaunch' has no attribute 'launch_everything'"):
        nblaunch.launch_everything  # noqa: B018  # the look-up is the test


# ------------------------------------------------------------------ what importing costs
HEAVY = {"torch", *NOTEBOOKS_OWN}


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import nblaunch", HEAVY | {"numpy", "cloudpickle"}),
        ("from nblaunch import notebook_launcher", HEAVY),
        ("import nblaunch.ranks.report", HEAVY),
        ("import nblaunch.training.peers", {"accelerate", "lightning", "pytorch_lightning", "transformers"}),
    ],
)
def test_importing_loads_nothing_heavy(code: str, absent: set[str]) -> None:
    loaded = python(f"{code}; import sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))").split()
    assert not absent.intersection(loaded)


def test_importing_takes_less_than_a_tenth_of_a_second() -> None:
    """Takes the best of five runs, and its own time, as the machine may be busy."""
    code = "import time; begin = time.process_time(); {}; print(time.process_time() - begin)"
    assert min(float(python(code.format("import nblaunch"))) for _ in range(5)) < 0.1


# ------------------------------------------------------------------ import directions
def wrong_in(room: str, is_right: Callable[[Path, Import], bool]) -> list[str]:
    """Return the imports of a room that break a rule."""
    return [
        f"{module.name}: {found.target}"
        for module in modules_in(room)
        for found in imports_of(module)
        if is_within(found.target, ("nblaunch", *NOTEBOOKS_OWN)) and not is_right(module, found)
    ]


def test_imports_by_name_are_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "import_module('a.b')\ndef f():\n    return getattr(importlib.import_module('c'), __import__('d'))\n"
    )
    assert imports_of(module) == [Import("a.b", ""), Import("c", "f"), Import("d", "f")]
    assert all_imports_of(module) == {"a.b", "c", "d"}


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    allowed = tuple(f"nblaunch.{name}" for name in ("errors", room, *BELOW[room]))
    also = {
        ("local.py", "fork_kernel"): ("nblaunch.ranks",),  # its child becomes a reaper
        ("distribute.py", "nblaunch"): ("nblaunch",),
        ("errors.py", ""): ("nblaunch.machine.own_code",),  # which imports nothing of ours
    }

    def is_right(module: Path, found: Import) -> bool:
        if room == "training" and is_within(found.target, ("nblaunch.ranks.report",)):
            return True
        if found.target == "nblaunch":
            return bool(found.function) or room in ("launch", "notebook")
        if is_within(found.target, NOTEBOOKS_OWN) and module.name == NOTEBOOK_NAMES:
            return bool(found.function)  # for user code that needs a shell
        if (room == "notebook" or module.name in (RANK_SHELL, RANK_DEBUGGER)) and is_within(
            found.target, NOTEBOOKS_OWN
        ):
            return True
        return is_within(found.target, (*allowed, *also.get((module.name, found.function), ())))

    assert wrong_in(room, is_right) == []


def test_the_kernel_imports_what_its_child_needs_before_it_forks() -> None:
    """Another thread may hold an import's lock at the fork, and the child would wait for it without end."""
    assert (
        python(
            "import os, sys; from nblaunch.engines import local\n"
            "os.fork = lambda: sys.exit("
            "print('nblaunch.ranks.worker' in sys.modules, local._fork_lock.locked()))\n"
            "local.fork_kernel(None)"
        )
        == "True True"
    )


def test_the_package_itself_imports_its_rooms_only_when_asked() -> None:
    ours = [found for found in imports_of(PACKAGE / "__init__.py") if is_within(found.target, ("nblaunch",))]
    assert ours
    assert all(found.function for found in ours)


def test_only_the_training_room_imports_torch_at_the_top_of_a_module() -> None:
    for module in MODULES:
        if room_of(module) != "training":
            torchs = [found for found in imports_of(module) if is_within(found.target, ("torch",))]
            assert not [found for found in torchs if not found.function]


def test_only_the_ranks_shell_and_debugger_load_ipython() -> None:
    own = ("__init__.py", RANK_SHELL, RANK_DEBUGGER)
    modules = [module for module in modules_in("ranks") if module.name not in own]
    names = [f"nblaunch.ranks.{module.stem}" for module in modules]
    loaded = python(f"import {', '.join(names)}; import sys; print(*sys.modules)").split()
    assert set(names) <= set(loaded)
    assert not [name for name in loaded if is_within(name, (*NOTEBOOKS_OWN, "nblaunch.launch", "nblaunch.notebook"))]


def test_the_top_level_has_only_what_belongs_there() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert {path.split("/")[0] for path in tracked.stdout.split("\0") if path} <= TOP_LEVEL


def test_there_are_no_other_rooms() -> None:
    assert {room_of(module) for module in MODULES if module != PACKAGE / "__init__.py"} == set(BELOW)


def test_imports_form_no_circle() -> None:
    """Imports of functions and type checkers count; the public namespace, which imports lazily, does not."""
    graph = {
        dotted(module): {name for name in all_imports_of(module) if is_within(name, ("nblaunch",))} - {"nblaunch"}
        for module in MODULES
        if dotted(module) != "nblaunch"
    }
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names a circle


def dotted(module: Path) -> str:
    """Return ``nblaunch.ranks.worker``; for a package's ``__init__.py`` the package."""
    return ".".join(module.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


# ------------------------------------------------------------------ the seam
def test_one_module_chooses_the_engine_and_others_know_the_protocol() -> None:
    seam = {"nblaunch.engines.current", "nblaunch.engines.protocol"}
    found = {
        f"{module.name}: {target}"
        for module in MODULES
        if room_of(module) != "engines"
        for target in all_imports_of(module)
        if is_within(target, ("nblaunch.engines",)) and target not in seam
    }
    assert found == set()
    users = {module.name for module in MODULES if "nblaunch.engines.local" in all_imports_of(module)}
    assert users == {"agent.py", "current.py"}


# ------------------------------------------------------------------ the documents
ARCHITECTURE = PACKAGE / "ARCHITECTURE.md"


def paths_named_in(text: str) -> list[str]:
    """Paths between backticks: files by their ending, folders by their slash."""
    return re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|js|mjs|css|md|ipynb|sh)|(?:[\w-]+/)+)`", text)


def test_every_path_in_the_architecture_exists() -> None:
    """Relative to the package, or to the repository for ``tests/`` and ``notebooks/``."""
    named = paths_named_in(ARCHITECTURE.read_text())
    assert len(named) > 30
    assert [path for path in named if not (PACKAGE / path).exists() and not (PACKAGE.parent / path).exists()] == []


def test_the_architecture_shows_every_room() -> None:
    rooms = {path.rstrip("/") for path in paths_named_in(ARCHITECTURE.read_text()) if path.count("/") == 1}
    assert set(BELOW) - {"errors", "__main__"} <= rooms


def test_the_launcher_documents_every_argument() -> None:
    documented = (nblaunch.notebook_launcher.__doc__ or "").partition("Args:")[2].partition("Returns:")[0]
    names = inspect.signature(nblaunch.notebook_launcher).parameters
    assert [name for name in names if not re.search(rf"\b{name}\b[,:]", documented)] == []


# ------------------------------------------------------------------ the tree of errors
class Branch(NamedTuple):
    """A line of the tree: a class, the class above it, and the builtin that it also is."""

    name: str
    above: str
    builtin: str


def drawn() -> list[Branch]:
    """The tree in the docstring of errors.py."""
    branches: list[Branch] = []
    stack: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│├└─ ]*)(\w+)(?: \((\w+)\))?", line)
        if match is not None:
            depth, name, builtin = len(match[1]), match[2], match[3] or ""
            stack = [entry for entry in stack if entry[0] < depth]
            branches.append(Branch(name, stack[-1][1] if stack else "Exception", builtin))
            stack.append((depth, name))
    return branches


def test_every_error_is_in_the_tree_of_the_docstring() -> None:
    defined = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert [branch.name for branch in drawn()].count("NblaunchError") == 1
    assert {branch.name for branch in drawn()} == defined


@pytest.mark.parametrize("branch", drawn(), ids=lambda branch: branch.name)
def test_an_error_stands_where_the_tree_has_it(branch: Branch) -> None:
    kind: type[Exception] = getattr(errors, branch.name)
    assert [base.__name__ for base in kind.__bases__] == [branch.above, *filter(None, [branch.builtin])]
    assert kind.__doc__


@pytest.mark.parametrize("kind", [errors.RankError, errors.RankDiedError, errors.CollectiveError, errors.ResultError])
def test_an_error_of_a_rank_carries_the_rank_and_its_log(kind: type[errors.RankError]) -> None:
    error = kind("it failed", 3, Path("/logs/rank3.err"))
    assert (str(error), error.rank, error.log) == ("it failed", 3, Path("/logs/rank3.err"))
    assert (kind("it failed").rank, kind("it failed").log) == (-1, None)


def test_a_stopped_launch_carries_what_came_back() -> None:
    assert errors.LaunchStoppedError("stopped", {1: "one"}).results == {1: "one"}
    assert errors.LaunchStoppedError("stopped").results == {}
