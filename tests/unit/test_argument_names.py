"""Misspelt keyword arguments of the functions and classes that users call."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nblaunch
from nblaunch.errors import ArgumentError
from nblaunch.training import Accelerator, Parallelism, TrainConfig, Trainer

MODEL = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("call", "given", "said"),
    [
        (
            Trainer,
            {"model": MODEL, "optmizer": None},
            r"Trainer\(\) .* argument 'optmizer': did you mean 'optimizer'\?",
        ),
        (TrainConfig, {"epoch": 3}, r"TrainConfig\(\) .* argument 'epoch': did you mean 'epochs'\?"),
        (TrainConfig, {"lr": 3}, r"TrainConfig\(\) .* argument 'lr': use one of nprocs, epochs, batch_size, "),
        (Parallelism, {"tensors": 2}, r"Parallelism\(\) .* argument 'tensors': did you mean 'tensor'\?"),
        (Accelerator, {"mixed_precison": "no"}, r"Accelerator\(\) .* 'mixed_precison': did you mean 'mixed_precision'"),
        (nblaunch.notebook_launcher, {"num_process": 2}, r"notebook_launcher\(\) .*: did you mean 'num_processes'\?"),
        (
            nblaunch.notebook_launcher,
            {"function": lambda model: model, "model": 3},
            r"no argument 'model', a parameter of your function: pass kwargs=\{'model': 3\}",
        ),
        (nblaunch.session, {"num_process": 2}, r"session\(\) .* 'num_process': did you mean 'num_processes'\?"),
        (nblaunch.session, {"start_methode": "spawn"}, r"session\(\) .*: did you mean 'start_method'\?"),
    ],
)
def test_a_misspelt_argument_names_the_nearest_one(call: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as caught:
        call(**given)
    assert isinstance(caught.value, TypeError)  # as Python's own


@pytest.mark.parametrize("call", [Trainer, TrainConfig, Parallelism, nblaunch.notebook_launcher])
def test_a_checked_signature_is_the_written_one(call: Callable[..., Any]) -> None:
    names = [*inspect.signature(call).parameters]
    assert not {"args", "kwargs", "self"} & {names[0], names[-1]}
    assert len(names) > 5
    assert call.__doc__


def test_a_checked_class_keeps_pythons_other_errors() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'optimizer'"):
        Trainer(MODEL)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="multiple values for argument 'nprocs'"):
        TrainConfig(1, nprocs=2)  # type: ignore[misc]


def test_checked_functions_and_objects_travel() -> None:
    assert pickle.loads(pickle.dumps(nblaunch.notebook_launcher)) is nblaunch.notebook_launcher
    assert pickle.loads(pickle.dumps(TrainConfig(epochs=3))) == TrainConfig(epochs=3)


class Own(Trainer):
    """Takes an argument more than its base, and passes the others on."""

    def __init__(self, *args: Any, margin: float = 0.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.margin = margin


def test_a_subclass_may_take_other_arguments() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters())
    assert Own(MODEL, optimizer, margin=0.5).margin == 0.5
    with pytest.raises(ArgumentError, match=r"argument 'margins': use one of model, optimizer, config, loss_fn"):
        Own(MODEL, optimizer, margins=0.5)
