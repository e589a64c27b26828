"""How the kernel's part of a launch grows with the number of nodes: up to 64 simulated agents with 8 ranks each.

The kernel's side is the real one, in a process of its own: `links` are the nodes and the workers of a group alone,
`launch` is a whole launch without a view. The agents are those of `simulated_agents`: no rank runs, and all links are
on this machine, so a node more costs neither memory nor CPU of its own. Each rank prints 20 lines and reports once a
second; each agent sends its ranks' collectives twice a second.

Usage of the process that is measured: python -m tests.benchmarks.nodes links|launch AGENTS SECONDS LINES_A_SECOND
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import nblaunch
from nblaunch.engines import current
from nblaunch.engines.command_starter import Command, CommandStarter
from nblaunch.engines.node_engine import NodeEngine
from nblaunch.engines.nodes import NodeWorkers
from nblaunch.engines.protocol import Received, Worker
from nblaunch.errors import LaunchStoppedError
from nblaunch.launch import frontend
from nblaunch.launch.commands import Commands
from nblaunch.launch.handle import Launch
from nblaunch.launch.views import Event, RanksChanged, RanksPlaced, View
from nblaunch.machine.inventory import this_process
from nblaunch.wire.link_messages import Boot
from nblaunch.wire.messages import Order, Running, Swept, Task, World
from tests.benchmarks.scale import slope

RANKS = 8
"""Of each agent."""
LINES = 20.0
"""A second, of each rank."""
_LIMIT_S = 300.0
Level = Literal["links", "launch"]
LEVELS: tuple[Level, ...] = ("links", "launch")


@dataclass(frozen=True)
class Growth:
    """One number of agents."""

    agents: int
    join_s: float
    """For all agents to join."""
    start_s: float
    """From placing the group until every rank runs."""
    cpu: float
    """Cores that the kernel uses while the ranks print."""
    memory: float
    """Bytes that the kernel has gained since before the agents joined, at the end of that time."""
    age_s: float
    """Of the oldest count of collectives that the kernel has of a rank: half a second, and the delay of the link."""
    stop_s: float
    """From the first interrupt until every node is swept."""
    messages: float
    """That arrive in a second."""
    bytes: float
    """The same in bytes, without encryption."""


@dataclass
class Figures:
    """All of the module's, by level."""

    levels: dict[str, list[Growth]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)


def measure(agents: Sequence[int], seconds: float) -> Figures:
    """Measure each number of agents at each level."""
    figures = Figures()
    for level in LEVELS:
        for count in agents:
            command = [sys.executable, "-m", "tests.benchmarks.nodes", level, str(count), str(seconds), str(LINES)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=True)
            figures.levels.setdefault(level, []).append(Growth(**json.loads(done.stdout.splitlines()[-1])))
    return figures


def table(figures: Figures) -> str:
    """The figures as Markdown tables, with what each agent more costs."""
    lines: list[str] = []
    for level, grown in figures.levels.items():
        agents = [each.agents for each in grown]
        what = {"links": "the links alone", "launch": "a whole launch"}[level]
        lines += [f"| {what}: agents of {RANKS} ranks | {' | '.join(map(str, agents))} | each more |"]
        lines.append("|---" * (len(agents) + 2) + "|")
        for name, digits, values in _rows(grown):
            each_more = slope(dict(zip(agents, values, strict=True)))
            cells = [f"{value:.{digits}f}" for value in values]
            lines.append(f"| {name} | {' | '.join(cells)} | {each_more:.{digits + 2}f} |")
        lines.append("")
    return "\n".join(lines[:-1])


def _rows(grown: Sequence[Growth]) -> list[tuple[str, int, list[float]]]:
    return [
        ("join, s", 2, [each.join_s for each in grown]),
        ("place to all running, s", 3, [each.start_s for each in grown]),
        ("kernel's CPU while ranks print, % of a core", 1, [100 * each.cpu for each in grown]),
        ("kernel's memory, MB more", 1, [each.memory / 1e6 for each in grown]),
        ("oldest count of collectives, s", 2, [each.age_s for each in grown]),
        ("interrupt to swept, s", 3, [each.stop_s for each in grown]),
        ("messages a second", 0, [each.messages for each in grown]),
        ("KB a second", 0, [each.bytes / 1e3 for each in grown]),
    ]


# ------------------------------------------------------------------ the process that is measured
class _Simulated(CommandStarter):
    """A `node_engine.Starter` of simulated agents, all in one process."""

    name = "simulated"

    def __init__(self, count: int, lines: float, rates: str) -> None:
        super().__init__()
        self.count = count
        self._arguments = [str(count), str(lines), rates]

    def addresses(self, check: Callable[[], None]) -> Sequence[str]:
        return ["127.0.0.1"]

    def start(self, boot: Boot) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.simulated_agents", *self._arguments]
        self.run([Command(-1, "simulated agents", command)], boot)

    def state(self) -> str:
        return ""


