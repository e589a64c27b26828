"""The notebooks on our Trainer and on other libraries', executed from the first cell to the last on real images."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernel.executed import run


def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("trainer", tmp_path, monkeypatch, "peers")

    assert f"two ranks {accuracy:.4f}, here {accuracy:.4f}" in printed
    assert accuracy >= 0.9
    assert "rank 1: out of luck" in printed
    assert "8 of 8 weights are equal to the last bit" in printed
    assert re.search(r"^best (0\.\d+) at step \d+, predicted \1$", printed, flags=re.MULTILINE)


def test_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("peers", tmp_path, monkeypatch)

    for line in (
        r"accelerate: 2 processes, 0\.\d+",
        r"transformers: loss .* \d\.\d+",
        r"Lightning: 2 ranks, .* 0\.\d+",
    ):
        assert re.search(f"^{line}$", printed, flags=re.MULTILINE)
    assert accuracy >= 0.85
