"""`save_state` and `load_state` in a single process: exact resuming, positions, errors, and writes that are killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nblaunch.errors import ArgumentError
from nblaunch.training import Accelerator, Prefetcher, skip_first_batches
from tests.processes.trained import Augmented

SAMPLES, BATCH = 20, 2
STEPS = SAMPLES // BATCH


pytestmark = pytest.mark.usefixtures("one_thread")


class Run:
    """A training run of one process; made again it is what a new process makes."""

    def __init__(self, start: int = 5, num_workers: int = 0, dataset: Any = None, **options: Any) -> None:
        torch.manual_seed(start)
        random.seed(start)
        np.random.seed(start)
        self.accelerator = Accelerator(compute_setup="cpu", **options)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        loader = DataLoader(dataset or Augmented(SAMPLES), BATCH, shuffle=dataset is None, num_workers=num_workers)
        valid = DataLoader(Augmented(SAMPLES), 5)
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
                    assert path is not None
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
    for save_at in (6, STEPS, STEPS + 3):
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
                active = skip_first_batches(run.loader, skipped)
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


def test_set_epoch_of_the_loaded_epoch_keeps_the_position(tmp_path: Path) -> None:
    whole = Run().epochs(2, STEPS + 3, tmp_path / "state").result()
    resumed = Run(start=11)
    resumed.accelerator.load_state(tmp_path / "state")
    resumed.loader.set_epoch(1)
    assert equal(whole, resumed.epochs(1, done=STEPS + 3).result())


def test_loading_twice_and_after_passes_is_the_same(tmp_path: Path) -> None:
    run = Run(gradient_accumulation_steps=3)
    whole = run.epochs(2, 6, tmp_path / "state").result()
    for trained in (0, 1, 7):
        for batch, _ in zip(run.loader, range(trained), strict=False):
            run.step(batch)
        run.accelerator.load_state(tmp_path / "state")
        run.accelerator.load_state(tmp_path / "state")
        assert equal(whole, run.epochs(2, done=6).result()), trained


def test_a_state_within_an_optimizer_step_is_refused(tmp_path: Path) -> None:
    run = Run(gradient_accumulation_steps=3)
    with pytest.raises(ArgumentError, match=r"an optimizer step is unfinished \(2 of 3 batches\).*sync_gradients is"):
        run.epochs(1, 5, tmp_path / "state")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("seed", [None, 3])
def test_a_peek_at_a_loaded_loader_takes_nothing(seed: int | None, tmp_path: Path) -> None:
    Run(seed=seed).epochs(1, 5, tmp_path / "state")
    resumed = Run(start=11, seed=seed)
    resumed.accelerator.load_state(tmp_path / "state")
    rest = [target.tolist() for _, target in resumed.loader]
    resumed.accelerator.load_state(tmp_path / "state")
    next(iter(resumed.loader))
    resumed.accelerator.save_state(tmp_path / "again")
    assert [target.tolist() for _, target in resumed.loader] == rest
    resumed.accelerator.load_state(tmp_path / "again")
    assert [target.tolist() for _, target in resumed.loader] == rest
    assert len(rest) == STEPS - 5


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("trains", [False, True])
def test_a_loop_that_was_left_continues_if_it_trained(trains: bool, seed: int | None, tmp_path: Path) -> None:
    run = Run(seed=seed)
    for batch in islice(run.loader, 4):
        if trains:
            run.step(batch)
    run.accelerator.save_state(tmp_path / "state")
    resumed = Run(seed=seed)
    resumed.accelerator.load_state(tmp_path / "state")
    assert len(list(resumed.loader)) == STEPS - 4 * trains
    assert len(list(resumed.valid)) == SAMPLES // 5


def test_batches_that_were_read_ahead_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def two_ahead(batches: Any, device: Any, depth: int) -> Iterator[Any]:
        waiting = [*islice(iterator := iter(batches), depth)]
        while waiting:
            waiting += islice(iterator, 1)
            yield waiting.pop(0)

    monkeypatch.setattr("nblaunch.training.loader.copied_ahead", two_ahead)  # as to a GPU
    accelerator = Accelerator(compute_setup="cpu", seed=3)
    loader: Any = accelerator.prepare(numbers())
    whole = [batch.tolist() for batch in loader]
    loader.load_state_dict({"epoch": 0, "batches": 0, "seed": 3})
    taken = []
    for batch in Prefetcher(loader, "cuda", depth=2):
        taken.append(batch.tolist())
        if len(taken) == 2:
            accelerator.save_state(tmp_path / "state")
            break
    accelerator.load_state(tmp_path / "state")
    reader = Prefetcher(loader, "cuda", depth=2)
    assert taken + [batch.tolist() for batch in skip_first_batches(reader, 2)] == whole


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
        loader.set_epoch(1)
        loader.set_epoch(0)
        assert [batch.tolist() for batch in skip_first_batches(loader, skipped)] == first[skipped:]
    assert loader.epoch == 1
    assert len(list(loader)) == 5


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("prefetches", [False, True])
def test_skipping_concerns_one_pass(seed: int | None, prefetches: bool) -> None:
    loader: Any = Accelerator(compute_setup="cpu", seed=seed).prepare(numbers(shuffle=False))
    loader = Prefetcher(loader, "cpu") if prefetches else loader
    for _ in range(2):
        assert next(iter(skip_first_batches(loader, 3))).tolist() == [6, 7]
        assert next(iter(loader)).tolist() == [0, 1]
    for _, _ in zip(range(3), loader, strict=False):
        pass  # a pass that is left at the batch where the next one begins
    assert [batch.tolist() for batch in skip_first_batches(loader, 3)] == [[6, 7], [8, 9]]
    assert len(list(loader)) == 5


def test_skipping_a_plain_loader_is_torchs_order() -> None:
    for loader in (numbers(), Prefetcher(numbers(), "cpu")):
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


# ------------------------------------------------------------------ the file
def test_plain_torch_reads_the_file_without_running_code(tmp_path: Path) -> None:
    run = Run(mixed_precision="fp16").epochs(1, 5, tmp_path / "state")
    saved = torch.load(tmp_path / "state" / "state.pt", weights_only=True)
    assert saved.keys() == {"kinds", "model", "optimizer", "scheduler", "object", "scaler", "ranks"}
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))
    model.load_state_dict(saved["model"][0])
    assert run.accelerator.get_state_dict(run.model).keys() == saved["model"][0].keys()


def test_the_folder_and_other_files_in_it_stay(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "latest"
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "notes.txt").touch()
    path.symlink_to("state")
    assert run.accelerator.save_state(path) == tmp_path / "state"
    assert sorted(os.listdir(tmp_path / "state")) == ["notes.txt", "state.pt"]
    run.accelerator.load_state(path)
    with pytest.raises(ArgumentError, match=r"output_dir='.*notes.txt': must be a folder, not a file"):
        run.accelerator.save_state(tmp_path / "state" / "notes.txt")


def _killed_at(step: int, run: Run, path: Path) -> bool:
    """Save in a fork that is killed before the given step of the write; return False if there is no such step."""
    child = os.fork()
    if child == 0:
        left = [step]
        for owner, name in ((torch, "save"), (os, "fsync"), (os, "replace")):
            real: Any = getattr(owner, name)

            def counted(*args: Any, real: Any = real, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            setattr(owner, name, counted)
        try:
            run.accelerator.save_state(path)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_kill_at_any_step_of_a_write_leaves_a_whole_state(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "states" / "latest"
    weight: Any = run.model[0].weight
    assert _killed_at(4, run, path)
    with pytest.raises(ArgumentError, match=r"input_dir='.*latest': the folder has no state\.pt"):
        run.accelerator.load_state(path)
    nn.init.constant_(weight, 1.0)
    run.accelerator.save_state(path)
    latest = [1.0]
    for step in range(100):
        nn.init.constant_(weight, 2.0)
        if not _killed_at(step, run, path):
            break
        run.accelerator.load_state(path)
        found = weight.unique().tolist()
        assert latest <= found <= [2.0], "an older state came back"
        latest = found
        nn.init.constant_(weight, 1.0)
        run.accelerator.save_state(path)
        assert os.listdir(path) == ["state.pt"]
    assert step > 4


# ------------------------------------------------------------------ what does not fit
def test_a_state_of_other_objects_is_refused(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "state"
    run.accelerator.save_state(path)

    def refused(*objects: Any, match: str, register: Any = None) -> None:
        accelerator = Accelerator(compute_setup="cpu")
        kept = accelerator.prepare(*objects)
        if register is not None:
            accelerator.register_for_checkpointing(register)
        with pytest.raises(ArgumentError, match=match):
            accelerator.load_state(path)
        assert kept is not None

    def model(width: int = 4, outputs: int = 2) -> nn.Module:
        return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(), nn.Linear(width, outputs))

    def parts(net: nn.Module, kind: Any = torch.optim.Adam, **options: Any) -> tuple[Any, ...]:
        optimizer = kind(net.parameters(), lr=0.1, **options)
        return net, optimizer, StepLR(optimizer, 1)

    refused(*parts(model(5)), match=r"state': the state does not.* has shape \[4, 3\] in the state and \[5, 3\]")
    refused(*parts(nn.Linear(3, 2)), match=r"this Linear: missing key weight; missing key bias; unexpected key 0")
    refused(*parts(model(), torch.optim.SGD), match=r"1 optimizer \(Adam\), but this process has prepared 1 .*\(SGD\)")
    refused(model(), match=r"state has 1 optimizer \(Adam\), but this process has prepared 0 opt")
    refused(*parts(model()), model(), match=r"has 1 model \(Sequential\), but this process has prepared 2 models")
    first, _, schedule = parts(model())
    refused(*parts(first)[:2], schedule, register=Counter(), match="the state has 0 objects.*registered 1 object")
    net = model()
    groups = torch.optim.Adam([{"params": [parameter]} for parameter in net.parameters()], lr=0.1)
    refused(
        net,
        groups,
        StepLR(groups, 1),
        match=r"groups of the saved optimizer have sizes \[6\].*\[1, 1, 1, 1, 1, 1\]",
    )


def test_nothing_changes_if_a_state_does_not_fit(tmp_path: Path) -> None:
    run = Run()
    run.accelerator.save_state(tmp_path / "state")
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    nn.init.constant_(run.model[0].weight, 7.0)
    with pytest.raises(ArgumentError, match=r"have sizes \[6\], those of this Adam have \[6, 1\]"):
        run.accelerator.load_state(tmp_path / "state")
    assert run.model[0].weight.unique().tolist() == [7.0]


def test_a_damaged_or_missing_state_is_refused(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "state"
    run.accelerator.save_state(path)
    (path / "state.pt").write_bytes(bytes(100))
    with pytest.raises(RuntimeError, match=r"state\.pt is damaged: load a state from another folder"):
        run.accelerator.load_state(path)
    torch.save({"epoch": 3}, path / "state.pt")
    with pytest.raises(ArgumentError, match=r"its state\.pt was not written by save_state"):
        run.accelerator.load_state(path)
    with pytest.raises(ArgumentError, match="no such folder"):
        run.accelerator.load_state(tmp_path / "none")


def test_other_weights_load_with_strict_false(tmp_path: Path) -> None:
    accelerator = Accelerator(compute_setup="cpu")
    small = accelerator.prepare(nn.Sequential(nn.Linear(2, 2)))
    accelerator.save_state(tmp_path / "state")
    other = Accelerator(compute_setup="cpu")
    large: Any = other.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(ArgumentError, match=r"missing key 1.weight; missing key 1.bias"):
        other.load_state(tmp_path / "state")
    other.load_state(tmp_path / "state", strict=False)
    assert torch.equal(large[0].weight, small[0].weight)


def test_a_changed_dataset_begins_the_pass_and_warns(tmp_path: Path) -> None:
    Run(seed=3).epochs(1, 5, tmp_path / "state")
    run = Run(seed=3)
    loader = run.accelerator.prepare(DataLoader(Augmented(SAMPLES), 2))
    other = Run(dataset=TensorDataset(torch.rand(6, 3), torch.ones(6).long()), seed=3)
    with pytest.warns(UserWarning, match="position of prepared loader 0 is not restored: its dataset had 20 samples"):
        other.accelerator.load_state(tmp_path / "state")
    assert len(list(other.loader)) == 3
    with pytest.warns(UserWarning, match="positions of 2 loaders, but 3 are prepared"):
        run.accelerator.load_state(tmp_path / "state")
    assert len(list(loader)) == STEPS


# ------------------------------------------------------------------ registered objects
class Counter:
    """An object with a state."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Odd:
    """A type that torch loads only by running code."""


