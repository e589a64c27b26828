"""What the watch tells data by, whom it takes for the user, and what it leaves alone. In ranks: tests/processes."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

from nblaunch.errors import warn
from nblaunch.ranks import callers, watch
from nblaunch.ranks.outline import _outline, outline


class Files(Dataset[str]):
    """A dataset that is expensive to read, and has what datasets have besides data."""

    def __init__(self, folder: str, names: list[str], targets: Any) -> None:
        self.names = [(folder + name, 0) for name in names]
        self.targets = targets
        self.transform = lambda name: name
        self.cache: set[str] = set()
        self.itself = self

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> str:
        raise AssertionError("no sample may be read for an outline")


def files(folder: str = "train/", count: int = 50, dtype: Any = np.int64) -> Files:
    return Files(folder, [f"{n}.png" for n in range(count)], np.arange(count, dtype=dtype))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process watches as a rank does; afterwards torch is as it was."""
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)
    monkeypatch.setattr(DistributedSampler, "__iter__", DistributedSampler.__iter__)
    monkeypatch.setattr(watch, "_seen", None)
    watch.install()


# ------------------------------------------------------------------ outlines
@pytest.mark.parametrize(
    "make",
    [
        files,
        lambda: TensorDataset(torch.arange(60.0).reshape(20, 3), torch.ones(20, dtype=torch.bfloat16)),
        lambda: Subset(files(), range(3, 40)),
        lambda: random_split(range(100), [0.5, 0.5], torch.Generator().manual_seed(1))[0],  # type: ignore[arg-type]
        lambda: [{"text": "a", "label": torch.tensor(1)}, (None, np.float32(2.5), np.array(7))],
        list,
        lambda: torch.empty(0, 3),
    ],
)
def test_equal_data_have_equal_outlines(make: Callable[[], Any]) -> None:
    assert outline(make()) == outline(make())


def test_an_outline_reads_the_ends_of_a_long_text() -> None:
    texts = [b"a" + bytes(2**20), bytes(2**20), bytes(2**20) + b"a", bytes(2**20 + 1)]
    assert len({outline(text) for text in texts}) == len(texts)
    assert len(repr(_outline(bytes(2**20), 0))) < 10_000


def test_an_outline_is_the_same_in_another_process() -> None:
    code = "from tests.unit.test_watch import files, outline; print(outline(files()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == outline(files())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (files(), files("valid/")),
        (files(), files(count=51)),
        (files(), files(dtype=np.int32)),
        (Subset(files(), range(0, 40, 2)), Subset(files(), range(1, 40, 2))),
        (TensorDataset(torch.arange(10)[::2]), TensorDataset(torch.arange(10)[1::2])),
        (torch.zeros(4, 3), torch.zeros(3, 4)),
        (list(range(0, 10, 2)), list(range(1, 10, 2))),
    ],
)
def test_data_that_differ_have_different_outlines(one: Any, other: Any) -> None:
    assert outline(one) != outline(other)


@settings(deadline=None)  # how long an example takes is no matter, and on a busy machine anything
@given(st.integers(4, 200), st.integers(2, 4))
def test_no_two_ranks_that_cut_the_data_look_alike(size: int, ranks: int) -> None:
    data = torch.rand(size, 2)
    assert len({outline(TensorDataset(data[rank::ranks])) for rank in range(ranks)}) == ranks


# ------------------------------------------------------------------ whose line it is
def test_the_line_is_the_users_past_libraries_and_generators() -> None:
    with ThreadPoolExecutor(1) as pool:
        name, number = next(callers.users_lines(1) for _ in range(1))[0]
        assert name == __file__
        assert "next(callers.users_lines" in callers.users_text()
        assert number > 1
        assert pool.submit(callers.users_lines, 5).result() == []  # a thread of the library's
        assert pool.submit(callers.users_text).result() == ""
    assert callers.package_outside("nblaunch.ranks.watch") == "tests"


def test_a_warning_stands_at_the_users_line() -> None:
    with pytest.warns(UserWarning, match="^look here$") as caught:
        warn("look here", beyond=callers.LIBRARIES)
    assert caught[0].filename == __file__
    with ThreadPoolExecutor(1) as pool, pytest.warns(UserWarning, match="^nobody's$"):
        pool.submit(warn, "nobody's", beyond=callers.LIBRARIES).result()


# ------------------------------------------------------------------ the order of a DistributedSampler
def sampler_of(size: int, **options: Any) -> DistributedSampler[int]:
    return DistributedSampler(range(size), num_replicas=2, rank=0, **options)  # type: ignore[arg-type]  # has a length


def go_through(sampler: Any, batch_size: int = 2, **options: Any) -> list[int]:
    return [int(i) for batch in DataLoader(sampler.dataset, batch_size, sampler=sampler, **options) for i in batch]


