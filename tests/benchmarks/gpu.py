"""Training and launches on GPUs, side by side; the memory that waiting ranks hold there.

* `launches`: from a notebook in which CUDA runs: nblaunch, accelerate (whose fork cannot follow CUDA) and torchrun.
* `loops`: a ResNet and a small transformer on synthetic data, the same program under each launcher, on every GPU.
  accelerate's kernel has not used CUDA. With a single GPU it calls the function in the notebook's own process.
* `prefetched`: the ResNet on pinned batches, with and without the Prefetcher.
* `held`: GPU memory of a notebook that waits for its next launch, and of a session.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu import gpus
from tests.kernel.harness import Kernel, running_kernel

LIMIT = 300.0
"""Seconds for a script or a cell."""
MODELS = {"ResNet-50, 64 images": "images/s", "transformer, 32 × 256 tokens": "tokens/s"}

_PROGRAM = """
import json, os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def join():
    '''Return this rank's device; make the group where the launcher has not.'''
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29519")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    makes_its_own = not dist.is_initialized()
    if makes_its_own:
        dist.init_process_group("nccl")
    return device, makes_its_own

def leave(makes_its_own):
    if makes_its_own:
        dist.destroy_process_group()

def meet():
    device, makes_its_own = join()
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    leave(makes_its_own)

class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(8192, 512)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(512, 8192)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))

