from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.conftest import eventually
from tests.kernel.harness import Kernel, running_kernel
from tests.processes.test_deaths import alive

LAUNCHES = 10
CELL = f"""
import torch, torch.distributed as dist
from nblaunch import notebook_launcher

def add_up(rank, world_size):
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    return total.item()

print('ready')
wrong = [values for _ in range({LAUNCHES}) if (values := list(notebook_launcher(add_up, num_processes=2))) != [3, 3]]
wrong
"""


@pytest.fixture(scope="module")
def other(shared_kernel: Kernel) -> Iterator[Kernel]:
    """They share the machine's ports, the state directory and the folder for temporary files."""
    state = shared_kernel.ask("__import__('os').environ['NBLAUNCH_STATE_DIR']")
    with running_kernel(NBLAUNCH_STATE_DIR=state, CUDA_VISIBLE_DEVICES="") as kernel:
        kernel.run("from nblaunch import notebook_launcher\nnotebook_launcher(int, num_processes=1)").check()
        yield kernel


def test_two_kernels_that_launch_at_once_do_not_clash(kernel: Kernel, other: Kernel) -> None:
    requests = [(each, each.start_cell(CELL)) for each in (kernel, other)]
    cells = [each.finish_cell(request).check() for each, request in requests]

    assert [cell.value for cell in cells] == ["[]", "[]"]


SESSION = """
import os, torch, torch.distributed as dist
import nblaunch
%load_ext nblaunch
session = nblaunch.session(2)
session.run(lambda: None, view="none")
"""
REDUCES = "%%distributed\nkept += 1\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(os.getpid(), kept, t.item())"


def test_the_end_of_one_kernels_session_spares_the_others(kernel: Kernel, other: Kernel) -> None:
    """Its stop, and the death of its kernel; both have a session of the same name."""
    kernel.run(SESSION).check()
    kernel.run("%%distributed\nkept = 10 * rank").check()
    ours = pids(kernel)
    try:
        for number, dies in enumerate((False, True), 1):
            other.run(SESSION).check()
            theirs = pids(other)
            if dies:
                os.kill(other.pid, signal.SIGKILL)
            else:
                other.run("%distributed session stop").check()
            eventually(lambda: not any(map(alive, theirs)))  # noqa: B023  # called at once
            said = kernel.run(REDUCES).check().text
            for rank, pid in enumerate(ours):
                assert f"[rank {rank}] {pid} {10 * rank + number} 2.0" in said
    finally:
        kernel.run("session.stop()").check()


def pids(kernel: Kernel) -> list[int]:
    return list(kernel.ask("session.pull('__import__(\"os\").getpid()')"))
