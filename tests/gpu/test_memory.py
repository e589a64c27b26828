"""GPU memory: what the panel shows, what an error says, and that nothing keeps any."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.conftest import command_of, eventually, marked_processes
from tests.gpu import gpus
from tests.kernel.harness import Kernel

COUNT = gpus.number()
GIB = 1 << 30
MIB = 1 << 20
HOLDS = """
def used(index):
    free, total = torch.cuda.mem_get_info(index)
    return total - free

def holds(rank, device):
    torch.ones(1, device=device).sum().item()
    torch.cuda.synchronize()
    before = used(device)
    (folder / f'pid{rank}.part').write_text(str(os.getpid()))
    (folder / f'pid{rank}.part').rename(folder / f'pid{rank}')
    wait_for(folder / 'more')
    kept = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    after = used(device)
    (folder / f'held{rank}').touch()
    if spins:
        torch.cuda._sleep(10**12)
        torch.cuda.synchronize()
    wait_for(folder / 'end')
    return after - before
"""
STARTS = f"""
launch = notebook_launcher(holds, num_processes={COUNT}, view='none', block=False)
wait_for(*(folder / f'pid{{rank}}' for rank in range({COUNT})))
pids = {{rank: int((folder / f'pid{{rank}}').read_text()) for rank in range({COUNT})}}
"""
GROWS = f"""
(folder / 'more').touch()
wait_for(*(folder / f'held{{rank}}' for rank in range({COUNT})))
"""


# ------------------------------------------------------------------ the panel's figures
@pytest.mark.usefixtures("folder")
def test_nvml_sees_what_each_rank_holds(kernel: Kernel) -> None:
    """Its figures grow by a tensor's size, as CUDA's own do. Where NVML hides pids, the whole GPU's memory counts."""
    kernel.run(f"spins = False\n{HOLDS}\n{STARTS}").check()
    try:
        kernel.run(
            "from nblaunch.machine.usage import Sampler\n"
            "sampler = Sampler(pids.__getitem__, 'cuda')\n"
            "before = sampler.sample(pids)\n"
            f"{GROWS}\n"
            "after = sampler.sample(pids)\n"
            "sampler.close()"
        ).check()
    finally:
        kernel.run("(folder / 'more').touch(); (folder / 'end').touch()\nlaunch.wait()").check()
    figures = "[(each.rank, each.gpu, each.gpu_memory) for each in {}]"
    before, after = kernel.ask(figures.format("before")), kernel.ask(figures.format("after"))
    cuda = kernel.ask("list(launch.result())")
    for (rank, _, held_before), (same, busy, held_after), grown in zip(before, after, cuda, strict=True):
        assert rank == same
        if not gpus.found().slices:  # for a slice NVML gives none
            assert busy is not None, "NVML gives no utilization: see the log of nblaunch.machine.usage"
            assert 0 <= busy <= 1
        assert held_before is not None, "NVML gives no memory: see the log of nblaunch.machine.usage"
        assert GIB <= grown <= GIB + 256 * MIB  # a library may load meanwhile
        assert held_after - held_before == pytest.approx(grown, abs=256 * MIB)
    assert [rank for rank, *_ in after] == list(range(COUNT))


