"""Whose code a frame runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import nblaunch
from nblaunch.machine.own_code import PACKAGE, RANK_THREADS, RANK_WORKER, is_rank_runtime, is_users
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
