"""The messages between processes: frozen dataclasses of plain values. `nblaunch.wire.channel` carries them.

User objects (functions, results, exceptions) are bytes inside a message or a blob: reading a message never runs
user code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nblaunch.machine.inventory import Process
from nblaunch.wire.tables import Begun

PROTOCOL = 10
"""Bump it whenever a message changes: a kernel refuses a fork server of another release."""

MAX_BOUND = 2_000
"""Names that a rank describes after a task; of more, the last."""

Method = Literal["forkserver", "spawn", "fork"]


# ------------------------------------------------------------------ fork server and kernel
@dataclass(frozen=True, slots=True)
class Hello:
    """Fork server -> kernel, once, after its imports; the server never changes afterwards."""

    protocol: int
    problem: str
    """Why it must not fork ranks (a second thread, CUDA, a failed import); empty if it may."""
    seconds: float
    packages: frozenset[str] = frozenset()
    """Top-level packages that it has imported after torch, dependencies included."""
    package: str = ""
    """The package at fault, if there is a problem: a server without it may fork."""


@dataclass(frozen=True, slots=True)
class Importing:
    """Fork server -> kernel: importing modules of this package now, which ranks can import for themselves."""

    package: str


@dataclass(frozen=True, slots=True)
class NewReaper:
    """Kernel -> fork server: fork the reaper of a launch. One descriptor: its control socket."""


# ------------------------------------------------------------------ reaper and kernel
@dataclass(frozen=True, slots=True)
class ReaperStarted:
    """Reaper -> kernel, as its first message. One descriptor where the system has pidfds: its own."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank's process needs before its first message from the kernel."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    method: Method
    env: dict[str, str]
    process: Process
    log_dir: str
    scratch: str
    """Directory for temporary files and sockets; removed with the launch."""
    is_kept: bool = False
    """True in a session: the rank runs many tasks, keeps its names, and may be replaced by a restart."""


@dataclass(frozen=True, slots=True)
class StartRank:
    """Kernel -> reaper: start this rank. One descriptor: the rank's end of its channel to the kernel."""

    spec: RankSpec


@dataclass(frozen=True, slots=True)
class RankStarted:
    """Reaper -> kernel: a rank's process exists."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """Reaper -> kernel: a rank could not be started. Fork server -> kernel: with rank -1, the reaper could not."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankExited:
    """Reaper -> kernel: how and when a rank's process exited."""

    rank: int
    returncode: int
    """The exit status; ``-n`` for death by signal ``n``, as in ``subprocess``."""
    time_ns: int
    """``time.monotonic_ns()``, one clock for the whole machine; of another node, in the kernel's clock."""
    lost: str = ""
    """Why its node is lost, and the process with it; empty if the process has exited."""


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Kernel -> reaper: signal a rank, or the whole process group it leads."""

    rank: int
    signum: int
    group: bool = False


@dataclass(frozen=True, slots=True)
class EndGroup:
    """Kernel -> reaper of kept ranks: start no more; sweep once the present ranks have exited."""


@dataclass(frozen=True, slots=True)
class Swept:
    """Reaper -> kernel, as its last message: no process of the launch is left, except ``stuck``."""

    stuck: tuple[int, ...] = ()
    """Pids that survive SIGKILL, in uninterruptible sleep: a dead disk or driver."""


# ------------------------------------------------------------------ what the ranks of a session have
@dataclass(frozen=True, slots=True)
class Bound:
    """A name of a kept rank, as far as it can be described without sending the value."""

    name: str
    type_name: str
    detail: str = ""
    """The shape and dtype of an array, the length of a container, or the beginning of the repr of a number."""
    size: int = 0
    """Bytes of memory, as far as they are known."""
    of_group: str = ""
    """The type, such as ``DistributedDataParallel``, that makes the value useless once its group is replaced."""


@dataclass(frozen=True, slots=True)
class CollectivesBegun:
    """The collectives that a kept rank has begun in its default process group."""

    last: Begun = field(default_factory=Begun)
    uncertain: int = 0
    """Operations of this task that the numbers do not show: point-to-point, of other groups, or of user threads."""
    is_counted: bool = False
    """Whether there is such a group."""


@dataclass(frozen=True, slots=True)
class Names:
    """Kept rank -> kernel, before `Done` and `Failed`: the names that it has bound."""

    rank: int
    task: int
    names: tuple[Bound, ...]
    private: tuple[str, ...] = ()
    """Further names that it has: those that begin with an underscore."""
    begun: CollectivesBegun = field(default_factory=CollectivesBegun)
    lost: tuple[str, ...] = ()
    """Keys of tensors and modules of the notebook that it no longer has."""


@dataclass(frozen=True, slots=True)
class NamesTaken:
    """What a kept rank has made of the names that the notebook has sent with a task."""

    kept: tuple[str, ...] = ()
    """Names that it has bound itself and keeps, though the notebook's value is new."""
    replaced: tuple[str, ...] = ()
    """Values of the notebook that it had changed in place, and that the notebook's new ones have replaced."""
    apart: tuple[tuple[str, str], ...] = ()
    """Pairs of a name that was bound and a kept name, such as an optimizer and its model: the first holds tensors of
    the notebook's value of the second."""


