"""The task of a Slurm step, from the variables that Slurm 22.05 sets."""

from __future__ import annotations

import pytest

from nblaunch.machine.slurm_variables import SlurmTask, describes_task, slurm_task

ALLOCATION = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_CPUS_ON_NODE": "4",
}
"""What ``salloc -n8`` gives its shell."""
BATCH = ALLOCATION | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
"""What ``sbatch -n8`` gives its script."""


def step(tasks: int, rank: int = 0, local_rank: int = 0, nodes: str = "n1", **more: str) -> dict[str, str]:
    """What ``srun`` gives a task, here inside ``sbatch``."""
    return {
        **BATCH,
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_STEP_ID": "3",
        "SLURM_STEPID": "3",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": "1" if nodes == "n1" else "2",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(tasks),
        "SLURM_TASK_PID": "422",
        **more,
    }


def task_of(env: dict[str, str]) -> SlurmTask:
    task = slurm_task(env)
    assert task is not None
    return task


@pytest.mark.parametrize("env", [{}, ALLOCATION, BATCH, step(1)], ids=["no-slurm", "salloc", "sbatch", "srun-n1"])
def test_a_notebook_in_an_allocation_and_a_lone_task_are_alone(env: dict[str, str]) -> None:
    assert slurm_task(env) is None


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID"])
@pytest.mark.parametrize("value", [None, "", "two"])
def test_a_process_with_only_some_of_the_variables_is_alone(name: str, value: str | None) -> None:
    env = {key: held for key, held in step(2).items() if key != name} | ({} if value is None else {name: value})
    assert slurm_task(env) is None


def test_a_task_of_several_has_its_place() -> None:
    task = task_of(step(4, rank=3, local_rank=1))
    assert (task.rank, task.local_rank, task.count) == (3, 1, 4)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "127.0.0.1"),  # one node: its name need not resolve
        ("n[1-2]", "n1"),
        ("gpu[007-009,012]-ib,cpu1", "gpu007-ib"),
        ("rack[1,4]node[2-3]", "rack1node2"),
        ("alpha,beta", "alpha"),
    ],
)
def test_the_rendezvous_is_on_the_first_node_of_the_step(nodes: str, first: str) -> None:
    assert task_of(step(2, nodes=nodes)).master_addr == first


def test_the_port_is_shared_within_a_step_and_differs_between_steps() -> None:
    ports = {task_of(step(2, rank=rank)).master_port for rank in (0, 1)}
    ports |= {task_of(step(2, SLURM_STEP_ID=str(number))).master_port for number in (4, 5)}
    ports |= {task_of(step(2, SLURM_JOB_ID=str(number))).master_port for number in (40, 42, 10_000_000)}
    assert len(ports) == 6
    assert all(20_000 <= port < 32_768 for port in ports)


def test_an_address_and_a_port_of_the_users_own_count() -> None:
    task = task_of(step(2, MASTER_ADDR="login", MASTER_PORT="4242"))
    assert (task.master_addr, task.master_port) == ("login", 4242)


def test_task_variables_are_distinguished_from_job_variables() -> None:
    kept = {name for name in step(2) if not describes_task(name)}
    assert kept == {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_CPUS_ON_NODE"}