@pytest.mark.needs("two GPUs")
@pytest.mark.usefixtures("folder")
def test_only_the_rank_that_allocates_grows(kernel: Kernel) -> None:
    kernel.run(
        "from nblaunch.machine.usage import Sampler\n"
        "def one_grows(rank, device):\n"
        "    torch.ones(1, device=device).sum().item()\n"
        "    (folder / f'pid{rank}.part').write_text(str(os.getpid()))\n"
        "    (folder / f'pid{rank}.part').rename(folder / f'pid{rank}')\n"
        "    wait_for(folder / 'more')\n"
        "    kept = torch.empty((1 << 30) * (rank == 1), dtype=torch.uint8, device=device)\n"
        "    torch.cuda.synchronize()\n"
        "    (folder / f'held{rank}').touch()\n"
        "    wait_for(folder / 'end')\n"
        f"{STARTS.replace('holds', 'one_grows')}"
        "sampler = Sampler(pids.__getitem__, 'cuda')\n"
        "before = sampler.sample(pids)\n"
        f"{GROWS}\n"
        "after = sampler.sample(pids)\n"
        "sampler.close()\n"
        "(folder / 'end').touch()\n"
        "launch.wait()\n"
        "grown = [new.gpu_memory - old.gpu_memory for old, new in zip(before, after)]"
    ).check()
    grown = kernel.ask("grown")
    assert [each > GIB // 2 for each in grown] == [rank == 1 for rank in range(COUNT)], grown


# ------------------------------------------------------------------ out of memory
def test_out_of_memory_names_the_rank_and_what_the_notebook_holds(kernel: Kernel) -> None:
    kernel.run(
        "notebooks = torch.empty(1 << 29, dtype=torch.uint8, device='cuda')\n"
        "def fills(rank, world_size, device):\n"
        "    kept = torch.empty(1 << 30, dtype=torch.uint8, device=device)\n"
        "    if rank == world_size - 1:\n"
        "        too_much = torch.empty(1 << 50, dtype=torch.uint8, device=device)\n"
        "    import torch.distributed as dist\n"
        "    dist.barrier()\n"
        "try:\n"
        f"    notebook_launcher(fills, num_processes={COUNT}, view='none')\n"
        "    caught = None\n"
        "except torch.cuda.OutOfMemoryError as error:\n"
        "    caught = error"
    ).check()
    rank, notebooks = kernel.ask("(caught.rank, *caught.__notes__)")
    assert rank == COUNT - 1
    held, advice = notebooks.split(" on cuda:0: ")
    assert re.fullmatch(r"The notebook itself holds 0\.[5-7] GB", held)
    assert advice == "delete tensors there, then call torch.cuda.empty_cache()"
    assert kernel.ask("set(caught.__notes__) <= set(caught._render_traceback_())")
    kernel.run("del notebooks, caught").check()


# ------------------------------------------------------------------ nothing is kept
@pytest.mark.usefixtures("folder")
def test_a_rank_killed_in_a_kernel_frees_its_memory_in_3_s(kernel: Kernel) -> None:
    kernel.run(f"spins = True\n{HOLDS}\nidle = used(0)\n{STARTS}\n{GROWS}\nbusy = used(0)").check()
    kernel.run(
        "import signal\n"
        "killed = time.monotonic()\n"
        "os.kill(pids[0], signal.SIGKILL)\n"
        "while used(0) > idle + (1 << 27) and time.monotonic() < killed + 60:\n"
        "    time.sleep(0.01)\n"
        "seconds = time.monotonic() - killed\n"
        "(folder / 'end').touch()\n"
        "launch.stop()\n"
        "launch.wait()"
    ).check()
    idle, busy, seconds = kernel.ask("(idle, busy, seconds)")
    assert busy > idle + GIB
    assert seconds < 3


def test_a_launch_leaves_no_memory_behind(kernel: Kernel) -> None:
    kernel.run(
        "def used():\n"
        f"    return sum(total - free for free, total in map(torch.cuda.mem_get_info, range({COUNT})))\n"
        "def takes(device):\n"
        "    torch.empty(1 << 30, dtype=torch.uint8, device=device).fill_(1)\n"
        "    torch.cuda.synchronize()\n"
        "idle = used()\n"
        f"notebook_launcher(takes, num_processes={COUNT}, view='none')"
    ).check()
    eventually(lambda: kernel.ask("used() - idle") < 64 * MIB, 20, lambda: kernel.ask("used() - idle"))


def test_fork_servers_touch_no_gpu(kernel: Kernel) -> None:
    """They have not used CUDA, so they hold no memory there, and no rank inherits a CUDA that is broken by the fork."""
    kernel.run(f"notebook_launcher(lambda: None, num_processes={COUNT}, view='none')").check()
    servers = [pid for pid in marked_processes() if "nblaunch.ranks.forkserver" in command_of(pid, 1000)]
    assert servers
    assert uses_cuda(kernel.pid)
    assert [pid for pid in servers if uses_cuda(pid)] == []


def uses_cuda(pid: int) -> bool:
    """Whether a process has the device open that CUDA opens first."""
    folder = f"/proc/{pid}/fd"
    try:
        return "/dev/nvidia-uvm" in {os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}
    except OSError:
        return False  # it has ended


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # it has ended
