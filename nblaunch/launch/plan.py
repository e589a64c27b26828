"""What a launch is to be, worked out before anything starts: ranks, devices, backend, threads, environment.

Pure: everything about the machine comes in as a `Machine`, so that it is tested without processes.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import operator
import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from nblaunch.errors import ArgumentError
from nblaunch.launch.output.metric_patterns import compile_patterns
from nblaunch.machine.limits import usable_cpus
from nblaunch.machine.packages import package_of, why_not_ahead
from nblaunch.machine.slurm_variables import tells_place
from nblaunch.wire.drops import log_limit
from nblaunch.wire.messages import Method, World

DEVICES = ("auto", "cpu", "cuda")
START_METHODS = ("auto", "forkserver", "spawn", "fork")
BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
PRECISIONS = ("no", "fp16", "bf16", "fp8")
DEFAULT_RANKS = 2
"""Ranks of a launch that names no number on a machine without GPUs."""
STOP_GRACE = 30.0
_FILES_PER_RANK = 7
"""In the notebook's process: a channel, two logs, reports, the store's connection, the result (most have one piece)."""
_FILES_TO_SEARCH = 2
"""More for each rank where metrics are read out of its logs."""
_FILES_BESIDES = 30
"""What the rest of a launch opens: 15, and some more where it begins to keep data for the next."""
MASTER_ADDR = "127.0.0.1"

_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)
_SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default: what a torch agent that a rank starts passes on to its own workers."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_NOTEBOOK_BACKENDS = ("inline", "ipympl", "widget", "nbagg", "notebook")
"""matplotlib backends that only a kernel can draw with."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan needs to know of the machine and the notebook's process."""

    gpus: int
    cpus: int
    platform: str
    env: Mapping[str, str]
    gpu_backend: str = "nccl"
    open_files: int = 1 << 20
    """How many more this process may have."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch, settled."""

    world_size: int
    device: str
    """``"cpu"`` or ``"cuda"``."""
    gpus: int
    backend: str
    method: Method
    threads: int
    env: Mapping[str, str]
    """The environment of every rank, without what differs by rank and attempt."""
    max_restarts: int = 0
    timeout: float | None = None
    stop_grace: float = STOP_GRACE
    metric_patterns: tuple[re.Pattern[str], ...] = ()
    """What to search every printed line for."""
    named: tuple[str, ...] = ()
    """The variables that ``env=`` names."""
    preload: tuple[str, ...] = ()
    """Modules to import ahead of later launches."""

    def device_of(self, rank: int) -> str:
        """The device of a rank, as torch writes it."""
        return f"cuda:{rank % self.gpus}" if self.device == "cuda" else "cpu"

    def world(self, rank: int, port: int) -> World:
        """Where a rank meets the others."""
        return World(MASTER_ADDR, port, self.backend, self.device_of(rank), self.threads)

    def environment(self, rank: int, port: int, launch_id: str, attempt: int, error_file: Path) -> dict[str, str]:
        """A rank's whole environment, as torchrun would set it.

        Args:
            rank: Which one.
            port: Where the ranks meet.
            launch_id: Names the launch.
            attempt: 0, or which restart this is.
            error_file: Where torch's ``@record`` writes the exception of this rank.
        """
        return {
            **self.env,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": MASTER_ADDR,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": launch_id,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": _SIGNALS_TO_HANDLE,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": self.env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "NBLAUNCH_RANK": str(rank),
            "NBLAUNCH_LAUNCH_ID": launch_id,
        }


def make_plan(
    machine: Machine,
    *,
    num_processes: Any = None,
    device: Any = "auto",
    backend: Any = None,
    start_method: Any = "auto",
    threads_per_rank: Any = None,
    env: Any = None,
    max_restarts: Any = 0,
    timeout: Any = None,
    stop_grace: Any = STOP_GRACE,
    mixed_precision: Any = "no",
    metric_patterns: Any = None,
    preload: Any = None,
) -> Plan:
    """Settle a launch. The arguments are those of `notebook_launcher`.

    Raises:
        ArgumentError: One of them is wrong; the message names it and its value.
    """
    if machine.platform == "win32":
        raise ArgumentError("nblaunch runs on Linux and macOS; on Windows, run the notebook inside WSL 2")
    device = _device(_one_of("device", device, DEVICES), machine)
    backend = backend if backend is None else _one_of("backend", backend, BACKENDS)
    count = _world_size(num_processes, device, backend, machine)
    patterns = compile_patterns(metric_patterns)
    _check_files(count, _FILES_PER_RANK + _FILES_TO_SEARCH * bool(patterns), machine)
    _check_backend(backend, device)
    extra = _extra_environment(env)
    threads = _threads(threads_per_rank, count, machine.cpus, {**machine.env, **extra})
    log_limit({**machine.env, **extra})  # the ranks read it; a bad one is told here
    return Plan(
        world_size=count,
        device=device,
        gpus=machine.gpus,
        backend=backend or (f"cpu:gloo,cuda:{machine.gpu_backend}" if device == "cuda" else "gloo"),
        method=_method(_one_of("start_method", start_method, START_METHODS), machine),
        threads=threads,
        env=_common_environment(machine, extra, threads, mixed_precision, device),
        max_restarts=whole("max_restarts", max_restarts, least=0),
        timeout=None if timeout is None else _seconds("timeout", timeout),
        stop_grace=_seconds("stop_grace", stop_grace),
        metric_patterns=patterns,
        named=tuple(extra),
        preload=modules_to_preload(preload),
    )


