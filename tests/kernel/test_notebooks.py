"""The notebooks on training loops, executed from the first cell to the last on real images; all are kept clean."""

from __future__ import annotations

import itertools
import re
import shutil
import socket
from pathlib import Path

import nbformat
import pytest

from tests.kernel.executed import NOTEBOOKS, run
from tests.kernel.harness import running_kernel


@pytest.mark.usefixtures("port_of_the_document")
def test_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("ddp", tmp_path, monkeypatch, "accelerator")

    two, one = re.findall(r"^(?:two ranks|one process): +(0\.\d+)$", printed, flags=re.MULTILINE)
    assert float(two) == float(one) == accuracy >= 0.9
    assert "7 ranks: 364 draws of 360 test images, 4 twice" in printed
    assert "rank 1 raised IndexError: Target 11 is out of bounds" in printed


def test_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("accelerator", tmp_path, monkeypatch)

    before, after = re.findall(r"^(?:before|after): (0\.\d+)$", printed, flags=re.MULTILINE)
    assert float(before) < 0.3 < 0.9 <= float(after)  # the notebook's own model
    assert accuracy >= 0.9
    assert "100 images" in printed
    assert "gathered in the data set's order: True" in printed


def test_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("sessions", tmp_path, monkeypatch, "debugging", "machines")

    trained, went_on = re.findall(r"^after .*: (0\.\d+)$", printed, flags=re.MULTILINE)
    assert 0.8 <= float(trained) <= float(went_on) + 0.05
    assert accuracy >= 0.9
    assert "wait was stopped after" in printed
    assert "rank 1 was killed by SIGKILL" in printed


def test_debugging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("debugging", tmp_path, monkeypatch)

    assert re.search(r"Stuck for \d+ s: rank 0 waits in all_reduce #26 .*; rank 1 waits in barrier #26", printed)
    assert "rank 1: the loss is nan\n" in printed
    assert "rank 0: Dimension out of range" in printed
    assert accuracy >= 0.85


def test_machines_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("machines", tmp_path, monkeypatch)

    name = socket.gethostname()
    assert f"rank 0 of 2 runs on {name}\nrank 1 of 2 runs on {name}\n" in printed
    assert f"rank 1 raised ValueError: a damaged image on {name}\n" in printed
    assert accuracy >= 0.9


def test_debugging_shows_what_one_types_and_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(NOTEBOOKS / "mnist_or_digits.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    cells = nbformat.read(NOTEBOOKS / "debugging.ipynb", as_version=4).cells
    typed = 0
    with running_kernel(NBLAUNCH_QUICKSTART_DATA="digits", CUDA_VISIBLE_DEVICES="") as kernel:
        for cell, after in itertools.pairwise(cells):
            if cell.cell_type == "code":
                shown = "".join(re.findall(r"^```text\n(.*?)^```", after.source, flags=re.DOTALL | re.MULTILINE))
                lines = re.findall(r"^\(rank \d of 2\) (.*)\n", shown, flags=re.MULTILINE)
                done = kernel.debug(cell.source.replace("timeout=40", "timeout=1"), *lines).check()
                box = [f"{prompt}{line}" for prompt, line in zip(done.prompts, lines, strict=True)]
                seen = "\n".join([re.sub(r"\x1b\[[0-9;]*m", "", done.text), *box])
                assert not lines or [line for line in shown.splitlines() if line not in seen] == []
                typed += len(lines)
    assert typed == 6


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)

    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not [cell.id for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
