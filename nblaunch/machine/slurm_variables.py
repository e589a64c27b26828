"""Slurm's environment variables: which task of a step this process is, and the address of the rendezvous.

``srun -n2 python train.py`` starts two processes, and describes each one's task in environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_TASK_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_NPROCS")
_TASK_PREFIXES = ("SLURM_STEP", "SLURM_TASK", "SLURM_NTASKS")
_FIRST_PORT, _PORTS = 20_000, 12_768
"""Below Linux's ephemeral ports."""


@dataclass(frozen=True, slots=True)
class SlurmTask:
    """One of several tasks of a Slurm step."""

    rank: int
    """From 0 to `count` - 1, over all nodes."""
    local_rank: int
    """On this node."""
    count: int
    """Of the step's tasks."""
    master_addr: str
    """The user's MASTER_ADDR, else the first node of the step."""
    master_port: int
    """The user's MASTER_PORT, else derived from the ids of the job and the step."""


def slurm_task(env: Mapping[str, str]) -> SlurmTask | None:
    """Return the Slurm task that has this environment; None outside Slurm and for a step of one task.

    Only ``srun`` sets the variables of a step. A notebook in an allocation (``salloc``, ``sbatch``) has
    ``SLURM_NTASKS`` and may have ``SLURM_PROCID``, but is a single process.
    """
    try:
        count = int(env["SLURM_STEP_NUM_TASKS"])
        if count < 2:
            return None
        is_one = env.get("SLURM_STEP_NUM_NODES") == "1"  # whose Slurm name need not resolve
        address = env.get("MASTER_ADDR") or ("127.0.0.1" if is_one else _first_node(env["SLURM_STEP_NODELIST"]))
        port = env.get("MASTER_PORT") or (
            _FIRST_PORT + (101 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])) % _PORTS
        )
        return SlurmTask(int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), count, address, int(port))
    except (KeyError, ValueError):
        return None  # some of the variables are missing


def refusal(task: SlurmTask) -> str:
    return (
        f"this is task {task.rank} of {task.count} of a Slurm step, and each task would launch its own ranks: start "
        "one task (srun -n1), or use the tasks as ranks without notebook_launcher (srun torchrun). If this process "
        "only inherited the variables of a task, first del os.environ['SLURM_STEP_NUM_TASKS']"
    )


def describes_task(name: str) -> bool:
    """Return True if a variable describes a Slurm task, not only the job."""
    return name in _TASK_VARIABLES or name.startswith(_TASK_PREFIXES)


def _first_node(nodes: str) -> str:
    """Return the first name in a node list such as ``gpu[007-009,012]-ib,cpu1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])
