"""The notebook's modules that shadow installed packages, and changes of installations."""

from __future__ import annotations

import csv
import importlib.machinery
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nblaunch.machine import packages
from nblaunch.machine.packages import imported_here, installed_now, shadowed

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook's own folder, which comes first, and one where packages are installed."""
    site = tmp_path / "site-packages"
    for place in (tmp_path / "own", site / "package", site / "namespace"):
        place.mkdir(parents=True)
    (site / "package" / "__init__.py").touch()
    (site / "namespace" / "part.py").touch()
    monkeypatch.setattr("sys.path", ["", str(site)])
    monkeypatch.chdir(tmp_path / "own")


@pytest.mark.parametrize(
    ("file", "hides"),
    [
        ("package.py", True),
        ("package/__init__.py", True),
        (f"package{SUFFIX}", True),
        ("package/run-1/debug.log", False),
        ("package.txt", False),
        ("another.py", False),
        ("namespace.py", True),
        ("namespace/part.py", True),
    ],
)
def test_a_module_shadows_a_package_and_a_data_folder_does_not(file: str, hides: bool) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).touch()
    assert shadowed(frozenset({"package", "namespace"})) is hides


def test_it_looks_where_the_notebook_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("package.py").touch()
    assert shadowed(frozenset({"package"}))
    monkeypatch.chdir(tmp_path)
    assert not shadowed(frozenset({"package"}))


def test_which_folder_comes_first_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(tmp_path / "site-packages"), str(tmp_path / "dist-packages")]
    Path(folders[1]).mkdir()
    monkeypatch.setattr("sys.path", folders)
    before = installed_now()
    assert installed_now() == before
    monkeypatch.setattr("sys.path", folders[::-1])
    assert installed_now() != before


# ------------------------------------------------------------------ what is imported
class ImportingDict(dict[str, object]):
    """Stands for ``sys.modules`` while another thread imports: it grows during every iteration."""

    def items(self) -> Any:
        for item in super().items():
            yield item
            self[f"module{len(self)}"] = None


def test_imported_modules_are_listed_while_another_thread_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = ImportingDict({"json": json, "json.decoder": json.decoder, "csv": csv})
    monkeypatch.setattr(packages, "sys", SimpleNamespace(modules=modules))
    assert imported_here({"json"}) == ["json", "json.decoder"]
