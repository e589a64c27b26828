"""Checks of single arguments."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from nblaunch.errors import ArgumentError
from nblaunch.machine.argument_checks import distinct_ranks, one_of, seconds, whole_number


@pytest.mark.parametrize("value", [1, 7, np.int64(7)])
def test_a_whole_number_comes_back_as_an_int(value: Any) -> None:
    number = whole_number("num_processes", value, least=1)
    assert (number, type(number)) == (value, int)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None])
def test_a_whole_number_is_no_bool_float_or_text(value: Any) -> None:
    expected = f"num_processes={value!r}: must be a whole number, at least 1"
    with pytest.raises(ArgumentError, match=re.escape(expected)):
        whole_number("num_processes", value, least=1)


@pytest.mark.parametrize("value", [0, 3, np.int64(3)])
def test_a_whole_number_may_be_either_end_of_its_range(value: Any) -> None:
    assert whole_number("src", value, least=0, most=3) == value


@pytest.mark.parametrize("value", [-1, 4, True, 2.0])
def test_a_whole_number_outside_its_range_names_both_ends(value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"^src={re.escape(repr(value))}: must be a whole number from 0 to 3$"):
        whole_number("src", value, least=0, most=3)


@pytest.mark.parametrize("value", [0.5, 30])
def test_seconds_come_back_as_a_float(value: Any) -> None:
    number = seconds("timeout", value)
    assert (number, type(number)) == (value, float)


@pytest.mark.parametrize("value", [0, -1.0, True, math.inf, math.nan, "30", None])
def test_seconds_are_finite_and_positive(value: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"timeout={value!r}: must be a number of seconds above 0")):
        seconds("timeout", value)


def test_one_of_returns_the_choice() -> None:
    assert one_of("device", "cpu", ("auto", "cpu")) == "cpu"


@pytest.mark.parametrize("value", ["gpu", None, 3])
def test_one_of_names_the_choices(value: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"device={value!r}: must be one of 'auto', 'cpu'")):
        one_of("device", value, ("auto", "cpu"))


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
