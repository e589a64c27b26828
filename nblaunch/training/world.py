"""Where this process stands among its ranks: in a launch, under torchrun or srun, or alone.

Everything is read when it is asked for, so that objects made in the notebook are right in the ranks that they are
sent to.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nblaunch.errors import NestedLaunchError
from nblaunch.machine.slurm_variables import refusal, slurm_task
from nblaunch.ranks.report import current

T = TypeVar("T")
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets. With fewer of them (a leftover in a notebook's environment) a process is alone."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place."""

    rank: int
    """From 0 to `size` - 1, over all machines."""
    local_rank: int
    """On this machine."""
    size: int

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks."""
        return self.size > 1


def world() -> World:
    """Where this process stands: by its process group, its launch, torchrun's variables or Slurm's, else alone.

    Raises:
        NestedLaunchError: This is the kernel of a notebook that is one of several Slurm tasks.
    """
    context = current()
    if has_group():
        rank = dist.get_rank()
        return World(rank, context.local_rank if context else _local_rank(rank), dist.get_world_size())
    if context is not None:
        return World(context.rank, context.local_rank, context.world_size)
    if _has_torchruns_variables():
        rank = int(os.environ["RANK"])
        return World(rank, _local_rank(rank), int(os.environ["WORLD_SIZE"]))
    task = slurm_task(os.environ)
    if task is None:
        return World(0, 0, 1)
    if _in_kernel():  # its cells would wait for those of the other tasks
        raise NestedLaunchError(refusal(task))
    return World(task.rank, task.local_rank, task.count)


def _in_kernel() -> bool:
    """Return True if this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _has_torchruns_variables() -> bool:
    return all(name in os.environ for name in _RENDEZVOUS)


def _local_rank(rank: int) -> int:
    """Torchrun's, else Slurm's, else that of one machine."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    task = slurm_task(os.environ)
    return rank if task is None else task.local_rank


def has_group() -> bool:
    """Whether this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


def ensure_group(backend: str | None = None) -> None:
    """Make the default group where there are other ranks and no group yet (under torchrun or srun).

    Args:
        backend: As ``init_process_group`` takes it. Default: gloo on the CPU, nccl (with gloo for CPU tensors) on GPUs.
    """
    if not world().is_shared or has_group():
        return
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    task = None if _has_torchruns_variables() else slurm_task(os.environ)
    if task is None:
        dist.init_process_group(backend)
    else:
        address = f"tcp://{task.master_addr}:{task.master_port}"
        dist.init_process_group(backend, address, rank=task.rank, world_size=task.count)


def own_device(setup: str = "auto") -> torch.device:
    """The device that this rank computes on.

    Args:
        setup: ``"cpu"``, ``"gpu"``, or ``"auto"``: in a launch the launch's own, else CUDA where there is a GPU.

    Raises:
        RuntimeError: A GPU is asked for, and none is visible.
    """
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
    """Where a tensor must be for the default group's collectives: the CPU if they can, else this rank's GPU."""
    if not has_group() or "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def exchange(value: T) -> list[T]:
    """Everybody's value, by rank. A collective; any object that pickles.

    ``torch.distributed.all_gather_object``, and without other ranks the value alone.
    """
    if not world().is_shared:
        return [value]
    ensure_group()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