def test_registered_objects_are_saved_in_order(tmp_path: Path) -> None:
    def registered(*objects: Any) -> Accelerator:
        accelerator = Accelerator(compute_setup="cpu")
        accelerator.register_for_checkpointing(*objects)
        accelerator.register_for_checkpointing(objects[0])
        return accelerator

    registered(Counter(3), Counter({"best": torch.ones(2)})).save_state(tmp_path / "state")
    first, second = Counter(), Counter()
    registered(first, second).load_state(tmp_path / "state")
    assert first.value == 3
    assert second.value["best"].tolist() == [1, 1]
    with pytest.raises(ArgumentError, match="objects: 5 has no state_dict and no load_state_dict"):
        registered(5)


def test_objects_that_need_code_are_a_warning_at_once(tmp_path: Path) -> None:
    accelerator, counter = Accelerator(compute_setup="cpu"), Counter(Odd())
    accelerator.register_for_checkpointing(counter)
    with pytest.warns(UserWarning, match=r"of the object holds .*Odd, which runs code.*weights_only"):
        accelerator.save_state(tmp_path / "state")
    with pytest.raises(ArgumentError, match=r"state.pt holds .*Odd.*If you trust the folder.*weights_only"):
        accelerator.load_state(tmp_path / "state")
    counter.value = None
    accelerator.load_state(tmp_path / "state", weights_only=False)
    assert isinstance(counter.value, Odd)


def test_objects_that_no_longer_exist_are_not_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(compute_setup="cpu")
    for _ in range(3):  # as a cell that is run again
        net = nn.Linear(1, 1)
        kept = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.save_state(tmp_path / "state")
    assert len(torch.load(tmp_path / "state" / "state.pt")["optimizer"]) == 1
    assert kept is not None
    del net, kept
    with pytest.raises(ArgumentError, match=r"prepared modules were garbage-collected: keep a reference"):
        accelerator.save_state(tmp_path / "state")
