"""`save_state` and `load_state` over real ranks: bit-equal resuming, another number of ranks, errors on every rank."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import LaunchResult, notebook_launcher
from nblaunch.errors import ArgumentError
from nblaunch.training import Accelerator
from tests.processes.trained import Augmented

pytestmark = pytest.mark.usefixtures("imported_ahead", "quiet")

SAMPLES, BATCH = 48, 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "states").mkdir()
    return tmp_path / "states"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.middle = nn.Linear(5, 7)
        self.last = nn.Linear(7, 2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.dropout(self.middle(self.first(inputs).tanh()).tanh()))
        return output


def train(
    start: int, batches: int, save: Path | None = None, save_at: int = 0, load: Path | None = None, **options: Any
) -> list[Tensor]:
    """Train for this many batches, from the beginning or from a saved state, and return what later steps depend on."""
    workers, prepares = options.pop("num_workers", 0), options.pop("prepares", 1)
    accelerator = Accelerator(compute_setup="cpu", seed=1, **options)
    torch.manual_seed(start + accelerator.rank)
    random.seed(start + accelerator.rank)
    np.random.seed(start + accelerator.rank)
    net = Net()
    inner = torch.optim.Adam(net.parameters(), lr=0.03)
    for _ in range(1, prepares):  # as a cell that is run again
        accelerator.prepare(net)
    model, optimizer, loader = accelerator.prepare(
        net, inner, DataLoader(Augmented(SAMPLES), BATCH, True, num_workers=workers)
    )
    done = 0
    if load is not None:
        accelerator.load_state(load)
        done = save_at
    while done < batches:
        for inputs, target in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), target))
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            if done == save_at and save is not None:
                accelerator.save_state(save)
            if done == batches:
                break
    return [*net.state_dict().values(), torch.rand(2), torch.tensor(random.random()), torch.tensor(np.random.rand())]


def launched(function: Callable[..., Any], ranks: int, *args: Any) -> LaunchResult:
    result = notebook_launcher(function, args, num_processes=ranks, device="cpu")
    assert isinstance(result, LaunchResult)
    return result


def equal(first: list[Tensor], second: list[Tensor], ranks: int) -> bool:
    """Compare what `train` returned: to the same bits, or from three ranks on the weights up to rounding.

    DDP sums the gradients of its first step in another order than those of later steps.
    """
    weights, drawn = [*zip(first[:-3], second[:-3], strict=True)], [*zip(first[-3:], second[-3:], strict=True)]
    tolerance = 0.0 if ranks < 3 else 1e-5
    is_same = all(torch.allclose(*pair, rtol=tolerance, atol=tolerance) for pair in weights)
    return is_same and all(torch.equal(*pair) for pair in drawn)


SETTINGS: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"mixed_precision": "fp16"}],
    3: [
        {"num_workers": 1},
        {"gradient_accumulation_steps": 3, "prepares": 2, "ddp_kwargs": {"gradient_as_bucket_view": True}},
    ],
}
"""By number of ranks."""


@pytest.mark.parametrize("ranks", SETTINGS)
def test_ranks_resume_to_the_same_weights(ranks: int, folder: Path) -> None:
    """In the first step, in the middle of a pass, and in the next one."""

    def both() -> list[Any]:
        wrong: list[Any] = []
        for number, options in enumerate(SETTINGS[ranks]):
            per_pass, every = SAMPLES // BATCH // ranks, options.get("gradient_accumulation_steps", 1)
            for save_at in (every, 2 * every, per_pass + every):
                path, batches = folder / f"{number}at{save_at}", per_pass + 8
                whole = train(5, batches, save=path, save_at=save_at, **options)
                resumed = train(11, batches, load=path, save_at=save_at, **options)
                if not equal(whole, resumed, ranks):
                    wrong.append((options, save_at))
        return wrong

    assert list(launched(both, ranks)) == [[]] * ranks


# ------------------------------------------------------------------ another number of ranks
def test_another_number_of_ranks_takes_what_is_left(folder: Path) -> None:
    """Each sample of an epoch comes once, on any rank."""

    def begin() -> tuple[Accelerator, Any, Any, Any]:
        accelerator = Accelerator(compute_setup="cpu", seed=1)
        torch.manual_seed(2)
        net = nn.Linear(1, 1, bias=False)
        data = DataLoader(TensorDataset(torch.arange(SAMPLES).float().reshape(-1, 1)), BATCH, shuffle=True)
        model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
        return accelerator, model, optimizer, loader

    def save(path: Path) -> tuple[list[float], Tensor]:
        accelerator, model, _, loader = begin()
        seen: list[float] = []
        torch.manual_seed(9 + accelerator.rank)
        for number, (inputs,) in enumerate(loader):
            accelerator.backward(model(inputs).mean())
            seen += inputs.flatten().tolist()
            if number == 2:
                accelerator.save_state(path)
                return seen, torch.rand(1)
        raise AssertionError("the loader is too short")

    def load(path: Path) -> tuple[list[float], Tensor]:
        accelerator, *kept, loader = begin()
        drawn = []
        for _again in range(2):
            accelerator.load_state(path)
            drawn.append(torch.rand(1))
        assert torch.equal(*drawn)
        assert kept
        return [value for (inputs,) in loader for value in inputs.flatten().tolist()], drawn[0]

    for before, after in ((2, 3), (3, 1)):
        path = folder / f"{before}to{after}"
        saved, loaded = list(launched(save, before, path)), list(launched(load, after, path))
        assert sorted(value for seen, _ in [*saved, *loaded] for value in seen) == list(range(SAMPLES))
        drawn = [float(value) for _, value in loaded]
        assert drawn[:before] == [float(value) for _, value in saved][:after]
        assert len(set(drawn)) == after


# ------------------------------------------------------------------ failures
def test_what_fails_on_one_rank_raises_on_all(folder: Path) -> None:
    def run(rank: int) -> list[str]:
        accelerator = Accelerator(compute_setup="cpu")
        net = accelerator.prepare(nn.Linear(200, 200))
        accelerator.save_state(folder / "saved")
        messages = []

        def expect(call: Callable[..., Any], *args: Any, **options: Any) -> None:
            with pytest.raises((ArgumentError, OSError, RuntimeError, KeyError)) as caught:
                call(*args, **options)
            messages.append(f"{type(caught.value).__name__}: {caught.value}")

        expect(accelerator.save_state, folder / ("a" if rank else "b"))
        expect(accelerator.load_state, folder / "none")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # as a full disk
        expect(accelerator.save_state, folder / "saved")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        extra = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1)) if rank == 1 else None
        expect(accelerator.save_state, folder / "saved")
        expect(accelerator.load_state, folder / "saved")
        assert extra is None or rank == 1
        return messages

    first, second = launched(run, 2)
    for messages in (first, second):
        assert messages[0].startswith("ArgumentError: output_dir differs between the ranks")
        assert re.match("ArgumentError: .*no such folder", messages[1])
        assert messages[3].startswith("ArgumentError: save_state: the ranks prepared or registered different objects")
    assert re.match("OSError: .*state.pt.* could not be written: is the disk full", first[2])
    assert second[2].startswith("OSError: rank 0: ")
    assert "has prepared 1 optimizer" in second[4]
    assert first[4].startswith("ArgumentError: rank 1: ")
    assert [os.listdir(folder), os.listdir(folder / "saved")] == [["saved"], ["state.pt"]]
