"""Everything that crosses a process: frozen dataclasses of plain values. How they travel is channel.py's.

What users send (functions, results, exceptions) is bytes inside a message or a blob, so that reading a message
never runs their code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PROTOCOL = 3
"""Raised whenever a message changes: a kernel and a fork server of different releases must not talk."""

Method = Literal["forkserver", "spawn", "fork"]


# ------------------------------------------------------------------ fork server and kernel
@dataclass(frozen=True, slots=True)
class Hello:
    """Fork server -> kernel, once, when its imports are over; it never changes afterwards."""

    protocol: int
    pid: int
    problem: str
    """Why it must not fork ranks (a second thread, CUDA, an import that failed); empty when it is fit."""
    seconds: float
    packages: frozenset[str] = frozenset()
    """Top names of what a successor has imported beyond the first server's imports, dependencies included."""


@dataclass(frozen=True, slots=True)
class NewReaper:
    """Kernel -> fork server: a reaper for this launch. One descriptor: its control socket.

    Fork server -> a reaper that waits for a launch: this is it.
    """

    launch_id: str
    ranks: int = 0
    """How many ranks it will fork; the fork server has as many waiting for the next launch."""


@dataclass(frozen=True, slots=True)
class Succeed:
    """Kernel -> fork server: fork a successor that imports these first. One descriptor: its channel to the kernel."""

    modules: tuple[str, ...]
    env: dict[str, str]
    """What modules may read while they are imported: the ranks' environment, without what differs between them."""
    cwd: str
    """The ranks' folder, for the same reason."""
    spares: int | None = None
    """How many ranks the successor forks ahead of its first launch; None: no launch has come lately."""


@dataclass(frozen=True, slots=True)
class Importing:
    """Successor -> kernel: it imports modules of this package now. One descriptor, the first time: its own pidfd."""

    package: str
    pid: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Successor -> kernel, as its last message: ranks must not be forked from a process that has this package."""

    package: str
    reason: str


# ------------------------------------------------------------------ reaper and kernel
@dataclass(frozen=True, slots=True)
class ReaperStarted:
    """Reaper -> kernel, first of all. One descriptor where the system has them: its own pidfd."""

    pid: int


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank's process is made of, before it has spoken to the kernel."""

    launch_id: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    method: Method
    env: dict[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    umask: int
    limits: tuple[tuple[int, int, int], ...]
    """(resource, soft, hard) for ``resource.setrlimit``."""
    cpus: tuple[int, ...]
    """For ``os.sched_setaffinity``; empty where there is no such thing."""
    log_dir: str
    scratch: str
    """A folder for what multiprocessing puts into a temporary one; it goes with the launch."""


@dataclass(frozen=True, slots=True)
class StartRank:
    """Kernel -> reaper: start this rank. One descriptor: the rank's end of its channel to the kernel."""

    spec: RankSpec


@dataclass(frozen=True, slots=True)
class RankStarted:
    """Reaper -> kernel."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """Reaper -> kernel: a rank could not be started. Fork server -> kernel, with rank -1: the reaper could not."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankExited:
    """Reaper -> kernel: how and when a rank's process ended."""

    rank: int
    returncode: int
    """The exit status; ``-n`` for death by signal ``n``, as in ``subprocess``."""
    time_ns: int
    """``time.monotonic_ns()``, one clock for the whole machine."""


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Kernel -> reaper: signal a rank, or the whole process group that it leads."""

    rank: int
    signum: int
    group: bool = False


@dataclass(frozen=True, slots=True)
class Swept:
    """Reaper -> kernel, last of all: none of the launch's processes is left, but for ``stuck``."""

    stuck: tuple[int, ...] = ()
    """Pids that survive SIGKILL: waiting in the operating system, for a dead disk or driver."""


# ------------------------------------------------------------------ rank and kernel
@dataclass(frozen=True, slots=True)
class Task:
    """Kernel -> rank: something to run. Its descriptors: the payload's parcel.

    A launch sends one and closes its side; the rank leaves when no further task can come.
    """

    world: World
    acknowledge: bool = False
    """Whether the rank is to say when it has come."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Rank -> kernel: its task has come, and the descriptors are no longer on their way."""

    rank: int


@dataclass(frozen=True, slots=True)
class World:
    """Where the ranks of one launch meet."""

    master_addr: str
    master_port: int
    backend: str
    device: str
    """``"cpu"`` or ``"cuda:N"``."""
    threads: int


@dataclass(frozen=True, slots=True)
class Running:
    """Rank -> kernel: the process group is ready, the function starts now."""

    rank: int


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Rank -> kernel: it has seen SIGINT and raises KeyboardInterrupt, this once."""

    rank: int


@dataclass(frozen=True, slots=True)
class Done:
    """Rank -> kernel: the function returned. Its descriptors: the result's parcel."""

    rank: int
    time_ns: int
    changed: tuple[str, ...] = ()
    """Names of arguments and globals that the function changed but did not return."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Rank -> kernel: its threads have ended too (one may have been saving a checkpoint); the process ends now."""

    rank: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Rank -> kernel: the function raised. Sent before any clean-up, which may hang."""

    rank: int
    time_ns: int
    kind: Literal["exception", "exit", "interrupt", "result"]
    type_name: str
    text: str
    """``str(exception)``, or what stands for it where that raises."""
    traceback: str
    pickled: bytes = b""
    """The exception, where it survives the way there and back."""
    collective: str = ""
    """The collective that it came out of, where it did: such an error is often another rank's fault."""
    status: int = 0
    """For ``exit``: the status."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The notebook's own state that ranks start from; None means: not loaded there, leave it."""

    python_rng: Any = None
    numpy_rng: Any = None
    torch_rng: bytes | None = None
    torch_seed: int | None = None
    has_gpu: bool = True
    """Whether there may be a GPU to seed."""
    default_dtype: str | None = None
    matmul_precision: str | None = None
    deterministic: tuple[bool, bool] | None = None
    """(use deterministic algorithms, only warn)."""
    cudnn: tuple[bool, bool] | None = None
    """(deterministic, benchmark)."""
    warning_filters: tuple[WarningFilter, ...] | None = None


@dataclass(frozen=True, slots=True)
class WarningFilter:
    """An entry of ``warnings.filters``, with its category by name: it must not make a rank import a package."""

    action: str
    message: re.Pattern[str] | str | None
    category: tuple[str, str]
    """Module and qualified name."""
    module: re.Pattern[str] | str | None
    lineno: int


@dataclass(frozen=True, slots=True)
class Payload:
    """What a launch runs, as it stands in the blob."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    anchor: Any
    """A function whose ``__globals__`` all shipped functions share: the ranks' ``__main__``."""
    settings: Settings
    watched: dict[str, Any]
    """What to compare before and after: names to modules and containers."""
    sources: Mapping[str, Source] = field(default_factory=dict)
    main: Mapping[str, Any] = field(default_factory=dict)
    """Classes and functions that only the notebook's ``__main__`` can name. Both are known, and pickled, last."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A ``%%distributed`` cell: source for the ranks to run in the notebook's names."""

    source: str
    filename: str
    label: str
    ranks: tuple[int, ...] | None = None
    """The ranks that run it; None for all."""


@dataclass(frozen=True, slots=True)
class Source:
    """The text of a cell that shipped functions were defined in, for tracebacks."""

    text: str
    label: str
    """How the notebook names it, such as ``Cell In[3]``; empty where it has no name but its file's."""
