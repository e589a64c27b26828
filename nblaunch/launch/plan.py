"""The plan of a launch: ranks, devices, backend, threads, environment.

`make_plan` is pure: it knows each node only as a `Machine`, and asks the engine only about start methods.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nblaunch.engines.protocol import Engine, Store
from nblaunch.errors import ArgumentError, StartError
from nblaunch.launch.options import TORCHRUN, Options
from nblaunch.machine.arguments import one_of
from nblaunch.machine.inventory import Machine, Process, free_descriptors
from nblaunch.machine.slurm_variables import describes_task
from nblaunch.wire import MATPLOTLIB_BACKEND, RANK
from nblaunch.wire.messages import Order, World
from nblaunch.wire.tables import log_limit

DEFAULT_CPU_RANKS = 2
"""The number of ranks on a machine without GPUs; of several, each has one."""
_DESCRIPTORS_PER_RANK = 4
"""In the kernel: a channel, the store's connection, and the result (most are one segment)."""
_DESCRIPTORS_PER_COPY = 1
"""The same for a rank on another machine: the result."""
_DESCRIPTORS_PER_LAUNCH = 30
"""Besides the ranks' own: 15, and more once sent data is cached for the next launch."""

_SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default: the signals that a torch agent inside a rank forwards to its own workers."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_NOTEBOOK_BACKENDS = ("inline", "ipympl", "widget", "nbagg", "notebook")
"""matplotlib backends that work in a kernel only."""
ANY_MACHINE = Machine(gpus=1 << 16, cpus=1 << 16, platform=sys.platform, env={})
"""A machine on which every number of ranks fits: to check arguments before a node is asked for."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    node: int
    local_rank: int
    local_world_size: int
    device: str
    """``"cpu"`` or ``"cuda:N"``."""
    threads: int
    host: str = ""
    """The name of the node; empty for the notebook's own machine."""


