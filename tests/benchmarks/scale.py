"""How launches grow: with the number of ranks, of launches at once, of lines and of reports.

* `ranks`: seconds of a launch of 2 to 64 ranks with one all_reduce, and CPU seconds of the kernel's process for it;
  beside the floor, a script of one thread that has torch imported, forks as many children, and lets them join a gloo
  group.
* `at_once`: so many launches of two ranks at the same time, and one after the other.
* `supervision`: CPU seconds of the kernel's process for each printed line and each report.
* `flood`: two ranks print a million lines each; beside a script whose two processes write the same to files.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.kernel.harness import Kernel, running_kernel

_LIMIT = 300.0
"""Seconds for a measurement."""
_SETUP = """
%load_ext nblaunch
import os, time
from nblaunch import notebook_launcher, report

def joins():
    import torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1))

def prints(lines, rank):
    for number in range(lines):
        print(f"rank {rank} line {number:07d}: loss 0.123456 accuracy 0.987654 lr 0.001")

def reports(count):
    for step in range(count):
        report(step=step, loss=0.5, accuracy=0.25)

def launched(function, *args, ranks=2, view="none", block=True):
    return notebook_launcher(function, args, ranks, device="cpu", start_method="forkserver", view=view, block=block)

def timed(function, *args, **options):
    seconds, used = time.perf_counter(), time.process_time()
    result = launched(function, *args, **options)
    return time.perf_counter() - seconds, time.process_time() - used

def at_once(count):
    begin = time.perf_counter()
    for launch in [launched(joins, block=False) for _ in range(count)]:
        launch.result()
    together = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(count):
        launched(joins)
    return together, time.perf_counter() - begin

def flooded(lines, view):
    seconds, used = time.perf_counter(), time.process_time()
    result = launched(prints, lines, view=view)
    seconds, used = time.perf_counter() - seconds, time.process_time() - used
    for rank in range(2):
        with open(result.logs[rank].out) as file:
            assert all(f"rank {rank} line {number:07d}" in line for number, line in enumerate(file)), "out of order"
            assert sum(1 for _ in open(result.logs[rank].out)) == lines, "lines are missing"
    return seconds, used
launched(joins)
"""
_FLOOR = """
import json, os, socket, statistics, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
ranks, rounds, times = int(sys.argv[1]), int(sys.argv[2]), []
for _ in range(rounds):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin, children = time.perf_counter(), []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(1))
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    times.append(time.perf_counter() - begin)
print(json.dumps(times))
"""
_WRITES = """
import os, sys
pid = os.fork()
rank, lines = int(pid == 0), int(sys.argv[2])
with open(f"{sys.argv[1]}/rank{rank}.out", "w", buffering=1) as out:
    for number in range(lines):
        print(f"rank {rank} line {number:07d}: loss 0.123456 accuracy 0.987654 lr 0.001", file=out)
if pid:
    os.waitpid(pid, 0)
"""


@dataclass
class Figures:
    """All of the module's."""

    ranks: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """Seconds and the kernel's CPU seconds of launches, by the number of ranks."""
    floor: dict[int, list[float]] = field(default_factory=dict)
    at_once: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds of so many launches: at the same time, and one after the other."""
    line: float = 0.0
    """CPU seconds of the kernel for a line, shown as text."""
    report: float = 0.0
    lines: int = 0
    """Of each rank in the flood."""
    flood: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Seconds and the kernel's CPU seconds, by view."""
    files: list[float] = field(default_factory=list)
    """Seconds of the script that writes the same."""

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)


