from __future__ import annotations

import shutil
from pathlib import Path

import headless
import pytest

NOTEBOOKS = Path(headless.__file__).parent


def test_quickstart_trains_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", "digits")  # the same images with and without a network
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # torch makes it for an optimiser
    for name in ("quickstart.ipynb", "mnist_or_digits.py"):
        shutil.copy(NOTEBOOKS / name, tmp_path)

    notebook = headless.execute(tmp_path / "quickstart.ipynb")  # raises where a cell does

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert headless.accuracy(notebook) >= 0.95
    assert headless.printed(notebook).splitlines()[-1].startswith("test accuracy: ")
