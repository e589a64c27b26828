"""What an import does besides is seen, and no more than that: else no package would be imported ahead of launches."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import locale
import os
import resource
import socket
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import pytest
import torch

from nblaunch.ranks import imports
from nblaunch.ranks.imports import Witness

LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)


def seen(*imported: Callable[[], object]) -> str:
    """What is said once these have run, each as the import of a package."""
    witness = Witness()  # not a fixture: pytest changes the environment between that and the test
    try:
        for each in imported:
            before = witness.objection()
            assert not before
            each()
        return witness.objection()
    finally:
        witness.close()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that is there before, with what another may change."""
    library = ModuleType("a_library")
    exec(
        "class Model:\n"
        "    def plain(self): pass\n"
        "    shown = property(plain)\n"
        "    made = classmethod(plain)\n"
        "    free = staticmethod(plain)\n"
        "count = 0\n"
        "def own(): pass\n",
        vars(library),
    )
    monkeypatch.setitem(sys.modules, "a_library", library)
    return library


def test_nothing_is_seen_where_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_HOST", "db1")
    assert not seen(*[lambda: None] * 3)


@pytest.mark.parametrize("name", ["MASTER_HOST", "OMP_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RANK"])
@pytest.mark.parametrize("read", [lambda name: os.environ.get(name), lambda name: name in os.environ])
def test_reading_a_variable_that_ranks_have_otherwise_is_seen(
    name: str, read: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "RANK":
        monkeypatch.setenv(name, "1")
    assert seen(lambda: dict(os.environ), lambda: read(name)) == f"it reads {name} while it is imported"


def test_copying_all_variables_is_not_reading_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert not seen(lambda: dict(os.environ), lambda: list(os.environ.items()), lambda: os.environ.get("HOME"))


NEW: dict[str, Any] = {
    "plain": lambda self: None,
    "shown": property(lambda self: None),
    "made": classmethod(lambda cls: None),
    "free": staticmethod(lambda: None),
}


@pytest.mark.parametrize("name", NEW)
def test_another_method_of_a_class_is_seen(library: ModuleType, name: str) -> None:
    change = f"it changes a_library.Model.{name} while it is imported"
    assert seen(lambda: setattr(library.Model, name, NEW[name])) == change


def test_another_function_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = functools.wraps(json.dumps)(lambda value: "patched")  # which takes over __module__
    assert seen(lambda: monkeypatch.setattr(json, "dumps", patched)) == "it changes json.dumps while it is imported"


def test_a_function_that_is_gone_is_seen(library: ModuleType) -> None:
    assert seen(lambda: delattr(library, "own")) == "it changes a_library.own while it is imported"


def test_a_change_of_what_an_earlier_one_has_brought_is_seen(library: ModuleType) -> None:
    del sys.modules["a_library"]
    brings = functools.partial(sys.modules.__setitem__, "a_library", library)
    assert seen(brings, lambda: setattr(library, "own", len)) == "it changes a_library.own while it is imported"


def test_what_a_package_does_to_itself_is_no_change(library: ModuleType) -> None:
    text = (
        "import json as submodule\n"
        "count += 1\n"
        "def own(): return 2\n"
        "Model.plain = own\n"
        "Model.shown = property(own)\n"
        "class Model: pass\n"
    )
    assert not seen(lambda: exec(text, vars(library)))


def test_names_that_are_new_are_no_change(library: ModuleType) -> None:
    assert not seen(lambda: setattr(library, "new", len), lambda: setattr(library.Model, "new", len))


def test_who_finds_modules_first_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    assert not seen(lambda: sys.meta_path.append(PathFinder))  # as six does
    assert seen(lambda: sys.meta_path.insert(0, PathFinder)) == "it changes sys.meta_path while it is imported"


CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "the garbage collector": (gc.disable, gc.enable),
    "torch's settings": (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
    "the limits of the process": (
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT[0] - 1, LIMIT[1])),
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, LIMIT),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_for_all_code_is_seen(what: str) -> None:
    change, undo = CHANGES[what]
    try:
        changed = seen(change)
    finally:
        undo()
    assert changed == f"it changes {what} while it is imported"


@pytest.mark.parametrize("read", [len, list, lambda argv: argv[0], lambda argv: "-v" in argv])
def test_reading_the_arguments_is_seen(read: Callable[[list[str]], object]) -> None:
    assert seen(lambda: read(sys.argv)) == "it reads sys.argv while it is imported"


def test_keeping_the_arguments_to_be_read_later_is_seen(library: ModuleType) -> None:
    assert seen(lambda: setattr(library, "argv", sys.argv)) == "it reads sys.argv while it is imported"


def test_the_arguments_are_as_before_then() -> None:
    before = sys.argv
    seen()
    assert sys.argv is before


@pytest.mark.parametrize("fd", [1, 2])
def test_what_is_written_is_seen_whoever_writes_it(fd: int) -> None:
    assert seen(lambda: os.write(fd, b"half a line")) == "it prints while it is imported"
    assert not seen()


def test_what_python_and_torch_do_at_the_exit_is_theirs() -> None:
    def register() -> None:
        exec("import atexit\natexit.register(done)\natexit.unregister(done)", {"__name__": "logging", "done": print})

    assert not seen(register)


def test_modules_that_are_not_found_are_known() -> None:
    witness = Witness()
    try:
        for name in ("no_such_module", "json.no_such_module", "json"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        assert witness.not_found() == ("no_such_module",)
    finally:
        witness.close()


def test_a_timeout_for_all_sockets_is_seen() -> None:
    try:
        changed = seen(lambda: socket.setdefaulttimeout(600))
    finally:
        socket.setdefaulttimeout(None)
    assert changed == "it changes the timeout of sockets while it is imported"


def test_another_locale_is_seen() -> None:
    before = locale.setlocale(locale.LC_NUMERIC)
    try:
        changed = seen(lambda: locale.setlocale(locale.LC_NUMERIC, "C" if before != "C" else "C.UTF-8"))
    finally:
        locale.setlocale(locale.LC_NUMERIC, before)
    assert changed == "it changes the locale while it is imported"


def test_modules_that_come_while_they_are_listed_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(str):
        __hash__ = str.__hash__

        def __ne__(self, other: object) -> bool:
            monkeypatch.setitem(sys.modules, f"not_{other}", ModuleType("not"))  # as an import of another thread's
            return str.__ne__(self, other)

    last = imports.latest()
    monkeypatch.setitem(sys.modules, "one_more", ModuleType("one_more"))
    assert imports.installed_since(Changing(last)) == ()
