"""`save_state` and `load_state` in a single process: exact resuming, positions, errors, and writes that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from nblaunch.errors import ArgumentError
from nblaunch.training import Accelerator, Prefetcher, ShardedLoader, shard, skip_first_batches
from nblaunch.training.data.counted_loader import CountedLoader
from nblaunch.training.state_folder import MANIFEST

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


SETTINGS = {
    "plain": {},
    "workers": {"num_workers": 2},
    "seeded": {"seed": 3},
    "accumulating": {"gradient_accumulation_steps": 3},
    "fp16": {"mixed_precision": "fp16"},
    "bf16": {"mixed_precision": "bf16"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = SETTINGS[name]
    for save_at in (5, STEPS, STEPS + 4):
        path = tmp_path / f"at{save_at}"
        whole = Run(**options).epochs(2, save_at, path).result()
        resumed = Run(start=11, **options)
        resumed.accelerator.load_state(path)
        assert equal(whole, resumed.epochs(2 - save_at // STEPS, done=save_at).result()), save_at
