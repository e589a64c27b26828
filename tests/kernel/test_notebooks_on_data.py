"""The notebooks on data, executed from the first cell to the last on real images."""

from __future__ import annotations

import re
from pathlib import Path

import headless
import pytest

from tests.kernel.executed import execute, run


def test_data_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("data_loading", tmp_path, monkeypatch, "large_data")

    assert accuracy >= 0.25  # plain SGD for three epochs: mostly 0.5 to 0.6, once 0.32; chance is 0.1
    assert "719 + 718 = 1437 images" in printed
    assert "images of each rank, in two epochs: [32, 32] [32, 32]" in printed
    found = re.search(r"^recall of rare classes: (0\.\d+) -> (0\.\d+)$", printed, flags=re.MULTILINE)
    assert found
    assert float(found[2]) > float(found[1])


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
    assert "of the file's 40 MB, 0 MB were copied" in printed
    assert "4 ranks returned 246 MB" in printed
    assert "after %distributed clear-cache: 246 MB copied" in printed
