"""One seed makes a run repeatable, workers and their augmentations included."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from nblaunch.errors import ArgumentError
from nblaunch.training import shard
from nblaunch.training.seeding import default_seed, derived_seed, seed_everything, seed_worker, seeded


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NBLAUNCH_SEED", "0")
    with seeded(0):
        yield


def drawn() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_the_same_seed_draws_the_same_everywhere() -> None:
    assert seed_everything(7) == 7
    first = drawn()
    seed_everything(7)
    assert drawn() == first
    seed_everything(8)
    assert not set(drawn()) & set(first)


def test_it_is_the_seed_of_whatever_is_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_everything(11)
    assert default_seed() == 11
    data: Any = [1]
    assert shard(DataLoader(data)).seed == 11
    monkeypatch.delenv("NBLAUNCH_SEED")
    assert default_seed() == 0


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, "1", None])
def test_a_seed_out_of_range_is_refused(seed: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^seed=.*: must be an integer from 0 to 4294967295"):
        seed_everything(seed)


def test_deterministic_asks_torch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    benchmark = torch.backends.cudnn.benchmark
    try:
        seed_everything(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark


def test_seed_worker_follows_torchs_seed() -> None:
    torch.manual_seed(2**40 + 5)
    seed_worker(0)
    first = random.random(), np.random.rand()
    torch.manual_seed(2**40 + 5)
    seed_worker(3)
    assert (random.random(), np.random.rand()) == first


def test_seeded_leaves_every_generator_as_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    seed_everything(1)
    expected = (*drawn(), torch.rand(1, generator=generator).item())
    seed_everything(1)
    generator.manual_seed(3)
    with seeded(5, generator):
        inside = (*drawn(), torch.rand(1, generator=generator).item())
    assert (*drawn(), torch.rand(1, generator=generator).item()) == expected
    with seeded(5, generator):
        assert (*drawn(), torch.rand(1, generator=generator).item()) == inside


def test_derived_seeds_differ_and_stay_the_same_over_versions() -> None:
    seeds = {derived_seed(seed, epoch) for seed in range(40) for epoch in range(40)}
    assert len(seeds) == 1600
    assert max(seeds) < 2**63
    assert derived_seed(0, 1) == 1506311409109703068
