"""Training side by side: the same DistributedDataParallel loop over three launchers, and what exact figures cost.

* `loops`: samples per second of four models on 2 ranks with as many threads each, under nblaunch and accelerate (each
  from a real kernel of its own) and torchrun (a script). Each rank is pinned to a core of its own.
* `evaluations`: `nblaunch.training.evaluate` against a padded DistributedSampler with a gather for each batch.
* `reductions`: `Accelerator.all_reduce_dict` against one ``all_reduce`` for each key; the collectives of both are
  counted by torch's profiler.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from nblaunch import notebook_launcher
from nblaunch.training import Accelerator, evaluate
from tests.kernel.harness import running_kernel

RANKS = 2
THREADS = 1
"""Of each rank."""
LIMIT = 300.0
"""Seconds for a script."""
EVALUATION_RANKS = 3
EVALUATED = 10_000
KEYS = 8

_LOOP = """
import json, os, resource, time
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

_digits = load_digits()
images = torch.tensor(_digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(_digits.target)
data = TensorDataset(images, labels)

def made(name):
    if name == "small conv":
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
        ), images, labels, 32
    if name == "BasicNet":  # of PyTorch's MNIST example
        return nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
            nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
        ), nn.functional.interpolate(images, (28, 28)), labels, 64
    if name == "MLP":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10),
        ), images, labels, 256
    assert name == "transformer"
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return nn.Sequential(
        nn.Flatten(2), nn.Linear(64, 64 * 32), nn.Flatten(1), nn.Unflatten(1, (32, 64)),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(2048, 10),
    ), images, labels, 64

def train(name, epochs, threads, path):
    torch.set_num_threads(threads)
    makes_its_own = not dist.is_initialized()  # with nblaunch the group is ready
    if makes_its_own:
        dist.init_process_group("gloo")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[dist.get_rank() % len(before)]})
    torch.manual_seed(0)
    net, inputs, targets, size = made(name)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = TensorDataset(inputs, targets)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=size, sampler=sampler)

    def one_epoch(epoch):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        return loss.item()

    one_epoch(0)  # the first pays for what is made once
    dist.barrier()
    first = resource.getrusage(resource.RUSAGE_SELF)
    begin = time.perf_counter()
    for epoch in range(1, epochs + 1):
        loss = one_epoch(epoch)
    dist.barrier()
    seconds = time.perf_counter() - begin
    last = resource.getrusage(resource.RUSAGE_SELF)
    if dist.get_rank() == 0:
        samples = epochs * len(sampler)
        used = last.ru_utime + last.ru_stime - first.ru_utime - first.ru_stime
        found = {
            "rate": samples * dist.get_world_size() / seconds, "loss": loss, "threads": torch.get_num_threads(),
            "cpu": used / samples * 1e3, "faults": (last.ru_minflt - first.ru_minflt) / (epochs * len(loader)),
        }
        with open(path, "w") as file:
            json.dump(found, file)
    if makes_its_own:
        dist.destroy_process_group()
"""
_NBLAUNCH = f"""
%load_ext nblaunch
from nblaunch import notebook_launcher

def launch(*arguments):
    notebook_launcher(train, args=arguments, num_processes={RANKS}, device="cpu", view="none")
"""
_ACCELERATE = f"""
import contextlib, io
from accelerate import notebook_launcher

def launch(*arguments):
    with contextlib.redirect_stdout(io.StringIO()):
        notebook_launcher(train, args=arguments, num_processes={RANKS}, use_port="29513")
"""
_SCRIPT = f"""{_LOOP}
if __name__ == "__main__":
    import sys
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""
Launch = Callable[[str, int, str], None]
"""Trains a model for so many epochs, and leaves what came of it in a file."""
EPOCHS = {"BasicNet": 2, "small conv": 12, "MLP": 6, "transformer": 2}
"""Of each model: a second or two under each launcher."""


@dataclass(frozen=True)
class Trained:
    """One launch."""

    rate: float
    """Samples per second, within the loop."""
    seconds: float
    """From the call to the result."""
    loss: float
    """Of rank 0's last batch: the same under each launcher, as the program is the same."""
    threads: int
    cpu: float
    """CPU time of rank 0 within the loop, in ms a sample."""
    faults: float
    """Page faults of rank 0 within the loop, a step."""


@dataclass(frozen=True)
class Evaluated:
    """One way to evaluate."""

    name: str
    samples: int
    """That it says it has counted."""
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class Reduced:
    """One way to reduce a dictionary."""

    name: str
    collectives: int
    seconds: float
    """Of one dictionary: the median."""


