"""Stop and interrupts while ranks wait for a GPU: in a long kernel, and in a collective of NCCL."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.gpu import gpus
from tests.gpu.conftest import LIMIT
from tests.kernel.harness import Cell, Kernel

COUNT = gpus.number()
STOPPED_WITHIN = 15.0
"""Seconds from an interrupt to the end of the cell: 3 for a rank to respond, and what a slow machine takes."""
ALL_REDUCE = """
def total(rank, device):
    import torch.distributed as dist
    summed = torch.full((3,), rank + 1.0, device=device)
    dist.all_reduce(summed)
    return summed.tolist()
"""
COUNTS = """%%distributed -o sums
summed = torch.ones(1, device=device)
dist.all_reduce(summed)
summed.item()
"""
PAIR = (
    "s = nblaunch.session(2)"
    if COUNT > 1
    else f"s = nblaunch.session(2, backend='gloo', env={{'{gpus.SHARED}': '1'}})"  # both on the only GPU
)
GROUP = "group = None" if COUNT > 1 else "group = dist.new_group(backend='nccl')"
SUMS = f"""%%distributed -o sums
{GROUP}
summed = torch.full((3,), rank + 1.0, device=device)
dist.all_reduce(summed, group=group)
summed.tolist()
"""


def interrupted(kernel: Kernel, code: str, *started: Path) -> Cell:
    """Run a cell, and interrupt the kernel once these files are there."""
    request = kernel.start_cell(code)
    eventually(lambda: all(path.exists() for path in started), LIMIT, lambda: kernel.cells[request].text)
    begin = time.monotonic()
    kernel.interrupt()
    cell = kernel.finish_cell(request, LIMIT)
    assert cell.error.startswith("KeyboardInterrupt"), cell.traceback
    assert time.monotonic() - begin < STOPPED_WITHIN
    return cell


def test_stop_ends_ranks_in_a_long_kernel(kernel: Kernel, folder: Path) -> None:
    kernel.run(
        "def spins(rank, device):\n"
        "    torch.ones(1, device=device).sum().item()\n"
        "    torch.cuda._sleep(10**12)\n"
        "    (folder / f'spins{rank}').touch()\n"
        "    torch.cuda.synchronize()"
    ).check()
    started = [folder / f"spins{rank}" for rank in range(COUNT)]
    interrupted(kernel, f"notebook_launcher(spins, num_processes={COUNT}, view='none')", *started)
    kernel.run(f"{ALL_REDUCE}\nresult = notebook_launcher(total, num_processes={COUNT}, view='none')").check()
    assert kernel.ask("list(result)") == [[sum(range(1, COUNT + 1)) * 1.0] * 3] * COUNT


def test_a_session_keeps_its_variables_after_a_long_kernel(kernel: Kernel, folder: Path) -> None:
    """The rank responds once its kernel has ended; its communicator is aborted before, and made again."""
    kernel.run(f"s = nblaunch.session({COUNT})").check()
    try:
        kernel.run(
            "%%distributed\n"
            "kept = torch.full((2,), rank + 10.0, device=device)\n"
            "dist.all_reduce(torch.ones(1, device=device))\n"
            "begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
            "begin.record()\n"
            "torch.cuda._sleep(10**8)\n"
            "end.record()\n"
            "torch.cuda.synchronize()\n"
            "cycles_of_4_s = int(10**8 / begin.elapsed_time(end) * 4000)"
        ).check()
        started = [folder / f"spins{rank}" for rank in range(COUNT)]
        interrupted(
            kernel,
            "%%distributed\n"
            "torch.cuda._sleep(cycles_of_4_s)\n"
            "(folder / f'spins{rank}').touch()\n"
            "torch.cuda.synchronize()\n"
            "kept = None",
            *started,
        )
        assert kernel.ask("[each.tolist() for each in s.pull('kept')]") == [[r + 10.0] * 2 for r in range(COUNT)]
        kernel.run(COUNTS).check()
        assert kernel.ask("list(sums)") == [float(COUNT)] * COUNT
        kernel.run("%%distributed\ntorch.cuda.synchronize()\nassert kept.sum().item() == 2 * (rank + 10)").check()
    finally:
        kernel.run("s.stop()").check()


@pytest.mark.needs("two NCCL ranks")
def test_stop_ends_ranks_in_a_collective_of_nccl(kernel: Kernel, folder: Path) -> None:
    launch = "notebook_launcher(waits, num_processes=2, view='none'"
    launch += ")" if COUNT > 1 else f", backend='gloo', env={{'{gpus.SHARED}': '1'}})"
    kernel.run(
        "def waits(rank, device):\n"
        "    import time\n"
        "    import torch.distributed as dist\n"
        f"    {GROUP}\n"
        "    dist.all_reduce(torch.ones(1, device=device), group=group)\n"
        "    torch.cuda.synchronize()\n"
        "    (folder / f'waits{rank}').touch()\n"
        "    if rank == 0:\n"
        "        dist.all_reduce(torch.ones(1, device=device), group=group)\n"
        "    torch.cuda.synchronize()\n"
        "    time.sleep(600)"
    ).check()
    interrupted(kernel, launch, folder / "waits0", folder / "waits1")
    kernel.run(f"{ALL_REDUCE}\nresult = notebook_launcher(total, num_processes={COUNT}, view='none')").check()
    assert kernel.ask("list(result)") == [[sum(range(1, COUNT + 1)) * 1.0] * 3] * COUNT


@pytest.mark.needs("two NCCL ranks")
def test_a_session_goes_on_after_a_collective_of_nccl(kernel: Kernel, folder: Path) -> None:
    """One rank waits in a collective that the other never calls; both keep their variables, and the next one works."""
    kernel.run(PAIR).check()
    try:
        kernel.run("%%distributed\nimport time\nkept = torch.full((2,), rank + 10.0, device=device)").check()
        kernel.run(SUMS).check()
        assert kernel.ask("list(sums)") == [[3.0] * 3] * 2
        interrupted(
            kernel,
            "%%distributed\n"
            "(folder / f'waits{rank}').touch()\n"
            "if rank == 0:\n"
            "    dist.all_reduce(torch.ones(1 << 20, device=device), group=group)\n"
            "    torch.cuda.synchronize()\n"
            "else:\n"
            "    time.sleep(600)\n"
            "kept = None",
            folder / "waits0",
            folder / "waits1",
        )
        assert kernel.ask("[each.tolist() for each in s.pull('kept')]") == [[10.0, 10.0], [11.0, 11.0]]
        for _ in range(2):
            kernel.run(SUMS).check()
            assert kernel.ask("list(sums)") == [[3.0] * 3] * 2
    finally:
        kernel.run("s.stop()").check()


@pytest.mark.needs("two NCCL ranks")
def test_a_group_is_replaced_while_nccl_waits(kernel: Kernel) -> None:
    """NCCL's calls return at once, so the cell ends; the collective does not, and the old group must."""
    kernel.run(PAIR).check()
    try:
        kernel.run(SUMS).check()
        lonely = "%%distributed\nif rank == 0:\n    dist.all_reduce(torch.ones(1, device=device), group=group)"
        kernel.run(lonely, LIMIT).check()
        kernel.run("s.regroup()").check()
        kernel.run(SUMS, LIMIT).check()
        assert kernel.ask("list(sums)") == [[3.0] * 3] * 2
    finally:
        kernel.run("s.stop()").check()


@pytest.mark.needs("two GPUs")
def test_a_failed_rank_frees_the_others_from_nccl(kernel: Kernel) -> None:
    kernel.run(f"s = nblaunch.session({COUNT})").check()
    try:
        kernel.run("%%distributed\nkept = rank + 10\ndist.all_reduce(torch.ones(1, device=device))").check()
        failed = kernel.run(
            "%%distributed\n"
            "if rank == 1:\n"
            "    raise ValueError('no such batch')\n"
            "dist.all_reduce(torch.ones(1, device=device))\n"
            "torch.cuda.synchronize()\n"
            "kept = None"
        )
        assert failed.error == "ValueError: no such batch"
        assert kernel.ask("s.pull('kept')") == [rank + 10 for rank in range(COUNT)]
        kernel.run(COUNTS).check()
        assert kernel.ask("list(sums)") == [float(COUNT)] * COUNT
    finally:
        kernel.run("s.stop()").check()