# ------------------------------------------------------------------ one argument each
def whole(name: str, value: Any, least: int) -> int:
    """`value` as an int that is at least `least`; numpy's integers are fine, ``True`` and ``2.0`` are not."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ArgumentError(f"{name}={value!r}: must be a whole number, at least {least}")
    return number


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ArgumentError(f"{name}={value!r}: must be a number of seconds above 0")


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ArgumentError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")
    return cast("str", value)


def modules_to_preload(names: Any) -> tuple[str, ...]:
    """Modules that are to be imported ahead of launches.

    Raises:
        ArgumentError: One is no installed module.
    """
    modules = (names,) if isinstance(names, str) else tuple(names or ())
    for name in modules:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise ArgumentError(f"preload={name!r}: must be the name of a module, as in 'torchvision.transforms'")
        if reason := why_not_ahead(package_of(name)):
            raise ArgumentError(f"preload={name!r}: {reason}")
    return modules


def _device(device: str, machine: Machine) -> str:
    if device == "cuda" and machine.gpus == 0:
        raise ArgumentError("device='cuda', but no GPU is visible (CUDA_VISIBLE_DEVICES?): use device='cpu'")
    return ("cuda" if machine.gpus else "cpu") if device == "auto" else device


def _world_size(num_processes: Any, device: str, backend: str | None, machine: Machine) -> int:
    if num_processes is None:
        return machine.gpus if device == "cuda" else DEFAULT_RANKS
    count = whole("num_processes", num_processes, least=1)
    if device == "cuda" and count > machine.gpus and backend != "gloo":
        seen = f"{machine.gpus} GPU{' is' if machine.gpus == 1 else 's are'} visible"
        raise ArgumentError(
            f"num_processes={count}, but {seen}: use num_processes={machine.gpus}, or device='cpu', "
            "or backend='gloo' to let ranks share a GPU"
        )
    return count


def _check_files(count: int, for_each: int, machine: Machine) -> None:
    needed = for_each * count + _FILES_BESIDES
    if needed > machine.open_files:  # torch's store would try to connect, in silence, for minutes
        raise ArgumentError(
            f"num_processes={count} opens about {needed:,} files in the notebook, which may open "
            f"{machine.open_files:,} more (ulimit -n): close what you do not need, raise the limit before the notebook "
            "starts, or use fewer ranks"
        )


def _check_backend(backend: str | None, device: str) -> None:
    if backend == "nccl" and device == "cpu":
        raise ArgumentError("backend='nccl' needs GPUs, and the device is 'cpu': use backend='gloo'")


def _method(method: str, machine: Machine) -> Method:
    linux = machine.platform == "linux"
    if method == "forkserver" and not linux:
        raise ArgumentError("start_method='forkserver': forking is safe on Linux only; use start_method='spawn'")
    if method == "auto":
        return "forkserver" if linux else "spawn"
    return cast("Method", method)


def _threads(threads_per_rank: Any, ranks: int, cpus: int, env: Mapping[str, str]) -> int:
    """The caller's choice, else the user's OMP_NUM_THREADS, else the CPUs divided by the ranks."""
    if threads_per_rank is not None:
        return whole("threads_per_rank", threads_per_rank, least=1)
    users = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(users) if users.isdecimal() and int(users) > 0 else max(1, cpus // ranks)


def _common_environment(
    machine: Machine, extra: Mapping[str, str], threads: int, mixed_precision: Any, device: str
) -> dict[str, str]:
    precision = _one_of("mixed_precision", mixed_precision, PRECISIONS)
    env = {name: value for name, value in machine.env.items() if not _is_ours(name)}
    loopback = "lo0" if machine.platform == "darwin" else "lo"
    env.update(dict.fromkeys(_INTERFACES, loopback))
    env["OMP_NUM_THREADS"] = str(threads)
    if any(word in env.get("MPLBACKEND", "") for word in _NOTEBOOK_BACKENDS):
        env["MPLBACKEND"] = "module://nblaunch.ranks.matplotlib_backend"
    if precision != "no":
        env["ACCELERATE_MIXED_PRECISION"] = precision
    if device == "cpu":
        env.setdefault("ACCELERATE_USE_CPU", "true")  # or accelerate's Accelerator() takes each CPU rank to be alone
    env.update(extra)
    return env


def _is_ours(name: str) -> bool:
    """Whether a variable tells a process its place in a launch: an inherited one tells of another launch."""
    return (
        name in _TORCHRUN
        or name in _INTERFACES
        or name.startswith(("TORCHELASTIC_", "NBLAUNCH_RANK", "NBLAUNCH_LAUNCH"))
        or tells_place(name)
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
            raise ArgumentError(f"env={{{name!r}: {value!r}}}: the system allows no such variable (empty, = or NUL)")
        if name in _TORCHRUN or name.startswith("TORCHELASTIC_"):
            raise ArgumentError(f"env={{{name!r}: {value!r}}}: nblaunch sets this one for each rank")
    return dict(extra)


# ------------------------------------------------------------------ the machine
def this_machine() -> Machine:
    """The machine as the notebook sees it now. Counting GPUs does not start CUDA (it asks the driver's library)."""
    _import_torch()
    import torch

    gpus = torch.cuda.device_count()
    return Machine(gpus, usable_cpus(), sys.platform, dict(os.environ), open_files=_files_left())


def _import_torch() -> None:
    """Import torch in another thread: an interrupt in the middle would leave it half imported, for good."""

    def try_to() -> None:
        with contextlib.suppress(Exception):  # the caller's own import raises it again
            importlib.import_module("torch")

    if "torch" not in sys.modules:
        thread = threading.Thread(target=try_to, daemon=True)
        thread.start()
        thread.join()


def _files_left() -> int:
    """How many files this process may open."""
    if sys.platform == "win32":
        return 1 << 20  # make_plan refuses in any case
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    try:
        used = len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")) - 1  # the list's own
        return max(0, soft - used)
    except OSError as error:
        return 0 if error.errno == errno.EMFILE else soft  # not even the list can be opened
