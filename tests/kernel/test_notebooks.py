"""Every notebook in `notebooks/`, executed from the first cell to the last on real images."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import headless
import nbformat
import pytest
from nbformat import NotebookNode

NOTEBOOKS = Path(headless.__file__).parent
HELPERS = ("mnist_or_digits.py", "cifar_or_digits.py")


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, float]:
    """Execute a copy; return what its cells printed, and the test accuracy."""
    notebook = execute(name, folder, monkeypatch)
    return headless.printed(notebook), headless.accuracy(notebook)


def execute(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> NotebookNode:
    """Execute a copy and check that every cell ran without an error."""
    monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", "digits")  # the same images with and without a network
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))  # torch makes it for an optimiser
    monkeypatch.setenv("HF_HOME", str(folder / "huggingface"))
    for file in (f"{name}.ipynb", *HELPERS):
        shutil.copy(NOTEBOOKS / file, folder)

    notebook = headless.execute(folder / f"{name}.ipynb")  # raises where a cell does

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    return notebook


def test_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("ddp", tmp_path, monkeypatch)

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


def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("trainer", tmp_path, monkeypatch)

    assert f"two ranks {accuracy:.4f}, here {accuracy:.4f}" in printed
    assert accuracy >= 0.9
    assert "rank 1: out of luck" in printed
    assert "8 of 8 weights are equal to the last bit" in printed


def test_data_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("data_loading", tmp_path, monkeypatch)

    assert accuracy >= 0.4  # three epochs of plain SGD
    assert "719 + 718 = 1437 images" in printed
    assert "images of each rank, in two epochs: [32, 32] [32, 32]" in printed
    found = re.search(r"^recall of rare classes: (0\.\d+) -> (0\.\d+)$", printed, flags=re.MULTILINE)
    assert found
    assert float(found[2]) > float(found[1])


def test_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("peers", tmp_path, monkeypatch)

    for line in (
        r"accelerate: 2 processes, 0\.\d+",
        r"transformers: loss .* \d\.\d+",
        r"Lightning: 2 ranks, .* 0\.\d+",
    ):
        assert re.search(f"^{line}$", printed, flags=re.MULTILINE)
    assert accuracy >= 0.85


@pytest.mark.timeout(300)
def test_large_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = headless.printed(execute("large_data", tmp_path, monkeypatch))

    found = re.search(r"^4 ranks read 246 MB each; together they grew by (\d+) MB$", printed, flags=re.MULTILINE)
    assert found
    assert int(found[1]) < 2 * 246  # and not four copies
    assert "unchanged: 0 MB copied" in printed
    assert "changed:   246 MB copied" in printed
    assert "the notebook sees zeros in: []" in printed
    assert "views are still tied: [True, True]" in printed
    assert "sum: 10,000,000; rows by rank, in the notebook: [2500, 2500, 2500, 2500]" in printed
    assert "sent 40 MB, copied 0 MB" in printed
    assert "4 ranks returned 246 MB" in printed
    assert "after %distributed free: 246 MB copied" in printed


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)

    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not [cell.id for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
