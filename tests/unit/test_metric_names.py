"""What the names of metrics say."""

from __future__ import annotations

import pytest

from nblaunch.launch.output.metric_names import ChartPlan, family, formatted, kind


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, ("loss", "training")) for name in ("loss", "train_loss", "train_loss_step", "trainingLoss", "Loss")),
        *((name, ("loss", "epoch")) for name in ("epoch_loss", "train_loss_epoch", "loss/epoch")),
        *((name, ("loss", "valid")) for name in ("valid_loss", "val/loss", "valLoss", "eval_loss", "validation.loss")),
        ("test_accuracy", ("accuracy", "test")),
        *(
            (name, (name, "training"))
            for name in ("valid", "epoch", "validity_loss", "evaluate", "testament", "", "val_", "test_")
        ),
        *((name, (name.lower(), "training")) for name in ("VALUE", "EPOCHS", "TESTING", "EVALUATE")),
        ("VAL_LOSS", ("loss", "valid")),
    ],
)
def test_the_prefix_of_a_name_says_which_data_it_is_of(name: str, expected: tuple[str, str]) -> None:
    assert family(name) == expected


def names_of(plan: ChartPlan) -> list[tuple[str, ...]]:
    return [chart.names for chart in plan.charts]


def test_losses_come_first_then_what_is_to_grow_and_rates_last() -> None:
    names = ("lr", "samples/s", "val_loss", "Grad", "loss", "f1", "accuracy", "RMSE")
    assert names_of(ChartPlan((name, 0, 0) for name in names)) == [
        ("loss", "val_loss"),
        *(("accuracy",), ("f1",), ("RMSE",), ("Grad",), ("lr",), ("samples/s",)),
    ]


def test_validation_joins_training_where_both_count_steps() -> None:
    plan = ChartPlan()
    for step in range(1, 301):
        for name in ("lr", "samples_per_second", "loss"):
            plan.add(name, step, 0)
        if step % 100 == 0:
            plan.add("valid_accuracy", step, 0)
            plan.add("valid_loss", step, 0)
            plan.add("epoch_loss", step, 0)
    assert names_of(plan) == [
        ("loss", "epoch_loss", "valid_loss"),
        ("valid_accuracy",),
        ("lr",),
        ("samples_per_second",),
    ]


def test_validation_that_counts_epochs_has_a_chart_of_its_own() -> None:
    plan = ChartPlan()
    for epoch in range(3):
        for step in range(50):
            plan.add("loss", 50 * epoch + step, 0)
        plan.add("valid_loss", epoch, 0)
    assert names_of(plan) == [("loss",), ("valid_loss",)]


def test_a_metric_whose_steps_go_back_is_numbered_and_drawn_alone() -> None:
    names = ("loss", "epoch_loss", "valid_loss")
    plan = ChartPlan((name, step, rank) for step in (1, 2) for rank in (0, 1) for name in names)
    assert (names_of(plan), plan.numbered) == ([names], set())
    assert plan.add("epoch_loss", 2, 1)  # the same step again
    assert not plan.add("epoch_loss", 1, 0)
    assert (names_of(plan), plan.numbered) == ([("epoch_loss",), ("loss", "valid_loss")], {"epoch_loss"})
    plan.add("loss", 1, 1)
    assert names_of(plan) == [("epoch_loss",), ("loss",), ("valid_loss",)]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("lr", 3e-4, "3e-4"),
        ("learning_rate", 1.25e-5, "1.25e-5"),
        ("lr-AdamW", 0.1, "0.1"),
        ("lr", 0.0, "0"),
        ("samples_per_second", 1234.5, "1.23k/s"),
        ("throughput", 12.34, "12.3/s"),
        ("images/s", 1.2e6, "1.2M/s"),
        ("tokens_per_sec", 999_700.0, "1M/s"),
        ("tokens_per_sec", 123_456.0, "123k/s"),
        ("tokens/sec", 123_456.0, "123k/s"),
        ("samplesPerSecond", 123_456.0, "123k/s"),
        ("learningRate", 3e-4, "3e-4"),
        ("lr_loss", 3e-4, "0.0003"),
        ("s", 1500.0, "1,500"),
        ("samples_per_second", float("nan"), "nan"),
        ("loss", 0.25, "0.25"),
        ("seconds", 1.5, "1.5"),
    ],
)
def test_rates_have_their_own_writing(name: str, value: float, text: str) -> None:
    assert formatted(value, kind(name)) == text
