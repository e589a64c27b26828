"""Finding values that a rank changed but did not return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from nblaunch.ranks.changed_values import content_of, unreturned


def noticed(value: Any, change: Callable[[Any], object], result: Callable[[Any], object] = lambda value: None) -> bool:
    """Return True if a change of the value named `it` is reported."""
    watched = {"it": value, "untouched": [1]}
    before = {name: content_of(each, is_deep=False) for name, each in watched.items()}
    change(value)
    names = unreturned(watched, before, result(value))
    assert names in ((), ("it",))
    return bool(names)


def trained(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def used(model: Any) -> None:
    model(torch.ones(1, 2)).sum().backward()


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda it: it.append(2)),
        ([1], lambda it: it.__setitem__(0, "one")),
        ({"a": 1}, lambda it: it.update(b=2)),
        ({1}, lambda it: it.add(2)),
        (module(), trained),
        (nn.BatchNorm1d(2), lambda it: it(torch.ones(3, 2))),
        (nn.Linear(2, 2), lambda it: it.load_state_dict(nn.Linear(2, 2).state_dict())),
        (nn.LazyLinear(2), used),
    ],
)
def test_a_change_is_noticed(value: Any, change: Callable[[Any], object]) -> None:
    assert noticed(value, change)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1, 2], len),
        ({"a": 1}, lambda it: it["a"]),
        (module(), used),
        (module(), lambda it: it.state_dict()),
        (module(), lambda it: it.requires_grad_(False)),
    ],
)
def test_use_without_change_is_not(value: Any, change: Callable[[Any], object]) -> None:
    assert not noticed(value, change)


@pytest.mark.parametrize(
    "result",
    [
        lambda it: it,
        lambda it: (1, it),
        lambda it: {"model": [it]},
    ],
)
@pytest.mark.parametrize("value", [[1], {"a": 1}, {1}])
def test_a_returned_value_is_not_reported(value: Any, result: Callable[[Any], object]) -> None:
    assert not noticed(value, lambda it: it.clear(), result)


@pytest.mark.parametrize(
    "result",
    [
        lambda it: it,
        lambda it: it.state_dict(),
        lambda it: {name: tensor.clone() for name, tensor in it.state_dict().items()},
        lambda it: {f"module.{name}": tensor for name, tensor in it.state_dict().items()},
        lambda it: {"epoch": 3, "state": it.state_dict()},
        lambda it: [it[0].weight],
        lambda it: it[0].weight.detach()[0],
    ],
)
def test_a_module_may_be_returned_as_its_state_or_its_tensors(result: Callable[[Any], object]) -> None:
    assert not noticed(module(), trained, result)


@pytest.mark.parametrize("result", [lambda it: 0.97, lambda it: {"accuracy": 0.9}, lambda it: [torch.ones(2)]])
def test_another_result_does_not_bring_a_module_back(result: Callable[[Any], object]) -> None:
    assert noticed(module(), trained, result)


class Secretive(nn.Linear):
    """Its parameters cannot be listed."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_odd_modules_are_watched_without_harm() -> None:
    with torch.inference_mode():
        frozen = nn.Linear(2, 2)
    assert not noticed(frozen, lambda it: None)
    assert not noticed(Secretive(2, 2), lambda it: None)


def test_a_result_that_holds_itself_is_gone_through_once() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert noticed([1], lambda it: it.append(2), lambda it: loop)


@pytest.mark.usefixtures("sparse_forgotten")
def test_sparse_tensors_of_a_module_and_a_result_harm_nothing() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    assert noticed(model, trained, lambda it: [torch.ones(2, 2).to_sparse()])
    assert not noticed(model, trained, lambda it: [it.weight])


# ------------------------------------------------------------------ the content of a session's values
class Holder:
    """An object of the user's, whose code must not run."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def __eq__(self, other: object) -> bool:
        raise AssertionError(other)


class OwnList(list[Any]):
    """A list whose own iteration must not run."""

    def __iter__(self) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: {"a": [1, {"b": 2}]}, lambda it: it["a"][1].update(b=3)),
        (lambda: {"a": 1}, lambda it: it.update(a=True)),
        (lambda: [float("nan")], lambda it: it.append(float("nan"))),
        (lambda: OwnList([1]), lambda it: it.append(2)),
        (lambda: Holder(x=[1]), lambda it: vars(it)["x"].append(2)),
        (lambda: numpy.zeros((300, 300)), lambda it: it.__iadd__(1)),
        (lambda: numpy.asfortranarray(numpy.zeros((300, 300)))[::2], lambda it: it.__iadd__(1)),
        (lambda: numpy.array([[1], None], dtype=object), lambda it: it.__setitem__(1, 2)),
        (lambda: torch.zeros(3), lambda it: it.add_(1)),
        (lambda: module(), trained),
        (lambda: deque([1]), None),
        (lambda: range(5), None),
        (lambda: torch.utils.data.TensorDataset(torch.ones(3)), lambda it: it.tensors[0].zero_()),
        (lambda: lambda: 1, None),
        (lambda: Holder, None),
    ],
)
def test_content_differs_once_it_is_changed(make: Callable[[], Any], change: Callable[[Any], Any] | None) -> None:
    value = make()
    before = content_of(value)
    assert before is not None
    assert content_of(value) == before
    if change is not None:
        change(value)
        assert content_of(value) != before


def test_what_reading_does_to_a_value_is_no_change() -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2)
    model = module()
    frame = {"data": data, "model": model, "loss": nn.CrossEntropyLoss()}
    before = content_of(frame)
    for (batch,) in data:
        nn.functional.cross_entropy(model(batch), torch.tensor([0, 1]))
    assert content_of(frame) == before


def test_the_content_of_a_large_value_is_bounded() -> None:
    assert len(content_of([[[] for _ in range(100)] for _ in range(1_000)])) <= 1_000
    circle: list[Any] = []
    circle.append(circle)
    assert content_of(circle) == content_of(circle)
