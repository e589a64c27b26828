"""`time_workers` and `preprocess` in one process."""

from __future__ import annotations

import _thread
import os
import pickle
import signal
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from nblaunch.errors import ArgumentError
from nblaunch.training.data import (
    ExactDistributedSampler,
    Preprocessed,
    preprocess,
    preprocessing,
    shard,
    time_workers,
)
from nblaunch.training.seeding import seed_everything

DATA: Any = list(range(100))
Pair = namedtuple("Pair", "pixels label")


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_SEED", "0")  # so that what a test sets is undone
    monkeypatch.delenv("NBLAUNCH_SEED")


# ------------------------------------------------------------------ time_workers
class Marked:
    """Says in which process it loads, and how often it was asked."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        return index, info.num_workers if info else 0


def test_candidates_load_the_same_order_with_their_own_workers() -> None:
    seen: list[tuple[list[int], int]] = []
    loader: Any = DataLoader(Marked(), 4, shuffle=True, drop_last=True)  # type: ignore[arg-type]  # it has a length
    timings = time_workers(
        loader, (2, 0, 4), step=lambda batch: seen.append((batch[0].tolist(), int(batch[1][0]))), warm_up=1
    )
    assert list(timings) == [2, 0, 4]
    assert [workers for _, workers in seen] == [2] * 7 + [0] * 7 + [4] * 7
    orders = [[indices for indices, _ in seen[begin : begin + 7]] for begin in (0, 7, 14)]
    assert orders[0] == orders[1] == orders[2]
    assert orders[0] != sorted(orders[0])
    for workers, timing in timings.items():
        assert (timing.num_workers, timing.samples) == (workers, 24)
        assert timing.samples_per_second == timing.samples / timing.seconds > 0


def test_every_other_argument_is_kept_and_the_loader_stays_as_it_was() -> None:
    sizes: list[int] = []
    generator = torch.Generator().manual_seed(1)
    loader: Any = DataLoader(
        DATA,
        10,
        shuffle=True,
        num_workers=1,
        prefetch_factor=5,
        timeout=60,
        persistent_workers=True,
        collate_fn=lambda samples: {"given": samples},
        generator=generator,
    )
    before, state, own = torch.get_rng_state(), generator.get_state(), {**vars(loader)}
    timings = time_workers(loader, (0, 1), step=lambda batch: sizes.append(len(batch["given"])), batches=3)
    assert sizes == [10] * 10
    assert [timing.samples for timing in timings.values()] == [
        3,
        3,
    ]  # a dict's length is its number of entries: no better guess
    assert vars(loader) == own
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), state)


def test_a_sharded_loader_stays_at_its_epoch_and_place() -> None:
    loader = shard(DataLoader(DATA, 10, shuffle=True), seed=3)
    whole = [batch.tolist() for batch in shard(DataLoader(DATA, 10, shuffle=True), seed=3)]
    passing = iter(loader)
    next(passing)
    state = loader.state_dict()
    seen: list[Any] = []
    assert time_workers(loader, (0, 1), step=lambda batch: seen.append(batch.tolist()), warm_up=0)[1].samples == 100
    assert seen == whole * 2
    assert loader.state_dict() == state
    assert [batch.tolist() for batch in passing] == whole[1:]


def test_a_sampler_stays_at_its_epoch() -> None:
    sampler = ExactDistributedSampler(DATA, seed=3)
    seen: list[Any] = []
    for options in ({"batch_size": 50}, {"batch_size": None}):
        loader: Any = DataLoader(DATA, sampler=sampler, **options)
        time_workers(loader, (0, 1), step=lambda batch: seen.append(torch.as_tensor(batch).tolist()), warm_up=0)
    assert seen[:2] == seen[2:4]
    assert seen[4:104] == seen[104:] == [*seen[0], *seen[1]]
    assert sampler.state_dict() == {"seed": 3, "epoch": 0, "position": 0, "samples": 0, "num_replicas": 1}


def test_streams_loaders_without_batches_and_short_passes_are_counted() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(7))

    counts = [
        time_workers(loader, (0,), warm_up=warm_up)[0].samples
        for loader, warm_up in (
            (DataLoader(Stream(), 2), 1),
            (DataLoader(TensorDataset(torch.zeros(5, 3)), batch_size=None), 1),
            (DataLoader(DATA, 50), 2),
        )
    ]
    assert counts == [5, 4, 0]
    assert time_workers(DataLoader(DATA, 50), (0,))[0].samples_per_second == 0.0


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (DATA, {}, r"loader=\[0, 1, 2.*give a DataLoader, such as DataLoader\(dataset, batch_size=32\)"),
        (DataLoader(DATA), {"candidates": ()}, r"candidates=\(\): give at least one number of workers"),
        (DataLoader(DATA), {"candidates": (1, -1)}, "candidates=-1: must be a whole number, at least 0"),
        (DataLoader(DATA), {"warm_up": 1.5}, r"warm_up=1\.5: must be a whole number, at least 0"),
        (DataLoader(DATA), {"batches": 0}, "batches=0: must be a whole number, at least 1"),
    ],
)
def test_an_untimeable_argument_is_refused(loader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        time_workers(loader, **options)


# ------------------------------------------------------------------ preprocess
def is_shared(data: Preprocessed) -> bool:
    return bool(data.results["noise"].is_shared())


@pytest.mark.parametrize("processes", [0, 1, 2])
def test_results_are_in_order_for_any_pytree_and_any_processes(processes: int) -> None:
    def make(number: int) -> dict[str, Any]:
        pixels = torch.full((2, 3), float(number), requires_grad=True) * 2
        return {"both": (pixels, number), "array": [np.int16(number)], "noise": torch.rand(2), "more": np.random.rand()}

    seed_everything(5)
    state = torch.get_rng_state()
    made = preprocess(DATA, make, processes=processes)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(made) == 100
    item = made[17]
    assert item["both"][0].tolist() == [[34.0] * 3] * 2
    assert (item["both"][1].item(), item["array"][0].item(), item["array"][0].dtype) == (17, 17, torch.int16)
    assert made.results["both"][1].tolist() == DATA
    assert not item["both"][0].requires_grad
    assert is_shared(made)
    alone = preprocess(DATA, make, processes=0)
    for name in ("noise", "more"):  # random, and yet the same from any number of processes
        assert torch.equal(made.results[name], alone.results[name])
        assert len(made.results[name].unique()) >= 100


def test_no_more_processes_are_used_than_there_are_items() -> None:
    pids = preprocess(DATA, lambda _: os.getpid(), processes=2).results.tolist()
    assert pids[0] == os.getpid()  # it finds out what results are like
    assert len(set(pids[1:])) == 2
    assert os.getpid() not in pids[1:]
    assert len(set(preprocess(DATA[:2], lambda _: os.getpid(), processes=5).results.tolist())) == 2
    assert preprocess(DATA[:1], lambda _: os.getpid()).results.tolist() == [os.getpid()]


def test_a_file_can_be_opened_anywhere_and_pickles_as_its_name(tmp_path: Path) -> None:
    path = tmp_path / "made" / "numbers.pt"
    preprocess(DATA, lambda number: 0, processes=0, path=path)
    made = preprocess(DATA, lambda number: (torch.ones(1000) * number, number), processes=2, path=path)
    assert [file.name for file in path.parent.iterdir()] == ["numbers.pt"]
    assert len(pickle.dumps(made)) < 1000
    for data in (made, Preprocessed.open(path), pickle.loads(pickle.dumps(made))):
        assert data.path == path
        assert data[99][0].sum() == 99_000
        assert data.results[1].tolist() == DATA
    loader = shard(DataLoader(made, 8, num_workers=1))
    assert torch.cat([numbers for _, numbers in loader]).tolist() == DATA
    with pytest.raises(FileNotFoundError):
        Preprocessed.open(tmp_path / "nothing.pt")


def raising(number: int) -> torch.Tensor:
    if number in (37, 80):
        raise KeyError("no such picture")
    return torch.ones(3)


def stopping(number: int) -> torch.Tensor:
    if number == 37:
        raise StopIteration
    return torch.ones(3)


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raising, r"preprocess: index 37: .*no such picture"),
        (stopping, r"preprocess: index 37: "),
        (
            lambda n: torch.ones(4 if n == 37 else 3),
            r"index 37: (?s:.*)its result is \(4, torch.float32\), and",
        ),
        (lambda n: 0.5 if n == 37 else 1, r"index 37: (?s:.*)\(torch.float32,\), and that of index 0 \(torch.int64,\)"),
        (lambda n: (n, n) if n == 37 else n, r"index 37: (?s:.*)return the same structure"),
        (lambda n: "text", r"^preprocess: index 0: .*'str'"),
        (lambda n: [], r"^preprocess: index 0: its result is \[\]: give at least one tensor"),
        (lambda n: Pair(n, n), r"^preprocess: index 0: (?s:.*)Pair"),
    ],
)
def test_an_error_names_the_index_and_leaves_no_file(
    processes: int, function: Callable[[int], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=message):
        preprocess(DATA, function, processes=processes, path=tmp_path / "numbers.pt")
    assert [path.name for path in tmp_path.iterdir() if path.name != "state"] == []


def test_a_killed_process_is_reported() -> None:
    def kill_at_40(number: int) -> int:
        if number == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(RuntimeError, match=r"^DataLoader worker .* (exited unexpectedly|is killed by signal)"):
        preprocess(DATA, kill_at_40, processes=1)


def test_an_interrupt_while_processes_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start = BaseProcess.start

    def start_and_be_interrupted(process: BaseProcess) -> None:
        start(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(BaseProcess, "start", start_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        preprocess(DATA, lambda number: number, processes=2)
    assert torch.multiprocessing.active_children() == []
    assert caught.value.__traceback__ is not None


def test_an_interrupt_leaves_no_process_and_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "numbers.pt"
    preprocess(DATA, lambda number: number, processes=0, path=path)
    at_work, all_started = torch.multiprocessing.get_context("fork").Event(), threading.Event()

    def started(batches: Any, **options: Any) -> Any:
        all_started.set()
        return batches

    def wait(number: int) -> int:
        if number == 1:
            at_work.set()
            threading.Event().wait()
        return number

    def interrupt() -> None:
        at_work.wait()
        all_started.wait()
        _thread.interrupt_main()

    monkeypatch.setattr(preprocessing, "progress", started)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt) as caught:  # whose traceback is kept, as IPython keeps it
        preprocess(DATA, wait, processes=2, path=path)
    interrupter.join()
    assert torch.multiprocessing.active_children() == []
    assert caught.value.__traceback__ is not None
    assert Preprocessed.open(path).results.tolist() == DATA


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, r"dataset=\[\]: give a dataset with items by index, at least one"),
        (iter([1]), {}, "dataset=<list_iterator .*give a dataset with items by index"),
        (DATA, {"processes": -1}, "processes=-1: must be a whole number, at least 0"),
        (DATA, {"processes": 1.0}, "processes=1.0: must be a whole number"),
    ],
)
def test_an_invalid_preprocess_argument_is_refused(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        preprocess(data, lambda item: item, **options)
