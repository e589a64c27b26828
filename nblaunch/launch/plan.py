"""The plan of a launch: ranks, devices, backend, threads, environment. All arguments are validated here.

`make_plan` is pure: it knows each node only as a `Machine`, and asks the engine only about start methods.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nblaunch.engines.protocol import Engine, Store
from nblaunch.errors import ArgumentError, StartError
from nblaunch.launch.output.reports import compile_patterns
from nblaunch.machine import arguments, timeouts
from nblaunch.machine.inventory import Machine, free_descriptors
from nblaunch.machine.packages import package_of, why_not_ahead
from nblaunch.machine.slurm_variables import describes_task
from nblaunch.wire import MATPLOTLIB_BACKEND, RANK
from nblaunch.wire.drops import log_limit
from nblaunch.wire.messages import World

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
PRECISIONS = ("no", "fp16", "bf16", "fp8")
ON_ERROR = ("raise", "debug")
ON_BREAKPOINT = ("continue", "fail")
_CHECKS = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
"""What names the rank, the sizes and the types at once when ranks call different collectives; 8 ms for each call."""
DEFAULT_CPU_RANKS = 2
"""The number of ranks on a machine without GPUs; of several, each has one."""
_DESCRIPTORS_PER_RANK = 7
"""In the kernel: a channel, two logs, a spool, the store's connection, and the result (most are one segment)."""
_DESCRIPTORS_PER_COPY = 4
"""The same for a rank on another machine: two logs, a spool, and the result."""
_DESCRIPTORS_PER_LAUNCH = 30
"""Besides the ranks' own: 15, and more once sent data is cached for the next launch."""

