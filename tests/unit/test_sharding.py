"""`shard`: every sample exactly once and equally many batches on every rank, for any loader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from nblaunch.errors import ArgumentError
from nblaunch.training import (
    ClassBalancedBatchSampler,
    ExactDistributedSampler,
    ShardedLoader,
    shard,
)
from nblaunch.training.seeding import seed_worker
from nblaunch.training.topology import World

FAST = settings(max_examples=40, deadline=None, derandomize=True, database=None)
PRIMES = (2, 3, 5, 7, 11, 13, 31, 61, 97)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Samples, batch size, ranks; the awkward ones above all."""
    ranks, batch_size = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    chunk = ranks * batch_size
    near = (0, 1, ranks - 1, ranks, ranks + 1, chunk - 1, chunk, chunk + 1, 2 * chunk + ranks - 1, *PRIMES)
    return draw(st.sampled_from(near) | st.integers(0, 120)), batch_size, ranks


class Standing:
    """Stands in for being one of several ranks, which this process then is for the loaders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = World(0, 0, 1)
        for module in ("topology", "loader"):
            monkeypatch.setattr(f"nblaunch.training.{module}.world", lambda: self.place)

    def at(self, rank: int, ranks: int) -> None:
        self.place = World(rank, rank, ranks)


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> Standing:
    return Standing(monkeypatch)


class Pass:
    """What one rank got in a pass."""

    def __init__(self, loader: ShardedLoader[Any]) -> None:
        self.expected, self.total = len(loader), loader.total
        self.batches: list[list[Any]] = []
        self.padding: list[bool] = []
        last = []
        for batch in loader:
            self.batches.append(torch.as_tensor(batch).reshape(-1).tolist())
            self.padding.append(loader.is_padding)
            last.append(loader.is_last)
        assert last == [False] * (len(last) - 1) + [True] * bool(last)

    @property
    def samples(self) -> list[Any]:
        pairs = zip(self.batches, self.padding, strict=True)
        return [sample for batch, is_padding in pairs if not is_padding for sample in batch]


def passes(standing: Standing, make: Callable[[], ShardedLoader[Any]], ranks: int, epoch: int = 0) -> list[Pass]:
    """A pass of every rank, each with generators in another state."""
    found = []
    for rank in range(ranks):
        standing.at(rank, ranks)
        torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
        loader = make()
        loader.set_epoch(epoch)
        found.append(Pass(loader))
    return found


def order_of(found: list[Pass]) -> list[Any]:
    """The ranks' batches gathered, without padding."""
    gathered = []
    for step in zip(*(zip(one.batches, one.padding, strict=True) for one in found), strict=True):
        gathered += [sample for batch, is_padding in step if not is_padding for sample in batch]
    return gathered


def check_exact(found: list[Pass], samples: int) -> None:
    """Each sample once, in as many batches on every rank."""
    assert sorted(order_of(found)) == list(range(samples))
    assert {len(one.batches) for one in found} == {one.expected for one in found} == {found[0].expected}


# ------------------------------------------------------------------ map-style datasets
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_loader_is_divided_exactly(standing: Standing, shuffled: bool) -> None:
    @FAST
    @given(cuts(), st.integers(0, 2**32 - 1), st.integers(0, 3))
    def holds(cut: tuple[int, int, int], seed: int, epoch: int) -> None:
        samples, size, ranks = cut
        data: Any = list(range(samples))
        shuffle = shuffled and samples > 0  # torch itself refuses to shuffle nothing
        found = passes(standing, lambda: shard(DataLoader(data, size, shuffle), seed=seed), ranks, epoch)
        check_exact(found, samples)
        assert {one.total for one in found} == {samples}
        alone = passes(standing, lambda: shard(DataLoader(data, size, shuffle), seed=seed), 1, epoch)
        assert order_of(found) == order_of(alone)  # the same order with workers
        assert shuffle or order_of(found) == data

    holds()


class Drawn(Sampler[int]):
    """A user's sampler that draws from the global generators."""

    def __len__(self) -> int:
        return 53

    def __iter__(self) -> Iterator[int]:
        order = list(range(53))
        random.shuffle(order)
        return iter(np.random.permutation(order)[torch.randperm(53).numpy()].tolist())


