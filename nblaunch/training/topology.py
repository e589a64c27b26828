"""The position of this process among its ranks: in a launch, under torchrun or srun, or alone.

Nothing is cached: an object made in the notebook must be valid in the ranks that it is sent to.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nblaunch.errors import NestedLaunchError
from nblaunch.machine.slurm_variables import refusal, slurm_task
from nblaunch.ranks.report import current

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Only all four make a rank: a notebook's environment may hold stale ones."""


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    local_rank: int
    size: int

    @property
    def is_shared(self) -> bool:
        return self.size > 1


def world() -> World:
    """Return this process's position.

    Sources, in this order: the process group, the launch, torchrun's variables, Slurm's variables. Without any of
    them the process is rank 0 of 1.
    """
    context = current()
    if has_group():
        rank = dist.get_rank()
        return World(rank, context.local_rank if context else _local_rank(rank), dist.get_world_size())
    if context is not None:
        return World(context.rank, context.local_rank, context.world_size)
    if _has_torchrun_variables():
        rank = int(os.environ["RANK"])
        return World(rank, _local_rank(rank), int(os.environ["WORLD_SIZE"]))
    task = slurm_task(os.environ)
    if task is None:
        return World(0, 0, 1)
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):  # its cells would wait for the other tasks
        raise NestedLaunchError(refusal(task))
    return World(task.rank, task.local_rank, task.count)


def data_world(copies: int = 1) -> World:
    """Return this process's position among those that read different samples."""
    place = world()
    return place if copies == 1 else World(place.rank // copies, place.local_rank, place.size // copies)


def _has_torchrun_variables() -> bool:
    return all(name in os.environ for name in _TORCHRUN_VARIABLES)


def _local_rank(rank: int) -> int:
    """Return torchrun's local rank, else Slurm's, else `rank`, as on a single machine."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    task = slurm_task(os.environ)
    return rank if task is None else task.local_rank


def has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def ensure_group(backend: str | None = None) -> None:
    """Initialize the default process group if there are other ranks and no group (under torchrun or srun)."""
    if not world().is_shared or has_group():
        return
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    task = None if _has_torchrun_variables() else slurm_task(os.environ)
    if task is None:
        dist.init_process_group(backend)
    else:
        address = f"tcp://{task.master_addr}:{task.master_port}"
        dist.init_process_group(backend, address, rank=task.rank, world_size=task.count)


def own_device(setup: str = "auto") -> torch.device:
    context = current()
    if setup == "cpu":
        return torch.device("cpu")
    if setup == "auto" and context is not None:
        return torch.device(context.device)
    if torch.cuda.is_available():
        return torch.device("cuda", world().local_rank % torch.cuda.device_count())
    if setup == "gpu":
        raise RuntimeError('compute_setup="gpu", but no GPU is visible: use compute_setup="auto" or "cpu"')
    return torch.device("cpu")


def collective_device() -> torch.device:
    """Return where tensors must be for the default group's collectives: the CPU if it can, else this rank's GPU."""
    if not has_group() or "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
