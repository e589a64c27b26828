"""`save_state`, `load_state` and the Trainer with models that the ranks divide."""

from __future__ import annotations

import resource
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nblaunch.errors import ArgumentError
from nblaunch.training import Accelerator, Parallelism
from nblaunch.training.sharded_models import is_sharded
from nblaunch.training.sharded_states import full_state, load_sharded_state
from tests.processes.conftest import Launcher
from tests.processes.test_parallelism import TIED_PLAN, Model, loss_of, sentences

SHARDED = Parallelism()
LAYERS = Parallelism(tensor=2, plan=TIED_PLAN)
BATCHES = 5


class Dropping(nn.Module):
    """Its ranks must draw the same numbers in a tensor group, and go on with them after a resume."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = Model(seed, tied=True)
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.inner(tokens))
        return output


def plan_of(how: Parallelism | None) -> Parallelism | None:
    """Return how to divide a `Dropping`."""
    if how is None or how.plan is None:
        return how
    return Parallelism(shard=how.shard, tensor=how.tensor, plan={f"inner.{name}": at for name, at in how.plan.items()})


class Loop:
    """A training loop of a single model, with everything that a state holds."""

    def __init__(self, how: Parallelism | None, seed: int, drops: bool = True) -> None:
        self.accelerator = Accelerator(
            compute_setup="cpu", parallelism=plan_of(how), seed=5, schedule_steps="optimizer"
        )
        self.model = Dropping(seed)
        self.model.dropout.p = 0.2 if drops else 0.0
        torch.manual_seed(seed + self.accelerator.rank)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        parts = self.accelerator.world_size // self.accelerator.copies
        loader = DataLoader(sentences(24), 4 // parts, shuffle=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.scheduler, self.net, self.optimizer, self.loader = self.accelerator.prepare(
            scheduler, self.model, optimizer, loader
        )

    def step(self, batches: int) -> None:
        """Train on the next batches of this pass, and leave the pass."""
        for number, (inputs, target) in enumerate(self.loader, 1):
            self.accelerator.backward(loss_of(self.net(inputs), target))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            if number == batches:
                return

    def whole(self) -> list[Any]:
        """Return the state on rank 0."""
        weights = self.accelerator.get_state_dict(self.net)
        own = full_state(self.optimizer)
        assert self.accelerator.rank == 0 or weights == own == {}
        return [{name: value.clone() for name, value in weights.items()}, own, self.scheduler.state_dict()["last_epoch"]]


def saves(folder: Path, how: Parallelism | None, drops: bool = True) -> list[Any]:
    """Save within a pass, train on, and return the states at both times."""
    loop = Loop(how, 0, drops)
    for number, (inputs, target) in enumerate(loop.loader, 1):
        loop.accelerator.backward(loss_of(loop.net(inputs), target))
        loop.optimizer.step()
        loop.scheduler.step()
        loop.optimizer.zero_grad()
        if number == 2:
            loop.accelerator.save_state(folder)
            saved = loop.whole()
        if number == BATCHES:
            break
    return [saved, loop.whole(), torch.rand(1)]


def loads(folder: Path, how: Parallelism | None, drops: bool = True) -> list[Any]:
    loop = Loop(how, 3, drops)
    loop.step(1)  # its own state is to be forgotten
    loop.accelerator.load_state(folder)
    loaded = loop.whole()
    loop.step(BATCHES - 2)
    return [loaded, loop.whole(), torch.rand(1)]


def same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_equal_ranks_resume_to_the_same_bits(launch: Launcher, tmp_path: Path) -> None:
    """Within a pass, with dropout."""

    def both(how: Parallelism) -> list[Any]:
        folder = tmp_path / f"saved{how.tensor}"
        return [saves(folder, how), loads(folder, how)]

    for ranks, how in ((2, SHARDED), (4, LAYERS)):
        for (saved, ended, drawn), (loaded, resumed, again) in launch(partial(both, how), num_processes=ranks, device="cpu"):
            same([loaded, resumed, again], [saved, ended, drawn])
    assert not (tmp_path / "saved1" / "model.pt").exists()


@pytest.mark.parametrize("before", [2, 4])
def test_other_ranks_divide_what_was_saved(launch: Launcher, tmp_path: Path, before: int) -> None:
    """From shards, divided layers and whole models to each other, and to one process."""
    first: Any = SHARDED if before == 2 else LAYERS
    run = partial(saves, tmp_path / "saved", first, False)
    saved, ended, _ = launch(run, num_processes=before, device="cpu")[0]
    for ranks, how in ((1, None), (2, None), (2, LAYERS), (4, SHARDED)):
        run = partial(loads, tmp_path / "saved", how, False)
        loaded, resumed, _ = run() if ranks == 1 else launch(run, num_processes=ranks, device="cpu")[0]
        same(loaded, saved)
        same(resumed, ended, 1e-10)
