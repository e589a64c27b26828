"""Execute copies of the notebooks in `notebooks/`: as they are, but with less to compute."""

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
NARROWER = {
    "nn.Conv2d(1, 32, 3, 1)": "nn.Conv2d(1, 8, 3, 1)",
    "nn.Conv2d(32, 64, 3, 1)": "nn.Conv2d(8, 32, 3, 1)",
    "nn.Linear(9216, 128)": "nn.Linear(4608, 128)",
    "nn.Conv2d(3, 32, 3, padding=1)": "nn.Conv2d(3, 16, 3, padding=1)",
    "nn.Conv2d(32, 64, 3, padding=1)": "nn.Conv2d(16, 32, 3, padding=1)",
    "nn.Linear(64 * 8 * 8, 512)": "nn.Linear(32 * 8 * 8, 256)",
    "nn.Linear(512, 10)": "nn.Linear(256, 10)",
    "nn.Conv2d(1, 16, 3, 2)": "nn.Conv2d(1, 16, 3, 2)",
    "pretrain(max_steps=150)": "pretrain(max_steps=40)",
    "pretrain(max_steps=300)": "pretrain(max_steps=80)",
    "validate_every=50": "validate_every=20",
    "valid, _ = dataset(files[::6], per_kind=120)": "valid, _ = dataset(files[::6], per_kind=40)",
}
"""Layers that learn the digits as well in a fraction of the time (the quickstart is executed with its own ones), a
shorter pretraining, and fewer samples to validate with.
"""
_executed: dict[tuple[str, str], NotebookNode] = {}
"""By engine and name."""


def run(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *others: str, engine: str = "local"
) -> tuple[str, float]:
    """Execute a copy; return what its cells printed, and the test accuracy."""
    notebook = execute(name, folder, monkeypatch, *others, engine=engine)
    return headless.printed(notebook), headless.accuracy(notebook)


def execute(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *others: str, engine: str = "local"
) -> NotebookNode:
    """Execute a copy and check that every cell ran without an error.

    Args:
        name: Of the notebook.
        folder: Where it runs.
        monkeypatch: Sets its environment.
        others: Notebooks that will be asked for next. They run after it in the same kernel, emptied: importing torch
            and torchvision there, in its fork servers and in ranks takes longer than training.
        engine: Where the ranks of `machines` run.
    """
    if (engine, name) not in _executed:
        monkeypatch.setenv("NBLAUNCH_NOTEBOOK_ENGINE", engine)
        monkeypatch.delenv("NBLAUNCH_PRELOAD")  # each launch trains
        monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", "digits")  # the same images with and without a network
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))  # torch makes it for an optimiser
        monkeypatch.setenv("HF_HOME", str(folder / "huggingface"))
        executed = _execute((name, *others), folder)
        _executed.update({(engine, each): notebook for each, notebook in executed.items()})
    code = [cell for cell in _executed[engine, name].cells if cell.cell_type == "code"]
    assert code
    assert all(cell.execution_count for cell in code)
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    return _executed[engine, name]


def _execute(names: tuple[str, ...], folder: Path) -> dict[str, NotebookNode]:
    """Execute notebooks as one, and take it apart again."""
    for file in HELPERS:
        shutil.copy(NOTEBOOKS / file, folder)
    notebooks = {name: nbformat.reads(_narrower(name), as_version=4) for name in names}
    cells = []
    for name, notebook in notebooks.items():
        for number, cell in enumerate(notebook.cells):
            cell.id = f"{name}-{number}"  # they may have the same
        cells += [nbformat.v4.new_code_cell("%reset -f"), *notebook.cells]
    nbformat.write(nbformat.v4.new_notebook(metadata=notebook.metadata, cells=cells), folder / "all.ipynb")

    executed = headless.execute(folder / "all.ipynb")  # raises where a cell does

    for name, notebook in notebooks.items():
        notebook.cells = [cell for cell in executed.cells if cell.id.rpartition("-")[0] == name]
    return notebooks


def _narrower(name: str) -> str:
    text = (NOTEBOOKS / f"{name}.ipynb").read_text()
    for layer, narrower in NARROWER.items():
        text = text.replace(layer, narrower)
    assert all(layer in NARROWER.values() for layer in re.findall(r"nn\.Conv2d\([^)]*\)", text))
    return text