_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)
_SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default: the signals that a torch agent inside a rank forwards to its own workers."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_NOTEBOOK_BACKENDS = ("inline", "ipympl", "widget", "nbagg", "notebook")
"""matplotlib backends that work in a kernel only."""
ANY_MACHINE = Machine(gpus=1 << 16, cpus=1 << 16, platform=sys.platform, env={})
"""A machine on which every number of ranks fits: to check arguments before a node is asked for."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank runs, and what it has there."""

    node: int
    """The node, from 0; torchrun's group rank."""
    local_rank: int
    local_world_size: int
    device: str
    """``"cpu"`` or ``"cuda:N"``."""
    threads: int
    host: str = ""
    """The name of the node; empty for the notebook's own machine."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of one launch, validated."""

    places: tuple[RankPlace, ...]
    """One for each rank."""
    device: str
    """``"cpu"`` or ``"cuda"``."""
    backend: str
    method: str
    """One of the engine's start methods."""
    envs: tuple[Mapping[str, str], ...]
    """The environment of the ranks of each node, without the variables that differ by rank or attempt."""
    max_restarts: int = 0
    timeout: float | None = None
    """Seconds."""
    stop_grace: float = timeouts.STOP_GRACE_S
    metric_patterns: tuple[re.Pattern[str], ...] = ()
    """Every printed line is searched for these."""
    named: tuple[str, ...] = ()
    """The names in ``env=``."""
    preload: tuple[str, ...] = ()
    """Modules to import ahead of later launches."""
    on_error: str = "raise"
    """``"debug"``: a rank that fails opens the debugger first."""
    on_breakpoint: str = "continue"
    """What ``breakpoint()`` does where no one can type: ``"continue"`` or ``"fail"``."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.places)

    @property
    def ranks(self) -> list[range]:
        """The ranks of each node."""
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

    def world(self, rank: int, store: Store) -> World:
        """Return the rendezvous and the device of a rank."""
        place = self.places[rank]
        return World(store.address, store.port, self.backend, place.device, place.threads)

    def environment(self, rank: int, store: Store, launch_id: str, attempt: int) -> dict[str, str]:
        """Return the environment of a rank, with the variables that torchrun sets.

        Args:
            rank: The rank.
            store: The rendezvous.
            launch_id: The id of the launch.
            attempt: The number of restarts before this attempt.
        """
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
            "MASTER_ADDR": store.address,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_RUN_ID": launch_id,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": _SIGNALS_TO_HANDLE,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            RANK: str(rank),
            "NBLAUNCH_LAUNCH_ID": launch_id,
        }


def make_plan(
    machines: Sequence[Machine],
    engine: Engine,
    *,
    num_processes: Any = None,
    device: Any = "auto",
    backend: Any = None,
    start_method: Any = "auto",
    threads_per_rank: Any = None,
    env: Any = None,
    max_restarts: Any = 0,
    timeout: Any = None,
    stop_grace: Any = timeouts.STOP_GRACE_S,
    mixed_precision: Any = "no",
    metric_patterns: Any = None,
    preload: Any = None,
    on_error: Any = "raise",
    on_breakpoint: Any = "continue",
    checks: Any = False,
) -> Plan:
    """Validate the arguments of `notebook_launcher` and fill in the defaults.

    Raises:
        ArgumentError: An argument is invalid; the message starts with its name and value.
    """
    if machines[0].platform == "win32":
        raise ArgumentError("nblaunch runs on Linux and macOS; on Windows, run the notebook inside WSL 2")
    device = _device(device, machines)
    backend = backend if backend is None else arguments.one_of("backend", backend, BACKENDS)
    counts = [_local_ranks(num_processes, device, backend, machine, len(machines)) for machine in machines]
    patterns = compile_patterns(metric_patterns)
    for count, machine in zip(counts, machines, strict=True):
        _check_descriptors(count, _DESCRIPTORS_PER_RANK, machine)
    if machines[0].name:  # of another machine: the kernel follows copies of the logs
        kernel = replace(machines[0], name="", free_descriptors=free_descriptors())
        _check_descriptors(sum(counts), _DESCRIPTORS_PER_COPY, kernel)
    if backend == "nccl" and device == "cpu":
        raise ArgumentError("backend='nccl' needs GPUs, but the device is 'cpu': use backend='gloo'")
    extra = {**(_CHECKS if checks else {}), **_extra_environment(env)}

    def device_of(local_rank: int, machine: Machine) -> str:
        return f"cuda:{local_rank % machine.gpus}" if device == "cuda" else "cpu"

    places: list[RankPlace] = []
    envs: list[Mapping[str, str]] = []
    for count, machine in zip(counts, machines, strict=True):
        threads = _threads(threads_per_rank, count, machine.cpus, {**machine.env, **extra})
        log_limit({**machine.env, **extra})  # as the ranks will: report an invalid value here
        node = len(envs)
        envs.append(_common_environment(machine, extra, threads, mixed_precision, device))
        places += [
            RankPlace(node, local, count, device_of(local, machine), threads, machine.name) for local in range(count)
        ]
    return Plan(
        places=tuple(places),
        device=device,
        backend=backend or (f"cpu:gloo,cuda:{machines[0].gpu_backend}" if device == "cuda" else "gloo"),
        method=engine.resolve(arguments.one_of("start_method", start_method, engine.start_methods)),
        envs=tuple(envs),
        max_restarts=arguments.whole_number("max_restarts", max_restarts, least=0),
        timeout=None if timeout is None else arguments.seconds("timeout", timeout),
        stop_grace=arguments.seconds("stop_grace", stop_grace),
        metric_patterns=patterns,
        named=tuple(extra),
        preload=_modules(preload),
        on_error=arguments.one_of("on_error", on_error, ON_ERROR),
        on_breakpoint=arguments.one_of("on_breakpoint", on_breakpoint, ON_BREAKPOINT),
    )


# ------------------------------------------------------------------ one argument each
def _modules(names: Any) -> tuple[str, ...]:
    modules = (names,) if isinstance(names, str) else tuple(names or ())
    for name in modules:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise ArgumentError(f"preload={name!r}: must be the name of a module, such as 'torchvision.transforms'")
        if reason := why_not_ahead(package_of(name)):
            raise ArgumentError(f"preload={name!r}: {reason}")
    return modules


def _device(device: Any, machines: Sequence[Machine]) -> str:
    chosen = arguments.one_of("device", device, DEVICES)
    without = [machine for machine in machines if machine.gpus == 0]
    if chosen == "auto" and len(without) in (0, len(machines)):
        return "cpu" if without else "cuda"
    if chosen == "auto":
        raise ArgumentError(
            f"device='auto': {without[0].name} has no GPU, and other nodes have: use nodes that are alike, or "
            "device='cpu'"
        )
    if chosen == "cuda" and without:
        on = f" on {without[0].name}" if without[0].name else ""
        raise ArgumentError(
            f"device='cuda', but no GPU is visible{on}: check CUDA_VISIBLE_DEVICES, or use device='cpu'"
        )
    return chosen


def _local_ranks(num_processes: Any, device: str, backend: str | None, machine: Machine, nodes: int) -> int:
    if num_processes is None:
        return machine.gpus if device == "cuda" else DEFAULT_CPU_RANKS if nodes == 1 else 1
    count = arguments.whole_number("num_processes", num_processes, least=1)
    if device == "cuda" and count > machine.gpus and backend != "gloo":
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
            f"num_processes={ranks} needs about {needed:,} file descriptors {where}, which may open "
            f"{machine.free_descriptors:,} more (ulimit -n): use fewer ranks, close files, or raise the limit before "
            "you start Jupyter"
        )


def _threads(threads_per_rank: Any, ranks: int, cpus: int, env: Mapping[str, str]) -> int:
    if threads_per_rank is not None:
        return arguments.whole_number("threads_per_rank", threads_per_rank, least=1)
    users = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(users) if users.isdecimal() and int(users) > 0 else max(1, cpus // ranks)


def _common_environment(
    machine: Machine, extra: Mapping[str, str], threads: int, mixed_precision: Any, device: str
) -> dict[str, str]:
    precision = arguments.one_of("mixed_precision", mixed_precision, PRECISIONS)
    env = {name: value for name, value in machine.env.items() if not _is_launch_variable(name)}
    env.update(dict.fromkeys(_INTERFACES, machine.socket_interface))
    env["OMP_NUM_THREADS"] = str(threads)
    if env.get("PYTHONBREAKPOINT", "").startswith("ray."):  # ray.init has set it, for its own workers
        del env["PYTHONBREAKPOINT"]
    if any(word in env.get("MPLBACKEND", "") for word in _NOTEBOOK_BACKENDS):
        env["MPLBACKEND"] = MATPLOTLIB_BACKEND
    if precision != "no":
        env["ACCELERATE_MIXED_PRECISION"] = precision
    if device == "cpu":
        env.setdefault("ACCELERATE_USE_CPU", "true")  # else Accelerator() ignores the other CPU ranks
    env.update(extra)
    return env


def _is_launch_variable(name: str) -> bool:
    """Return True if a launcher sets this variable for each rank: an inherited value is of another launch."""
    return (
        name in _TORCHRUN
        or name in _INTERFACES
        or name.startswith(("TORCHELASTIC_", RANK, "NBLAUNCH_LAUNCH"))
        or describes_task(name)
    )


def _extra_environment(extra: Any) -> dict[str, str]:
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise ArgumentError(f"env={extra!r}: must be a dict of strings")
    for name, value in extra.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ArgumentError(f"env={{{name!r}: {value!r}}}: names and values must be strings")
        if not name or "=" in name or "\0" in name + value:
            raise ArgumentError(f"env={{{name!r}: {value!r}}}: not a valid variable name or value ('=', NUL or empty)")
        if name in _TORCHRUN or name.startswith("TORCHELASTIC_"):
            raise ArgumentError(f"env={{{name!r}: {value!r}}}: nblaunch sets this variable for each rank")
    return dict(extra)


def moved(plan: Plan, machines: Sequence[Machine]) -> Plan:
    """Return the plan for other nodes: those that were lost have been replaced.

    Raises:
        StartError: A node has not enough GPUs.
    """
    for place in plan.places:
        node = machines[place.node]
        if plan.device == "cuda" and node.gpus < place.local_world_size and plan.backend != "gloo":
            raise StartError(f"{node.name} has {node.gpus} GPUs, and {place.local_world_size} ranks are to run there")
    envs = [
        env | {name: node.socket_interface for name in _INTERFACES if name not in plan.named}
        for env, node in zip(map(dict, plan.envs), machines, strict=True)
    ]
    places = [replace(place, host=machines[place.node].name) for place in plan.places]
    return replace(plan, places=tuple(places), envs=tuple(envs))


def changed(plan: Plan, **changes: Any) -> Plan:
    """Return a plan with other settings, validated; None leaves a setting alone."""
    given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    for name in ("timeout", "stop_grace"):
        if name in given:
            given[name] = arguments.seconds(name, given[name])
    if "metric_patterns" in given:
        given["metric_patterns"] = compile_patterns(given["metric_patterns"])
    for name, choices in (("on_error", ON_ERROR), ("on_breakpoint", ON_BREAKPOINT)):
        if name in given:
            arguments.one_of(name, given[name], choices)
    return replace(plan, **given)
