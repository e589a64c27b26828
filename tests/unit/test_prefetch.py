"""The prefetcher: all batches in order, each synchronized, with its memory kept alive.

There is no GPU here: what runs on one is tested with a stand-in for ``torch.cuda`` that writes down what it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from nblaunch.errors import ArgumentError
from nblaunch.training import Accelerator, Prefetcher, shard
from nblaunch.training.loader import copied_ahead


class Log(list[tuple[str, Any]]):
    """What happened, in order."""


class FakeStream:
    """A CUDA stream that only writes down."""

    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name, self.events = log, name, 0

    def record_event(self) -> int:
        self.events += 1
        self.log.append(("recorded", self.events))
        return self.events

    def wait_stream(self, stream: FakeStream) -> None:
        self.log.append((f"{self.name} waited for", stream.name))

    def wait_event(self, event: int) -> None:
        self.log.append(("waited", event))


class Cuda:
    """Stands in for ``torch.cuda``."""

    def __init__(self, log: Log) -> None:
        self.log, self.main, self.current = log, FakeStream(log, "main"), "main"

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802  # torch's name
        assert device == torch.device("cuda:0")
        return FakeStream(self.log, "copying")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.main

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current = stream.name
        yield
        self.current = "main"


class Pinned(torch.Tensor):
    """A tensor that writes down where it is copied and who uses it."""

    asked: Cuda

    def to(self, device: torch.device, *, dtype: Any = None, non_blocking: bool = False) -> Pinned:  # type: ignore[override]
        assert device == torch.device("cuda:0")
        assert non_blocking
        self.asked.log.append(("copied on", self.asked.current))
        return self

    def record_stream(self, stream: FakeStream) -> None:  # type: ignore[override]
        self.asked.log.append(("used on", stream.name))


def pinned(cuda: Cuda, value: int) -> Pinned:
    tensor = torch.tensor([value]).as_subclass(Pinned)
    tensor.asked = cuda
    return tensor


def data(size: int) -> Any:
    return list(range(size))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda(Log())
    monkeypatch.setattr("nblaunch.training.loader.copied_ahead", partial(copied_ahead, cuda=stand_in))
    return stand_in


def test_on_the_cpu_it_gives_what_the_loader_gives() -> None:
    batches = [{"x": torch.ones(2), "y": [1, None, "a"]}, (torch.zeros(1),)]
    prefetcher = Prefetcher(batches, "cpu")
    assert len(prefetcher) == 2
    assert all(given is batch for given, batch in zip(prefetcher, batches, strict=True))


def test_on_the_cpu_nothing_is_read_ahead() -> None:
    source = iter(range(5))
    assert next(iter(Prefetcher(source, "cpu"))) == 0
    assert next(source) == 1


def test_the_next_batch_is_copied_before_one_is_yielded(cuda: Cuda) -> None:
    """Each tensor's stream is recorded with the allocator, at any nesting depth."""
    batches = [{"x": pinned(cuda, value), "more": [(pinned(cuda, value), None)]} for value in range(3)]
    for batch in Prefetcher(batches, "cuda:0"):
        cuda.log.append(("given out", int(batch["x"])))
    copied = [("copying waited for", "main"), *[("copied on", "copying")] * 2]
    at_the_end = ("copying waited for", "main")
    used = [("used on", "main")] * 2
    assert cuda.log == [
        *(*copied, ("recorded", 1)),
        *(*copied, ("recorded", 2)),
        *(("waited", 1), *used, ("given out", 0)),
        *(*copied, ("recorded", 3)),
        *(("waited", 2), *used, ("given out", 1)),
        at_the_end,
        *(("waited", 3), *used, ("given out", 2)),
    ]


@pytest.mark.parametrize("depth", [1, 3])
def test_its_position_is_that_of_the_yielded_batch(cuda: Cuda, depth: int) -> None:
    loader = shard(DataLoader(data(3), collate_fn=lambda values: pinned(cuda, values[0])), seed=4)
    prefetcher = Prefetcher(loader, "cuda:0", depth)
    states = [(prefetcher.is_last, prefetcher.is_padding, prefetcher.state_dict()) for _ in prefetcher]
    places = [(0, 1), (0, 2), (1, 0)]
    assert [(last, padding) for last, padding, _ in states] == [(place == places[-1], False) for place in places]
    assert [(state["epoch"], state["batches"]) for _, _, state in states] == places
    assert prefetcher.state_dict() == states[-1][2]
    assert (prefetcher.epoch, prefetcher.total, prefetcher.dataset) == (1, 3, [0, 1, 2])
    prefetcher.load_state_dict({"epoch": 2, "batches": 1, "seed": 4})
    assert [int(batch) for batch in prefetcher] == [1, 2]


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_an_accelerator_counts_the_batches_given_out(cuda: Cuda, depth: int) -> None:
    accelerator = Accelerator(compute_setup="cpu", gradient_accumulation_steps=3)
    loader: Any = accelerator.prepare(DataLoader(data(8), collate_fn=list))
    weight = torch.ones(1, requires_grad=True)
    came = []
    for _ in Prefetcher(loader, "cuda:0", depth):
        with accelerator.accumulate():
            accelerator.backward(weight.sum())
        came.append((accelerator.sync_gradients, loader.is_last, round(1 / float(weight.grad))))  # type: ignore[arg-type]
        weight.grad = None
    assert came == [(place in (3, 6, 8), place == 8, 2 if place > 6 else 3) for place in range(1, 9)]


@pytest.mark.parametrize("size", [1, 3])
def test_a_look_does_not_advance_the_epoch(cuda: Cuda, size: int) -> None:
    loader = shard(DataLoader(data(size), collate_fn=lambda values: pinned(cuda, values[0])))
    prefetcher = Prefetcher(loader, "cuda:0", 4)
    for _ in range(2):
        assert int(next(iter(prefetcher))) == 0
        assert loader.epoch == 0


def test_a_wrong_depth_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"^depth=0: must be an integer, at least 1"):
        Prefetcher([], "cpu", 0)
