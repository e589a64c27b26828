"""Whose code a frame runs, and which of the user's own modules another machine is told of."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

import nblaunch
from nblaunch.machine.own_code import (
    PACKAGE,
    RANK_THREADS,
    RANK_WORKER,
    OwnFile,
    digest_of,
    is_rank_runtime,
    is_users,
    own_files,
)
from nblaunch.training import distribute


def test_the_files_that_are_named_exist() -> None:
    assert Path(PACKAGE, "__init__.py").samefile(nblaunch.__file__)
    assert os.path.isfile(RANK_WORKER)
    assert all(map(os.path.isfile, RANK_THREADS))


ODDLY_SPELT = os.path.join(PACKAGE, "..", "nblaunch", "ranks", "worker.py")
"""As frames name it after ``sys.path.insert(0, "..")``."""


@pytest.mark.parametrize("filename", [RANK_WORKER, *RANK_THREADS, ODDLY_SPELT, str(distribute.__file__)])
def test_the_rank_runtime_is_known_by_its_files(filename: str) -> None:
    assert is_rank_runtime(filename)
    assert not is_users(filename)


@pytest.mark.parametrize(
    "filename", ["/home/me/nblaunch/ranks/mine.py", os.path.join(PACKAGE, "training", "trainer.py")]
)
def test_other_files_are_no_rank_runtime(filename: str) -> None:
    assert not is_rank_runtime(filename)


@pytest.mark.parametrize(
    "filename", ["/home/me/nblaunch/train.py", "/tmp/ipykernel_7/123.py", "/home/me/site-packages.py", "<stdin>"]
)
def test_a_file_of_the_users_may_have_any_name(filename: str) -> None:
    assert is_users(filename)


@pytest.mark.parametrize(
    "filename", [torch.__file__, json.__file__, nblaunch.__file__, "<string>", r"C:\env\Lib\site-packages\torch\nn.py"]
)
def test_libraries_and_generated_code_are_not_the_users(filename: str) -> None:
    assert not is_users(filename)


def files_of(package: str) -> dict[str, OwnFile]:
    return {file.name: file for file in own_files() if file.package == package}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("alone", "owned", "owned.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "alone.py").write_text("A = 1")
    package = tmp_path / "owned"
    own = ("__init__.py", "used.py", "unused.py", "inner/__init__.py")
    for name in (*own, "data.txt", "__pycache__/x.py", "venv/pyvenv.cfg", "venv/lib/library.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    return tmp_path


def test_a_package_is_all_its_files_and_a_module_is_one(folder: Path) -> None:
    assert files_of("alone") == files_of("owned") == {}  # not imported
    importlib.import_module("alone")
    importlib.import_module("owned")
    assert files_of("alone").keys() == {"alone.py"}
    assert files_of("owned").keys() == {
        *("owned/__init__.py", "owned/inner/__init__.py", "owned/unused.py", "owned/used.py")
    }
    assert files_of("alone")["alone.py"].path == str(folder / "alone.py")
    for name in ("alone", "owned"):
        del sys.modules[name]


def test_what_is_installed_and_what_is_ours_is_left_out() -> None:
    packages = {file.package for file in own_files()}
    assert "tests" in packages
    assert packages.isdisjoint({"nblaunch", "torch", "numpy", "pytest", "json", "os", "__main__"})


def test_a_digest_follows_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    assert digest_of(str(file)) == b""
    file.write_text("A = 1")
    first = digest_of(str(file))
    assert first == digest_of(str(file)) != b""
    file.write_text("A = 22")
    assert digest_of(str(file)) != first
