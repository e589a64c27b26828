"""The result of a launch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nblaunch import LaunchResult
from nblaunch.launch.output.log_directory import RankLogs
from nblaunch.launch.output.reports import Best, Report, ReportList
from nblaunch.launch.result import Metrics

LOGS = [RankLogs(Path(f"/logs/rank{rank}.out"), Path(f"/logs/rank{rank}.err")) for rank in range(3)]
REPORTS = [
    Report(0, 1.0, 1, {"loss": 0.9, "accuracy": 0.1}),
    Report(1, 2.0, 1, {"loss": 0.8}),
    Report(0, 3.0, 2, {"loss": 0.7}),
    Report(1, 4.0, None, {"loss": 0.6, "lr": 0.01}),
]


def result_of(*values: Any, reports: Sequence[Report] = (), name: str = "train") -> LaunchResult:
    return LaunchResult(name, values, Metrics(reports), LOGS[: len(values)], 1.2345)


# ------------------------------------------------------------------ the values
def test_a_result_is_the_sequence_of_return_values_by_rank() -> None:
    result = result_of("a", None, "c")
    assert isinstance(result, Sequence)
    assert (len(result), result[0], result[2], result[-1], result[1:]) == (3, "a", "c", "c", (None, "c"))
    assert list(result) == ["a", None, "c"]
    assert list(reversed(result)) == ["c", None, "a"]
    assert ("a" in result, result.index("c"), result.count(None)) == (True, 2, 1)


def test_a_rank_that_there_is_not_is_an_index_error() -> None:
    with pytest.raises(IndexError, match=r"^result\[2\]: the ranks are 0 and 1$"):
        result_of("a", "b")[2]


@pytest.mark.parametrize(
    ("values", "reports", "text"),
    [
        ([1], [], "<LaunchResult of train: 1 rank, 1.23 s>"),
        ([1, 2], REPORTS[:1], "<LaunchResult of train: 2 ranks, 1.23 s, loss 0.9, accuracy 0.1>"),
        (
            [1, 2],
            REPORTS,
            "<LaunchResult of train: 2 ranks, 1.23 s, loss 0.65 (mean of 2 ranks), accuracy 0.1, lr 0.01>",
        ),
        ([None, None], [], "<LaunchResult of train: 2 ranks, 1.23 s; every rank returned None>"),
        ([None, 2], [], "<LaunchResult of train: 2 ranks, 1.23 s>"),
        (["x" * 10_000, 2], [], "<LaunchResult of train: 2 ranks, 1.23 s>"),
    ],
)
def test_the_repr_is_short(values: list[Any], reports: list[Report], text: str) -> None:
    assert repr(result_of(*values, reports=reports)) == text


# ------------------------------------------------------------------ metrics
def test_metrics_are_in_order_of_time_across_ranks() -> None:
    shuffled = random.Random(1).sample(REPORTS, len(REPORTS))
    metrics = Metrics(shuffled)
    assert list(metrics) == REPORTS
    assert (len(metrics), metrics[-1], metrics[:2]) == (4, REPORTS[3], REPORTS[:2])


def test_last_is_the_mean_over_the_ranks_that_reported_it() -> None:
    assert Metrics(REPORTS).last == {"loss": pytest.approx(0.65), "accuracy": 0.1, "lr": 0.01}
    alike = [Report(rank, 1.0, 1, {"loss": 0.1}) for rank in range(3)]
    assert Metrics(alike).last == {"loss": 0.1}  # to the last bit
    assert Metrics([]).last == {}


def test_pandas_gets_a_row_per_report_and_a_column_per_metric() -> None:
    frame = Metrics(REPORTS).to_pandas()
    assert list(frame.columns) == ["rank", "time", "step", "loss", "accuracy", "lr"]
    assert list(frame["rank"]) == [0, 1, 0, 1]
    assert frame["loss"].tolist() == [0.9, 0.8, 0.7, 0.6]
    assert frame["lr"].isna().tolist() == [True, True, True, False]
    assert frame["step"].isna().tolist() == [False, False, False, True]


# ------------------------------------------------------------------ the best step
def test_the_best_step_has_the_value_of_its_report() -> None:
    columns = ReportList(REPORTS)
    columns.mark(0, "loss", 2, None)
    columns.mark(1, "loss", 1, None)  # the lowest rank's mark is shown
    columns.mark(1, "lr", 7, None)
    assert Metrics(columns).best == {"loss": Best(2, 0.7), "lr": Best(7, None)}
    columns.add(0, 9.0, 2**70, {"loss": 0.4})
    assert columns.mark(0, "loss", 2**70, None) == Best(2**70, 0.4)
    columns.mark(0, "loss", 1, 0.5)
    assert Metrics(columns).best["loss"] == Best(1, 0.5)