def measure(ranks: tuple[int, ...], rounds: int, lines: int, at_once: tuple[int, ...]) -> Figures:
    """Measure everything."""
    figures = Figures(lines=lines)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_kernel(NBLAUNCH_VIEW="auto", NBLAUNCH_STATE_DIR=f"{folder}/state") as kernel,
    ):
        kernel.run(_SETUP).check()
        kernel.run("time.sleep(8)").check()  # the next fork server is built meanwhile
        for count in ranks:
            figures.ranks[count] = [_ask(kernel, f"timed(joins, ranks={count})") for _ in range(rounds)]
            figures.floor[count] = json.loads(_script(_FLOOR, str(count), str(rounds)))
        for count in at_once:
            figures.at_once[count] = _ask(kernel, f"at_once({count})")
        figures.line = _cost(kernel, "prints", lines // 10)
        figures.report = _cost(kernel, "reports", lines // 100)
        for _ in range(rounds):
            figures.files.append(_seconds_of_files(folder, lines))
            for view in ("none", "text", "auto"):
                figures.flood.setdefault(view, []).append(_ask(kernel, f"flooded({lines}, {view!r})"))
    return figures


def _cost(kernel: Kernel, function: str, count: int) -> float:
    """CPU seconds of the kernel for each of what two ranks send, besides those of the launch itself."""
    view = "'text'"
    with_them, without = (
        statistics.median(_ask(kernel, f"timed({function}, {each}, view={view})[1]") for _ in range(3))
        for each in (count, 0)
    )
    return max(0.0, with_them - without) / (2 * count)


def _ask(kernel: Kernel, expression: str) -> Any:
    """The value of an expression that may print."""
    kernel.run(f"found = {expression}", limit=_LIMIT).check()
    return kernel.ask("found")


def _script(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT).stdout


def _seconds_of_files(folder: str, lines: int) -> float:
    begin = time.perf_counter()
    _script(_WRITES, folder, str(lines))
    for file in Path(folder).glob("rank?.out"):
        file.unlink()
    return time.perf_counter() - begin


# ------------------------------------------------------------------ in words
def slope(seconds: dict[int, float]) -> float:
    """Seconds for each further rank: the line of least squares."""
    mean_x, mean_y = statistics.mean(seconds), statistics.mean(seconds.values())
    spread = sum((x - mean_x) ** 2 for x in seconds)
    return sum((x - mean_x) * (y - mean_y) for x, y in seconds.items()) / spread if spread else 0.0


def table(figures: Figures) -> str:
    """The figures as Markdown tables."""
    ours = {n: statistics.median(seconds for seconds, _ in times) for n, times in figures.ranks.items()}
    used = {n: statistics.median(cpu for _, cpu in times) for n, times in figures.ranks.items()}
    floor = {n: statistics.median(times) for n, times in figures.floor.items()}
    rows = ["| ranks | launch, s | fork and gloo alone, s | ratio | kernel's CPU, s |", "|---|---|---|---|---|"]
    rows += [f"| {n} | {ours[n]:.3f} | {floor[n]:.3f} | {ours[n] / floor[n]:.2f} | {used[n]:.3f} |" for n in ours]
    rows += [
        f"| each more | {slope(ours):.4f} | {slope(floor):.4f} | {slope(ours) / (slope(floor) or 1):.2f} "
        f"| {slope(used):.4f} |",
        "",
        *(
            f"{count} launches of 2 ranks: {together:.2f} s at once, {apart:.2f} s one after the other."
            for count, (together, apart) in figures.at_once.items()
        ),
        f"The kernel's CPU: {figures.line * 1e6:.2f} µs for a printed line, "
        f"{figures.report * 1e6:.1f} µs for a report.",
        "",
        f"| 2 × {figures.lines:,} lines | seconds | to the files alone | kernel's CPU, of a core |",
        "|---|---|---|---|",
    ]
    files = statistics.median(figures.files)
    rows.append(f"| a script, to files | {files:.2f} | 1.00 | |")
    for view, times in figures.flood.items():
        seconds, cpu = statistics.median(s for s, _ in times), statistics.median(c / s for s, c in times)
        name = {"none": "shown nowhere", "text": "as text", "auto": "in the panel"}[view]
        rows.append(f"| nblaunch, {name} | {seconds:.2f} | {seconds / files:.2f} | {cpu:.0%} |")
    return "\n".join(rows)