@pytest.mark.usefixtures("watched")
def test_an_order_that_repeats_is_told_once_and_stays_as_torch_makes_it() -> None:
    sampler = sampler_of(20)
    with pytest.warns(UserWarning, match=r"goes through epoch 0 again.*set_epoch\(epoch\)") as caught:
        orders = [go_through(sampler) for _ in range(3)]  # with a loader of its own each time
    assert (len(caught), caught[0].filename) == (1, __file__)
    assert orders == [orders[0]] * 3


@pytest.mark.usefixtures("watched")
def test_a_second_loaders_pass_is_told_of_only_when_it_repeats() -> None:
    sampler = sampler_of(20)
    first, second = (DataLoader(sampler.dataset, 2, sampler=sampler) for _ in range(2))
    list(first)
    list(second)
    sampler.set_epoch(1)
    list(second)
    list(first)
    with pytest.warns(UserWarning, match=r"goes through epoch 1 again"):
        list(second)


@pytest.mark.usefixtures("watched")
def test_an_order_that_does_not_repeat_is_not_told() -> None:
    for size in (0, 1, 2, 3, 4):  # a peek at one of two batches is half of them
        sampler = sampler_of(size)
        assert go_through(sampler) == go_through(sampler)
    sampler = sampler_of(40)
    list(sampler)  # the user looks at the order
    list(sampler)
    for _ in range(3):
        next(iter(DataLoader(sampler.dataset, 2, sampler=sampler)))
    go_through(sampler)
    with torch.no_grad():
        go_through(sampler)
    sampler.set_epoch(5)
    go_through(sampler)


@pytest.mark.usefixtures("watched")
def test_a_sampler_with_an_order_of_its_own_is_left_alone() -> None:
    class Backwards(DistributedSampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([*super().__iter__()][::-1])

    sampler = Backwards(range(40), num_replicas=2, rank=0)  # type: ignore[arg-type]  # has a length
    assert go_through(sampler) == go_through(sampler)


# ------------------------------------------------------------------ only looking
@pytest.mark.usefixtures("watched")
def test_a_second_install_puts_no_second_look() -> None:
    once = DataLoader.__iter__
    watch.install()
    assert DataLoader.__iter__ is once


@pytest.mark.usefixtures("watched")
def test_without_a_group_the_loader_is_only_iterated() -> None:
    assert [batch.tolist() for batch in DataLoader(range(3), batch_size=2)] == [[0, 1], [2]]  # type: ignore[arg-type]


@pytest.mark.usefixtures("watched")
def test_trouble_of_a_look_is_logged_and_not_the_users(caplog: pytest.LogCaptureFixture) -> None:
    class Endless(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

    with caplog.at_level(logging.INFO, "nblaunch.ranks.watch"):
        assert len(list(DataLoader(range(3), sampler=Endless()))) == 2  # type: ignore[arg-type]  # has no length
    assert "DataLoader is not watched" in caplog.text
    assert "TypeError" in caplog.text


@pytest.mark.usefixtures("watched")
def test_an_iterable_datasets_length_is_not_asked_for() -> None:
    """torch remembers that somebody did, and then warns of each sample beyond it."""

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

        def __len__(self) -> int:
            return 3

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(DataLoader(Stream()))) == 5


@pytest.mark.usefixtures("watched")
def test_a_forked_worker_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(watch, "_at_pass", asked.append)
    list(DataLoader(range(3)))  # type: ignore[arg-type]  # has a length
    assert len(asked) == 1
    monkeypatch.setattr(os, "getpid", lambda: -1)
    list(DataLoader(range(3)))  # type: ignore[arg-type]  # has a length
    assert len(asked) == 1


# ------------------------------------------------------------------ what it costs
def noting(calls: list[Any], result: Any) -> Callable[..., Any]:
    """A function that notes what it is called with."""

    def noted(*args: Any) -> Any:
        calls.append(args)
        return result

    return noted


@pytest.mark.usefixtures("watched")
def test_a_dataset_is_outlined_in_the_first_pass_alone_and_compared_in_a_limited_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outlined: list[Any] = []
    compared: list[Any] = []
    monkeypatch.setattr(watch, "outline", noting(outlined, 1))
    monkeypatch.setattr(watch, "_compare", noting(compared, None))
    loader = DataLoader(files(), batch_size=10)
    for _ in range(watch._MOST_PASSES + 20):
        iter(loader)
    assert outlined == [(loader.dataset,)]
    assert len({key for key, _ in compared}) == len(compared) == watch._MOST_PASSES


@pytest.mark.usefixtures("watched")
def test_the_process_is_searched_for_models_a_limited_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Any] = []
    monkeypatch.setattr(gc, "get_objects", noting(searched, []))
    assert not any(watch._will_hang(2) for _ in range(watch._MOST_SCANS + 5))
    assert len(searched) == watch._MOST_SCANS


# ------------------------------------------------------------------ the words
def test_unequal_counts_name_the_ranks_with_the_most_and_the_fewest() -> None:
    text = watch._of_unequal([7, 1200, 5, 5])
    assert text.startswith("rank 1 has 1,200 batches of this DataLoader, rank 2 has 5: ")
    assert "after batch 5 they hang" in text