def parts(name, device):
    '''Return a model, a batch, its targets, and the items of a batch.'''
    if name.startswith("ResNet"):
        from torchvision.models import resnet50
        model = resnet50().to(device, memory_format=torch.channels_last)
        images = torch.randn(64, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
        return model, images, torch.randint(1000, (64,), device=device), 64
    tokens = torch.randint(8192, (32, 256), device=device)
    return Transformer().to(device), tokens, tokens.roll(-1, 1).flatten(), tokens.numel()

def train(name, steps, path):
    device, makes_its_own = join()
    torch.manual_seed(0)
    model, inputs, targets, items = parts(name, device)
    model = DistributedDataParallel(model, device_ids=[device])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = model(inputs)
        loss = nn.functional.cross_entropy(output.flatten(0, -2).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    dist.barrier(device_ids=[device.index])
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(steps * items * dist.get_world_size() / seconds, file)
    leave(makes_its_own)
"""
_NBLAUNCH = """
%load_ext nblaunch
from nblaunch import notebook_launcher

def launch(function, *args):
    notebook_launcher(function, args, num_processes=RANKS, view="none")
"""
_ACCELERATE = """
import contextlib, io
from accelerate import notebook_launcher

def launch(function, *args):
    with contextlib.redirect_stdout(io.StringIO()):
        notebook_launcher(function, args, num_processes=RANKS, use_port="29521")
"""
_SCRIPT = """
import sys
if sys.argv[1] == "meet":
    meet()
else:
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3])
"""
_PREFETCHES = """
def rates(rounds, steps):
    from torchvision.models import resnet50
    from nblaunch.training import Prefetcher
    device, _ = join()
    model = resnet50().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = [torch.randn(64, 3, 224, 224).pin_memory() for _ in range(4)]
    targets = torch.randint(1000, (64,), device=device)

    def rate(moved):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for images in moved:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                output = model(images.to(memory_format=torch.channels_last))
            nn.functional.cross_entropy(output.float(), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return steps * 64 / (time.perf_counter() - begin)

    loader = [batches[number % 4] for number in range(steps)]
    ways = {
        "Prefetcher": lambda: Prefetcher(loader, device),
        "each batch on demand": lambda: (batch.to(device, non_blocking=True) for batch in loader),
    }
    for moved in ways.values():
        rate(moved())
    found = {name: [] for name in ways}
    for _ in range(rounds):
        for name, moved in ways.items():
            found[name].append(rate(moved()))
    return found
"""
_USED = "sum(t - f for f, t in map(torch.cuda.mem_get_info, range(RANKS)))"
Launch = Callable[..., None]


@dataclass(frozen=True)
class Figures:
    """Every measurement; seconds, items per second, bytes."""

    gpus: str
    ranks: int
    launches: dict[str, list[float]]
    """Empty: impossible."""
    loops: dict[str, dict[str, list[float]]]
    """By model and launcher."""
    prefetched: dict[str, list[float]]
    session: int

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)


def measure(rounds: int, steps: int) -> Figures:
    """Measure on all visible GPUs.

    Args:
        rounds: Of each measurement; the median counts.
        steps: Of a training loop.

    Raises:
        NoGpuError: There is no GPU.
    """
    found = gpus.found()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        ours, forked = (_kernel(stack, setup, found.count, folder) for setup in (_NBLAUNCH, _ACCELERATE))
        by_torchrun = _by_torchrun(folder, found.count)
        launchers: dict[str, Launch] = {
            "nblaunch": _in_kernel(ours),
            "torchrun": by_torchrun,
            "accelerate": _in_kernel(forked),
        }
        loops = {model: _loops(launchers, model, rounds, steps, folder) for model in MODELS}
        ours.run(
            f"{_PREFETCHES}\nprefetched = notebook_launcher(rates, ({rounds}, {steps}), 1, view='none')[0]"
        ).check()
        prefetched: dict[str, list[float]] = ours.ask("prefetched")
        for kernel in (ours, forked):
            kernel.run("assert torch.ones(1, device='cuda').item() == 1").check()
        launches = {name: _seconds(launch, rounds) for name, launch in launchers.items()}
        session = _held(ours)
    return Figures(found.line(), found.count, launches, loops, prefetched, session)


def _kernel(stack: contextlib.ExitStack, setup: str, ranks: int, folder: str) -> Kernel:
    kernel = stack.enter_context(running_kernel(NBLAUNCH_STATE_DIR=f"{folder}/state", TMPDIR=folder))
    kernel.run(f"RANKS = {ranks}\n{_PROGRAM}{setup}", LIMIT).check()
    return kernel


def _in_kernel(kernel: Kernel) -> Launch:
    def launch(function: str, *arguments: Any) -> None:
        kernel.run(f"launch({', '.join([function, *map(repr, arguments)])})", LIMIT).check()

    return launch


def _by_torchrun(folder: str, ranks: int) -> Launch:
    script = Path(folder, "program.py")
    script.write_text(_PROGRAM + _SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]

    def launch(function: str, *arguments: Any) -> None:
        words = ["meet"] if function == "meet" else list(map(str, arguments))
        environ = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(
            [*command, *words], env=environ, capture_output=True, text=True, check=False, timeout=LIMIT
        )
        assert done.returncode == 0, done.stderr

    return launch


def _loops(launchers: dict[str, Launch], model: str, rounds: int, steps: int, folder: str) -> dict[str, list[float]]:
    """Each launcher in turn, so that a slow minute hits all of them."""
    rates: dict[str, list[float]] = {name: [] for name in launchers}
    path = Path(folder, "rate.json")
    for _ in range(rounds):
        for name, launch in launchers.items():
            launch("train", model, steps, str(path))
            rates[name].append(json.loads(path.read_text()))
            path.unlink()
    return rates


def _seconds(launch: Launch, rounds: int) -> list[float]:
    """The seconds of launches that meet in one all_reduce; none if the launcher raises."""
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        try:
            launch("meet")
        except AssertionError:
            return []
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]  # the first pays for what is made once


def _held(kernel: Kernel) -> int:
    """Bytes on all GPUs that a session of a rank on each holds, once it has met in one all_reduce."""
    idle = _used(kernel)
    kernel.run("import nblaunch\ns = nblaunch.session(RANKS)\ns.run(meet)", LIMIT).check()
    with_session = _used(kernel)
    kernel.run("s.stop()").check()
    return with_session - idle


def _used(kernel: Kernel) -> int:
    """Bytes in use on all GPUs, once the last ranks have given theirs back."""
    readings = [0, 1]
    while readings[-1] != readings[-2]:
        kernel.run("time.sleep(0.5)").check()
        readings.append(int(kernel.ask(_USED)))
    return readings[-1]


# ------------------------------------------------------------------ what came of it
def table(figures: Figures) -> str:
    """The figures as Markdown tables."""
    names = list(figures.launches)
    rows = [f"On {figures.gpus}; {figures.ranks} rank{'s' * (figures.ranks > 1)}.", ""]
    rows += [f"| medians | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    seconds = [f"{statistics.median(each):.3f}" if each else "impossible" for each in figures.launches.values()]
    rows.append(f"| a launch from a notebook that has used CUDA, s | {' | '.join(seconds)} |")
    for model, rates in figures.loops.items():
        cells = [f"{statistics.median(rates[name]):,.0f}" for name in names]
        rows.append(f"| {model}, {MODELS[model]} | {' | '.join(cells)} |")
    if figures.ranks == 1:
        rows += ["", "With one GPU accelerate starts no process: it calls the function in the notebook's own."]
    rows += ["", "| ResNet-50 on pinned batches | images/s |", "|---|---|"]
    rows += [f"| {name} | {statistics.median(rates):,.0f} |" for name, rates in figures.prefetched.items()]
    rows += ["", "| held on the GPUs | MB |", "|---|---|"]
    rows.append(f"| by a session of {figures.ranks}, with CUDA and NCCL started | {figures.session / 1e6:.0f} |")
    return "\n".join(rows)
