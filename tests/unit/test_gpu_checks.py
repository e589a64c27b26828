"""The command that runs tests/gpu: it fails without a GPU, and its table lists every check. No GPU is needed here."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import LONG
from tests.gpu import gpus
from tests.gpu.__main__ import README, main, with_table
from tests.gpu.outcomes import Outcomes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("tests.gpu", 2, r"tests/gpu: a GPU is needed, and torch \S+ sees none here with CUDA_VISIBLE_DEVICES=''$"),
        ("pytest tests/gpu", 4, r"ERROR: tests/gpu: a GPU is needed, and torch \S+ sees none here"),
        ("tests.benchmarks --only gpu", 1, r"--only gpu: a GPU is needed, and torch \S+ sees none here"),
    ],
)
def test_without_a_gpu_nothing_counts_as_passed(command: str, status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert re.search(said, done.stdout + done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("uses_it", "limit", "said"),
    [
        (
            "raise SystemExit('the driver is too old')",
            LONG,
            r"torch \S+ cannot use the one here: the driver is too old$",
        ),
        ("import threading; threading.Event().wait()", 1.0, r"the one here gave no answer in 1 s$"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_no_gpu(
    uses_it: str, limit: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpus, "number", lambda: 1)
    monkeypatch.setattr(gpus, "_USES_THEM", uses_it)
    monkeypatch.setattr(gpus, "_PROBE_TIMEOUT_S", limit)
    gpus.found.cache_clear()
    with pytest.raises(gpus.NoGpuError, match=said):
        gpus.found()


def test_a_device_that_nvml_refuses_has_no_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    class RefusedError(Exception):
        pass

    def refuses(index: int) -> None:
        raise RefusedError

    nvml = SimpleNamespace(
        NVMLError=RefusedError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=refuses,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpus._from_nvml() == ("580", (), ())


def test_a_bare_python_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(gpus, "absent_modules", lambda names=(): ["pytest_timeout", "pynvml"])
    assert main([]) == 2
    said = f"tests/gpu needs what {sys.executable} lacks: {sys.executable} -m pip install pytest-timeout nvidia-ml-py\n"
    assert capsys.readouterr().out == said


def test_all_that_may_be_absent_is_a_dependency() -> None:
    """With the names that pip knows: `absent_modules` finds modules."""
    config = (ROOT / "pyproject.toml").read_text()
    for module, package in gpus.PACKAGES.items():
        assert re.search(rf'^    "{package}[><=]', config, re.MULTILINE), package
        assert not gpus.absent_modules([module])


def test_a_gpu_that_torch_does_not_see_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "number", lambda: 0)
    monkeypatch.setattr(gpus, "device_files", lambda: ["/dev/nvidia0"])
    assert main(["--look"]) == 0
    assert capsys.readouterr().out.startswith("A GPU is here that torch does not see: tests/gpu was not run")


def test_the_default_run_does_not_collect_them() -> None:
    config = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^norecursedirs = \[.*"tests/gpu"', config, re.MULTILINE)


def test_every_need_is_looked_for() -> None:
    """A name that is misspelled would leave its test out on every machine."""
    named = set()
    for file in (ROOT / "tests/gpu").glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "needs":
                named |= {ast.literal_eval(argument) for argument in node.args}
    known = ("two GPUs", "two NCCL ranks", "GPUs with UUIDs", "MIG slices", "a C compiler and Python.h")
    assert named <= {*known, "the notebooks' packages"}
    assert all(f'"{name}": ' in Path(gpus.__file__).read_text() for name in named)


# ------------------------------------------------------------------ the table
def report(nodeid: str, outcome: str, when: str = "call") -> Any:
    return SimpleNamespace(nodeid=nodeid, outcome=outcome, when=when, duration=0.5)


def test_the_table_lists_every_check() -> None:
    outcomes = Outcomes({"two NCCL ranks"})

    def item(name: str, *needs: str) -> Any:
        return SimpleNamespace(nodeid=f"x.py::{name}", iter_markers=lambda _: [SimpleNamespace(args=needs)])

    outcomes.pytest_deselected([item("test_two", "two GPUs"), item("test_other", "two NCCL ranks")])
    items = [item(name) for name in ("test_a_rank_waits[one]", "test_b", "test_c", "test_d")]
    outcomes.pytest_collection_finish(SimpleNamespace(items=items))  # type: ignore[arg-type]
    for when in ("setup", "call", "teardown"):
        outcomes.pytest_runtest_logreport(report("x.py::test_a_rank_waits[one]", "passed", when))
    outcomes.pytest_runtest_logreport(report("x.py::test_b", "failed"))
    outcomes.pytest_runtest_logreport(report("x.py::test_b", "failed", "teardown"))
    outcomes.pytest_runtest_logreport(report("x.py::test_c", "failed", "setup"))
    assert outcomes.table("1 × H100").splitlines() == [
        "1 × H100: 1 passed, 2 failed, 3 not run.",
        "",
        "| checked | | s |",
        "|---|---|---|",
        "| two | not run: needs two GPUs | 0.0 |",
        "| other | not run: not asked for | 0.0 |",
        "| a rank waits: one | passed | 1.5 |",
        "| b | **failed** | 1.0 |",
        "| c | **failed** in its setup | 0.5 |",
        "| d | not run: the run ended before | 0.0 |",
    ]


def test_a_table_comes_before_the_older_ones() -> None:
    text = with_table(with_table(README.read_text(), "| first |"), "| second |")
    assert "<!-- tables -->\n| second |\n\n| first |\n<!-- end of tables -->\n" in text
    with pytest.raises(ValueError, match="no line <!-- tables --> and <!-- end of tables -->"):
        with_table("no place", "| new |")


def test_the_line_says_on_what_it_was_checked() -> None:
    found = gpus.Gpus(("A", "B", "A"), (1, 2, 1), "580", "2.14", "2.30", (), (), frozenset())
    assert found.count == 3
    assert re.fullmatch(
        r"2 × A, 1 × B; driver 580, torch 2\.14, NCCL 2\.30, Python [\d.]+; \d{4}-\d\d-\d\d", found.line()
    )
