"""The notebooks on our Trainer and on other libraries', executed from the first cell to the last on real data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernel.executed import run


def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("trainer", tmp_path, monkeypatch, "finetune", "peers")

    assert f"two ranks {accuracy:.4f}, here {accuracy:.4f}" in printed
    assert accuracy >= 0.9
    assert "rank 1: out of luck" in printed
    assert "8 of 8 weights are equal to the last bit" in printed
    assert re.search(r"^best (0\.\d+) at step \d+, predicted \1$", printed, flags=re.MULTILINE)


def test_finetune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("finetune", tmp_path, monkeypatch)

    lines = re.findall(r"^step (\d+): validation loss (\d\.\d+)$", printed, flags=re.MULTILINE)
    losses = [float(loss) for _, loss in lines]
    assert [int(step) for step, _ in lines] == [20, 40, 60, 80]  # of both runs: the second one has continued the first
    assert losses == sorted(losses, reverse=True)
    assert f"today ends at step 40, with a validation loss of {losses[1]:.3f}" in printed
    found = re.findall(r"^(last step \d+|best step \d+|the restored model): validation loss (\d\.\d+)$", printed, re.M)
    last, best, restored = (float(loss) for _, loss in found)
    assert best == restored < last
    found = re.findall(r"^(\d+) predictions for (\d+) examples: ", printed, flags=re.MULTILINE)
    assert found
    assert found[0][0] == found[0][1]
    assert accuracy >= 0.3  # one in five by chance; mostly 0.4 to 0.5
    predicted = re.findall(r"^--- predicted (\S+) ", printed, flags=re.MULTILINE)
    assert len({*predicted}) == len(predicted) >= 4  # mistakes of different kinds


def test_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, accuracy = run("peers", tmp_path, monkeypatch)

    for line in (
        r"accelerate: 2 processes, 0\.\d+",
        r"transformers: loss .* \d\.\d+",
        r"Lightning: 2 ranks, .* 0\.\d+",
    ):
        assert re.search(f"^{line}$", printed, flags=re.MULTILINE)
    assert accuracy >= 0.85
