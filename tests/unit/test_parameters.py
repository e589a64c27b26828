"""Which parameters a rank fills in, and which calls cannot be made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from nblaunch.transfer.parameters import FILLED_IN, check, complete, left_out


def plain(rank, world_size): ...
def mixed(data, rank, *, device, lr=0.1): ...
def defaults(epochs=1, local_rank=0): ...
def stars(*args, **kwargs): ...
def none(): ...
def positional_only(rank, /, x): ...
def star_first(*rank, device): ...
def epochs(rank, world_size, epochs=1): ...
def before_rank(rank, model): ...
def after_rank(model, rank): ...
def rank_and_stars(rank, *args, **kwargs): ...
def on_device(rank, device): ...
async def awaits(rank): ...


class Method:
    def fit(self, rank, epochs): ...


class Awaits:
    async def __call__(self): ...


class Trainer:
    def __init__(self, rank, lr): ...

    def fit(self, world_size): ...

    def __call__(self, device): ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "names"),
    [
        (mixed, (), {"data": 1, "device": "cpu"}, ("rank",)),
        (defaults, (), {}, ("local_rank",)),
        (defaults, (3,), {}, ("local_rank",)),
        (none, (), {}, ()),
        (positional_only, (), {"x": 1}, ("rank",)),
        (star_first, (1, 2), {}, ("device",)),
        (Trainer, (), {"lr": 1}, ("rank",)),
        (Trainer(0, 1).fit, (), {}, ("world_size",)),
        (Trainer(0, 1), (), {}, ("device",)),
        (functools.partial(plain, rank=3), (), {}, ("world_size",)),
        (functools.partial(functools.partial(plain, rank=3), world_size=9), (), {}, ()),
        (functools.partial(mixed, lr=3), (1,), {}, ("rank", "device")),
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
        (plain, (0, 2), {}, "too many .* args fill no parameter, and nblaunch fills in `rank` and `world_size`"),
        (plain, (), {"ranks": 1}, "got an unexpected keyword argument 'ranks': did you mean 'rank'?"),
        (plain, (4,), {}, "args has world_size=4, but the launch has 2 ranks: leave world_size out"),
        (defaults, (3, 1), {}, "too many positional arguments; args fill `epochs`, and nblaunch fills in `local_"),
        (none, (1,), {}, "^too many positional arguments$"),
        (epochs, (2,), {}, "it may include `world_size`, as for mp.spawn, or not; pass `world_size` in kwargs"),
        (after_rank, ("net", 8), {}, "args fill `model`, and nblaunch fills in `rank`"),
        (functools.partial(plain, 2), (), {}, "the partial binds `rank` to one value for all ranks"),
        (awaits, (), {}, "it is an async function"),
        (Awaits(), (), {}, "it is an async function"),
    ],
)
def test_a_call_that_cannot_be_made_is_refused_in_pythons_own_words(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        check(function, args, kwargs, 2)


OWN = {"rank": "r", "world_size": 2, "local_rank": "l", "device": "d"}


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "called"),
    [
        (plain, (), {}, ((), {"rank": "r", "world_size": 2})),
        (plain, (2,), {}, (("r", 2), {})),
        (plain, (), {"rank": 7}, ((), {"rank": 7, "world_size": 2})),
        (epochs, (3,), {}, (("r", 2, 3), {})),
        (epochs, (2, 3), {}, (("r", 2, 3), {})),
        (epochs, (2,), {"world_size": 2}, (("r", 2, 2), {})),
        (before_rank, ("net",), {}, (("r", "net"), {})),
        (after_rank, ("net",), {}, (("net",), {"rank": "r"})),
        (after_rank, (), {"model": 1}, ((), {"model": 1, "rank": "r"})),
        (rank_and_stars, (5, 6), {"lr": 1}, (("r", 5, 6), {"lr": 1})),
        (positional_only, (8,), {}, (("r", 8), {})),
        (mixed, ("data",), {"lr": 1}, (("data",), {"lr": 1, "rank": "r", "device": "d"})),
        (on_device, ("cuda:1",), {}, (("r", "cuda:1"), {})),
        (stars, (1, 2), {"rank": 3}, ((1, 2), {"rank": 3})),
        (before_rank, ("net",), {"rank": 3}, ((3, "net"), {})),
        (lambda x, device=None, k=1: ..., (1, "cuda:0"), {}, ((1, "cuda:0"), {})),
        (Method().fit, (5,), {}, (("r", 5), {})),
        (functools.partial(before_rank, model="net"), (), {}, ((), {"rank": "r"})),
        (functools.partial(after_rank, "net"), (), {}, ((), {"rank": "r"})),
        (lambda a, b: ..., (1, 2), {}, ((1, 2), {})),
        (max, (1, 2), {}, ((1, 2), {})),
    ],
)
def test_args_skip_what_ranks_fill_in_as_mp_spawn_does(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], called: Any
) -> None:
    check(function, args, kwargs, 2)
    given, named = complete(function, args, kwargs, OWN)
    assert (given, named) == called
    if function is not max:
        function(*given, **named)


def test_the_arguments_come_back_by_name_without_what_ranks_fill_in() -> None:
    assert check(mixed, ([1],), {"lr": 0.5}) == {"data": [1], "lr": 0.5}


def test_a_builtin_without_a_signature_gets_the_arguments_as_given() -> None:
    assert left_out(dict.fromkeys, ([1],), {}) == ()
    assert check(type, (1, 2, 3, 4, 5), {}) == {}
