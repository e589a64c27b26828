"""A cell's round trip on two ranks that stay: nblaunch's session beside ipyparallel, nbdistributed, and new ranks.

Each way runs in a real kernel of its own, with the default panel; the ways take turns. Seconds are those of the whole
cell, from its request until the kernel is idle. The others are measured where they are installed (the extra ``bench``).
A long session follows: what the kernel and its ranks hold after the first cells, and after many.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.benchmarks.patience import shown
from tests.kernel.harness import Kernel, running_kernel

CELLS = ("x = 1", "t = torch.ones(1); dist.all_reduce(t)", "push of a new tensor", "pull of a number")
"""What is measured. The first two are the bodies of cells."""
_MB = 1 << 20


@dataclass(frozen=True)
class Way:
    """A way to keep ranks: the cell that starts them, the first line of their cells, how they push and pull."""

    name: str
    setup: str
    magic: str
    push: str
    pull: str
    end: str

    def cell(self, measure: str) -> str:
        """Return the cell to measure; empty if there is none."""
        own = {CELLS[2]: self.push, CELLS[3]: self.pull}
        return own.get(measure, f"{self.magic}\n{measure}")


_IMPORTS = "import torch\nimport torch.distributed as dist"
_SESSION = f"%load_ext nblaunch\nimport nblaunch\n{_IMPORTS}\ns = nblaunch.session(2, device='cpu')"
_IPYPARALLEL = f"""
import socket
import ipyparallel
{_IMPORTS}
cluster = ipyparallel.Cluster(n=2)
client = cluster.start_and_connect_sync()
view = client[:]
view.block = True
view.activate()
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{{free.getsockname()[1]}}"
view.scatter("rank", [0, 1], flatten=True)
view.push(dict(address=address))
view.execute('''{_IMPORTS}
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)''')
"""
_NEW_TENSOR = "torch.rand({size} // 4)"
_NBDISTRIBUTED = f"""
import os
import sys
os.environ.update(CUDA_VISIBLE_DEVICES="", PATH=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])
%load_ext nbdistributed
%dist_init -n 2
%dist_mode --disable
own = get_ipython().magics_manager.registry["DistributedMagic"]
answers = {{}}
while not answers:
    try:
        answers = own._comm_manager.send_to_all("execute", {_IMPORTS!r}, timeout=1.0)
    except TimeoutError:  # %dist_init waits for 2 s, its ranks import torch for longer
        pass
assert [answer.get("status") for answer in answers.values()] == ["success"] * 2, answers
"""
OURS = Way("nblaunch, session", _SESSION, "%%distributed", f"s.push(a={_NEW_TENSOR})", "s.pull('x')", "s.stop()")
WAYS = (
    OURS,
    Way("nblaunch, new ranks", _SESSION, "%%distributed --fresh -n 2 --device cpu", "", "", "s.stop()"),
    Way(
        "ipyparallel",
        _IPYPARALLEL,
        "%%px",
        f"view.push(dict(a={_NEW_TENSOR}.numpy()))",
        "view.pull('x')",
        "cluster.stop_cluster_sync()",
    ),
    # It has no push and pull. Its %dist_shutdown ends no rank, and its %dist_reset kills by name: pkill -f worker.py.
    Way("nbdistributed", _NBDISTRIBUTED, "%%distributed", "", "", "own._process_manager.shutdown()"),
)


_HELD = """
import os
from pathlib import Path

def held():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "memory, MB": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
    }
"""
_LOGS = "len(os.listdir(os.environ['NBLAUNCH_STATE_DIR']))"


@dataclass
class Figures:
    """Seconds of each measure by way; none where a way has no such thing, or is not installed."""

    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    size: int = 0
    """Bytes of the tensor."""
    held: dict[int, dict[str, float]] = field(default_factory=dict)
    """By number of cells: what the kernel and rank 0 hold, and the log directories on disk."""

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)


def measure(rounds: int, size: int, cells: int, ways: Sequence[Way] = WAYS) -> Figures:
    """Measure each cell this often with each way, and then a long session.

    Args:
        rounds: Measurements of each cell.
        size: Bytes of the tensor that is pushed.
        cells: Cells of the long session, each with an all_reduce.
        ways: Those to measure.
    """
    figures = Figures({each: {way.name: [] for way in ways} for each in CELLS}, size)
    with contextlib.ExitStack() as stack:
        kernels = {way: kernel for way in ways if (kernel := stack.enter_context(_started(way))) is not None}
        for each, by_way in figures.seconds.items():
            bodies = {way: way.cell(each).format(size=size) for way in kernels if way.cell(each)}
            for way, cell in bodies.items():
                kernels[way].run(cell).check()  # the first pays for imports
            for _ in range(rounds):
                for way, cell in bodies.items():
                    by_way[way.name].append(kernels[way].run(cell).check().seconds)
    figures.held = _held_over(cells)
    return figures


def _held_over(cells: int) -> dict[int, dict[str, float]]:
    """Run this many cells in one session; return what is held after a tenth of them, and after all."""
    found: dict[int, dict[str, float]] = {}
    with _started(OURS) as kernel:
        assert kernel is not None
        kernel.run(_HELD).check()
        for number in range(1, cells + 1):
            kernel.run(OURS.cell(CELLS[1])).check()
            if number in (cells // 10, cells):
                by_process = kernel.ask("{'the kernel': held(), 'a rank': s.run(held, view='none')[0]}")
                found[number] = {f"{name} of {of}": n for of, held in by_process.items() for name, n in held.items()}
                found[number]["log directories"] = kernel.ask(_LOGS)
    return found


@contextlib.contextmanager
def _started(way: Way) -> Iterator[Kernel | None]:
    """Start a kernel with a way's ranks; None if its package is not installed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        own = {"NBLAUNCH_VIEW": "auto", "TMPDIR": folder, "IPYTHONDIR": folder, "NBLAUNCH_STATE_DIR": f"{folder}/state"}
        with running_kernel(**own) as kernel:
            started = kernel.run(way.setup)
            if started.error.startswith("ModuleNotFoundError"):
                yield None
                return
            started.check()
            yield kernel
            kernel.run(way.end).check()


def table(figures: Figures) -> str:
    """The medians as a Markdown table, in milliseconds."""
    every = list(next(iter(figures.seconds.values())))
    ways = [way for way in every if any(by_way[way] for by_way in figures.seconds.values())]
    rounds = max(len(values) for by_way in figures.seconds.values() for values in by_way.values())
    rows = [f"| median of {rounds}, milliseconds | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for name, by_way in figures.seconds.items():
        base = 1000 * statistics.median(by_way.get("ipyparallel") or [math.inf])
        cells = [shown(1000 * statistics.median(by_way[way]), 1, base) if by_way[way] else "" for way in ways]
        what = f"{name}, {figures.size / _MB:.0f} MB" if name == CELLS[2] else name
        rows.append(f"| {what} | {' | '.join(cells)} |")
    counts = list(figures.held)
    rows += ["", f"Not measured: {', '.join(missing)}."] if (missing := sorted({*every} - {*ways})) else []
    rows += ["", "In brackets: the ratio to ipyparallel. A long session, each cell with an all_reduce:", ""]
    rows += [f"| held after | {' | '.join(f'{count:,} cells' for count in counts)} |", "|---" * (len(counts) + 1) + "|"]
    for name in figures.held[counts[0]]:
        rows.append(f"| {name} | {' | '.join(f'{figures.held[count][name]:g}' for count in counts)} |")
    return "\n".join(rows)
