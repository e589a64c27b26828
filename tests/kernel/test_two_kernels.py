from __future__ import annotations

from pathlib import Path

from tests.kernel.harness import running_kernel

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


def test_two_kernels_that_launch_at_once_do_not_clash(tmp_path: Path) -> None:
    """They share the machine's ports, the state directory and the folder for temporary files."""
    environment = {"NBLAUNCH_STATE_DIR": str(tmp_path / "state"), "CUDA_VISIBLE_DEVICES": ""}
    with running_kernel(**environment) as one, running_kernel(**environment) as other:
        requests = [(kernel, kernel.start_cell(CELL)) for kernel in (one, other)]
        cells = [kernel.finish_cell(request).check() for kernel, request in requests]

    assert [cell.value for cell in cells] == ["[]", "[]"]
