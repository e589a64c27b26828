"""Data in and results out, side by side: a tensor that a cell's function uses, and one that each rank returns.

Each way runs in a real kernel of its own. What everything is compared with is one copy of the same data into fresh
memory, measured in the same kernel a moment before.

* `captured`: a launch of ranks that use a tensor of the notebook, for the first time, again, and after a change. Then
  the ranks read all of it, and the memory of the notebook and the ranks is measured as PSS: each page counts once. The
  tensor is in memory, or of an `np.memmap`.
* `returned`: two ranks return a tensor each.
* `imported`: a launch of a function that imports torchvision and transformers, for the second time and later.
"""

from __future__ import annotations

import math
import queue
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.benchmarks.patience import shown
from tests.kernel.harness import Kernel, running_kernel

_DATA = """
import gc, os, re, time
import torch

data = torch.ones(1024)
notebook = os.getpid()

def proportional(pid):
    text = open(f"/proc/{pid}/smaps_rollup").read()
    return int(re.search(r"^Pss: +([0-9]+)", text, re.M)[1]) << 10

def copied(size):
    source, times = torch.ones(size // 4), []
    for _ in range(4):  # a virtual machine's memory is slow when it is touched for the first time
        begin = time.perf_counter()
        source.clone()
        times.append(time.perf_counter() - begin)
    return min(times)

def uses(out):
    import torch.distributed as dist
    assert float(data.view(-1, 1024)[:, 0].sum()) > 0  # touches every page
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.barrier()
    share = proportional(os.getpid()) + (proportional(notebook) if dist.get_rank() == 0 else 0)
    dist.barrier()
    with open(f"{out}-{dist.get_rank()}", "w") as file:
        file.write(str(share))

def touches(out):
    return float(data[-1])

def in_all(out, ranks):
    return sum(int(open(f"{out}-{rank}").read()) for rank in range(ranks))

def in_memory(size):
    return torch.ones(size // 4)

def in_file(size):
    import numpy as np
    mapped = np.memmap(os.environ["BENCHMARK_FOLDER"] + "/data", np.float32, "w+", shape=size // 4)
    mapped[:] = 1
    return torch.from_numpy(mapped)

def timed(function, ranks, *args):
    gc.collect()
    begin = time.perf_counter()
    result = launch(function, args, ranks)
    return time.perf_counter() - begin
"""
_RETURNS = """
def gives(size, rank):
    return torch.full((size // 4,), rank + 1.0), time.monotonic()

def returned(size):
    results = launch(gives, (size,), 2)
    seconds = time.monotonic() - max(made for _, made in results)
    assert [float(result[-1]) for result, _ in results] == [1.0, 2.0]
    return seconds
"""
_SENDS_FILES = """
def gives(size, folder):  # its user has to write files
    import torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    result = torch.full((size // 4,), dist.get_rank() + 1.0)
    made = time.monotonic()
    torch.save((result, made), f"{folder}/{dist.get_rank()}.pt")
    dist.destroy_process_group()

def returned(size):
    folder = os.environ["BENCHMARK_FOLDER"]
    launch(gives, (size, folder), 2)
    results = [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]
    seconds = time.monotonic() - max(made for _, made in results)
    assert [float(result[-1]) for result, _ in results] == [1.0, 2.0]
    return seconds
"""
_IMPORTS = """
def plain():
    pass

def imports():
    import torchvision, transformers

import torchvision, transformers  # as a notebook that trains with them does
"""
_NBLAUNCH = """
%load_ext nblaunch
from nblaunch import notebook_launcher

def launch(function, args, ranks):
    return notebook_launcher(function, args, ranks, device="cpu", view="none", start_method="forkserver")
"""
_ACCELERATE = """
import contextlib, io
from accelerate import notebook_launcher

def launch(function, args, ranks):
    with contextlib.redirect_stdout(io.StringIO()):
        notebook_launcher(function, args, ranks, use_port="29513")
"""
_TORCHS_PICKLE = """
import multiprocessing, pickle
import cloudpickle

def _run(data, rank, ranks):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29514")
    function, args = pickle.loads(data)
    function(*args)

def launch(function, args, ranks):  # what launchers do that know nothing of tensors
    data = cloudpickle.dumps((function, args))
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_run, args=(data, rank, ranks)) for rank in range(ranks)]
    for child in children:
        child.start()
    for child in children:
        child.join()
"""


@dataclass
class Captured:
    """What a launch over data took."""

    name: str
    first: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)
    empty: list[float] = field(default_factory=list)
    """A launch of as many ranks over no data."""
    copy: list[float] = field(default_factory=list)
    """One copy of the data into fresh memory."""
    share: float = 0.0
    """Memory of the notebook and the ranks beyond the notebook's own data, as a part of that."""


@dataclass
class Figures:
    """All of the module's."""

    size: int
    ranks: int
    captured: dict[int, list[Captured]]
    """By the size of the data: all, and half of it, which is more likely to be kept for the next launch."""
    returned: dict[str, list[float]]
    copy: list[float]
    """One copy of a result into fresh memory."""
    imports: dict[str, list[float]]

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)


WAYS = {"nblaunch": _NBLAUNCH, "accelerate (fork)": _ACCELERATE, "pickle, then fork": _TORCHS_PICKLE}
MAPPED = "nblaunch, np.memmap"


