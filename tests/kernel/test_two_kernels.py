from __future__ import annotations

from tests.kernel.harness import Kernel, running_kernel

LAUNCHES = 20
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


def test_two_kernels_that_launch_at_once_do_not_clash(kernel: Kernel) -> None:
    """They share the machine's ports, the state directory and the folder for temporary files."""
    state = kernel.ask("__import__('os').environ['NBLAUNCH_STATE_DIR']")
    with running_kernel(NBLAUNCH_STATE_DIR=state, CUDA_VISIBLE_DEVICES="") as other:
        other.run("from nblaunch import notebook_launcher\nnotebook_launcher(int, num_processes=1)").check()
        requests = [(each, each.start_cell(CELL)) for each in (kernel, other)]
        cells = [each.finish_cell(request).check() for each, request in requests]

    assert [cell.value for cell in cells] == ["[]", "[]"]
