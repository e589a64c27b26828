"""Invalid calls raise before anything starts, with a message that names the argument."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nblaunch import notebook_launcher
from nblaunch.errors import ArgumentError, PayloadError
from tests.conftest import marked_processes
from tests.processes.conftest import Launcher

LOCK = threading.Lock()


@pytest.fixture
def _nothing_starts() -> Iterator[None]:
    """Assert that no process was started, and no log directory made."""
    before = marked_processes()
    yield
    assert marked_processes() <= before
    assert not Path(os.environ["NBLAUNCH_STATE_DIR"]).exists()


pytestmark = pytest.mark.usefixtures("_nothing_starts")


def train(lr: float, *, rank: int = 0, epochs: int = 1) -> float:
    return lr * rank * epochs


# ------------------------------------------------------------------ the call
@pytest.mark.parametrize(
    ("value", "kind"),
    [(None, "a NoneType"), (train(0.1), "a float"), ("train", "a str; %%distributed runs a cell"), ([train], "a list")],
)
def test_a_non_function_is_named(value: Any, kind: str, launch: Launcher) -> None:
    with pytest.raises(ArgumentError, match=rf"^function={re.escape(repr(value)[:80])}: must be a function.* {kind}$"):
        launch(value)


@pytest.mark.parametrize(
    ("args", "kwargs", "why"),
    [
        ((), {}, "missing a required argument: 'lr'"),
        ((0.1, 2), {}, "too many positional arguments"),
        ((0.1,), {"momentum": 0.9}, "unexpected keyword argument 'momentum'"),
        ((0.1,), {"lr": 0.2}, "multiple values for argument 'lr'"),
    ],
)
def test_arguments_that_do_not_fit_the_function_are_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], why: str, launch: Launcher
) -> None:
    message = re.escape(f"args={args!r}, kwargs={kwargs!r} do not fit train: ") + f".*{re.escape(why)}"
    with pytest.raises(ArgumentError, match=message):
        launch(train, args, kwargs=kwargs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"args": "ab"}, r"args='ab': must be a tuple; for one argument write args=\(value,\)"),
        ({"args": 3}, r"args=3: must be a tuple"),
        ({"args": {"lr": 1}}, r"args=\{'lr': 1\}: must be a tuple"),
        ({"kwargs": [("lr", 1)]}, r"kwargs=\[\('lr', 1\)\]: must be a dict with string keys"),
        ({"kwargs": {1: 2}}, r"kwargs=\{1: 2\}: must be a dict with string keys"),
        ({"block": "no"}, r"block='no': must be True or False"),
        ({"view": "loud"}, r"view='loud': must be one of 'auto', 'text', 'none'"),
        ({"num_nodes": 2}, r"num_nodes=2: engine='auto' uses only this machine; choose another engine"),
        ({"node_rank": 1}, r"node_rank=1: must be 0, because the ranks of every node are started from this notebook"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_named_with_its_value(arguments: dict[str, Any], message: str, start_method: str) -> None:
    call = {"args": (0.1,), "num_processes": 2, "start_method": start_method, "view": "none", **arguments}
    with pytest.raises(ArgumentError, match=message):
        notebook_launcher(train, **call)


# ------------------------------------------------------------------ what cannot be sent
def _holding(thing: Any) -> Callable[[], Any]:
    def train() -> Any:
        return thing

    return train


def test_what_cannot_be_sent_is_named_before_anything_starts(launch: Launcher) -> None:
    said = r"`.*train` uses `thing`, a thread lock, which.*: create it in the ranks"
    with pytest.raises(PayloadError, match=said) as caught:
        launch(_holding(LOCK))
    assert isinstance(caught.value, TypeError)