@dataclass(frozen=True, slots=True)
class Plan:
    places: tuple[RankPlace, ...]
    device: str
    backend: str
    method: str
    """One of the engine's start methods."""
    envs: tuple[Mapping[str, str], ...]
    """The environment of the ranks of each node, without the variables that differ by rank or attempt."""
    options: Options
    named: tuple[str, ...] = ()
    """The names of variables that the options set."""

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def ranks(self) -> list[range]:
        counts = [place.local_world_size for place in self.places if place.local_rank == 0]
        return [range(sum(counts[:node]), sum(counts[: node + 1])) for node in range(len(counts))]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The node of each rank, by name; none if all are on the notebook's own machine."""
        return tuple(place.host for place in self.places if place.host)

    @property
    def env(self) -> Mapping[str, str]:
        """The environment of the ranks on the first node."""
        return self.envs[0]

    def order(self, launch_id: str, process: Process, log_dir: Path, **more: Any) -> Order:
        where = self.ranks, self.method, process, self.envs, self.named, str(log_dir)
        return Order(launch_id, self.world_size, *where, **more)

    def world(self, rank: int, store: Store) -> World:
        place = self.places[rank]
        return World(*store, self.backend, place.device, place.threads)

    def environment(self, rank: int, store: Store, launch_id: str, attempt: int) -> dict[str, str]:
        """Return the environment of a rank, with the variables that torchrun sets; `attempt` counts the restarts."""
        place, env = self.places[rank], self.envs[self.places[rank].node]
        return {
            **env,
            "RANK": str(rank),
            "LOCAL_RANK": str(place.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            "GROUP_RANK": str(place.node),
            "GROUP_WORLD_SIZE": str(len(self.envs)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": store[0],
            "MASTER_PORT": str(store[1]),
            "TORCHELASTIC_RUN_ID": launch_id,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.options.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": _SIGNALS_TO_HANDLE,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            RANK: str(rank),
            "NBLAUNCH_LAUNCH_ID": launch_id,
        }


def make_plan(machines: Sequence[Machine], engine: Engine, options: Options | None = None) -> Plan:
    options = Options() if options is None else options
    if machines[0].platform == "win32":
        raise ArgumentError("nblaunch runs on Linux and macOS; on Windows, run the notebook inside WSL 2")
    device = _device(options.device, machines)
    counts = [_local_ranks(options, device, machine, len(machines)) for machine in machines]
    for count, machine in zip(counts, machines, strict=True):
        _check_descriptors(count, _DESCRIPTORS_PER_RANK, machine)
    if machines[0].name:  # of another machine: the kernel follows copies of the logs
        kernel = replace(machines[0], name="", free_descriptors=free_descriptors())
        _check_descriptors(sum(counts), _DESCRIPTORS_PER_COPY, kernel)
    if options.backend == "nccl" and device == "cpu":
        raise ArgumentError("backend='nccl' needs GPUs, but the device is 'cpu': use backend='gloo'")

    places: list[RankPlace] = []
    envs: list[Mapping[str, str]] = []
    for node, (count, machine) in enumerate(zip(counts, machines, strict=True)):
        own = {**machine.env, **options.variables}
        log_limit(own)  # as the ranks will: report an invalid value here
        users = own.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        threads = options.threads_per_rank or int(users if users.isdecimal() else 0) or max(1, machine.cpus // count)
        envs.append(_common_environment(machine, options.variables, threads, device))
        for local in range(count):
            on = f"cuda:{local % machine.gpus}" if device == "cuda" else "cpu"
            places.append(RankPlace(node, local, count, on, threads, machine.name))
    return Plan(
        places=tuple(places),
        device=device,
        backend=options.backend or ("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"),
        method=one_of("start_method", options.start_method, engine.start_methods),
        envs=tuple(envs),
        options=options,
        named=tuple(options.variables),
    )


def _device(chosen: str, machines: Sequence[Machine]) -> str:
    without = [machine for machine in machines if machine.gpus == 0]
    if chosen == "auto" and len(without) in (0, len(machines)):
        return "cpu" if without else "cuda"
    if chosen == "auto":
        raise ArgumentError(
            f"device='auto': {without[0].name} has no GPU, but other nodes do: use identical nodes, or device='cpu'"
        )
    if chosen == "cuda" and without:
        on = f" on {without[0].name}" if without[0].name else ""
        raise ArgumentError(
            f"device='cuda', but no GPU is visible{on}: check CUDA_VISIBLE_DEVICES, or use device='cpu'"
        )
    return chosen


def _local_ranks(options: Options, device: str, machine: Machine, nodes: int) -> int:
    count = options.num_processes
    if count is None:
        return machine.gpus if device == "cuda" else DEFAULT_CPU_RANKS if nodes == 1 else 1
    if device == "cuda" and count > machine.gpus and options.backend != "gloo":
        on = f" on {machine.name}" if machine.name else ""
        visible = f"{machine.gpus} GPU{' is' if machine.gpus == 1 else 's are'} visible{on}"
        raise ArgumentError(
            f"num_processes={count}, but {visible}: use num_processes={machine.gpus}, or device='cpu', "
            "or backend='gloo' to let ranks share a GPU"
        )
    return count


def _check_descriptors(ranks: int, per_rank: int, machine: Machine) -> None:
    needed = per_rank * ranks + _DESCRIPTORS_PER_LAUNCH
    if needed > machine.free_descriptors:  # out of descriptors, torch's store silently retries for minutes
        where = f"on {machine.name}" if machine.name else "in the kernel"
        raise ArgumentError(
            f"num_processes={ranks} needs about {needed:,} file descriptors {where}, but only "
            f"{machine.free_descriptors:,} are free (ulimit -n): use fewer ranks, close files, or raise the limit "
            "before starting Jupyter"
        )


def _common_environment(machine: Machine, extra: Mapping[str, str], threads: int, device: str) -> dict[str, str]:
    env = {name: value for name, value in machine.env.items() if not _is_launch_variable(name)}
    env.update(dict.fromkeys(_INTERFACES, machine.socket_interface))
    env["OMP_NUM_THREADS"] = str(threads)
    if env.get("PYTHONBREAKPOINT", "").startswith("ray."):  # ray.init has set it, for its own workers
        del env["PYTHONBREAKPOINT"]
    if any(word in env.get("MPLBACKEND", "") for word in _NOTEBOOK_BACKENDS):
        env["MPLBACKEND"] = MATPLOTLIB_BACKEND
    if device == "cpu":
        env.setdefault("ACCELERATE_USE_CPU", "true")  # else Accelerator() ignores the other CPU ranks
    env.update(extra)
    return env


def _is_launch_variable(name: str) -> bool:
    """Return True if a launcher sets this variable for each rank: an inherited value is of another launch."""
    return (
        name in TORCHRUN
        or name in _INTERFACES
        or name.startswith(("TORCHELASTIC_", RANK, "NBLAUNCH_LAUNCH"))
        or describes_task(name)
    )


def moved(plan: Plan, machines: Sequence[Machine]) -> Plan:
    """Return the plan for other nodes: those that were lost have been replaced."""
    for place in plan.places:
        node = machines[place.node]
        if plan.device == "cuda" and node.gpus < place.local_world_size and plan.backend != "gloo":
            raise StartError(f"{node.name} has {node.gpus} GPUs, but must run {place.local_world_size} ranks")
    envs = [
        env | {name: node.socket_interface for name in _INTERFACES if name not in plan.named}
        for env, node in zip(map(dict, plan.envs), machines, strict=True)
    ]
    places = [replace(place, host=machines[place.node].name) for place in plan.places]
    return replace(plan, places=tuple(places), envs=tuple(envs))