def measure(size: int, ranks: int, rounds: int) -> Figures:
    """Measure everything.

    Args:
        size: Bytes of the data, and of each result.
        ranks: That use the data.
        rounds: Measurements of each.
    """
    captured = {part: [captured_by(name, part, ranks, rounds) for name in WAYS] for part in (size, size // 2)}
    captured[size // 2].insert(1, captured_by(MAPPED, size // 2, ranks, rounds))
    returned: dict[str, list[float]] = {}
    copy = [math.inf]
    for name, rest in {"nblaunch": _RETURNS, "accelerate (fork), by files": _SENDS_FILES}.items():
        try:
            returned[name], copied = _in_kernel(
                WAYS[name.partition(",")[0]] + rest,
                lambda kernel: (
                    [float(kernel.ask(f"returned({size})")) for _ in range(rounds)],
                    [float(kernel.ask(f"copied({size})")) for _ in range(rounds)],
                ),
            )
        except queue.Empty:
            returned[name] = [math.inf]
        else:
            copy = copied
    return Figures(
        size, ranks, captured, returned, copy, _in_kernel(_NBLAUNCH + _IMPORTS, lambda k: _imported(k, rounds))
    )


def _in_kernel(setup: str, work: Callable[[Kernel], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        own = {"BENCHMARK_FOLDER": folder, "TMPDIR": folder, "NBLAUNCH_STATE_DIR": f"{folder}/state"}
        own["NBLAUNCH_PRELOAD"] = "1"  # imports ahead of launches are measured, also where the caller has none
        with running_kernel(OMP_NUM_THREADS="1", **own) as kernel:  # with more, a fork of the kernel deadlocks
            kernel.run(_DATA + setup).check()
            kernel.run("def warms(): pass\nlaunch(warms, (), 2)").check()
            return work(kernel)


def captured_by(name: str, size: int, ranks: int, rounds: int) -> Captured:
    found = Captured(name)

    def work(kernel: Kernel) -> None:
        out = "os.environ['BENCHMARK_FOLDER'] + '/share'"
        kernel.run(f"timed(uses, {ranks}, {out})").check()
        before = int(kernel.ask(f"in_all({out}, {ranks})"))
        for _ in range(rounds):
            found.empty.append(float(kernel.ask(f"timed(warms, {ranks})")))
            kernel.run(f"data = None; data = {'in_file' if name == MAPPED else 'in_memory'}({size})").check()
            found.copy.append(float(kernel.ask(f"copied({size})")))
            found.first.append(float(kernel.ask(f"timed(touches, {ranks}, '')")))
            found.again.append(float(kernel.ask(f"timed(touches, {ranks}, '')")))
            kernel.run("data.add_(1); None").check()
            found.changed.append(float(kernel.ask(f"timed(touches, {ranks}, '')")))
        kernel.run(f"timed(uses, {ranks}, {out})").check()
        found.share = (int(kernel.ask(f"in_all({out}, {ranks})")) - before) / size - 1

    try:
        _in_kernel(WAYS["nblaunch" if name == MAPPED else name], work)
    except queue.Empty:  # it hangs, as forks of kernels do
        for times in (found.first, found.again, found.changed, found.empty):
            times.append(math.inf)
        found.copy = found.copy or [math.inf]
    return found


def _imported(kernel: Kernel, rounds: int) -> dict[str, list[float]]:
    first = [float(kernel.ask("timed(imports, 2)"))]
    kernel.run(
        "from nblaunch.engines.fork_servers import servers\n"
        "deadline = time.monotonic() + 60\n"
        "while servers._builder is not None or all(server.is_plain for server in servers._servers):\n"
        "    assert time.monotonic() < deadline, servers.status()\n"
        "    time.sleep(0.1)"
    ).check()
    times: dict[str, list[float]] = {"first": first, "later": [], "plain": []}
    for _ in range(rounds):
        times["later"].append(float(kernel.ask("timed(imports, 2)")))
        times["plain"].append(float(kernel.ask("timed(plain, 2)")))
    return times


# ------------------------------------------------------------------ in words
def table(figures: Figures) -> str:
    """The figures as Markdown tables."""
    rows = [row for size, ways in figures.captured.items() for row in [*captured_table(size, figures.ranks, ways), ""]]
    size = f"{figures.size / 1e9:.1f} GB"
    copy = statistics.median(figures.copy)
    rows += [f"| {size} from each of 2 ranks | seconds | to one copy of {size} |", "|---|---|---|"]
    for name, times in figures.returned.items():
        rows.append(f"| {name} | {shown(statistics.median(times))} | {shown(statistics.median(times) / copy)} |")
    first, later, plain = (statistics.median(figures.imports[name]) for name in ("first", "later", "plain"))
    rows += [
        "",
        f"A function that imports torchvision and transformers: {first:.2f} s the first time, then {later:.3f} s, "
        f"{later / plain:.2f} of one that imports nothing ({plain:.3f} s).",
    ]
    return "\n".join(rows)


def captured_table(size: int, ranks: int, ways: list[Captured]) -> list[str]:
    rows = [
        f"| {size / 1e9:.1f} GB used by {ranks} ranks: seconds | first launch | again | after a change | no data | "
        "first, to one copy | memory beyond the notebook's, to the data |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in ways:
        first, again, changed, empty, copy = map(
            statistics.median, (way.first, way.again, way.changed, way.empty, way.copy)
        )
        rows.append(
            f"| {way.name} | {shown(first)} | {shown(again)} | {shown(changed)} | {shown(empty)} "
            f"| {shown(first / copy)} | {way.share:.2f} |"
        )
    return rows
