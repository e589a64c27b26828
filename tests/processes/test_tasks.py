"""Consecutive tasks in the same ranks: results, failures, and stale interrupts."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nblaunch.engines.current import engine
from nblaunch.engines.local import LocalWorkers
from nblaunch.launch import payload as payloads
from nblaunch.launch.commands import Commands
from nblaunch.launch.group import WorkerGroup
from nblaunch.launch.options import Options
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.plan import make_plan
from nblaunch.launch.stopping import SESSION
from nblaunch.launch.task import Task
from nblaunch.launch.views import NullView
from nblaunch.machine.inventory import this_process
from nblaunch.transfer.parcel import unpack
from nblaunch.wire.messages import Look, Order
from tests.conftest import LONG, eventually


class Group:
    """Two ranks on this machine that stay for several tasks."""

    def __init__(self, opened: ExitStack, start_method: str) -> None:
        self.plan = make_plan(engine.machines(print), engine, Options(num_processes=2, start_method=start_method))
        files = LaunchFiles.create("several")
        opened.callback(files.close)
        self.commands = Commands()
        opened.callback(self.commands.close)
        plan, here = self.plan, this_process()
        order = Order(
            "several", 2, plan.ranks, "forkserver", here, plan.envs, plan.named, str(files.directory), is_kept=True
        )
        self.workers = engine.place(order, self.commands)
        assert isinstance(self.workers, LocalWorkers)
        self.group = WorkerGroup(self.workers, lambda text: None, is_kept=True)
        opened.callback(self.group.close)
        self.store = self.workers.open_store()
        self.group.start(lambda rank: plan.environment(rank, self.store, "several", 0))
        self._numbers = itertools.count(1)
        opened.callback(self.leave)

    def begin(self, function: Callable[..., Any], *args: Any, generation: int = 0) -> Task:
        shipment = payloads.ship(payloads.for_function(function, args, {}))
        assert shipment.parcel is not None
        task = Task(next(self._numbers), self.group, NullView(), self.commands, {}, 30.0, policy=SESSION)
        task.send(lambda rank: replace(self.plan.world(rank, self.store), generation=generation), shipment.parcel.fds)
        self.follow(task, lambda: all(rank.is_running or rank.failed for rank in task.ranks))
        shipment.parcel.close()
        return task

    def follow(self, task: Task, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG
        while not until():
            assert time.monotonic() < deadline, "the task does not get on"
            for event in self.group.wait(0.05):
                task.take(event)
            task.step()

    def end(self, task: Task) -> dict[int, Any]:
        """Wait for the task's end, and return the ranks' values."""
        self.follow(task, lambda: task.is_over)
        return {rank: unpack(fds) for rank, fds in task.take_results().items()}

    def run(self, function: Callable[..., Any], *args: Any, generation: int = 0) -> dict[int, Any]:
        return self.end(self.begin(function, *args, generation=generation))

    def leave(self) -> None:
        """Let the ranks leave, and wait for their end."""
        self.group.end()
        deadline = time.monotonic() + LONG
        while not self.group.is_over and time.monotonic() < deadline:
            for _ in self.group.wait(0.05):
                pass


@pytest.fixture
def ranks(start_method: str) -> Iterator[Group]:
    with ExitStack() as opened:
        yield Group(opened, start_method)


def sum_of_ranks(add: int, rank: int) -> tuple[int, float]:
    total = torch.tensor([float(rank + add)])
    dist.all_reduce(total)
    return os.getpid(), total.item()


def fail_on_first(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        raise ValueError("the first rank fails")


def wait_for_file(path: str, rank: int) -> str:
    """Wait until the file is there, or for an interrupt; return which it was."""
    try:
        Path(f"{path}.begun{rank}").touch()
        eventually(Path(path).exists, LONG)
    except KeyboardInterrupt:
        return "interrupted"
    return "undisturbed"


def test_ranks_run_one_task_after_the_other(ranks: Group) -> None:
    first, second, third = (ranks.run(sum_of_ranks, add) for add in (0, 1, 2))
    assert [total for _, total in first.values()] == [1.0, 1.0]
    assert [total for _, total in second.values()] == [3.0, 3.0]
    assert [total for _, total in third.values()] == [5.0, 5.0]
    assert {pid for pid, _ in first.values()} == {pid for pid, _ in third.values()}
    assert len({pid for pid, _ in first.values()}) == 2


def test_a_failed_task_does_not_spoil_the_next(ranks: Group) -> None:
    failed = ranks.begin(fail_on_first)
    assert set(ranks.end(failed)) == {1}
    cause = failed.verdict().cause
    assert cause is not None
    assert (cause.kind, cause.rank) == ("exception", 0)
    assert [total for _, total in ranks.run(sum_of_ranks, 0).values()] == [1.0, 1.0]


def leave_the_group(rank: int) -> None:
    if rank == 0:
        dist.destroy_process_group()


def test_a_new_generation_makes_a_new_process_group(ranks: Group) -> None:
    ranks.run(leave_the_group)
    assert [total for _, total in ranks.run(sum_of_ranks, 1, generation=1).values()] == [3.0, 3.0]


@pytest.mark.parametrize("start_method", ["forkserver"], indirect=True)
def test_an_interrupt_that_comes_too_late_hits_no_later_task(ranks: Group, tmp_path: Path) -> None:
    first = ranks.begin(wait_for_file, str(tmp_path / "first"))
    (tmp_path / "first").touch()
    assert ranks.end(first) == {0: "undisturbed", 1: "undisturbed"}
    second = ranks.begin(wait_for_file, str(tmp_path / "second"))
    for member in ranks.group.members:
        member.worker.interrupt(first.number)
        member.worker.tell(Look(second.number, "place"))  # its answer shows that the interrupt was read
    said: list[str] = []

    def both_have_answered() -> bool:
        said.append(second.console.take_text())
        return "".join(said).count("rank ") == 2

    ranks.follow(second, both_have_answered)
    eventually(lambda: all(has_taken_sigint(member.pid) for member in ranks.group.members))
    (tmp_path / "second").touch()
    assert ranks.end(second) == {0: "undisturbed", 1: "undisturbed"}


def test_an_interrupt_stops_its_own_task_alone(ranks: Group, tmp_path: Path) -> None:
    for name in ("first", "second"):
        task = ranks.begin(wait_for_file, str(tmp_path / name))
        for rank in range(2):
            eventually(Path(f"{tmp_path / name}.begun{rank}").exists, LONG)
            ranks.group.members[rank].worker.interrupt(task.number)
        assert ranks.end(task) == {0: "interrupted", 1: "interrupted"}
        assert all(rank.interrupted for rank in task.ranks)
    assert [total for _, total in ranks.run(sum_of_ranks, 0).values()] == [1.0, 1.0]


def has_taken_sigint(pid: int) -> bool:
    """Return True if no SIGINT is pending there."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return not any(mask >> (signal.SIGINT - 1) & 1 for mask in pending)