@dataclass(frozen=True, slots=True)
class SentName:
    """A name of the notebook on its way to kept ranks."""

    value: Any
    digest: bytes
    """Of the pickled value: a rank that was sent the same before keeps what it has. Empty: the name is the ranks' own
    from now on."""
    is_forced: bool = False
    """Whether to bind it in any case: the user has pushed it."""
    ranks: tuple[int, ...] | None = None
    """Ranks that bind it; None: all."""
    holds: tuple[str, ...] = ()
    """Other names whose tensors or modules are in it."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the kernel asks kept ranks about their names, in place of a function."""

    kind: Literal["value", "repr", "names", "complete", "push", "dump", "restore", "debug"]
    text: str = ""
    """An expression, or for ``complete`` the code up to the cursor."""
    ranks: tuple[int, ...] | None = None
    """Ranks that answer; None: all."""


# ------------------------------------------------------------------ rank and kernel
@dataclass(frozen=True, slots=True)
class World:
    """The process group of a task, and this rank's device and threads."""

    master_addr: str
    master_port: int
    backend: str
    device: str
    threads: int
    generation: int = 0
    """Number of the default process group: a rank keeps its group while this stays the same."""
    waits_for_user: bool = False
    """Whether a rank may wait in a collective for one that the user debugs: then the kernel limits the time."""
    no_group: str = ""


@dataclass(frozen=True, slots=True)
class Debugging:
    """What a task does where it would stop for the user."""

    can_type: bool = False
    fails: bool = False
    """Whether ``breakpoint()`` raises an exception where no one can type; else it prints its place."""
    post_mortem: bool = False
    """Whether a rank that fails opens the debugger on its exception first."""


@dataclass(frozen=True, slots=True)
class Task:
    """Kernel -> rank: run this. Its descriptors: the payload's parcel.

    A rank runs tasks one after the other, and exits after the last, or at EOF.
    """

    task: int
    """The task's number, from 1; higher than that of every task before it."""
    world: World
    log_dir: str = ""
    """The folder for a kept rank's output and reports during the task; empty: that of the previous task."""
    joins: bool = True
    path: tuple[str, ...] = ()
    is_last: bool = False
    takes_part: bool = True
    """Whether the rank runs it; else it returns None at once."""
    debugging: Debugging = field(default_factory=Debugging)
    reports_step: bool = False
    """Whether the rank reports the first step of an optimizer."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Kernel -> rank, before the SIGINT: it is meant for this task. A SIGINT that arrives in a later task is stale."""

    task: int


@dataclass(frozen=True, slots=True)
class Free:
    """Kernel -> kept rank: cut the connections of the process groups, so that a call that waits for a peer raises."""

    task: int


@dataclass(frozen=True, slots=True)
class Running:
    """Rank -> kernel: the process group is ready, and the function starts now."""

    rank: int
    task: int
    names: NamesTaken = field(default_factory=NamesTaken)


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Rank -> kernel: SIGINT has arrived, and the rank raises KeyboardInterrupt, once for each task, now or soon."""

    rank: int
    task: int


@dataclass(frozen=True, slots=True)
class Done:
    """Rank -> kernel: the function returned. Its descriptors: the result's parcel."""

    rank: int
    task: int
    time_ns: int
    changed: tuple[str, ...] = ()
    was_stopped: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Rank -> kernel: the function raised. Sent before any clean-up, which may hang."""

    rank: int
    task: int
    time_ns: int
    kind: Literal["exception", "exit", "interrupt", "result"]
    type_name: str
    text: str
    """``str(exception)``, or a substitute if that raises."""
    traceback: str
    pickled: bytes = b""
    """The exception, if it survives a round trip through pickle."""
    collective: str = ""
    """The collective that raised it, if any: such an error is often another rank's fault."""
    status: int = 0
    advice: str = ""
    """If the rank's machine has reached a limit: which, and what to do."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Rank -> kernel: no more tasks, and the rank's threads have ended; the process exits now."""

    rank: int
    task: int


@dataclass(frozen=True, slots=True)
class Settings:
    """The notebook's state that ranks start from; None: not loaded in the notebook, leave it alone."""

    authkey: bytes | None = None
    """The key of multiprocessing's connections, which ranks need for the notebook's managers."""
    python_rng: Any = None
    numpy_rng: Any = None
    torch_rng: bytes | None = None
    torch_seed: int | None = None
    has_gpu: bool = True
    """Whether there may be a GPU generator to seed."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Of Python, NumPy and torch, by the names in `nblaunch.transfer.cell_effects`."""
    warning_filters: tuple[WarningFilter, ...] | None = None
    logging: RootLogger | None = None
    """None: the notebook has not configured it."""
    ranks: tuple[int, ...] | None = None
    """The ranks that apply them; None: all."""


@dataclass(frozen=True, slots=True)
class RootLogger:
    """What ``logging.basicConfig`` sets."""

    level: int
    has_handler: bool = False
    is_stdout: bool = False
    format: str = "%(message)s"
    datefmt: str | None = None
    style: Literal["%", "{", "$"] = "%"


