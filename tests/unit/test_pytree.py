"""Pytrees: moved leaves, rebuilt containers, and objects that stay identical."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from nblaunch.training.pytree import tensors_in, to_device


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Sample:
    x: Any
    label: Any = None


@dataclass(frozen=True)
class Frozen:
    x: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any = 0


class Graph:
    """As torch_geometric's: it moves itself."""

    def __init__(self, where: str = "cpu") -> None:
        self.where = where

    def to(self, device: Any) -> Graph:
        return Graph(str(device))


class Encoding(UserDict):
    """As transformers' BatchEncoding: a mapping with a ``to`` that knows no dtype."""

    def to(self, device: Any) -> Any:
        raise AssertionError("its tensors are moved one by one")


WRAPS = [
    lambda value: [value, 1],
    lambda value: (value,),
    lambda value: (),
    lambda value: Pair(value, None),
    lambda value: {"a": value, "b": "text"},
    lambda value: OrderedDict(a=value),
    lambda value: defaultdict(list, a=value),
    lambda value: UserDict(a=value),
    lambda value: Encoding(a=value),
    lambda value: MappingProxyType({"a": value}),
    lambda value: deque([value], maxlen=3),
    lambda value: Sample(value, "cat"),
    lambda value: Frozen(value),
    lambda value: Slotted(value),
]


def float_tensor() -> torch.Tensor:
    return torch.ones(2, dtype=torch.float32)


@pytest.mark.parametrize("wrap", WRAPS)
def test_containers_keep_their_types_and_the_original_is_unchanged(wrap: Any) -> None:
    nest = wrap(wrap(float_tensor()))
    moved = to_device(nest, "cpu", torch.float64)

    assert type(moved) is type(nest)
    assert {tensor.dtype for tensor in tensors_in(moved)} <= {torch.float64}
    assert {tensor.dtype for tensor in tensors_in(nest)} <= {torch.float32}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_nest_that_need_not_change_is_the_very_same(wrap: Any) -> None:
    nest = wrap(wrap(float_tensor()))
    assert to_device(nest, "cpu", torch.float32) is nest


def test_special_properties_of_containers_are_kept() -> None:
    moved = to_device(defaultdict(list, a=float_tensor()), "cpu", torch.float64)
    assert moved["b"] == []
    assert to_device(deque([float_tensor()], maxlen=3), "cpu", torch.float64).maxlen == 3
    assert to_device(torch.ones(2, 3).max(dim=1), "cpu", torch.float64).values.dtype == torch.float64


def test_non_tensors_are_not_touched() -> None:
    for leaf in (None, "text", b"bytes", 1, 2.5, True, torch.float32, torch.Size([2]), int, {1, 2}, object()):
        assert to_device(leaf, "cpu", torch.float64) is leaf


def test_an_object_with_a_method_to_moves_itself() -> None:
    assert to_device([Graph()], torch.device("meta"))[0].where == "meta"
    packed = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), "cpu", torch.float64)
    assert packed.data.dtype == torch.float64
    assert packed.batch_sizes.dtype == torch.int64
    assert len(list(tensors_in([packed]))) == 2


@pytest.mark.parametrize(
    ("dtype", "of_floats", "of_complex"),
    [
        (torch.float64, torch.float64, torch.complex128),
        (torch.float32, torch.float32, torch.complex64),
        (torch.float16, torch.float16, torch.complex32),
        (torch.bfloat16, torch.bfloat16, torch.complex64),
        (torch.complex128, torch.float64, torch.complex128),
        (torch.complex64, torch.float32, torch.complex64),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtypes_of_floats_and_of_complex_ones(dtype: Any, of_floats: Any, of_complex: Any) -> None:
    batch = [torch.ones(1), torch.ones(1, dtype=torch.complex64), torch.ones(1).long(), torch.ones(1).bool()]
    moved = to_device(batch, "cpu", dtype)
    assert [tensor.dtype for tensor in moved] == [of_floats, of_complex, torch.int64, torch.bool]
