"""Leaks of launches in the notebook's process and its fork server."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nblaunch import notebook_launcher
from nblaunch.launch.output.log_directory import prune
from nblaunch.machine.processes import descendants
from tests.conftest import LONG, eventually, present_server, settled_server

MEGABYTE = 1 << 20


# ------------------------------------------------------------------ what ranks run
def add_up(rank: int, numbers: list[float]) -> float:
    total = torch.tensor(numbers) * (rank + 1)
    dist.all_reduce(total)
    return float(total.sum())


# ------------------------------------------------------------------ flat
@dataclass(frozen=True)
class Footprint:
    """What this process and its fork server hold."""

    descriptors: int
    threads: int
    children: int
    server_descriptors: int
    memory: int
    server_memory: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        its = present_server().process.pid
        return cls(
            descriptors_of(os.getpid()),
            threading.active_count(),
            len(descendants(os.getpid())),
            descriptors_of(its),
            memory_of(os.getpid()),
            memory_of(its),
        )

    def exceeds(self, before: Footprint) -> bool:
        """Whether there is more of anything that can be counted."""
        counted = ("descriptors", "threads", "children", "server_descriptors")
        return any(getattr(self, name) > getattr(before, name) for name in counted)


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_of(pid: int) -> int:
    """Bytes of a process's own: what is shared with files and other processes is not counted."""
    words = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")


def logs() -> int:
    return len(list(Path(os.environ["NBLAUNCH_STATE_DIR"]).iterdir()))


def wait_for_supervisor() -> None:
    """The last launch's: when the result is there it still prunes the logs."""
    eventually(lambda: not any(thread.name.startswith("nblaunch-") for thread in threading.enumerate()))


def kept_logs() -> int:
    """How many launches have their logs, once those that only wait for the collector have gone."""
    gc.collect()
    prune()
    return logs()


def test_more_launches_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "__defaults__", (10, 1 << 30))  # instead of 50 launches

    def launch() -> None:
        result = notebook_launcher(add_up, num_processes=2, kwargs={"numbers": [1.0] * 1000}, view="none")
        assert list(result) == [3000.0, 3000.0]  # type: ignore[arg-type]  # a blocking launch returns its result

    settled_server()
    for _ in range(15):  # the pages that are used once, and the 10 launches whose logs are kept
        launch()
    wait_for_supervisor()
    rounds = [Footprint.now()]
    kept = kept_logs()

    for _ in range(3):
        for _ in range(15):
            launch()
        wait_for_supervisor()
        eventually(lambda: not Footprint.now().exceeds(rounds[0]), LONG, lambda: (rounds, Footprint.now()))
        rounds.append(Footprint.now())

    grown = [(now.memory - then.memory, now.server_memory - then.server_memory) for then, now in pairwise(rounds)]
    assert min(here for here, _ in grown) < 1.5 * MEGABYTE, grown  # a leak grows in each; the allocator in one at times
    assert min(there for _, there in grown) < MEGABYTE // 2, grown
    assert kept_logs() == kept == 10
