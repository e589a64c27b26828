"""A working day in one notebook, from end to end: much data, many lines, a busy kernel, a stop, and once more.

Four ranks use a large tensor of the notebook, print and report, while the kernel is busy with another cell; they are
stopped in the middle of their work and save a checkpoint; then the launch runs again, to its end. accelerate's launcher
can follow where nothing runs in the background: the two whole runs.
"""

from __future__ import annotations

import contextlib
import math
import queue
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.kernel.harness import Kernel, running_kernel

RANKS = 4
_LIMIT = 60.0
"""Seconds after which a run counts as hung: a fork of a kernel with threads sometimes deadlocks."""

_TRAINS = """
import os, time
import torch

def train(steps, folder):
    import torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert float(data.view(-1, 1024)[:, 0].sum()) > 0  # reads all of it
    try:
        for step in range(steps):
            print(f"rank {rank} step {step}: loss {1 / (step + 1):.4f} " + "." * 40)
            report(step=step, loss=1 / (step + 1))
            if step % 500 == 0:
                open(f"{folder}/began{rank}", "w").close()
                dist.all_reduce(torch.ones(1000))
            if steps > 10_000:
                time.sleep(0.0005)  # until it is stopped
    except KeyboardInterrupt:
        for part in range(4):
            torch.save(data[: 1 << 22].clone(), f"{folder}/checkpoint{rank}-{part}.pt")
        raise
    return rank

def whole(steps):
    begin = time.perf_counter()
    result = launch(train, (steps, os.environ["BENCHMARK_FOLDER"]))
    return time.perf_counter() - begin
"""
_NBLAUNCH = """
%load_ext nblaunch
from nblaunch import notebook_launcher, report

def launch(function, args, block=True):
    return notebook_launcher(function, args, RANKS, device="cpu", start_method="forkserver", block=block)

def steps(folder, rank):
    open(f"{folder}/steps{rank}", "w").close()
    while True:
        time.sleep(0.001)

def day():
    folder, times = os.environ["BENCHMARK_FOLDER"], {}
    begin = time.perf_counter()
    running = launch(train, (1_000_000, folder), block=False)
    times["call to a Launch"] = time.perf_counter() - begin
    while not all(os.path.exists(f"{folder}/began{rank}") for rank in range(RANKS)):
        time.sleep(0.001)
    times["call to the ranks' first steps"] = time.perf_counter() - begin
    busy = time.perf_counter()
    count = 0
    while time.perf_counter() - busy < BUSY:  # another cell's work, which lets go of nothing
        count += sum(i * i for i in range(1000))
    asked = time.perf_counter()
    running.stop()
    running.wait()
    times["stop, with 4 checkpoints of 16 MB, to the end"] = time.perf_counter() - asked
    found = [name for name in os.listdir(folder) if name.startswith("checkpoint")]
    assert len(found) == 4 * RANKS, found
    running = launch(steps, (folder,), block=False)
    while not all(os.path.exists(f"{folder}/steps{rank}") for rank in range(RANKS)):
        time.sleep(0.001)
    asked = time.perf_counter()
    running.stop()
    running.wait()
    times["stop of ranks that save nothing, to the end"] = time.perf_counter() - asked
    return times
"""
_ACCELERATE = """
import contextlib, io
from accelerate import notebook_launcher

def report(**values):
    pass

def launch(function, args):
    notebook_launcher(function, args, RANKS, use_port="29515")
"""


@dataclass
class Figures:
    """Seconds by phase."""

    day: dict[str, float] = field(default_factory=dict)
    whole: dict[str, list[float]] = field(default_factory=dict)
    """Two whole runs, one after the other, by way."""
    size: int = 0
    lines: int = 0
    """Of all ranks in a whole run."""

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)


def measure(size: int, lines: int, busy: float) -> Figures:
    """Live through the day.

    Args:
        size: Bytes of the data.
        lines: That the four ranks print in a whole run.
        busy: Seconds for which the kernel computes.
    """
    figures = Figures(size=size, lines=lines)
    for name, setup in {"nblaunch": _NBLAUNCH, "accelerate (fork)": _ACCELERATE}.items():
        with tempfile.TemporaryDirectory() as folder:
            own = {"BENCHMARK_FOLDER": folder, "TMPDIR": folder, "NBLAUNCH_STATE_DIR": f"{folder}/state"}
            with running_kernel(OMP_NUM_THREADS="1", NBLAUNCH_VIEW="auto", **own) as kernel:
                kernel.run(f"RANKS, BUSY = {RANKS}, {busy}\n{_TRAINS}{setup}").check()
                kernel.run("def warms(*args): pass\nlaunch(warms, ()); time.sleep(8)").check()
                kernel.run(f"data = torch.ones({size} // 4)").check()
                if name == "nblaunch":
                    figures.day = _asked(kernel, "day()")
                    kernel.run("%distributed clear-cache\ndel data").check()  # the whole runs begin alike
                    kernel.run(f"data = torch.ones({size} // 4)").check()
                first = _whole(kernel, lines // RANKS, Path(folder, "first"))
                again = _whole(kernel, lines // RANKS, Path(folder, "again")) if math.isfinite(first) else math.inf
                figures.whole[name] = [first, again]
    return figures


def _asked(kernel: Kernel, expression: str) -> Any:
    kernel.run(f"found = {expression}", limit=300).check()
    return kernel.ask("found")


def _whole(kernel: Kernel, steps: int, answer: Path) -> float:
    """Seconds of a whole run, by a file: of what tens of thousands of messages bring, a client loses some."""
    kernel.client.execute(f"seconds = whole({steps})\nopen({str(answer)!r}, 'w').write(str(seconds))")
    deadline = time.monotonic() + _LIMIT
    while not (answer.exists() and answer.read_text()):
        if time.monotonic() > deadline:
            return math.inf
        with contextlib.suppress(queue.Empty):
            kernel.client.get_iopub_msg(timeout=0.02)
    return float(answer.read_text())


def table(figures: Figures) -> str:
    """The figures as Markdown tables."""
    rows = [f"| {figures.size / 1e9:.1f} GB, {RANKS} ranks, a busy kernel: nblaunch | seconds |", "|---|---|"]
    rows += [f"| {phase} | {seconds:.2f} |" for phase, seconds in figures.day.items()]
    rows += ["", f"| a whole run, with {figures.lines:,} lines | first, s | again, s |", "|---|---|---|"]
    rows += [f"| {name} | {_seconds(first)} | {_seconds(again)} |" for name, (first, again) in figures.whole.items()]
    return "\n".join(rows)


def _seconds(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "endless"
