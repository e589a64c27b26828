"""Checks of arguments, and misspelt names of arguments."""

from __future__ import annotations

import inspect
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nblaunch
from nblaunch.errors import ArgumentError
from nblaunch.launch import options
from nblaunch.machine.arguments import distinct_ranks, seconds, whole_number
from nblaunch.training import Accelerator, Parallelism, TrainConfig, Trainer

MODEL = nn.Linear(1, 1)


# ------------------------------------------------------------------ values
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None])
def test_a_whole_number_is_no_bool_float_or_text(value: Any) -> None:
    expected = f"num_processes={value!r}: must be an integer, at least 1"
    with pytest.raises(ArgumentError, match=re.escape(expected)):
        whole_number("num_processes", value, least=1)


@pytest.mark.parametrize("value", [-1, 4, True, 2.0])
def test_a_whole_number_outside_its_range_names_both_ends(value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"^src={re.escape(repr(value))}: must be an integer from 0 to 3$"):
        whole_number("src", value, least=0, most=3)


@pytest.mark.parametrize("value", [0, -1.0, True, math.inf, math.nan, "30", None])
def test_seconds_are_finite_and_positive(value: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"timeout={value!r}: must be a positive number of seconds")):
        seconds("timeout", value)


@pytest.mark.parametrize("value", [[1, 0], (1, 0), iter([1, 0]), np.array([1, 0])])
def test_ranks_come_back_as_ints(value: Any) -> None:
    chosen = distinct_ranks("ranks", value, 2)
    assert chosen == (1, 0)
    assert {type(rank) for rank in chosen} == {int}


@pytest.mark.parametrize(
    ("value", "world_size", "said"),
    [
        (0, 2, "ranks=0: must be a list of ranks, as in ranks=[0]"),
        ("01", 2, "ranks='01': must be a list of ranks, as in ranks=[0]"),
        ([], 2, "ranks=[]: must name a rank"),
        ([1, 1], 2, "ranks=[1, 1]: must name each rank once"),
        ([1], 1, "ranks=[1]: the only rank is 0"),
        ([-1], 2, "ranks=[-1]: the ranks are 0 and 1"),
        ([True], 2, "ranks=[True]: the ranks are 0 and 1"),
        ([1.0], 2, "ranks=[1.0]: the ranks are 0 and 1"),
        ([0, 4], 4, "ranks=[0, 4]: the ranks are 0 to 3"),
    ],
)
def test_ranks_that_do_not_exist_are_named(value: Any, world_size: int, said: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(said)}$"):
        distinct_ranks("ranks", value, world_size)


# ------------------------------------------------------------------ names
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
            r"no argument 'model', but your function does: pass kwargs=\{'model': 3\}",
        ),
        (nblaunch.session, {"num_process": 2}, r"session\(\) .* 'num_process': did you mean 'num_processes'\?"),
        (nblaunch.session, {"start_methode": "spawn"}, r"session\(\) .*: did you mean 'start_method'\?"),
    ],
)
def test_a_misspelt_argument_names_the_nearest_one(call: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as caught:
        call(**given)
    assert isinstance(caught.value, TypeError)  # as Python's own


def test_the_launchers_signature_is_the_table_of_options() -> None:
    own = inspect.signature(nblaunch.notebook_launcher).parameters
    defaults = {name: each.default for name, each in own.items() if name in options.TABLE}
    assert defaults == {name: option.default for name, option in options.TABLE.items()}
    assert own.keys() - defaults.keys() == {"function", "args", "kwargs", "accelerate_options"}


@pytest.mark.parametrize("call", [Trainer, TrainConfig, Parallelism, nblaunch.notebook_launcher])
def test_a_checked_signature_is_the_written_one(call: Callable[..., Any]) -> None:
    names = [*inspect.signature(call).parameters]
    assert not {"args", "kwargs", "self"} & {names[0], names[-1]}
    assert len(names) > 5
    assert call.__doc__


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