class _Group:
    """A group without a launch: its events are only counted."""

    def __init__(self, engine: NodeEngine, agents: int, log_dir: str) -> None:
        ranks = [range(first, first + RANKS) for first in range(0, agents * RANKS, RANKS)]
        world_size, env = agents * RANKS, dict(os.environ)
        order = Order(
            secrets.token_hex(3), world_size, ranks, "forkserver", this_process(), [env] * len(ranks), (), log_dir
        )
        self.workers = engine.place(order, Commands())
        self._running = threading.Semaphore(0)
        self._is_over = threading.Event()
        store = self.workers.open_store()
        self.members = self.workers.start(lambda rank: {"RANK": str(rank), "LOCAL_RANK": str(rank % RANKS)})
        task = Task(1, World(*store, "gloo", "cpu", 1), is_last=True)
        with tempfile.TemporaryFile() as payload:
            payload.write(b"p" * 4000)
            payload.flush()
            self.workers.send_tasks([task] * world_size, [payload.fileno()])
        threading.Thread(target=self._drain, daemon=True).start()
        for _ in range(world_size):
            self._running.acquire()

    def _drain(self) -> None:
        while not self._is_over.is_set():
            for event in self.workers.wait(0.05):
                if isinstance(event, Received):
                    event.parcel.close()
                    if isinstance(event.message, Running):
                        self._running.release()
                elif isinstance(event, Swept):
                    self._is_over.set()

    def stop(self) -> None:
        for member in self.members:
            member.interrupt(1)
        assert self._is_over.wait(_LIMIT_S)

    def close(self) -> None:
        self.workers.close()


class _Launch(View):
    """A whole launch, with a view that counts the ranks that run."""

    shows_notes = False

    def __init__(self, engine: NodeEngine, agents: int, log_dir: str) -> None:
        os.environ["NBLAUNCH_STATE_DIR"] = log_dir
        self._ranks: set[int] = set()
        self._all_run = threading.Event()
        self._world_size = agents * RANKS
        name = "ssh simulated"
        current._held[name, agents] = engine  # found before any ssh is asked for
        frontend.register(_Frontend(self))
        chosen: dict[str, Any] = {"engine": name, "num_nodes": agents, "num_processes": RANKS}
        launch = nblaunch.notebook_launcher(_nothing, **chosen, block=False)
        assert isinstance(launch, Launch)
        self._launch = launch
        assert self._all_run.wait(_LIMIT_S)

    def on(self, event: Event) -> None:
        if isinstance(event, RanksPlaced):
            assert isinstance(event.workers, NodeWorkers)
            self.members = list(event.workers._workers.values())
        elif isinstance(event, RanksChanged):
            self._ranks |= {status.rank for status in event.ranks if status.state == "running"}
            if len(self._ranks) == self._world_size:
                self._all_run.set()

    def stop(self) -> None:
        self._launch.stop()
        with contextlib.suppress(LaunchStoppedError):
            self._launch.result()

    def close(self) -> None:
        """Nothing is left of a launch."""


class _Frontend(frontend.Frontend):
    def __init__(self, view: View) -> None:
        self._view = view

    def view(self, choice: str) -> View:
        return self._view


def _nothing() -> None:
    """Ranks that are only numbers do not run it."""


def measured(level: Level, agents: int, seconds: float, lines: float) -> Growth:
    """Measure one number of agents, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        rates = Path(folder, "rates")
        memory = _memory()
        begin = time.monotonic()
        engine = NodeEngine(_Simulated(agents, lines, str(rates)))
        engine.machines(lambda text: None)
        joined = time.monotonic()
        made = _Group if level == "links" else _Launch
        first = made(engine, agents, folder)  # it pays for imports
        first.stop()
        first.close()
        placing = time.monotonic()
        group = made(engine, agents, folder)
        started = time.monotonic()
        time.sleep(min(2.0, seconds))  # what the start has left is over
        used, at = time.process_time(), time.monotonic()
        ages = []
        while time.monotonic() - at < seconds:
            time.sleep(0.5)
            ages.append(max(_age(worker) for worker in group.members))
        cpu = (time.process_time() - used) / (time.monotonic() - at)
        gained = _memory() - memory
        stopping = time.monotonic()
        group.stop()
        stop_s = time.monotonic() - stopping
        assert all(worker.log("out").size() for worker in group.members)
        group.close()
        engine.stop()
        messages, size = json.loads(rates.read_text())
    return Growth(
        agents,
        joined - begin,
        started - placing,
        cpu,
        gained,
        statistics.median(ages),
        stop_s,
        messages,
        size,
    )


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _age(worker: Worker) -> float:
    return min((time.monotonic_ns() - begun.time_ns for begun in worker.collectives()), default=0) / 1e9


def main() -> None:
    """Measure what the command line says, and print it as JSON."""
    level, agents, seconds, lines = sys.argv[1:]
    assert level in LEVELS
    print(json.dumps(asdict(measured(level, int(agents), float(seconds), float(lines)))))


if __name__ == "__main__":
    main()
