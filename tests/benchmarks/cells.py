"""Whole cells with the default panel: from the request to an idle kernel, also where the kernel is new.

A launch of two ranks with one all_reduce: over and over beside accelerate's; the first ones of a kernel, right after
one another; and after large imports in the notebook. At the end, what an idle notebook holds.
"""

from __future__ import annotations

import contextlib
import math
import queue
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from nblaunch.machine import timeouts
from tests.benchmarks.patience import kill_children, shown
from tests.kernel.harness import Kernel, running_kernel

_TRAIN = """
import torch

def train():
    import torch.distributed as dist
    makes_its_own = not dist.is_initialized()
    if makes_its_own:
        dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if makes_its_own:
        dist.destroy_process_group()
"""
_NBLAUNCH = "from nblaunch import notebook_launcher"
_ACCELERATE = "from accelerate import notebook_launcher"
WAYS = {
    _NBLAUNCH: "notebook_launcher(train, num_processes={}, device='cpu')",
    _ACCELERATE: "notebook_launcher(train, num_processes={}, use_port='29517')",
}
"""The call of each way, by its import."""
_LIMIT = 30.0
"""Seconds after which a cell counts as hung."""
_PAUSE = 0.5
"""Between two cells: a quick hand. The first ten cells of a kernel have none."""
_HELD = """
import glob, json, os
from nblaunch.machine.processes import memory_of
_held = []
for _path in glob.glob("/proc/[0-9]*/comm"):
    try:
        _words = open(_path.replace("comm", "cmdline")).read().split(chr(0))
        if open(_path).read().startswith("nblaunch") and json.loads(_words[3])[1] == os.getpid():
            _held.append(memory_of(int(_path.split("/")[2])))
    except (OSError, IndexError, TypeError, ValueError):
        pass
print(repr(_held))
"""
"""Prints the bytes of each process that waits for the kernel's next launch, with its part of what several share."""


@dataclass
class Figures:
    """Seconds of cells, and bytes."""

    steady: dict[str, list[float]] = field(default_factory=dict)
    """Cells in turn, by way."""
    fresh: dict[str, list[list[float]]] = field(default_factory=dict)
    """The first ten cells of each new kernel, by way."""
    after_imports: list[list[float]] = field(default_factory=list)
    """Cells in a kernel that has just imported much, by kernel."""
    held: dict[str, list[int]] = field(default_factory=dict)
    """Bytes of each waiting process, by when."""

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)


def measure(rounds: int, kernels: int, idle: float) -> Figures:
    """Run the cells.

    Args:
        rounds: Cells of each way, in turn.
        kernels: New kernels for the first cells.
        idle: Seconds after the last launch before the second look at what is held.
    """
    figures = Figures()
    with contextlib.ExitStack() as opened:
        ways = {way: opened.enter_context(_kernel(way)) for way in WAYS}
        for way, kernel in ways.items():
            _cell(kernel, way)
            figures.steady[way] = []
            kernel.run(f"import time; time.sleep({min(idle, 8.0)})").check()
        for _ in range(rounds):
            for way, kernel in ways.items():
                if math.inf not in figures.steady[way]:  # it would hang again
                    figures.steady[way].append(_cell(kernel, way))
                    time.sleep(_PAUSE)
    for way in WAYS:
        figures.fresh[way] = []
    for _ in range(kernels):
        for way in WAYS:
            with _kernel(way) as kernel:
                time.sleep(3.0)  # as long as it takes to write the next cell
                cells: list[float] = []
                while len(cells) < 10 and math.inf not in cells:
                    cells.append(_cell(kernel, way))
                figures.fresh[way].append(cells)
        with _kernel(_NBLAUNCH) as kernel:
            kernel.run("import torchvision, sklearn, transformers").check()
            cells = []
            for _ in range(20):
                cells.append(_cell(kernel, _NBLAUNCH))
                time.sleep(0.5)
            figures.after_imports.append(cells)
    with _kernel(_NBLAUNCH) as kernel:
        for _ in range(3):
            _cell(kernel, _NBLAUNCH, ranks=8)
        time.sleep(min(idle, 8.0))
        figures.held["after 8 s"] = eval(kernel.run(_HELD).check().stdout)
        time.sleep(idle)
        figures.held[f"after {idle + 8:.0f} s"] = eval(kernel.run(_HELD).check().stdout)
    return figures


@contextlib.contextmanager
def _kernel(way: str) -> Iterator[Kernel]:
    with running_kernel(NBLAUNCH_VIEW="auto", CUDA_VISIBLE_DEVICES="") as kernel:
        kernel.run(_TRAIN).check()
        kernel.run(way).check()
        yield kernel


def _cell(kernel: Kernel, way: str, ranks: int = 2) -> float:
    try:
        return kernel.run(WAYS[way].format(ranks), _LIMIT).check().seconds
    except queue.Empty:
        kill_children(kernel)
        return math.inf


def table(figures: Figures) -> str:
    """The figures as Markdown tables."""
    own, base = _NBLAUNCH, _ACCELERATE
    steady = {way: statistics.median(cells) for way, cells in figures.steady.items()}
    first = {way: statistics.median(cells[0] for cells in kernels) for way, kernels in figures.fresh.items()}
    next_ones = {way: [c for cells in kernels for c in cells[1:] or cells] for way, kernels in figures.fresh.items()}
    rows = {
        f"median of {len(figures.steady[own])}, in turn, half a second apart": steady,
        f"the first of a kernel, 3 s after the import; median of {len(figures.fresh[own])}": first,
        "the 2nd to 10th right after it, median": {way: statistics.median(c) for way, c in next_ones.items()},
        "the slowest of them": {way: max(c) for way, c in next_ones.items()},
    }
    lines = ["| whole cells of 2 ranks, seconds | nblaunch | accelerate (fork) |", "|---|---|---|"]
    for name, found in rows.items():
        lines.append(f"| {name} | {shown(found[own], 3, found[base])} | {shown(found[base], 3, found[base])} |")
    late = statistics.median(max(cells) for cells in figures.after_imports)
    lines += ["", "In brackets: the ratio to accelerate (fork)."]
    lines.append(
        "After importing torchvision, sklearn and transformers in the notebook, the slowest of 20 cells took "
        f"{late:.3f} s (median of {len(figures.after_imports)} kernels)."
    )
    lines += ["", "| waiting after launches of 8 ranks | processes | MB |", "|---|---|---|"]
    lines += [f"| {when} | {len(held)} | {sum(held) / 1e6:.0f} |" for when, held in figures.held.items()]
    ends = timeouts.SERVER_IDLE_TIMEOUT_S / 60
    return "\n".join([*lines, "", f"After {ends:.0f} minutes without a launch there is none, until the next cell."])
