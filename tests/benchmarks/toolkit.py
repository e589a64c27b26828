"""The training toolkit beside accelerate and plain DDP: `prepare`, whole states, and the steps of a small loop.

All of it in the two ranks of one launch, in turn and in both orders, so that a slow minute hits all of them. The
median of the ratios of pairs counts. A rank's figures are those of rank 0, between barriers.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from nblaunch import notebook_launcher
from nblaunch.training import Accelerator, TrainConfig, Trainer

RANKS = 2
BATCH = 32
OURS, TRAINER, THEIRS, PLAIN = "nblaunch.Accelerator", "nblaunch.training.Trainer", "accelerate.Accelerator", "DDP"
Seconds = dict[str, dict[str, list[float]]]
"""Of each round, by what was measured and whose it is."""


@dataclass(frozen=True)
class Figures:
    """What came of it."""

    seconds: Seconds
    megabytes: int
    """Of the model whose state was saved."""
    steps: int

    def as_json(self) -> dict[str, Any]:
        """Every measurement."""
        return asdict(self)


def measure(rounds: int, megabytes: int, steps: int) -> Figures:
    """Measure everything this often.

    Args:
        rounds: How often.
        megabytes: Of the model whose state is saved.
        steps: Of a loop.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (rounds, megabytes, steps, Path(folder))
        results: Any = notebook_launcher(_measure, arguments, num_processes=RANKS, device="cpu", view="none")
    return Figures(results[0], megabytes, steps)


def _measure(rounds: int, megabytes: int, steps: int, folder: Path) -> Seconds:
    from accelerate import Accelerator as Theirs

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of both: what differs is told elsewhere
    made: dict[str, Callable[[], Any]] = {
        OURS: lambda: Accelerator(compute_setup="cpu"),
        THEIRS: lambda: Theirs(cpu=True),
    }
    seconds: Seconds = {
        "prepare": {OURS: [], THEIRS: []},
        "save_state": {OURS: [], THEIRS: []},
        "load_state": {OURS: [], THEIRS: []},
        "a step": {PLAIN: [], OURS: [], TRAINER: [], THEIRS: []},
    }
    loops = {PLAIN: _plain, TRAINER: _trained, **{name: _accelerated(make) for name, make in made.items()}}
    for number in range(-1, rounds):  # the first pays for what is made once
        found: dict[tuple[str, str], float] = {}
        for name in list(made)[:: 1 if number % 2 else -1]:
            found["prepare", name] = _prepare(made[name]())
            found["save_state", name], found["load_state", name] = _states(made[name](), megabytes, folder)
        for name in list(seconds["a step"])[:: 1 if number % 2 else -1]:
            found["a step", name] = loops[name](steps)
        for (what, name), value in found.items():
            if number >= 0:
                seconds[what][name].append(value)
    return seconds


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def _data(steps: int) -> TensorDataset:
    count = steps * BATCH * RANKS
    return TensorDataset(torch.rand(count, 64), torch.randint(10, (count,)))


def _timed(work: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def _prepare(accelerator: Any) -> float:
    net = _net()
    loader = DataLoader(_data(8), BATCH, shuffle=True)
    return _timed(lambda: accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader))


def _states(accelerator: Any, megabytes: int, folder: Path) -> tuple[float, float]:
    """Save and load a model, and AdamW's two moments of each weight."""
    net = nn.Linear(1 << 10, megabytes << 8, bias=False)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(model(torch.ones(1, 1 << 10)).sum())
    optimizer.step()
    saved = _timed(lambda: accelerator.save_state(str(folder / "state")))
    loaded = _timed(lambda: accelerator.load_state(str(folder / "state")))
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "state")
    dist.barrier()
    return saved, loaded


# ------------------------------------------------------------------ the same loop by each: the median of its steps
def _median(ends: list[float]) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def _plain(steps: int) -> float:
    data, net = _data(steps), _net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters())
    ends = []
    for inputs, targets in DataLoader(data, BATCH, sampler=DistributedSampler(data)):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return _median(ends)


def _accelerated(make: Callable[[], Any]) -> Callable[[int], float]:
    def loop(steps: int) -> float:
        accelerator, net = make(), _net()
        loader = DataLoader(_data(steps), BATCH, shuffle=True)
        model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
        ends = []
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
        return _median(ends)

    return loop


class _Ends:
    """A callback that notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, trainer: Trainer, loss: Tensor) -> None:
        self.ends.append(time.perf_counter())


def _trained(steps: int) -> float:
    """With what it does besides: it reports the loss and the progress, as its defaults say."""
    net, noted = _net(), _Ends()
    config = TrainConfig(nprocs=RANKS, epochs=1, batch_size=BATCH, compute_setup="cpu")
    optimizer = torch.optim.AdamW(net.parameters())
    trainer = Trainer(net, optimizer, config, loss_fn=nn.functional.cross_entropy, callbacks=[noted])
    trainer.fit(_data(steps))
    return _median(noted.ends)


# ------------------------------------------------------------------ what came of it
def table(figures: Figures) -> str:
    """The figures as Markdown tables."""
    names = {
        "prepare": "prepare: a model, an optimizer and a loader",
        "save_state": f"save_state: a model of {figures.megabytes} MB, with AdamW",
        "load_state": "load_state: the same",
        "a step": f"a step of a small loop, medians of {figures.steps}",
    }
    rounds = len(figures.seconds["prepare"][OURS])
    rows = [
        f"| {RANKS} ranks of 1 thread, medians of {rounds} | ms | to accelerate, median of pairs |",
        "|---|---|---|",
    ]
    for what, by_name in figures.seconds.items():
        for name, values in by_name.items():
            ratio = statistics.median(own / other for own, other in zip(values, by_name[THEIRS], strict=True))
            rows.append(f"| {names[what]}: {name} | {statistics.median(values) * 1e3:.3f} | {ratio:.3f} |")
    return "\n".join(rows)
