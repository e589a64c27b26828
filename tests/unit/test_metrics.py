"""Metrics in one process: exact for any order and split; `evaluate` without ranks."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nblaunch.errors import ArgumentError
from nblaunch.training import evaluation, metrics
from nblaunch.training.evaluation import evaluate, split
from nblaunch.training.metrics import Accuracy, FromTorchmetrics, Mean, Metric

finite = st.floats(allow_nan=False, allow_infinity=False)


def mean_of(*values: Any) -> float:
    mean = Mean()
    for value in values:
        mean.update(*value) if isinstance(value, tuple) else mean.update(value)
    return mean.compute()


def accuracy_of(output: Tensor, target: Tensor, **settings: Any) -> Accuracy:
    accuracy = Accuracy(**settings)
    accuracy.update(output, target)
    accuracy.compute()
    return accuracy


# ------------------------------------------------------------------ means
@given(values=st.lists(st.tuples(finite, st.integers(0, 1000)), min_size=1))
def test_a_mean_is_the_exact_one_rounded_once(values: list[tuple[float, int]]) -> None:
    count = sum(times for _, times in values)
    if count:
        assert mean_of(*values) == float(sum(Fraction(value) * times for value, times in values) / count)


@given(data=st.data(), values=st.lists(st.tuples(finite, st.integers(1, 9)), max_size=30), ranks=st.integers(1, 5))
def test_a_mean_is_the_same_for_any_split_over_ranks(
    data: st.DataObject, values: list[tuple[float, int]], ranks: int
) -> None:
    order = data.draw(st.permutations(values))
    parts = [Mean() for _ in range(ranks)]
    for value, count in order:
        parts[data.draw(st.integers(0, ranks - 1))].update(value, count)
    sent: list[Any] = [(part._sum, part._nonfinite, part._count) for part in parts]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metrics, "exchange", lambda value: sent)
        assert repr([part.compute() for part in parts]) == repr([mean_of(*values)] * ranks)
        assert [part.count for part in parts] == [sum(count for _, count in values)] * ranks


def test_a_mean_takes_tensors_element_by_element() -> None:
    losses = torch.tensor([[1.0, 2.0], [4.0, 5.0]], requires_grad=True)
    assert mean_of(losses) == 3.0
    assert mean_of(torch.tensor(7)) == 7.0
    assert mean_of(torch.tensor(0.1)) == float(torch.tensor(0.1))
    assert mean_of((losses, 2), 1, True) == (24 + 2) / 10
    assert mean_of(2.0, torch.empty(0)) == 2.0


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([], math.nan),
        ([1.0, math.nan], math.nan),
        ([math.inf, 1.0], math.inf),
        ([-math.inf, -math.inf, 3.0], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([(math.nan, 0), 2.0], 2.0),
        ([(math.nan, 0)], math.nan),
    ],
)
def test_a_mean_of_nothing_and_of_what_is_not_finite(values: list[Any], mean: float) -> None:
    assert repr(mean_of(*values)) == repr(mean)


@pytest.mark.parametrize("count", [-1, 1.5, "two"])
def test_a_count_is_a_number_of_samples(count: Any) -> None:
    with pytest.raises(ArgumentError, match=f"count={count!r}: must be an integer, at least 0"):
        Mean().update(1.0, count)


def test_a_mean_goes_on_after_compute_and_forgets_when_reset() -> None:
    mean = Mean()
    mean.update(1.0, 3)
    assert (mean.compute(), mean.count) == (1.0, 3)
    mean.update(5.0)
    assert mean.compute() == 2.0
    mean.reset()
    assert (mean.count, math.isnan(mean.compute())) == (0, True)


# ------------------------------------------------------------------ accuracy
SCORES = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4], [0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])


@pytest.mark.parametrize(
    ("output", "target", "settings", "correct", "count"),
    [
        (SCORES, torch.tensor([1, 0, 2, 1]), {}, 3, 4),
        (SCORES, torch.tensor([1, 2, 1, 2]), {}, 1, 4),
        (SCORES, torch.tensor([1, 2, 1, 2]), {"top_k": 2}, 3, 4),
        (SCORES, torch.tensor([1, 2, 1, 2]), {"top_k": 3}, 4, 4),
        (SCORES.requires_grad_(), torch.tensor([1, -100, 1, -100]), {"ignore_index": -100}, 1, 2),
        (SCORES, torch.full((4,), -100), {"ignore_index": -100, "top_k": 2}, 0, 0),
        (SCORES.argmax(1), torch.tensor([1, 0, 2, 1]), {}, 3, 4),
        (torch.tensor([True, False]), torch.tensor([True, True]), {}, 1, 2),
        (torch.tensor([0.4, 0.6]), torch.tensor([0, 1]), {"threshold": 0.5}, 2, 2),
        (torch.tensor([[-1.0], [0.2]]), torch.tensor([0.0, 0.0]), {"threshold": 0}, 1, 2),
        (torch.tensor([[0.2, 0.9], [0.8, 0.1]]), torch.tensor([[0, 1], [0, 0]]), {"threshold": 0.5}, 3, 4),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long), {}, 32, 32),
        (torch.rand(2, 5, 7), torch.zeros(2, 7, dtype=torch.long), {"top_k": 5}, 14, 14),
        (torch.empty(0, 3), torch.empty(0, dtype=torch.long), {}, 0, 0),
    ],
)
def test_accuracy_counts_right_predictions(
    output: Tensor, target: Tensor, settings: dict[str, Any], correct: int, count: int
) -> None:
    accuracy = accuracy_of(output, target, **settings)
    assert (accuracy.correct, accuracy.count) == (correct, count)
    assert repr(accuracy.compute()) == repr(correct / count if count else math.nan)


@pytest.mark.parametrize(
    ("output", "target", "settings", "message"),
    [
        (
            torch.rand(4, 3),
            torch.zeros(5),
            {},
            r"output has shape \(4, 3\).* and target \(5,\): pass scores \(N, C\)",
        ),
        (
            torch.rand(4),
            torch.zeros(4),
            {},
            r"\(4,\) \(torch.float32\) and target \(4,\): for binary outputs use Accuracy\(thr",
        ),
        (torch.rand(4, 3), torch.zeros(4), {"top_k": 4}, r"top_k=4 needs scores \(N, C\) of at least 4"),
        (torch.rand(4, 3), torch.zeros(4), {"threshold": 0.5}, "with threshold=0.5 the shapes must be equal"),
        ([1, 2], torch.zeros(2), {}, "output is a list and target a Tensor: Accuracy takes tensors"),
    ],
)
def test_accuracy_names_both_shapes_where_they_do_not_fit(
    output: Any, target: Tensor, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        Accuracy(**settings).update(output, target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 0}, "top_k=0: must be an integer, at least 1"),
        ({"top_k": 2, "threshold": 0.5}, "top_k=2, threshold=0.5: binary outputs need top_k=1"),
    ],
)
def test_accuracy_refuses_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Accuracy(**settings)


# ------------------------------------------------------------------ batches
@pytest.mark.parametrize(
    ("batch", "inputs", "target"),
    [
        ((1, 2), 1, 2),
        ([1, 2], 1, 2),
        ({"x": 1, "labels": 2}, 1, 2),
        ({"target": 2, "x": 1}, 1, 2),
        ({"x": 1, "mask": 3, "label": 2}, {"x": 1, "mask": 3}, 2),
        ({"x": 1, "label": 3, "labels": 2}, {"x": 1, "label": 3}, 2),
    ],
)
def test_a_batch_is_split(batch: Any, inputs: Any, target: Any) -> None:
    assert split(batch) == (inputs, target)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((1, 2, 3), "a tuple of 3"),
        ({"y": 1, "x": 2}, r"a dict with \['x', 'y'\]"),
        (torch.zeros(2), "a Tensor"),
    ],
)
def test_a_batch_that_cannot_be_split_says_what_to_do(batch: Any, found: str) -> None:
    with pytest.raises(ArgumentError, match=f"the batch is {found}, neither .*step=lambda model, batch"):
        split(batch)


# ------------------------------------------------------------------ evaluate
SAMPLES = 23


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(SAMPLES, 6, generator=draw), torch.randint(3, (SAMPLES,), generator=draw))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))


def expected(model: nn.Module) -> tuple[float, float]:
    """Accuracy and loss over all samples at once."""
    inputs, target = data().tensors
    model.eval()
    with torch.no_grad():
        output = model(inputs)
    model.train()
    return int((output.argmax(1) == target).sum()) / SAMPLES, float(nn.functional.cross_entropy(output, target))


def test_evaluate_counts_every_sample_and_puts_the_model_back() -> None:
    model = net()
    model[0].eval()
    accuracy, loss = expected(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].eval()
    figures = evaluate(model, DataLoader(data(), batch_size=4), loss_fn=nn.functional.cross_entropy)
    assert figures == {"accuracy": accuracy, "loss": pytest.approx(loss, abs=1e-6)}
    assert [part.training for part in model] == [False, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    nn.functional.cross_entropy(model(data().tensors[0]), data().tensors[1]).backward()  # training goes on


def test_evaluate_puts_the_model_back_after_an_error_too() -> None:
    model = net()
    with pytest.raises(ArgumentError, match="pass scores"):
        evaluate(model, [(torch.rand(2, 6), torch.zeros(3))])
    assert model.training
    assert torch.is_grad_enabled()


def test_evaluate_takes_many_metrics_dicts_and_a_prefix() -> None:
    inputs, target = data().tensors
    batches = [{"input": inputs[:9], "labels": target[:9]}, {"input": inputs[9:], "labels": target[9:]}]
    model = net()
    top: dict[str, Metric] = {"top1": Accuracy(), "top3": Accuracy(top_k=3)}
    figures = evaluate(model, batches, metrics=top, prefix="valid_")
    assert figures == {"valid_top1": expected(model)[0], "valid_top3": 1.0}
    assert evaluate(model, batches, metrics=Accuracy(top_k=3)) == {"accuracy": 1.0}
    assert evaluate(model, batches, metrics={}) == {}
    assert evaluate(model, batches, metrics=top)["top3"] == 1.0  # reset before, or it would count 46
    assert top["top3"].count == SAMPLES  # type: ignore[attr-defined]  # an Accuracy


def test_evaluate_takes_a_step_of_ones_own() -> None:
    model = net()
    inputs, target = data().tensors
    batches = [(inputs[:9], "a", target[:9]), (inputs[9:], "b", target[9:])]
    figures = evaluate(model, batches, step=lambda module, batch: (module(batch[0]), batch[2]))
    assert figures == {"accuracy": expected(model)[0]}


class Named(nn.Module):
    def forward(self, scores: Tensor, bias: Tensor) -> Tensor:
        return scores + bias


def test_a_dict_of_several_inputs_goes_in_by_name() -> None:
    batch = {"bias": torch.zeros(3), "scores": torch.eye(3), "label": torch.arange(3)}
    assert evaluate(Named(), [batch]) == {"accuracy": 1.0}


class Pairs(Dataset[Any]):
    """Each sample is two rows, which a collate_fn puts one after the other."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.eye(3)[:2], torch.arange(2)


def joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([rows for rows, _ in pairs]), torch.cat([labels for _, labels in pairs])


def test_samples_that_do_not_add_up_are_an_error_with_both_numbers() -> None:
    loader = DataLoader(Pairs(), batch_size=2, collate_fn=joined)
    with pytest.raises(RuntimeError, match=r"counted 10 samples over all ranks, but the loader has 5\. .*pass size="):
        evaluate(nn.Identity(), loader)
    assert evaluate(nn.Identity(), loader, size=lambda batch: len(batch[1]) // 2) == {"accuracy": 1.0}


def test_a_batch_without_a_length_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"the batch has no tensor, so its size is unknown: pass size="):
        evaluate(nn.Identity(), [(torch.tensor(1.0), torch.tensor(1))], metrics={})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Mean(), "metrics: 'mean' is .*: use a metric with update"),
        ({"right": Accuracy}, "metrics: 'right' is <class"),
        ({"loss": Accuracy()}, "the name 'loss' is reserved: use another"),
        ("accuracy", "metrics: 'str' is 'accuracy'"),
    ],
)
def test_metrics_that_are_none_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        evaluate(net(), [], metrics=given)


def test_figures_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(evaluation, "report", lambda values, step=None: reported.append((step, values)))
    evaluate(nn.Identity(), [(torch.eye(3), torch.arange(3))], prefix="valid_", at=7)
    assert reported == [(7, {"valid_accuracy": 1.0})]


def test_a_non_torchmetrics_metric_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"must be a torchmetrics\.Metric; for several use a dict"):
        FromTorchmetrics(Accuracy())
