"""Which parameters a rank fills in, and which calls cannot be made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from nblaunch.transfer.parameters import FILLED_IN, check, left_out


def plain(rank, world_size): ...
def mixed(data, rank, *, device, lr=0.1): ...
def defaults(epochs=1, local_rank=0): ...
def stars(*args, **kwargs): ...
def none(): ...
def positional_only(rank, /, x): ...
def star_first(*rank, device): ...


class Trainer:
    def __init__(self, rank, lr): ...

    def fit(self, world_size): ...

    def __call__(self, device): ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "names"),
    [
        (plain, (), {}, ("rank", "world_size")),
        (plain, (0,), {}, ("world_size",)),
        (plain, (0, 2), {}, ()),
        (plain, (), {"rank": 7}, ("world_size",)),
        (mixed, ("data",), {}, ("rank", "device")),
        (mixed, (), {"data": 1, "device": "cpu"}, ("rank",)),
        (defaults, (), {}, ("local_rank",)),
        (defaults, (3, 1), {}, ()),
        (stars, (1, 2), {"rank": 3}, ()),
        (none, (), {}, ()),
        (positional_only, (), {"x": 1}, ()),
        (star_first, (1, 2), {}, ("device",)),
        (Trainer, (), {"lr": 1}, ("rank",)),
        (Trainer(0, 1).fit, (), {}, ("world_size",)),
        (Trainer(0, 1), (), {}, ("device",)),
        (lambda rank: rank, (), {}, ("rank",)),
        (functools.partial(plain, 3), (), {}, ("world_size",)),
        (functools.partial(plain, rank=3), (), {}, ("world_size",)),
        (functools.partial(functools.partial(plain, rank=3), world_size=9), (), {}, ()),
        (functools.partial(mixed, lr=3), (1,), {}, ("rank", "device")),
        (max, (1, 2), {}, ()),
        (print, ("hello",), {}, ()),
        (dict, (), {"a": 1}, ()),
    ],
)
def test_omitted_parameters_are_filled_in(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert left_out(function, args, kwargs) == names


def test_all_four_names_are_filled_in_the_order_of_the_signature() -> None:
    def everything(device, local_rank, world_size, rank): ...

    assert left_out(everything, (), {}) == tuple(reversed(FILLED_IN))


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        (mixed, (), {}, "missing a required argument: 'data'"),
        (plain, (0, 1, 2), {}, "too many positional arguments"),
        (plain, (), {"ranks": 1}, "got an unexpected keyword argument 'ranks'"),
        (plain, (0,), {"rank": 1}, "multiple values for argument 'rank'"),
        (none, (1,), {}, "too many positional arguments"),
        (positional_only, (), {"x": 1}, "missing a required positional-only argument: 'rank'|missing a required arg"),
        (positional_only, (8,), {}, r"missing .* 'x' \(args gives `rank` a value, which each rank has: use kwargs\)"),
    ],
)
def test_a_call_that_cannot_be_made_is_refused_in_pythons_own_words(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        check(function, args, kwargs)


def test_the_arguments_come_back_by_name_without_what_ranks_fill_in() -> None:
    assert check(mixed, ([1],), {"lr": 0.5}) == {"data": [1], "lr": 0.5}


def test_a_builtin_without_a_signature_gets_the_arguments_as_given() -> None:
    assert left_out(dict.fromkeys, ([1],), {}) == ()
    assert check(type, (1, 2, 3, 4, 5), {}) == {}