class Moving(Sampler[int]):
    """One whose state moves on whenever it is run."""

    def __init__(self) -> None:
        self.generator_of_its_own = np.random.default_rng(4)

    def __len__(self) -> int:
        return 53

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator_of_its_own.permutation(53).tolist())


class Buckets(Sampler[list[int]]):
    """Batches of one kind each, of many lengths."""

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[list[int]]:
        bounds = [0, 3, 8, 12, 15, 21, 26, 30, 33, 41, 47, 53]
        batches = [list(range(begin, end)) for begin, end in pairwise(bounds)]
        random.shuffle(batches)
        return iter(batches)


DATA: Any = list(range(53))
ARANGE: Any = torch.arange(53)
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "a generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator()),
    "a sampler": lambda: DataLoader(DATA, 4, sampler=Drawn()),
    "a list as sampler": lambda: DataLoader(DATA, 4, sampler=DATA[::-1]),
    "a sampler with a state": lambda: DataLoader(DATA, 4, sampler=Moving()),
    "a batch sampler of torch's": lambda: DataLoader(DATA, batch_sampler=BatchSampler(Drawn(), 4, False)),
    "a batch sampler": lambda: DataLoader(DATA, batch_sampler=Buckets()),
    "one by one": lambda: DataLoader(DATA, None, shuffle=True),
    "batches by the dataset": lambda: DataLoader(ARANGE, None, sampler=BatchSampler(RandomSampler(DATA), 4, False)),
    "workers": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=1, persistent_workers=True),
}


@pytest.fixture(params=LOADERS)
def make(request: pytest.FixtureRequest) -> Callable[[], ShardedLoader[Any]]:
    return lambda: shard(LOADERS[request.param](), seed=1)


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_kind_of_loader_is_divided_exactly(
    standing: Standing, make: Callable[[], ShardedLoader[Any]], ranks: int
) -> None:
    check_exact(passes(standing, make, ranks), 53)


def test_a_completed_pass_advances_the_epoch_and_a_look_does_not(
    standing: Standing, make: Callable[[], ShardedLoader[Any]]
) -> None:
    standing.at(1, 3)
    loader, other = make(), make()
    look = next(iter(loader))
    assert torch.equal(torch.as_tensor(next(iter(loader))), torch.as_tensor(look))  # a look twice, and broken off
    first, second = Pass(loader), Pass(loader)
    assert loader.epoch == 2
    assert [Pass(other).batches, Pass(other).batches] == [first.batches, second.batches]


def test_a_resumed_pass_continues_without_loading_what_was_taken(
    standing: Standing, make: Callable[[], ShardedLoader[Any]]
) -> None:
    standing.at(2, 3)
    loader, fresh, whole = make(), make(), make()
    if isinstance(loader.sampler, Moving):
        list(fresh)  # nothing can bring its state back but running it as often
    Pass(loader), Pass(whole)
    expected = Pass(whole).batches
    passing = iter(loader)
    for _ in range(2):
        next(passing)
    state = loader.state_dict()
    assert (state["epoch"], state["batches"], state["seed"], state["world_size"]) == (1, 2, 1, 3)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert torch.as_tensor(next(iter(fresh))).reshape(-1).tolist() == expected[2]  # a look does not use it up
    rest = [torch.as_tensor(batch).reshape(-1).tolist() for batch in fresh]
    assert rest == expected[2:]
    assert Pass(fresh).batches == Pass(whole).batches


def begun(standing: Standing, make: Callable[[], ShardedLoader[Any]], ranks: int, batches: int) -> tuple[Any, Any]:
    """What ranks take of a pass that each leaves after so many batches, and the state then."""
    taken, states = [], []
    for rank in range(ranks):
        standing.at(rank, ranks)
        loader = make()
        for batch in islice(loader, batches):
            taken += [] if loader.is_padding else torch.as_tensor(batch).reshape(-1).tolist()
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    return taken, states[0]