# ------------------------------------------------------------------ the same loop under each launcher
def loops(rounds: int, quick: bool = False) -> dict[str, dict[str, list[Trained]]]:
    """Each model's runs by launcher: in turn, in both orders, so that a slow minute hits all of them.

    A first launch of each does not count.
    """
    found: dict[str, dict[str, list[Trained]]] = {}
    with _launchers() as (launchers, folder):
        if rounds > 1:
            for launch in launchers.values():
                launch("small conv", 1, f"{folder}/first.json")
        for model, epochs in EPOCHS.items():
            trained = found[model] = {name: [] for name in launchers}
            for number in range(rounds):
                for name in list(launchers) if number % 2 == 0 else list(launchers)[::-1]:
                    trained[name].append(_timed(launchers[name], model, 1 if quick else epochs, f"{folder}/run.json"))
    return found


def _timed(launch: Launch, model: str, epochs: int, path: str) -> Trained:
    begin = time.perf_counter()
    launch(model, epochs, path)
    seconds = time.perf_counter() - begin
    trained = Trained(seconds=seconds, **json.loads(Path(path).read_text()))
    Path(path).unlink()
    return trained


@contextlib.contextmanager
def _launchers() -> Iterator[tuple[dict[str, Launch], str]]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        env = {"TMPDIR": folder, "OMP_NUM_THREADS": str(THREADS)}
        yield (
            {
                "nblaunch": _in_kernel(stack, _NBLAUNCH, env),
                "torchrun": _by_torchrun(folder, env),
                "accelerate (fork)": _in_kernel(stack, _ACCELERATE, env),
            },
            folder,
        )


def _in_kernel(stack: contextlib.ExitStack, setup: str, env: dict[str, str]) -> Launch:
    kernel = stack.enter_context(running_kernel(**env))
    kernel.run(_LOOP + setup).check()

    def launch(model: str, epochs: int, path: str) -> None:
        kernel.run(f"launch({model!r}, {epochs}, {THREADS}, {path!r})").check()

    return launch


def _by_torchrun(folder: str, env: dict[str, str]) -> Launch:
    script = Path(folder, "train.py")
    script.write_text(_SCRIPT)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(script))

    def launch(model: str, epochs: int, path: str) -> None:
        command = [*torchrun, model, str(epochs), str(THREADS), path]
        environ = {**os.environ, **env}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=LIMIT)
        assert done.returncode == 0, done.stderr

    return launch


# ------------------------------------------------------------------ exact evaluation against padded
def evaluations(rounds: int) -> list[Evaluated]:
    """Both ways over the same ranks, in turn; the least time of each, as a rank of three shares two cores."""
    results: Any = notebook_launcher(
        _evaluate, args=(rounds,), num_processes=EVALUATION_RANKS, device="cpu", view="none"
    )
    found: list[Evaluated] = results[0]
    return found


def _evaluate(rounds: int) -> list[Evaluated]:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    inputs = torch.rand(EVALUATED, 1, 8, 8)
    data = TensorDataset(inputs, torch.randint(10, (EVALUATED,)))
    ways = {"nblaunch.training.evaluate": _exactly, "DistributedSampler, gather": _padded}
    best: dict[str, Evaluated] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            samples, accuracy = way(model, data)
            evaluated = Evaluated(name, samples, accuracy, time.perf_counter() - begin)
            best[name] = min(best.get(name, evaluated), evaluated, key=lambda each: each.seconds)
    return list(best.values())


class _Right:
    """The metric that `evaluate` is given: as its own accuracy, and it says how many samples it has counted."""

    def __init__(self) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64)

    def update(self, output: Tensor, target: Tensor) -> None:
        self.counts += torch.tensor([int((output.argmax(1) == target).sum()), len(target)])

    def compute(self) -> float:
        dist.all_reduce(self.counts)
        return int(self.counts[0]) / int(self.counts[1])

    def reset(self) -> None:
        self.counts.zero_()


def _exactly(model: nn.Module, data: TensorDataset) -> tuple[int, float]:
    right = _Right()
    figures = evaluate(model, DataLoader(data, batch_size=100), metrics={"accuracy": right})
    return int(right.counts[1]), figures["accuracy"]