@dataclass(frozen=True, slots=True)
class WarningFilter:
    """An entry of ``warnings.filters``; its category by name, so that a rank need not import a package."""

    action: str
    message: re.Pattern[str] | str | None
    category: tuple[str, str]
    module: re.Pattern[str] | str | None
    lineno: int


@dataclass(frozen=True, slots=True)
class Payload:
    """What a launch runs, as pickled into its parcel."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    anchor: Any
    """A function whose ``__globals__`` all shipped functions share: the ranks' ``__main__``."""
    settings: Settings
    watched: dict[str, Any]
    """Modules and containers to compare before and after, by name."""
    imports: Mapping[str, bool] = field(default_factory=dict)
    """Modules that cells have imported, for their effect: see `nblaunch.transfer.cell_effects`."""
    attributes: Mapping[tuple[str, str, str], Any] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    main: Mapping[str, Any] = field(default_factory=dict)
    """Classes and functions that only the notebook's ``__main__`` defines. Pickled last, like `sources`."""
    names: Mapping[str, SentName] = field(default_factory=dict)
    """For kept ranks: names of the notebook to bind first."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A ``%%distributed`` cell: source that the ranks run in the notebook's namespace."""

    source: str
    filename: str
    label: str
    ranks: tuple[int, ...] | None = None
    shows_value: bool = False
    value_rank: int = -1
    """The rank whose value the notebook displays itself; -1: none."""
    keeps_value: bool = False
    """Whether the value stays in the ranks, so that it need not be sent."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a cell that defined shipped functions, for tracebacks."""

    text: str
    label: str
    """The notebook's name for it, such as ``Cell In[3]``; empty if it has only a file name."""


# ------------------------------------------------------------------ debugger and kernel
# A rank asks for one line at a time. Requests are numbered, because an answer may cross an interrupt.
OpenedBy = Literal["breakpoint", "exception", "look", "input"]
"""Why a rank waits for the user. ``look``: another thread shows the frames of the main one, which runs on."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Rank -> kernel: a debugger has opened, or the rank has called ``input``."""

    rank: int
    task: int
    by: OpenedBy
    filename: str = ""
    line: int = 0
    function: str = ""
    error: str = ""
    """Of ``exception``: its type and message."""
    command: str = ""
    """Of ``look``: the only command that it runs; empty if the user types."""


@dataclass(frozen=True, slots=True)
class Printed:
    """Rank -> kernel: text of the debugger, with colours as ANSI sequences."""

    rank: int
    task: int
    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Rank -> kernel: the rank waits for a line."""

    rank: int
    task: int
    number: int
    prompt: str
    """What to show after the rank's own prompt; of ``input``: its argument."""
    is_secret: bool = False
    is_command: bool = False
    """Whether the debugger takes a command: no line of ``commands`` or of ``input``."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Rank -> kernel: the debugger is closed, or ``input`` has its line, or was interrupted."""

    rank: int
    task: int
    steps: bool = False
    """Whether the debugger is to open again: the rank runs to its next line or breakpoint."""
    quits: bool = False
    """Whether the user has quit: the task is to be stopped."""


@dataclass(frozen=True, slots=True)
class Typed:
    """Kernel -> rank: the line that the rank has asked for; None: the end of the input."""

    task: int
    number: int
    line: str | None


@dataclass(frozen=True, slots=True)
class Look:
    """Kernel -> rank: open a debugger beside the main thread, on the frames that it is in. No effect if one is open."""

    task: int
    command: str = ""
    """Run this alone, and close; empty: stay."""


FromDebugger = Opened | Printed | Asked | Closed
ToDebugger = Typed | Look


# ------------------------------------------------------------------ profiles
@dataclass(frozen=True, slots=True)
class StartProfile:
    """Kernel -> rank: begin a recording of this length."""

    task: int
    number: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """Rank -> kernel: an optimizer has made its first step."""

    rank: int
    task: int


@dataclass(frozen=True, slots=True)
class Profiled:
    """Rank -> kernel: the recording of this number has begun, or is over: then its descriptors are its two files."""

    rank: int
    task: int
    number: int
    has_begun: bool = False
    problem: str = ""
    """Why there is no recording."""


ToRank = ToDebugger | StartProfile


# ------------------------------------------------------------------ engines
@dataclass(frozen=True, slots=True)
class Order:
    """The group that an engine is to place."""

    launch_id: str
    world_size: int
    ranks: Sequence[range]
    """The ranks of each node that the engine places."""
    method: str
    """As `Engine.usable` returns it."""
    process: Process
    envs: Sequence[Mapping[str, str]]
    """The environment of the ranks of each node, without the variables that differ by rank."""
    named: Sequence[str]
    """Variables that the user has set with ``env=``."""
    log_dir: str
    payload: Payload | None = None
    """For an engine whose ranks share the notebook's memory."""
    is_kept: bool = False
    """Whether the ranks stay for many tasks, and can be restarted one by one."""