def rest(standing: Standing, make: Callable[[], ShardedLoader[Any]], ranks: int, state: Any) -> tuple[Any, Any]:
    """What ranks take from a state on, in equally many batches; and after them."""
    taken, lengths, then = [], set(), set()
    for rank in range(ranks):
        standing.at(rank, ranks)
        loader = make()
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        left = []
        for batch in loader:
            left.append(loader.remaining)
            taken += [] if loader.is_padding else torch.as_tensor(batch).reshape(-1).tolist()
        assert left in (list(range(len(left), 0, -1)), [None] * len(left))
        lengths.add(len(left))
        then.add((loader.epoch, len(list(loader))))
    assert len(lengths) == len(then) == 1
    return taken, then.pop()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_pass_goes_on_with_other_ranks_and_batch_sizes(standing: Standing, is_stream: bool) -> None:
    @FAST
    @given(cuts(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
    def holds(cut: tuple[int, int, int], batches: int, size: int, ranks: int) -> None:
        samples, size_before, ranks_before = cut
        data: Any = Sized(samples) if is_stream else list(range(samples))

        def make(size: int) -> Callable[[], ShardedLoader[Any]]:
            shuffle = None if is_stream or not samples else True
            return lambda: shard(DataLoader(data, size, shuffle), seed=3, dispatch=False)

        taken, state = begun(standing, make(size_before), ranks_before, batches)
        if state["epoch"]:  # it took all
            return
        others, state = begun(standing, lambda: resumed(make(size)(), state), ranks, 1)
        last = [] if state["epoch"] else rest(standing, make(size_before), ranks_before, state)[0]
        assert sorted(taken + others + last) == list(range(samples))

    holds()


def resumed(loader: ShardedLoader[Any], state: Any) -> ShardedLoader[Any]:
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_kind_of_loader_goes_on_with_other_ranks(
    standing: Standing, make: Callable[[], ShardedLoader[Any]], ranks: int
) -> None:
    taken, state = begun(standing, make, 3, 2)
    others, (epoch, batches) = rest(standing, make, ranks, state)
    assert sorted(taken + others) == DATA
    standing.at(0, ranks)
    assert (epoch, batches) == (1, len(make()))  # the next one is whole


class InBatches(BatchSampler):
    """A user's batch sampler: as torch's, for all that `shard` knows of it."""


def exact() -> DataLoader[Any]:
    return DataLoader(DATA, 4, sampler=ExactDistributedSampler(53))


def torchs(ranks: int) -> DataLoader[Any]:
    return DataLoader(DATA, 4, sampler=DistributedSampler(DATA, ranks, 0))


def in_batches(size: int) -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=InBatches(SequentialSampler(DATA), size, False))


def streamed(workers: int) -> DataLoader[Any]:
    return DataLoader(Sized(53), 4, num_workers=workers)


@pytest.mark.parametrize(
    ("make", "make_other", "ranks", "why"),
    [
        (exact, exact, 3, "its sampler shards"),
        (partial(torchs, 2), partial(torchs, 1), 1, "its sampler shards"),
        (partial(in_batches, 4), partial(in_batches, 2), 2, "its batch sampler makes"),
        (partial(streamed, 2), partial(streamed, 0), 2, "workers read"),
    ],
)
def test_a_pass_does_not_go_on_where_orders_differ(
    standing: Standing,
    make: Callable[[], DataLoader[Any]],
    make_other: Callable[[], DataLoader[Any]],
    ranks: int,
    why: str,
) -> None:
    def sharded(make: Callable[[], DataLoader[Any]] = make) -> ShardedLoader[Any]:
        return shard(make(), seed=1, dispatch=False)

    standing.at(0, 2)
    loader = sharded()
    next(iter(loader))
    state = loader.state_dict()
    other = resumed(sharded(), state)
    assert [len(batch) for batch in other] == [len(batch) for batch in sharded()][1:]
    standing.at(0, ranks)
    with pytest.raises(
        ArgumentError, match=rf"world_size=2, batch_size=4.*, but it now has world_size={ranks}.*{why}.*epoch\(1\)"
    ):
        next(iter(resumed(sharded(make_other), state)))


def test_epochs_have_orders_of_their_own_and_set_epoch_wins(standing: Standing) -> None:
    loader = shard(DataLoader(DATA, 4, shuffle=True), seed=1)
    first, second = Pass(loader).samples, Pass(loader).samples
    assert first != second
    loader.set_epoch(0)
    assert Pass(loader).samples == first
    for batch in loader:
        assert len(batch)
        loader.set_epoch(0)  # in the middle of epoch 1
    assert loader.epoch == 0
    assert Pass(shard(DataLoader(DATA, 4, shuffle=True), seed=2)).samples != first


def _until_the_last(loader: ShardedLoader[Any]) -> Iterator[Any]:
    for batch in loader:
        yield batch
        if loader.is_last:
            break


WHOLE: dict[str, Callable[[ShardedLoader[Any]], Any]] = {
    "zip": lambda loader: [batch for _, batch in zip(range(len(loader)), loader)],  # noqa: B905  # stops at the range
    "islice": lambda loader: list(islice(loader, len(loader))),
    "break": lambda loader: list(_until_the_last(loader)),
}


@pytest.mark.parametrize("way", WHOLE)
def test_a_pass_whose_last_batch_was_taken_counts(standing: Standing, way: str) -> None:
    standing.at(1, 3)
    loader, other = (shard(DataLoader(DATA, 4, shuffle=True), seed=1) for _ in range(2))
    found = [[batch.tolist() for batch in WHOLE[way](loader)] for _ in range(3)]
    assert found == [Pass(other).batches for _ in range(3)]
    loader.set_epoch(2)  # again, and that wins
    assert Pass(loader).batches == found[2]
    WHOLE[way](loader)
    loader.load_state_dict({"epoch": 0, "batches": 1, "seed": 1})
    assert Pass(loader).batches == found[0][1:]
    WHOLE[way](loader)
    other.load_state_dict(loader.state_dict())  # all of epoch 1 was taken
    assert Pass(other).batches == found[2]


def test_a_look_within_a_pass_leaves_it_as_it_was() -> None:
    loader, other = (shard(DataLoader(DATA, 16, shuffle=True), seed=1) for _ in range(2))
    expected = Pass(other).batches
    taken = []
    for batch in loader:
        taken.append(batch.tolist())
        said = (loader.is_last, loader.remaining, loader.state_dict())
        if not loader.is_last:  # then another would be a look at the next epoch
            assert next(iter(loader)).tolist() == expected[0]
        assert (loader.is_last, loader.remaining, loader.state_dict()) == said
    assert taken == expected
    assert loader.epoch == 1


def test_a_look_at_the_only_batch_is_no_pass() -> None:
    loader = shard(DataLoader(DATA, 64, shuffle=True), seed=1)
    assert torch.equal(next(iter(loader)), next(iter(loader)))
    assert loader.epoch == 0
    loader.load_state_dict({"epoch": 0, "batches": 0, "seed": 1})
    rest = shard(DataLoader(DATA, 50, shuffle=True), seed=1)
    rest.load_state_dict({"epoch": 0, "batches": 1, "seed": 1})
    assert torch.equal(next(iter(rest)), next(iter(rest)))  # the only one that was left


@pytest.mark.parametrize(("samples", "size"), [(2, 4), (7, 1), (1, 8)])
def test_too_few_samples_repeat_one_with_is_padding(standing: Standing, samples: int, size: int) -> None:
    found = passes(standing, lambda: shard(DataLoader(DATA[:samples], size)), 3)
    check_exact(found, samples)
    assert [one.padding[-1] for one in found] == [rank >= samples % 3 for rank in range(3)]
    assert found[0].total == samples


def test_padding_is_identified_even_if_workers_may_overtake(standing: Standing) -> None:
    standing.at(2, 3)
    loader = shard(DataLoader(DATA[:7], 1, num_workers=2, in_order=False))
    assert Pass(loader).padding == [False, False, True]


def test_an_empty_dataset_is_an_empty_pass(standing: Standing) -> None:
    several: list[dict[str, Any]] = [{}, {"num_workers": 1}, {"batch_size": None}, {"drop_last": True}]
    for options in several:
        loader = shard(DataLoader(DATA[:0], **options))
        assert (list(loader), len(loader), loader.total, loader.epoch) == ([], 0, 0, 1)


class Endless(Sampler[int]):
    """Has no length and no end."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(5)


def test_a_sampler_without_an_end_is_dealt_out_as_it_comes(standing: Standing) -> None:
    heads = []
    for rank in range(2):
        standing.at(rank, 2)
        loader = shard(DataLoader(DATA, 2, sampler=Endless()))
        assert loader.total is None
        passing = iter(loader)
        heads.append([next(passing).tolist() for _ in range(3)])
        with pytest.raises(TypeError, match=r"has no len\(\)"):
            len(loader)
    assert heads == [[[0, 1], [4, 0], [3, 4]], [[2, 3], [1, 2], [0, 1]]]


# ------------------------------------------------------------------ arguments
def _collated(samples: list[int]) -> tuple[str, list[int]]:
    return "mine", samples


def test_every_argument_is_kept() -> None:
    options: dict[str, Any] = {
        "batch_size": 3,
        "sampler": Drawn(),
        "num_workers": 2,
        "collate_fn": _collated,
        "pin_memory": False,
        "drop_last": True,
        "timeout": 30,
        "worker_init_fn": seed_worker,
        "multiprocessing_context": "spawn",
        "generator": torch.Generator(),
        "prefetch_factor": 5,
        "persistent_workers": True,
        "pin_memory_device": "",
    }
    given = DataLoader(DATA, **options)
    loader = shard(given)
    assert isinstance(loader, DataLoader)
    for name in (*options, "dataset", "batch_sampler"):
        assert getattr(loader, name) is getattr(given, name)
    assert type(loader.multiprocessing_context).__name__ == "SpawnContext"
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        loader.batch_size = 4


def test_move_applies_to_each_batch_and_reshard_returns_the_loader() -> None:
    loader = shard(DataLoader(DATA[1:4], 2), seed=3)
    assert shard(loader, move=lambda batch: batch.tolist()) is loader
    assert list(loader) == [[1, 2], [3]]
    assert (loader.seed, shard(loader).seed, shard(loader, seed=4).seed) == (3, 3, 4)
    assert list(loader) == [[1, 2], [3]]  # the move stayed


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"^loader=\[1, 2\]: must be a torch.utils.data.DataLoader, not a list"):
        shard([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^seed=-1: must be an integer from 0"):
        shard(DataLoader(DATA), seed=-1)


def test_two_passes_at_once_do_not_mix() -> None:
    loader = shard(DataLoader(DATA, 10))
    assert all(torch.equal(first, second) for first, second in zip(loader, loader, strict=True))
    assert loader.epoch == 1


# ------------------------------------------------------------------ samplers that shard already
def test_a_sharding_sampler_is_kept_and_its_epoch_set(standing: Standing) -> None:
    for rank in range(3):
        standing.at(rank, 3)
        loader = shard(DataLoader(DATA, 4, sampler=DistributedSampler(DATA, num_replicas=3, rank=rank)))
        for epoch in range(2):
            expected: DistributedSampler[int] = DistributedSampler(DATA, num_replicas=3, rank=rank)
            expected.set_epoch(epoch)
            assert Pass(loader).samples == list(expected)
        assert len(loader) == 5


def test_our_samplers_are_kept(standing: Standing) -> None:
    labels = [index % 2 for index in DATA]
    makers: list[Callable[[], DataLoader[Any]]] = [
        lambda: DataLoader(DATA, 4, sampler=ExactDistributedSampler(DATA)),
        lambda: DataLoader(DATA, batch_sampler=ClassBalancedBatchSampler(labels, 4, short="stop")),
    ]
    for make_own in makers:
        seen: list[int] = []
        for rank in range(3):
            standing.at(rank, 3)
            loader = shard(make_own())
            first, second = Pass(loader), Pass(loader)
            assert first.batches != second.batches
            assert loader.epoch == 2
            seen += first.samples
        assert len(set(seen)) == len(seen)


def test_an_epoch_set_on_the_users_own_sampler_wins(standing: Standing) -> None:
    standing.at(1, 2)
    sampler: DistributedSampler[int] = DistributedSampler(DATA, num_replicas=2, rank=1)
    loader = shard(DataLoader(DATA, 4, sampler=sampler))
    Pass(loader)
    sampler.set_epoch(7)
    expected = list(sampler)
    assert Pass(loader).samples == expected
    assert loader.epoch == 8
    loader.load_state_dict({"epoch": 3, "batches": 0, "seed": 0})
    Pass(loader)
    assert sampler.epoch == 3


class WithSetEpoch(Dataset):
    """A dataset that wants to know the epoch, as those of Hugging Face do."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_a_datasets_set_epoch_is_called() -> None:
    data = WithSetEpoch()
    loader = shard(DataLoader(data, sampler=WeightedRandomSampler([1, 1], 2)))
    list(loader), list(loader)
    assert sorted(set(data.epochs)) == [0, 1]


# ------------------------------------------------------------------ iterable datasets
class Stream(IterableDataset):
    """Numbers; its workers divide them among themselves."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, self.size, info.num_workers) if info else range(self.size))


class Sized(Stream):
    """One that knows its length."""

    def __len__(self) -> int:
        return self.size


def test_a_stream_that_every_rank_reads_is_divided_exactly(standing: Standing) -> None:
    @FAST
    @given(cuts())
    def holds(cut: tuple[int, int, int]) -> None:
        samples, size, ranks = cut
        found = passes(standing, lambda: shard(DataLoader(Sized(samples), size), dispatch=False), ranks)
        check_exact(found, samples)
        assert order_of(found) == list(range(samples))
        assert {one.total for one in found} == {samples}

    holds()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "options", [{"num_workers": 2}, {"batch_size": None}, {"num_workers": 1, "persistent_workers": True}]
)
def test_streams_of_every_kind(standing: Standing, options: dict[str, Any], ranks: int) -> None:
    make = {"batch_size": 4, **options}
    found = passes(standing, lambda: shard(DataLoader(Sized(23), **make), dispatch=False), ranks)
    assert sorted(order_of(found)) == list(range(23))
    assert len({len(one.batches) for one in found}) == 1


# ------------------------------------------------------------------ workers
class Noise(Dataset):
    """What each of the generators draws in a worker."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([np.random.rand(), random.random(), torch.rand(()).item()])


class NoiseStream(IterableDataset):
    """The same from a stream, which also draws when it begins."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        random.random()
        return (Noise()[index] for index in range(12))


def test_no_two_ranks_draw_the_same_augmentations(standing: Standing) -> None:
    drawn = []
    for rank in range(2):
        standing.at(rank, 2)
        torch.manual_seed(0)  # as seed_everything leaves every rank
        drawn.append(torch.cat(list(shard(DataLoader(Noise(), 3, num_workers=1), seed=1))))
    assert drawn[0].shape == (6, 3)
    assert not (drawn[0] == drawn[1]).any()


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}, {}])
def test_a_resumed_pass_loads_the_very_same_batches(standing: Standing, options: dict[str, Any]) -> None:
    standing.at(1, 2)

    def make() -> ShardedLoader[Any]:
        return shard(DataLoader(Noise(), 2, **options), seed=1)

    whole = list(make())
    loader = make()
    next(iter(loader))
    torch.manual_seed(7), random.seed(7), np.random.seed(7)  # as another process begins
    assert torch.equal(torch.cat(list(resumed(make(), loader.state_dict()))), torch.cat(whole[1:]))
    assert torch.equal(torch.cat(list(shard(DataLoader(Noise(), 2), seed=1))), torch.cat(whole))  # however it is loaded


@pytest.mark.parametrize("dataset", [Noise(), NoiseStream()])
def test_loading_draws_nothing_from_this_processs_generators(dataset: Dataset) -> None:
    loader = shard(DataLoader(dataset, 4), seed=1)
    drawn = []
    for batches in range(2):
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        list(islice(loader, batches))
        drawn.append([torch.rand(()).item(), random.random(), np.random.rand()])
    assert drawn[0] == drawn[1]


def test_a_stream_is_read_again_with_the_same_draws() -> None:
    def make() -> ShardedLoader[Any]:
        return shard(DataLoader(NoiseStream(), 4), seed=1)

    first, *rest = make()
    loader = make()
    assert torch.equal(next(iter(loader)), first)
    random.seed(7)  # as another process begins
    assert torch.equal(torch.cat(list(resumed(make(), loader.state_dict()))), torch.cat(rest))
    assert not torch.equal(rest[0], rest[1])


def test_loaders_side_by_side_draw_apart_with_seeds_of_their_own() -> None:
    one, alike, other = (torch.cat(list(shard(DataLoader(Noise(), 4), seed=seed))) for seed in (1, 1, 2))
    assert torch.equal(one, alike)
    assert not (one == other).any()
