"""Rebuilding what can be rebuilt of a parcel."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nblaunch.transfer.parcel import pack, unpack
from nblaunch.transfer.salvage import Salvaged, Unbuilt


class Fails:
    """Cannot be rebuilt: its state is refused."""

    def __init__(self) -> None:
        self.kept = [1]

    def __setstate__(self, state: object) -> None:
        raise ValueError("refused")


class Odd(Fails):
    """Cannot be a key while it has no state."""

    def __hash__(self) -> int:
        return len(self.kept)


class Grows(list[Any]):
    """Refuses elements, though it is created."""

    def extend(self, items: object) -> None:
        raise RuntimeError("full")


class Raises:
    """Cannot be created."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("x",)


class Slotted:
    __slots__ = ("__weakref__", "value")

    def __new__(cls, *args: int) -> Slotted:
        if args:
            raise KeyError("no arguments")
        return super().__new__(cls)

    def __getnewargs__(self) -> tuple[int]:
        return (1,)


def sent(value: Any, folder: Path, *, may_salvage: bool = True) -> list[int]:
    """Pack a value, and return the descriptors as a receiver gets them."""
    parcel = pack(lambda found: value, folder, may_salvage=may_salvage)
    fds = [os.dup(fd) for fd in parcel.fds]
    parcel.close()
    return fds


def through(value: Any, folder: Path) -> Any:
    return unpack(sent(value, folder))


def test_what_can_be_rebuilt_arrives_as_usual(tmp_path: Path) -> None:
    assert through({"a": [1, 2]}, tmp_path) == {"a": [1, 2]}


@pytest.mark.parametrize("make", [Fails, Raises, Slotted, lambda: Grows([1, 2])])
def test_an_object_that_fails_costs_no_other(make: Any, tmp_path: Path) -> None:
    shared, large = [1], np.arange(100_000)
    found = through({"bad": make(), "one": (shared, large), "two": [shared, large]}, tmp_path)
    assert isinstance(found, Salvaged)
    value = found.value
    assert any(value["bad"] is thing for thing, _ in found.failed)
    assert value["one"][0] is value["two"][0]
    assert value["one"][1] is value["two"][1]
    assert value["one"][1].sum() == large.sum()
    assert len(found.failed) == 1


@pytest.mark.parametrize("kind", [dict.fromkeys, set, frozenset])
def test_a_key_that_fails_marks_its_container(kind: Any, tmp_path: Path) -> None:
    found = through([kind([Odd()]), "rest"], tmp_path)
    assert found.value[1] == "rest"
    holder = found.value[0]
    assert isinstance(holder, Unbuilt) or any(isinstance(each, Unbuilt) for each in holder)


@pytest.mark.parametrize("reduce", [{}, {"__reduce__": lambda it: (type(it), ())}], ids=["NEWOBJ", "REDUCE"])
def test_a_class_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reduce: dict[str, Any]) -> None:
    module = types.ModuleType("passing")
    module.Kind = type("Kind", (), {"__module__": "passing", **reduce})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "passing", module)
    fds = sent([module.Kind(), 5], tmp_path)
    monkeypatch.delitem(sys.modules, "passing")
    found = unpack(fds)
    assert found.value[1] == 5
    assert {reason for _, reason in found.failed} == {"ModuleNotFoundError: No module named 'passing'"}
    assert any(found.value[0] is thing for thing, _ in found.failed)


def test_others_parcels_raise(tmp_path: Path) -> None:
    fds = sent(Fails(), tmp_path, may_salvage=False)
    with pytest.raises(ValueError, match="refused"):
        unpack(fds)
