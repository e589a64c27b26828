"""The samplers: each index exactly once over the ranks, the same draw for any number of them, and resumable."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sized
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nblaunch.errors import ArgumentError
from nblaunch.training import (
    ClassBalancedBatchSampler,
    DistributedWeightedSampler,
    ExactDistributedSampler,
)
from nblaunch.training.samplers import RankSampler

FAST = settings(max_examples=40, deadline=None, derandomize=True, database=None)
PRIMES = (2, 3, 5, 7, 11, 13, 31, 61, 97)
RANKS = st.integers(1, 7)
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    """A number of ranks, and an awkward number of samples for it."""
    ranks = draw(RANKS)
    near = (0, 1, ranks - 1, ranks, ranks + 1)
    return ranks, draw(st.sampled_from(near) | st.sampled_from(PRIMES) | st.integers(0, 200))


@st.composite
def classes(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A number of ranks, and awkward sizes of classes for it; a class of none is not there."""
    ranks = draw(RANKS)
    size = st.sampled_from((0, 1, ranks - 1, ranks, ranks + 1)) | st.sampled_from(PRIMES)
    return ranks, [count for count in draw(st.lists(size, max_size=4)) if count]


Maker = Callable[[int, int, int], RankSampler]
"""(rank, ranks, seed) to a sampler."""


def parts(make: Maker, ranks: int, seed: int = 0, epoch: int = 0) -> list[list[Any]]:
    """What each rank gets."""
    samplers = [make(rank, ranks, seed) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    found = [list(sampler) for sampler in samplers]
    assert [len(cast(Sized, sampler)) for sampler in samplers] == [len(part) for part in found]
    return found


def joined(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def interleaved(found: list[list[Any]]) -> list[Any]:
    """The ranks' parts as one order again."""
    return [part[place] for place in range(max(map(len, found))) for part in found if place < len(part)]


def exact(size: int, **options: Any) -> Maker:
    return lambda rank, ranks, seed: ExactDistributedSampler(size, num_replicas=ranks, rank=rank, seed=seed, **options)


def weighted(weights: Any, *arguments: Any, **options: Any) -> Maker:
    return lambda rank, ranks, seed: DistributedWeightedSampler(
        weights, *arguments, num_replicas=ranks, rank=rank, seed=seed, **options
    )


def balanced(labels: Any, batch_size: int, **options: Any) -> Maker:
    return lambda rank, ranks, seed: ClassBalancedBatchSampler(
        labels, batch_size, num_replicas=ranks, rank=rank, seed=seed, **options
    )


# ------------------------------------------------------------------ each index exactly once
@FAST
@given(sizes(), SEEDS, st.integers(0, 5), st.booleans())
def test_exact_gives_each_index_once_and_divides_evenly(
    size: tuple[int, int], seed: int, epoch: int, shuffle: bool
) -> None:
    ranks, samples = size
    found = parts(exact(samples, shuffle=shuffle), ranks, seed, epoch)
    assert sorted(joined(found)) == list(range(samples))
    whole, rest = divmod(samples, ranks)
    assert [len(part) for part in found] == [whole + (rank < rest) for rank in range(ranks)]
    assert interleaved(found) == interleaved(parts(exact(samples, shuffle=shuffle), 1, seed, epoch))


@FAST
@given(sizes(), SEEDS, st.booleans())
def test_weighted_draws_are_the_same_for_any_number_of_ranks(
    size: tuple[int, int], seed: int, replacement: bool
) -> None:
    ranks, draws = size
    weights = [1.0 + index % 5 for index in range(max(draws, 1))]
    make = weighted(weights, draws, replacement=replacement)
    found = parts(make, ranks, seed)
    assert interleaved(found) == interleaved(parts(make, 1, seed))
    assert sum(map(len, found)) == draws
    if not replacement:
        assert len(set(joined(found))) == draws


# ------------------------------------------------------------------ weights
def chi_square(counts: list[int], expected: list[float]) -> float:
    return sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))


WEIGHTS = [0.5, 1, 0, 2, 3, 0.25, 0, 8, 1, 4.25]  # 20 in all; 8 of them positive: 7 degrees of freedom
LIMIT = 24.32  # of chi-square with 7 degrees of freedom, exceeded once in 1000


def test_draws_with_replacement_follow_the_weights() -> None:
    sampler = DistributedWeightedSampler(WEIGHTS, 100_000, num_replicas=1, rank=0, seed=1)
    counts = Counter(sampler)
    assert counts[2] == counts[6] == 0
    places = [place for place, weight in enumerate(WEIGHTS) if weight]
    assert chi_square([counts[p] for p in places], [WEIGHTS[p] / 20 * 100_000 for p in places]) < LIMIT


