"""`save_state` and `load_state` over real ranks: bit-equal resuming, another number of ranks, errors on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nblaunch import LaunchResult, notebook_launcher
from nblaunch.training import Accelerator

SAMPLES, BATCH = 48, 2


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_VIEW", "none")


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise of all three generators to each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(3) + random.random() + np.random.rand()
        return torch.full((3,), float(index)) + noise, torch.tensor(index % 2)


class Net(nn.Module):
    """Uses its layers in another order than it has them, so that DDP regroups the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(7, 2)
        self.middle = nn.Linear(5, 7)
        self.first = nn.Linear(3, 5)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.dropout(self.middle(self.first(inputs).tanh()).tanh()))
        return output


def train(
    start: int, batches: int, save: Path | None = None, save_at: int = 0, load: Path | None = None, **options: Any
) -> list[Tensor]:
    """Train for this many batches, from the beginning or from a saved state, and return what later steps depend on."""
    workers = options.pop("num_workers", 0)
    accelerator = Accelerator(compute_setup="cpu", seed=1, **options)
    torch.manual_seed(start + accelerator.rank)
    random.seed(start + accelerator.rank)
    np.random.seed(start + accelerator.rank)
    net = Net()
    inner = torch.optim.Adam(net.parameters(), lr=0.03)
    model, optimizer, loader = accelerator.prepare(
        net, inner, DataLoader(Augmented(), BATCH, True, num_workers=workers)
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


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"gradient_accumulation_steps": 3}, {"mixed_precision": "fp16"}],
    ids=["plain", "workers", "accumulating", "fp16"],
)
def test_ranks_resume_to_the_same_bits(ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    per_pass = SAMPLES // BATCH // ranks
    for save_at in (5, per_pass + 4):
        path = tmp_path / f"at{save_at}"

        def both(path: Path = path, save_at: int = save_at) -> tuple[list[Tensor], list[Tensor]]:
            batches = per_pass + 8
            whole = train(5, batches, save=path, save_at=save_at, **options)
            return whole, train(11, batches, load=path, save_at=save_at, **options)

        for whole, resumed in launched(both, ranks):
            assert equal(whole, resumed), save_at
