"""Metrics of functions that only print, read out of their ranks' logs."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
from tqdm import tqdm

import nblaunch
from nblaunch.errors import ArgumentError
from tests.conftest import eventually
from tests.processes.conftest import Launcher

EPOCH = r"epoch (?P<step>\d+): loss (?P<loss>[\d.]+)"
ACCURACY = r"Accuracy: (?P<accuracy>[\d.]+)"


# ------------------------------------------------------------------ what ranks run
def train(rank: int) -> None:
    for epoch in range(3):
        print(f"epoch {epoch}: loss {1 / (epoch + 1)}")
    print(f"\x1b[32mAccuracy: {90 + rank}.5%\x1b[0m", file=sys.stderr)


def train_and_report(rank: int) -> None:
    nblaunch.report(step=1, loss=7)
    print("epoch 2: loss 0.5")


def train_with_bars(rank: int) -> None:
    for epoch in range(2):
        bar = tqdm(range(50), desc=f"epoch {epoch}", mininterval=0)
        for done in bar:
            bar.set_description(f"epoch {epoch}: loss {epoch + done / 100}")
    sys.stdout.write("Accuracy: 0.75")


def print_and_wait(folder: Path) -> None:
    print("Accuracy: 0.5", flush=True)
    while not (folder / "go").exists():
        time.sleep(0.01)


def print_and_fail_once(rank: int) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"Accuracy: 0.{attempt}", flush=True)
    if rank == 0 and attempt == 0:
        raise ValueError("only the first time")


def never_runs(folder: Path) -> None:
    (folder / "ran").touch()


# ------------------------------------------------------------------ metrics
def test_printed_metrics_are_in_the_result_with_rank_step_and_time(launch: Launcher) -> None:
    begin = time.time()
    metrics = launch(train, metric_patterns=[EPOCH, re.compile(ACCURACY)]).metrics
    for rank in range(2):
        own = [(report.step, dict(report.values)) for report in metrics if report.rank == rank]
        printed, on_stderr = ([found for found in own if name in found[1]] for name in ("loss", "accuracy"))
        assert printed == [(n, {"loss": 1 / (n + 1)}) for n in range(3)]
        assert on_stderr == [(None, {"accuracy": 90.5 + rank})]  # wherever among the others: they are two streams
        assert len(own) == 4
    assert all(begin <= report.time <= time.time() for report in metrics)
    assert metrics.last == {"loss": pytest.approx(1 / 3), "accuracy": 91.0}  # means over the ranks


def test_they_stand_beside_those_that_are_reported(launch: Launcher) -> None:
    metrics = launch(train_and_report, metric_patterns=EPOCH).metrics
    for rank in range(2):
        assert sorted((r.step, r.values["loss"]) for r in metrics if r.rank == rank) == [(1, 7.0), (2, 0.5)]


def test_a_progress_bars_last_state_and_an_unfinished_line_count(launch: Launcher) -> None:
    metrics = launch(train_with_bars, metric_patterns=[EPOCH, ACCURACY]).metrics
    for rank in range(2):
        own = [(report.step, dict(report.values)) for report in metrics if report.rank == rank]
        assert sorted(own, key=str) == [(0, {"loss": 0.49}), (1, {"loss": 1.49}), (None, {"accuracy": 0.75})]


def test_they_are_shown_while_the_ranks_run(
    launch: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def seen() -> bool:
        shown.append(capsys.readouterr().out)
        return all(f"[rank {rank}] accuracy 0.5\n" in "".join(shown) for rank in range(2))

    running = launch(print_and_wait, (tmp_path,), metric_patterns=ACCURACY, view="text", block=False)
    eventually(seen, otherwise=lambda: "".join(shown))
    assert not running.done
    (tmp_path / "go").touch()
    assert len(running.result().metrics) == 2


def test_of_restarts_the_last_attempt_counts(launch: Launcher) -> None:
    metrics = launch(print_and_fail_once, metric_patterns=ACCURACY, max_restarts=1).metrics
    assert sorted((report.rank, report.values["accuracy"]) for report in metrics) == [(0, 0.1), (1, 0.1)]


def test_a_wrong_pattern_is_named_before_anything_starts(launch: Launcher, tmp_path: Path) -> None:
    said = r"^metric_patterns='loss: \(': not a regular expression: missing \), unterminated subpattern at position 6$"
    with pytest.raises(ArgumentError, match=said):
        launch(never_runs, (tmp_path,), metric_patterns=["(?P<x>.)", "loss: ("])
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "state").exists()
