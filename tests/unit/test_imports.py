"""What an import does besides is seen, and no more than that: else no package would be imported ahead of launches."""

from __future__ import annotations

import functools
import json
import locale
import os
import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from nblaunch.ranks import imports
from nblaunch.ranks.imports import Witness


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
    after, first = [*sys.meta_path, object()], [object(), *sys.meta_path]
    assert not seen(lambda: monkeypatch.setattr(sys, "meta_path", after))  # as six does
    assert seen(lambda: monkeypatch.setattr(sys, "meta_path", first)) == "it changes sys.meta_path while it is imported"


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
