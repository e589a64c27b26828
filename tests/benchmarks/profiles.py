"""What a profile costs: the rate of a DistributedDataParallel loop on 2 ranks before, during and after it.

A step is recorded at its end in each rank, by the clock of the machine. The rate while recorded is that of the profile
itself.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nblaunch import Launch, notebook_launcher
from tests.conftest import eventually

BATCH = 64


@dataclass(frozen=True)
class Profiled:
    """Steps per second, and the seconds until `Launch.profile` returned."""

    before: float
    recorded: float
    read: float
    after: float
    answered: float


@dataclass(frozen=True)
class Figures:
    seconds: float
    by_width: dict[int, list[Profiled]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def train(rank: int, width: int, folder: Path) -> list[float]:
    """Take steps until the file "enough" is there. Return the time at the end of each."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    x, ends, is_over = torch.randn(BATCH, width), [time.time()], torch.zeros(1)
    while not is_over:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        ends.append(time.time())
        if len(ends) % 20 == 0:
            (folder / str(rank)).touch()
            is_over[0] = (folder / "enough").exists()
            dist.all_reduce(is_over)
    return ends


def measure(seconds: float, rounds: int, pause: float = 3.0, widths: tuple[int, ...] = (64, 512, 1024)) -> Figures:
    """Profile loops of models of these widths for so many seconds, with a pause before and after each profile."""
    by_width: dict[int, list[Profiled]] = {width: [] for width in widths}
    for width in [width for _ in range(rounds) for width in widths]:
        with tempfile.TemporaryDirectory() as folder:
            by_width[width].append(_profiled(width, seconds, pause, Path(folder)))
    return Figures(seconds, by_width)


def _profiled(width: int, seconds: float, pause: float, folder: Path) -> Profiled:
    kwargs = {"width": width, "folder": folder}
    begun = notebook_launcher(train, kwargs=kwargs, num_processes=2, device="cpu", block=False, view="none")
    launch = cast("Launch", begun)
    eventually(lambda: len(list(folder.iterdir())) == 2)
    time.sleep(1.5 * pause)
    asked = time.time()
    profile = launch.profile(seconds)
    answered = time.time()
    time.sleep(pause)
    (folder / "enough").touch()
    ends = launch.result()[0]

    def rate(begin: float, end: float) -> float:
        return sum(begin <= moment < end for moment in ends) / (end - begin)

    recorded = asked + profile.ranks[0].seconds
    return Profiled(
        rate(asked - pause, asked),
        profile.ranks[0].steps_per_second,
        rate(min(recorded, answered - 0.1), answered),
        rate(answered, answered + pause),
        answered - asked,
    )


def table(figures: Figures) -> str:
    """Return the medians as a Markdown table, with the ratio to the rate before."""
    rounds = len(next(iter(figures.by_width.values())))
    lines = [
        f"| median of {rounds}, steps per second | before | while recorded | while traces are read | after | answer |",
        "|---|---|---|---|---|---|",
    ]
    for width, found in figures.by_width.items():
        before, recorded, read, after, answered = (
            statistics.median(getattr(each, name) for each in found)
            for name in ("before", "recorded", "read", "after", "answered")
        )
        rates = " | ".join(f"{each:.1f} ({each / before:.2f})" for each in (before, recorded, read, after))
        lines.append(f"| 2 layers of {width} | {rates} | {answered:.1f} s |")
    return "\n".join([*lines, "", f"In brackets: the ratio to the rate before. Asked for {figures.seconds:g} s."])
