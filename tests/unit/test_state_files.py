"""`save_state` and `load_state` in a single process: exact resuming, positions, errors, and writes that are killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nblaunch.errors import ArgumentError
from nblaunch.training import Accelerator, Prefetcher, ShardedLoader, shard, skip_first_batches
from nblaunch.training.data.counted_loader import CountedLoader

SAMPLES, BATCH = 20, 2
STEPS = SAMPLES // BATCH


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise of all three generators to each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(3) + random.random() + np.random.rand()
        return torch.full((3,), float(index)) + noise, torch.tensor(index % 2)


class Run:
    """A training run of one process; made again it is what a new process makes."""

    def __init__(self, start: int = 5, num_workers: int = 0, dataset: Any = None, **options: Any) -> None:
        torch.manual_seed(start)
        random.seed(start)
        np.random.seed(start)
        self.accelerator = Accelerator(compute_setup="cpu", **options)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        loader = DataLoader(dataset or Augmented(), BATCH, shuffle=dataset is None, num_workers=num_workers)
        valid = DataLoader(Augmented(), 5)
        self.model, self.optimizer, self.schedule, self.loader, self.valid = self.accelerator.prepare(
            model, optimizer, StepLR(optimizer, 7, 0.5), loader, valid
        )

    def step(self, batch: Any) -> None:
        with self.accelerator.accumulate(self.model):
            inputs, target = batch
            loss = nn.functional.cross_entropy(self.model(inputs), target)
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def validate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            for number, (inputs, _) in enumerate(self.valid):
                self.model(inputs)
                if number == 1:
                    break  # as scripts do with a limit on validation batches
        self.model.train()

    def epochs(self, count: int, save_at: int = -1, path: Path | None = None, done: int = 0) -> Run:
        for _ in range(count):
            for batch in self.loader:
                self.step(batch)
                done += 1
                if done % 4 == 0:
                    self.validate()
                if done == save_at:
                    self.accelerator.save_state(path)
        return self

    def result(self) -> list[Tensor]:
        """Everything that a later step depends on."""
        state = [*self.model.state_dict().values(), torch.tensor(self.optimizer.param_groups[0]["lr"])]
        state += [value for part in self.optimizer.state_dict()["state"].values() for value in part.values()]
        return [*state, torch.rand(2), torch.tensor(random.random()), torch.tensor(np.random.rand())]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "workers": {"num_workers": 2},
    "seeded": {"seed": 3},
    "accumulating": {"gradient_accumulation_steps": 3},
    "fp16": {"mixed_precision": "fp16"},
    "bf16": {"mixed_precision": "bf16"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    options = SETTINGS[name]
    for save_at in (5, STEPS, STEPS + 4):
        path = tmp_path / f"at{save_at}"
        whole = Run(**options).epochs(2, save_at, path).result()
        resumed = Run(start=11, **options)
        resumed.accelerator.load_state(path)
        assert equal(whole, resumed.epochs(2 - save_at // STEPS, done=save_at).result()), save_at


# ------------------------------------------------------------------ how scripts resume
@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["plain", "seeded"])
def test_a_loop_that_also_skips_batches_skips_them_once(options: dict[str, Any], tmp_path: Path) -> None:
    """As accelerate's scripts do, with a step count in the folder's name."""

    def script(resume: int | None) -> list[Tensor]:
        run = Run(start=5 if resume is None else 11, **options)
        overall, first_epoch, skipped = 0, 0, None
        if resume is not None:
            run.accelerator.load_state(tmp_path / f"step_{resume}")
            first_epoch, skipped = divmod(resume, len(run.loader))
            overall = first_epoch * len(run.loader)
        for epoch in range(first_epoch, 3):
            active = run.loader
            if skipped is not None and epoch == first_epoch:
                active = run.accelerator.skip_first_batches(run.loader, skipped)
                overall += skipped
            for batch in active:
                run.step(batch)
                overall += 1
                if overall % 4 == 0:
                    run.validate()
                if overall % 5 == 0 and resume is None:
                    run.accelerator.save_state(tmp_path / f"step_{overall}")
        assert overall == 3 * STEPS
        return run.result()

    whole = script(None)
    for resume in (5, STEPS, STEPS + 5, 3 * STEPS - 5):
        assert equal(whole, script(resume)), resume


@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["plain", "seeded"])
def test_set_epoch_of_the_loaded_epoch_keeps_the_position(options: dict[str, Any], tmp_path: Path) -> None:
    whole = Run(**options).epochs(2, STEPS + 3, tmp_path / "state").result()
    resumed = Run(start=11, **options)
    resumed.accelerator.load_state(tmp_path / "state")
    resumed.loader.set_epoch(1)
    assert equal(whole, resumed.epochs(1, done=STEPS + 3).result())


def test_loading_twice_and_after_passes_is_the_same(tmp_path: Path) -> None:
    run = Run(gradient_accumulation_steps=3)
    whole = run.epochs(2, 5, tmp_path / "state").result()
    for trained in (0, 1, 7):
        for batch, _ in zip(run.loader, range(trained), strict=False):
            run.step(batch)
        run.accelerator.load_state(tmp_path / "state")
        run.accelerator.load_state(tmp_path / "state")
        assert equal(whole, run.epochs(2, done=5).result()), trained


def test_a_loaded_state_that_is_saved_again_is_the_same(tmp_path: Path) -> None:
    whole = Run().epochs(2, 5, tmp_path / "one").result()
    middle = Run(start=11)
    middle.accelerator.load_state(tmp_path / "one")
    middle.accelerator.save_state(tmp_path / "two")
    resumed = Run(start=12)
    resumed.accelerator.load_state(tmp_path / "two")
    assert equal(whole, resumed.epochs(2, done=5).result())


def test_a_peek_at_a_loaded_loader_takes_nothing(tmp_path: Path) -> None:
    whole = Run(seed=3).epochs(2, 5, tmp_path / "state").result()
    resumed = Run(start=11, seed=3)
    resumed.accelerator.load_state(tmp_path / "state")
    next(iter(resumed.loader))
    resumed.accelerator.load_state(tmp_path / "state")
    next(iter(resumed.loader))
    assert equal(whole, resumed.epochs(2, done=5).result())


def test_a_loop_that_was_left_continues_where_it_was(tmp_path: Path) -> None:
    for options in ({}, {"seed": 3}):
        run = Run(**options)
        for number, batch in enumerate(run.loader):
            run.step(batch)
            if number == 3:
                break
        run.accelerator.save_state(tmp_path / "state")
        resumed = Run(**options)
        resumed.accelerator.load_state(tmp_path / "state")
        assert len(list(resumed.loader)) == STEPS - 4
        assert len(list(resumed.valid)) == SAMPLES // 5


def test_a_broken_off_pass_without_training_begins_again(tmp_path: Path) -> None:
    for options in ({}, {"seed": 3}):
        run = Run(**options)
        for number, _ in enumerate(run.loader):
            if number == 3:
                break
        run.accelerator.save_state(tmp_path / "state")
        run.accelerator.load_state(tmp_path / "state")
        assert len(list(run.loader)) == STEPS


# ------------------------------------------------------------------ skip_first_batches
class Numbers(Dataset[int]):
    """Notes which samples were loaded."""

    loaded: ClassVar[list[int]] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


def numbers(shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), 2, shuffle=shuffle, **options)


def test_skipping_counts_from_the_beginning_of_the_pass() -> None:
    loader: Any = Accelerator(compute_setup="cpu", seed=3).prepare(numbers())
    first = [batch.tolist() for batch in loader]
    loader.load_state_dict({"epoch": 0, "batches": 2, "seed": 3})
    for skipped in (2, 0, 4, 5, 9):
        view = skip_first_batches(loader, skipped)
        loader.set_epoch(1)
        loader.set_epoch(0)
        assert [batch.tolist() for batch in view] == first[skipped:]
        assert (len(view), view.dataset is loader.dataset) == (max(0, 5 - skipped), True)
    assert loader.epoch == 1
    assert len(list(loader)) == 5


def test_skipping_a_plain_loader_is_torchs_order() -> None:
    for loader in (numbers(), Accelerator(compute_setup="cpu").prepare(numbers()), Prefetcher(numbers(), "cpu")):
        torch.manual_seed(1)
        whole = [batch.tolist() for batch in loader]
        torch.manual_seed(1)
        assert [batch.tolist() for batch in skip_first_batches(loader, 3)] == whole[3:]
        assert len(list(loader)) == 5
    with pytest.raises(ArgumentError, match="num_batches=-1"):
        skip_first_batches(numbers(), -1)


@pytest.mark.parametrize("seed", [None, 3])
def test_what_is_skipped_is_not_loaded(seed: int | None) -> None:
    loader = Accelerator(compute_setup="cpu", seed=seed).prepare(numbers(shuffle=False))
    Numbers.loaded.clear()
    assert len(list(skip_first_batches(loader, 3))) == 2
    assert Numbers.loaded == [6, 7, 8, 9]


# ------------------------------------------------------------------ a counted loader
def test_a_counted_loader_draws_what_torchs_draws() -> None:
    def passes(loaders: tuple[Any, Any]) -> list[Any]:
        torch.manual_seed(1)
        drawn: list[Any] = [(a.tolist(), b.tolist(), torch.rand(1)) for a, b in zip(*loaders, strict=True)]
        return [*drawn, [batch.tolist() for batch in loaders[0]], torch.rand(1)]

    prepare = Accelerator(compute_setup="cpu").prepare
    assert passes((numbers(), numbers())) == passes(prepare(numbers(), numbers()))


def test_a_counted_loader_resumes_with_generators_of_its_own() -> None:
    def loader(seed: int) -> Any:
        given = numbers(generator=torch.Generator().manual_seed(seed))
        return Accelerator(compute_setup="cpu").prepare(given)

    first = loader(1)
    list(first)
    passing = iter(first)
    next(passing), next(passing)
    state = first.state_dict()
    rest = [[batch.tolist() for batch in passing], [batch.tolist() for batch in first]]
    second = loader(2)
    second.load_state_dict(state)
    assert [[batch.tolist() for batch in second], [batch.tolist() for batch in second]] == rest
    assert state["epoch"] == 1
    assert second.epoch == 3


def test_a_stream_resumes_in_a_single_process() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    loader: Any = Accelerator(compute_setup="cpu").prepare(DataLoader(Stream(), 2))
    passing = iter(loader)
    next(passing), next(passing)
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7], [8, 9]]
    assert len(list(loader)) == 5


def test_a_counted_loader_is_sharded_like_the_one_it_was_made_of() -> None:
    counted: Any = Accelerator(compute_setup="cpu").prepare(numbers())
    assert [batch.tolist() for batch in shard(counted)] == [batch.tolist() for batch in shard(numbers())]
    assert isinstance(Accelerator(compute_setup="cpu", seed=1).prepare(counted), ShardedLoader)
    assert isinstance(counted, CountedLoader)
