"""`find_executable_batch_size` in a single process."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch.errors import ArgumentError
from nblaunch.training import find_executable_batch_size
from nblaunch.training.accelerator import batch_size_search
from nblaunch.training.accelerator.batch_size_search import is_out_of_memory


def test_smaller_sizes_are_tried_until_one_fits() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=20)
    def train(batch_size: int, name: str, *, lr: float) -> tuple[int, str, float]:
        tried.append(batch_size)
        if batch_size > 15:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return batch_size, name, lr

    assert train("net", lr=0.5) == (14, "net", 0.5)
    assert train("net", lr=0.5) == (14, "net", 0.5)  # begins where the last call ended
    assert tried == [20, 18, 16, 14, 14]
    assert train.__name__ == "train"


def test_the_next_size_may_be_the_users() -> None:
    sizes = iter([50, 7])

    def train(batch_size: int) -> int:
        if batch_size > 10:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return batch_size

    assert find_executable_batch_size(train, 100, lambda: next(sizes))() == 7


def test_a_result_is_freed_before_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False])
    monkeypatch.setattr(batch_size_search, "_any_failed", lambda failed: next(answers))
    models: list[weakref.ref[Any]] = []

    def train(batch_size: int) -> nn.Module:
        assert all(model() is None for model in models)
        model = nn.Linear(1, 1)
        models.append(weakref.ref(model))
        return model

    assert find_executable_batch_size(train, 8)() is models[1]()


def test_no_size_that_fits_is_an_error() -> None:
    def train(batch_size: int) -> None:
        raise RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)")

    with pytest.raises(RuntimeError, match="no batch size fits into memory, not even 1"):
        find_executable_batch_size(train, 2)()


def test_other_errors_are_raised_at_once() -> None:
    tried: list[int] = []

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train()
    assert tried == [128]
    with pytest.raises(TypeError, match="train gets the batch size as its first argument: call it without one"):
        train(64)
    with pytest.raises(ArgumentError, match="starting_batch_size=0: must be a whole number, at least 1"):
        find_executable_batch_size(starting_batch_size=0)(train)


def test_the_cpu_allocators_error_is_recognized() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(MemoryError("out of memory."))
