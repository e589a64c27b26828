"""The state of a launch, and the changes sent to the page."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nblaunch.launch.output.reports import ReportList
from nblaunch.launch.result import Metrics
from nblaunch.launch.views import Failure, LaunchInfo, Outcome, RankStatus, Stuck
from nblaunch.machine.usage import Usage
from nblaunch.notebook.panel_state import PanelState
from nblaunch.notebook.record import record_of

INFO = LaunchInfo("abc", "train", 2, "cpu", Path("/logs"))
FAILURE = Failure(1, "ValueError", "no", "Cell In[3], line 4", "raise", "Traceback", ("rank 0: reset",))


@pytest.fixture
def state() -> PanelState:
    state = PanelState(2)
    state.start(INFO)
    state.delta()
    return state


def report(state: PanelState, rank: int, /, step: int | None = None, **metrics: Any) -> None:
    state.add_reports(rank, [{"time": 0.0, "step": step, "metrics": metrics}])


def changes_of(state: PanelState) -> Any:
    changes = state.delta()
    assert changes is not None
    return changes


def bar(desc: str, done: int, total: int | None = 10) -> dict[str, Any]:
    return {"progress": desc, "done": done, "total": total, "seconds": 1.0}


def test_a_delta_holds_each_change_once(state: PanelState) -> None:
    assert state.delta() is None
    state.set_ranks([RankStatus(1, "running", 77)])
    delta = changes_of(state)
    assert delta.ranks == [(1, "running")]
    assert delta.state.name == "running"
    assert not state.is_changed
    assert state.delta() is None


def test_metrics_are_points_by_step_or_by_their_number(state: PanelState) -> None:
    report(state, 0, step=5, loss=0.5)
    report(state, 0, loss=0.25)
    report(state, 1, loss=math.nan)
    assert changes_of(state).metrics == [
        ("loss", 0, 5.0, 0.5, 0),
        ("loss", 0, 1.0, 0.25, 1),
        ("loss", 1, 0.0, None, 0),
    ]


def test_very_many_points_at_once_are_downsampled_to_their_ends(state: PanelState) -> None:
    for step in range(10_000):
        report(state, 0, step=step, loss=1.0 / (step + 1))
    messages = []
    while state.is_changed:
        messages.append(changes_of(state).metrics)
    assert max(map(len, messages)) <= 300
    points = [point for message in messages for point in message]
    assert len(points) <= 3000
    assert points[0][3] == 1.0  # the extremes are among them
    assert points[-1][2] == 9999
    assert [x for _, _, x, *_ in points] == sorted(x for _, _, x, *_ in points)


def test_a_block_of_reports_draws_what_they_draw_one_by_one() -> None:
    records: list[dict[str, Any]] = []
    for step in range(1000):
        records.append({"time": 0.0, "step": step, "metrics": {"train_loss": 1 / (step + 1)}})
        if step in (200, 400):
            records.append({"time": 0.0, "step": step, "metrics": {"val_loss": math.nan, "lr": 0.1}})
    records.append({"time": 0.0, "step": 10**400, "metrics": {"lr": 0.2}})  # as far as Python counts
    together, one_by_one = PanelState(1), PanelState(1)
    together.add_reports(0, records)
    for record in records:
        one_by_one.add_reports(0, [record])
    assert together.plan.charts == one_by_one.plan.charts
    assert ("train_loss", "val_loss") in [chart.names for chart in together.plan.charts]
    for name, ranks in one_by_one.series.items():
        assert repr(together.series[name][0].reported[-1]) == repr(ranks[0].reported[-1])


def test_the_bar_of_the_whole_run_stays_above_those_of_its_epochs(state: PanelState) -> None:
    for epoch in range(5):
        state.add_reports(0, [bar(f"epoch {epoch}", done) | {"level": 1} for done in (0, 10)])
        state.add_reports(0, [bar("fit", epoch + 1) | {"first": 1}])
    state.add_reports(0, [bar("epoch 5", 1) | {"level": 1}])
    assert changes_of(state).progress == [(0, "fit", 5, 10, 1.0, 1, 0), (0, "epoch 5", 1, 10, 1.0, 0, 1)]
    for desc in ("valid", "rest", "more"):
        state.add_reports(0, [bar(desc, 1) | {"level": 1}])
    assert [entry.name for entry in changes_of(state).progress] == ["fit", "rest", "more"]


def test_a_bar_that_ended_early_makes_room_for_the_next(state: PanelState) -> None:
    for epoch in range(3):
        state.add_reports(0, [bar("fit", epoch), bar(f"epoch {epoch}", 5) | {"level": 1}])
        assert [entry.name for entry in changes_of(state).progress] == ["fit", f"epoch {epoch}"]
        state.add_reports(0, [bar(f"epoch {epoch}", 5) | {"level": 1, "seconds": None}])


def test_validation_joins_training_and_has_its_best_step(state: PanelState) -> None:
    report(state, 0, step=9, loss=0.5, lr=1e-3)
    state.delta()
    report(state, 0, step=9, valid_loss=0.6)
    state.add_reports(1, [{"best": "valid_loss", "step": 9, "value": None}])
    state.add_reports(0, [{"best": "valid_loss", "step": 9, "value": 0.6}])
    state.add_reports(1, [{"best": "valid_loss", "step": 10, "value": 0.7}])  # the lowest rank's is shown
    delta = changes_of(state)
    assert delta.charts == [
        ([("loss", "training", False), ("valid_loss", "valid", False)], "down", ""),
        ([("lr", "training", False)], "", "lr"),
    ]
    assert delta.best == [("valid_loss", 9, 0.6)]
    report(state, 0, step=10, loss=0.4)
    assert changes_of(state).charts is None


def test_the_record_of_a_long_run_has_the_mean_of_all_ranks(state: PanelState) -> None:
    for step in range(1500):
        for rank in (0, 1):
            report(state, rank, step, loss=1 + (-1.0) ** (step + rank) * (step % 7))
    ((loss,),) = record_of(state, None, 1.0).summaries()
    assert {y for _, y in loss.mean} == {1.0}
    assert (loss.latest, loss.best, loss.mean[-1][0]) == (1.0, 1.0, 1499)


def test_the_record_and_the_repr_of_a_result_show_the_same_means(state: PanelState) -> None:
    columns = ReportList()
    for step in range(3):
        for rank in (0, 1):
            values = {"loss": 1 / (step + 1) + rank} | ({"lr": 0.5} if rank == 0 else {})
            report(state, rank, step, **values)
            columns.add(rank, step + rank / 2, step, values)
    groups = record_of(state, None, 1.0).summaries()
    assert Metrics(columns).last == {summary.name: summary.latest for group in groups for summary in group}


def test_unchanged_resources_are_sent_once(state: PanelState) -> None:
    state.set_resources([Usage(0, 0.501, 1000, None, None)])
    assert changes_of(state).resources == [(0, [("CPU", 0.5, "share"), ("", 1000, "bytes")])]
    state.set_resources([Usage(0, 0.499, 1000, None, None)])
    assert not state.is_changed


def test_the_countdown_shows_that_it_is_stopping(state: PanelState) -> None:
    state.set_countdown("stopping: 29 s left")
    sent = changes_of(state).state
    assert (sent.name, sent.countdown) == ("stopping", "stopping: 29 s left")
    state.set_countdown("stopping: 29 s left")
    assert not state.is_changed
    state.end(Outcome("stopped", 3.0, "stopped"))
    state.set_countdown("stopping: 28 s left")
    assert (state.state.name, state.state.countdown) == ("stopped", "")


def test_the_end_brings_the_root_cause_and_marks_its_rank(state: PanelState) -> None:
    state.set_ranks([RankStatus(0, "running", 70), RankStatus(1, "running", 71)])
    coloured = replace(FAILURE, details="\x1b[31mno\x1b[0m", traceback="\x1b[1;31mtrace\x1b[0m")
    state.end(Outcome("failed", 3.2109, "rank 1: ValueError: no", coloured))
    delta = changes_of(state)
    assert (delta.failure.details, delta.failure.traceback) == ("no", "trace")
    assert delta.ranks == [(0, "ended"), (1, "failed")]
    assert delta.failure.where == "Cell In[3], line 4"
    assert delta.state.seconds == 3.211
    assert state.pids == {}


def test_a_new_attempt_starts_fresh_but_keeps_reports(state: PanelState) -> None:
    report(state, 0, loss=1.0)
    state.add_reports(0, [bar("", 3)])
    state.set_ranks([RankStatus(0, "failed", 70)])
    state.start(LaunchInfo("abc", "train", 2, "cpu", Path("/again"), 1))
    delta = changes_of(state)
    assert delta.ranks == [(0, "starting"), (1, "starting")]
    assert (delta.state.attempt, delta.state.log_dir) == (1, "/again")
    assert state.series["loss"][0].count == 1


def test_a_snapshot_is_all_of_it(state: PanelState) -> None:
    report(state, 0, step=1, loss=1.0)
    state.add_reports(1, [bar("epoch", 3)])
    state.add_note(1.5, "restarting: `f`")
    state.set_stacks(2.0, {0: "in train"})
    state.delta()
    whole: Any = state.snapshot()
    assert whole.metrics == [("loss", 0, 1.0, 1.0, 0)]
    assert whole.progress == [(1, "epoch", 3, 10, 1.0, 0, 0)]
    assert whole.notes == [(1.5, "restarting: f")]
    assert whole.stacks.ranks == [(0, "in train")]
    assert whole.failure is None
    assert len(whole.ranks) == 2
    assert state.delta() is None


def test_a_reloaded_page_gets_a_bounded_number_of_points(state: PanelState) -> None:
    for number in range(40):
        for rank in (0, 1):
            for step in range(1000):
                report(state, rank, step, **{f"m{number}": float(step == 500)})
    points = state.snapshot().metrics or []
    assert len(points) <= 2000
    assert len({(name, rank) for name, rank, *_ in points}) == 80
    assert sum(y == 1.0 for _, _, _, y, _ in points) == 80  # each series' best
    assert not state.is_changed


def test_endless_new_metrics_take_bounded_memory(state: PanelState) -> None:
    for number in range(1000):
        report(state, 0, None, **{f"m{number}": 1.0})
    assert len(state.series) == 100
    assert len(state.notes) == 1
    assert "only the first 100 metrics" in state.notes[0].text


def test_why_ranks_wait_is_shown_until_they_go_on(state: PanelState) -> None:
    state.set_stuck(3.0, Stuck(("rank 0 waits", "rank 1 runs"), (1,)))
    changes = changes_of(state)
    assert (changes.stuck.lines, changes.stuck.ranks) == (["rank 0 waits", "rank 1 runs"], (1,))
    assert [note.text for note in changes.notes] == ["rank 0 waits", "rank 1 runs"]
    assert state.snapshot().stuck == changes.stuck
    state.set_stuck(4.0, Stuck())
    changes = changes_of(state)
    assert (list(changes.stuck.lines), changes.notes) == ([], None)


@pytest.mark.parametrize("ends", [True, False])
def test_the_end_and_a_restart_take_the_reason_away(state: PanelState, ends: bool) -> None:
    state.set_stuck(3.0, Stuck(("rank 0 waits",), (1,)))
    state.delta()
    state.end(Outcome("stopped", 1.0, "")) if ends else state.start(INFO)
    assert not changes_of(state).stuck.lines


def test_steps_that_go_back_are_numbered_in_the_panel_and_its_record(state: PanelState) -> None:
    for step in (1, 2, 3):
        report(state, 0, step, loss=float(step))
        report(state, 0, step, valid_loss=1.0)
    assert [[line[::2] for line in lines] for lines, *_ in changes_of(state).charts] == [
        [("loss", False), ("valid_loss", False)]
    ]
    report(state, 0, 2, loss=9.0)
    state.add_reports(0, [{"best": "loss", "step": 1, "value": 1.0}])
    delta = changes_of(state)
    assert [[line[::2] for line in lines] for lines, *_ in delta.charts] == [[("loss", True)], [("valid_loss", False)]]
    assert delta.metrics == [("loss", 0, 2.0, 9.0, 3)]
    (loss,), (valid_loss,) = record_of(state, None, 1.0).summaries()
    assert list(loss.mean) == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 9.0)]
    assert [x for x, _ in valid_loss.mean] == [1, 2, 3]
    assert loss.best_text == "best 1 at step 1"
    assert loss.ring is None
