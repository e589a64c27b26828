"""Launches by a real Slurm with two nodes."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import torch.distributed as dist

from nblaunch import notebook_launcher
from nblaunch.engines import current
from tests.conftest import eventually
from tests.engines.slurm_cluster import SlurmCluster

ENGINE: dict[str, Any] = {"engine": "slurm", "num_nodes": 2, "view": "none"}


def hosts() -> tuple[str, list[str]]:
    dist.barrier()
    return socket.gethostname(), [name for name in os.environ if name.startswith(("SLURM_NTASKS", "SLURM_PROCID"))]


def test_ranks_run_on_the_nodes_that_slurm_gives(slurm: SlurmCluster) -> None:
    result = notebook_launcher(hosts, num_processes=2, **ENGINE)
    assert list(result) == [("n1", []), ("n1", []), ("n2", []), ("n2", [])]
    (job,) = slurm.run("squeue", "-h", "-o", "%i %j %D").splitlines()
    assert job.split()[1].startswith("nblaunch-")
    assert job.split()[2] == "2"
    assert current.status()[-1] == f"slurm job {job.split()[0]}: n1, n2"
    begin = time.monotonic()
    notebook_launcher(hosts, **ENGINE)
    assert time.monotonic() - begin < 10  # the nodes are held
    assert len(current.release()) == 1
    eventually(slurm.is_idle, 20, slurm.log)
