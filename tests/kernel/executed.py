"""Execute a copy of one of the notebooks in `notebooks/`."""

from __future__ import annotations

import shutil
from pathlib import Path

import headless
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