def test_draws_without_replacement_are_drawn_one_after_another() -> None:
    """First and second of each draw against their exact probabilities: p_i, and the sum over j of p_j p_i / (1-p_j)."""
    p = [weight / 20 for weight in WEIGHTS]
    places = [place for place, weight in enumerate(p) if weight]
    sampler = DistributedWeightedSampler(WEIGHTS, 2, replacement=False, num_replicas=1, rank=0, seed=2)
    draws = [tuple(sampler) for _ in range(5_000)]
    first, second = (Counter(draw[place] for draw in draws) for place in (0, 1))
    expected = {i: sum(p[j] * p[i] / (1 - p[j]) for j in places if j != i) for i in places}
    assert chi_square([first[i] for i in places], [p[i] * 5_000 for i in places]) < LIMIT
    assert chi_square([second[i] for i in places], [expected[i] * 5_000 for i in places]) < LIMIT


@FAST
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1.0, 1e-320, 1e-200, 1e308, 5.5]), min_size=1, max_size=30).filter(any),
    SEEDS,
    st.booleans(),
)
def test_a_weight_of_zero_is_never_drawn(weights: list[float], seed: int, replacement: bool) -> None:
    positive = sum(weight > 0 for weight in weights)
    draws = 64 if replacement else positive
    found = list(DistributedWeightedSampler(weights, draws, replacement=replacement, num_replicas=1, rank=0, seed=seed))
    assert len(found) == draws
    assert all(weights[index] > 0 for index in found)
    if not replacement:
        assert len(set(found)) == positive


def test_a_draw_on_the_edge_of_the_sum_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda count, **_: torch.ones(count, dtype=torch.float64))
    assert list(DistributedWeightedSampler([0, 1, 1, 0], 3, num_replicas=1, rank=0)) == [2, 2, 2]
    monkeypatch.setattr(torch, "rand", lambda count, **_: torch.zeros(count, dtype=torch.float64))
    assert list(DistributedWeightedSampler([0, 1, 1, 0], 3, num_replicas=1, rank=0)) == [1, 1, 1]