def _padded(model: nn.Module, data: TensorDataset) -> tuple[int, float]:
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=False)
    right = samples = 0
    with torch.no_grad():
        for inputs, targets in DataLoader(data, batch_size=100, sampler=sampler):
            hits = (model(inputs).argmax(1) == targets).to(torch.int64)
            gathered = [torch.empty_like(hits) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, hits)
            right += sum(int(part.sum()) for part in gathered)
            samples += sum(len(part) for part in gathered)
    return samples, right / samples


# ------------------------------------------------------------------ one collective against one for each key
def reductions(calls: int) -> list[Reduced]:
    """Means of `KEYS` floats over 2 ranks, in turn."""
    results: Any = notebook_launcher(_reduce, args=(calls,), num_processes=RANKS, device="cpu", view="none")
    found: list[Reduced] = results[0]
    return found


def _reduce(calls: int) -> list[Reduced]:
    torch.set_num_threads(THREADS)
    accelerator = Accelerator()
    values = {f"metric {number}": 1.5 * number + dist.get_rank() for number in range(KEYS)}
    ways: dict[str, Callable[[dict[str, float]], dict[Any, Any]]] = {
        "Accelerator.all_reduce_dict": accelerator.all_reduce_dict,
        "all_reduce of each key": _each_key,
    }
    collectives = {name: _collectives_of(functools.partial(way, values)) for name, way in ways.items()}
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(calls):
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            reduced = way(values)
            took[name].append(time.perf_counter() - begin)
            assert float(reduced[f"metric {KEYS - 1}"]) == 1.5 * (KEYS - 1) + 0.5
    return [Reduced(name, collectives[name], statistics.median(each)) for name, each in took.items()]


def _collectives_of(work: Callable[[], object]) -> int:
    """How many collectives a piece of work runs, as torch's profiler sees the backend run them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return sum(event.count for event in profile.key_averages() if event.key.startswith("c10d::"))


def _each_key(values: dict[str, float]) -> dict[str, float]:
    reduced = {}
    for name, value in values.items():
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor)
        reduced[name] = tensor.item() / dist.get_world_size()
    return reduced


# ------------------------------------------------------------------ what came of it
@dataclass(frozen=True)
class Figures:
    """All three parts."""

    loops: dict[str, dict[str, list[Trained]]]
    evaluations: list[Evaluated]
    reductions: list[Reduced]

    def as_json(self) -> dict[str, Any]:
        """Every measurement."""
        return asdict(self)


def measure(quick: bool = False) -> Figures:
    """All three parts; a quick one shows that they run, not how fast."""
    if quick:
        return Figures(loops(1, quick=True), evaluations(1), reductions(3))
    return Figures(loops(7), evaluations(7), reductions(300))


def table(figures: Figures) -> str:
    """The figures as Markdown tables."""
    return "\n\n".join([_loop_table(figures.loops), _evaluation_table(figures), _reduction_table(figures)])


def _loop_table(loops: dict[str, dict[str, list[Trained]]]) -> str:
    rounds = len(next(iter(next(iter(loops.values())).values())))
    rows = [
        f"| training, {RANKS} ranks of {THREADS} thread, each pinned to a core, medians of {rounds} | samples/s "
        "| to torchrun, median of pairs | CPU ms a sample | page faults a step | call to result, s |",
        "|---|---|---|---|---|---|",
    ]
    for model, trained in loops.items():
        for name, runs in trained.items():
            pairs = zip(runs, trained["torchrun"], strict=True)
            ratio = statistics.median(each.rate / other.rate for each, other in pairs)
            rate, cpu, faults, seconds = (
                statistics.median(getattr(each, field) for each in runs)
                for field in ("rate", "cpu", "faults", "seconds")
            )
            rows.append(f"| {model}: {name} | {rate:,.0f} | {ratio:.3f} | {cpu:.3f} | {faults:,.0f} | {seconds:.2f} |")
    return "\n".join(rows)


def _evaluation_table(figures: Figures) -> str:
    rows = [
        f"| evaluation of {EVALUATED:,} samples, {EVALUATION_RANKS} ranks | samples counted | accuracy | ms |",
        "|---|---|---|---|",
    ]
    for each in figures.evaluations:
        rows.append(f"| {each.name} | {each.samples:,} | {each.accuracy:.6f} | {each.seconds * 1e3:.1f} |")
    return "\n".join(rows)


def _reduction_table(figures: Figures) -> str:
    rows = [f"| mean of {KEYS} keys, {RANKS} ranks | collectives | ms |", "|---|---|---|"]
    for each in figures.reductions:
        rows.append(f"| {each.name} | {each.collectives} | {each.seconds * 1e3:.3f} |")
    return "\n".join(rows)