def test_more_weights_than_torch_can_draw_from() -> None:
    weights = torch.zeros(2**24 + 3)  # torch.multinomial ends at 2**24
    weights[[0, -2, -1]] = 1
    sampler = DistributedWeightedSampler(weights, 100, num_replicas=1, rank=0)
    assert set(sampler) == {0, 2**24 + 1, 2**24 + 2}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -1.0, 2], r"weights\[1\]=-1.0: must be finite and at least 0"),
        ([1, 2, math.nan], r"weights\[2\]=nan: must be finite"),
        (np.array([math.inf, 1]), r"weights\[0\]=inf: must be finite"),
        (torch.zeros(3), "weights: all 3 are 0"),
        ([], r"weights has shape \(0,\): must be 1-D and not empty"),
        ([[1.0], [2.0]], r"weights has shape \(2, 1\): must be 1-D"),
        (1.0, r"weights has shape \(\): must be 1-D"),
        (["a"], r"weights=\['a'\]: must be numbers"),
        (None, "weights=None: must be numbers"),
    ],
)
def test_weights_that_cannot_be_are_named(weights: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        DistributedWeightedSampler(weights)


def test_more_draws_than_positive_weights_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^num_samples=3, replacement=False: only 2 weights are positive: use"):
        DistributedWeightedSampler([1, 0, 1], replacement=False)
    assert len(DistributedWeightedSampler([1, 0, 1], 3, num_replicas=2, rank=0)) == 2


# ------------------------------------------------------------------ equal counts of each class
@FAST
@given(classes(), st.integers(1, 3), st.sampled_from(["repeat", "stop"]), st.booleans(), SEEDS)
@example((3, []), 1, "repeat", True, 0)
@example((3, [1]), 1, "repeat", True, 0)
@example((3, [2, 3, 4, 97]), 1, "repeat", True, 0)
@example((3, [3, 4, 97]), 1, "stop", True, 0)
@example((3, [2, 61]), 2, "stop", False, 0)
def test_every_batch_has_as_many_of_each_class(
    division: tuple[int, list[int]], each: int, short: str, shuffle: bool, seed: int
) -> None:
    ranks, counts = division
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    random.Random(seed).shuffle(labels)
    size = each * max(len(counts), 1)
    found = parts(balanced(labels, size, short=short, shuffle=shuffle), ranks, seed)
    assert len({len(part) for part in found}) == 1
    for batch in joined(found):
        assert Counter(labels[index] for index in batch) == dict.fromkeys(range(len(counts)), each)
    for label, count in enumerate(counts):
        drawn = [index for batch in interleaved(found) for index in batch if labels[index] == label]
        lasting = drawn[: len(drawn) if short == "stop" else count - count % (each * ranks)]
        assert len(set(lasting)) == len(lasting)  # no sample twice, on whatever rank, while the class lasts
        if short == "repeat":
            assert len(set(drawn)) == count  # and in the end each was there
    single = parts(balanced(labels, ranks * size, short=short, shuffle=shuffle), 1, seed)
    rounds = [sorted(joined(batches)) for batches in zip(*found, strict=True)]
    assert rounds == [sorted(batch) for batch in single[0]]


def test_labels_may_be_tensors_arrays_or_none_at_all() -> None:
    for labels in (torch.tensor([0, 1, 1, 0]), np.array([0, 1, 1, 0]), [0, 1, 1, 0], "abba"):
        batches = list(ClassBalancedBatchSampler(labels, 2, shuffle=False, num_replicas=1, rank=0))
        assert batches == [[0, 1], [3, 2]]
    assert list(ClassBalancedBatchSampler([], 2, num_replicas=1, rank=0)) == []


def test_labels_in_separate_tensors_are_compared_by_value() -> None:
    expected = list(ClassBalancedBatchSampler([0, 1, 1, 0], 2, seed=1, num_replicas=1, rank=0))
    apart = list(torch.tensor([0, 1, 1, 0]))  # as a dataset gives them
    for labels in (apart, [label.reshape(1) for label in apart]):
        assert list(ClassBalancedBatchSampler(labels, 2, seed=1, num_replicas=1, rank=0)) == expected
    with pytest.raises(ArgumentError, match=r"^labels\[1\] has shape \(3,\): must be a single class"):
        ClassBalancedBatchSampler([torch.tensor(0), torch.zeros(3)], 2)


@pytest.mark.parametrize(("size", "fix"), [(4, "use 3 or 6"), (2, "use 3"), (10, "use 9 or 12")])
def test_a_batch_that_the_classes_do_not_divide_is_refused(size: int, fix: str) -> None:
    message = rf"^batch_size={size}: must be a multiple of the number of classes in labels, 3: {fix}$"
    with pytest.raises(ArgumentError, match=message):
        ClassBalancedBatchSampler([0, 1, 2], size)
    with pytest.raises(ArgumentError, match=r"^short=.never.: must be one of .repeat., .stop."):
        ClassBalancedBatchSampler([0, 1, 2], 3, short="never")  # type: ignore[arg-type]


# ------------------------------------------------------------------ epochs and resumption, of each
EACH: dict[str, Maker] = {
    "exact": exact(29),
    "weighted": weighted([1.0 + index for index in range(29)]),
    "balanced": balanced([index % 2 for index in range(29)], 4),
}


@pytest.fixture(params=EACH)
def make(request: pytest.FixtureRequest) -> Callable[[], RankSampler]:
    return lambda: EACH[request.param](1, 2, 9)


def test_a_completed_pass_advances_the_epoch_and_a_look_does_not(make: Callable[[], RankSampler]) -> None:
    sampler, other = make(), make()
    assert next(iter(sampler)) == next(iter(sampler))
    assert sampler.epoch == 0
    first, second = list(sampler), list(sampler)
    assert first != second
    assert sampler.epoch == 2
    assert [list(other), list(other)] == [first, second]
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_a_resumed_pass_gives_the_rest_alone(make: Callable[[], RankSampler]) -> None:
    sampler, fresh = make(), make()
    list(sampler)
    passing = iter(sampler)
    for _ in range(3):
        next(passing)
    state = sampler.state_dict()
    assert state == {"seed": 9, "epoch": 1, "position": 3, "samples": 6, "num_replicas": 2}
    rest = list(passing)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    next(iter(fresh))  # a look does not use it up
    assert list(fresh) == rest
    assert list(fresh) == list(sampler)
    assert fresh.state_dict() == sampler.state_dict()


@pytest.mark.parametrize("name", sorted(EACH))
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_other_ranks_divide_the_rest_of_a_pass(name: str, ranks: int) -> None:
    whole = list(EACH[name](0, 1, 9))
    samplers = [EACH[name](rank, 2, 9) for rank in range(2)]
    taken = [next(each) for each in map(iter, samplers) for _ in range(3)]
    others = [EACH[name](rank, ranks, 9) for rank in range(ranks)]
    for other in others:
        other.load_state_dict(samplers[0].state_dict())
    if name == "balanced":
        with pytest.raises(ArgumentError, match=r"num_replicas=2, but it now has .: .*set_epoch\(1\)"):
            list(others[0])
        return
    taken += [next(each) for each in map(iter, others)]
    latest = [EACH[name](rank, 2, 9) for rank in range(2)]
    for other in latest:
        other.load_state_dict(others[0].state_dict())
    taken += interleaved([list(other) for other in latest])
    assert sorted(taken) == sorted(whole)


def test_the_generators_are_left_as_they_were(make: Callable[[], RankSampler]) -> None:
    sampler = make()
    before = random.getstate(), torch.get_rng_state()
    assert list(sampler)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_dataset_or_its_length() -> None:
    assert len(ExactDistributedSampler([5, 6, 7])) == len(ExactDistributedSampler(3)) == 3
    assert list(ExactDistributedSampler(3, shuffle=False)) == [0, 1, 2]  # alone, as no ranks were named


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_replicas": 0}, "num_replicas=0: must be an integer, at least 1"),
        ({"num_replicas": 2, "rank": 2}, "rank=2, num_replicas=2: rank must be below num_replicas"),
        ({"rank": -1}, "rank=-1: must be an integer, at least 0"),
        ({"seed": -1}, "seed=-1: must be an integer from 0"),
        ({"dataset_or_length": -1}, "dataset_or_length=-1: must be an integer, at least 0"),
    ],
)
def test_numbers_out_of_range_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        ExactDistributedSampler(**{"dataset_or_length": 3, **arguments})
