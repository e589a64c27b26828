"""The seam between tasks and processes: what `nblaunch.launch` needs from an engine.

An engine places the ranks of a group and runs them. `Workers` are the processes of one group, a `Worker` is one rank,
on any machine. A group is used from one thread; `Workers.wait` returns its events.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from nblaunch.errors import StartError
from nblaunch.machine.inventory import Machine
from nblaunch.wire.messages import NotStarted, Order, RankExited, RankStarted, Swept, Task, ToRank
from nblaunch.wire.tables import Begun, Dropped

if TYPE_CHECKING:
    from nblaunch.machine.usage import Usage  # which imports psutil: only panels measure

Stream = Literal["out", "err", "spool"]
"""The streams of a rank: stdout, stderr, and its reports as JSON lines."""
Store = tuple[str, int]
"""The address and port of a group's TCPStore."""


# ------------------------------------------------------------------ one rank
class Log(Protocol):
    """One stream of a rank so far. Thread-safe, and readable after the group is closed."""

    name: str
    """The location of the log, for messages to the user."""

    def size(self) -> int:
        """Return the number of bytes written so far; 0 before the first."""

    def read(self, start: int, end: int) -> bytes:
        """Return these bytes; fewer if the log was truncated meanwhile, none if it was removed."""


class StackDumps(Protocol):
    """Asks one rank for the stacks of its threads."""

    main: str
    """The main thread, as dumps name it."""
    dump: str | None
    """The answer to the last request, in faulthandler's format."""

    @property
    def is_ready(self) -> bool:
        """Return True if the rank can answer: it has installed its handlers."""

    def ask(self, signal_at: float) -> None:
        """Request a dump unless a request is pending. A rank without an answer by `signal_at` gets a signal."""

    def look(self, now: float) -> bool:
        """Return True if the answer is complete."""


class Worker(Protocol):
    """One rank. After its exit, messages and signals have no effect."""

    rank: int

    @property
    def stacks(self) -> StackDumps:
        """Requests the stacks of the rank."""

    @property
    def is_open(self) -> bool:
        """Return True if messages may still come: the rank runs, and has not called exec."""

    def interrupt(self, task: int) -> None:
        """Send SIGINT; no effect on a later task."""

    def free(self, task: int) -> None:
        """Make a call of a kept rank that waits for a peer raise, by cutting the connections of its process groups."""

    def tell(self, message: ToRank) -> None:
        """Send a message to the reading thread of the rank."""

    def signal(self, signum: int, group: bool = False) -> None:
        """Send a signal to the rank, or to its process group."""

    def log(self, stream: Stream) -> Log:
        """Return one stream of what the rank writes in its present task."""

    def output(self, key: str, mime: str) -> Path:
        """Return the file with the body that a record of the present task names by key and type. It may be removed."""

    def dropped(self) -> Dropped:
        """Return the output that the rank could not write so far."""

    def collectives(self) -> Sequence[Begun]:
        """Return the last collective that the rank has begun in each process group, the latest first."""


# ------------------------------------------------------------------ events
class Descriptors:
    """What has arrived with a message: descriptors of files in this machine's memory, which their holder closes."""

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self._fds = list(fds)

    def __bool__(self) -> bool:
        return bool(self._fds)

    def take(self) -> list[int]:
        """Return the descriptors, which the caller closes; none at the next call."""
        taken, self._fds = self._fds, []
        return taken

    def close(self) -> None:
        """Close the descriptors, unless they were taken. Idempotent."""
        for fd in self.take():
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Received:
    """A rank has sent a message. The receiver takes or closes the parcel."""

    rank: int
    message: object
    parcel: Descriptors
    lost: str = ""
    """Why the parcel is missing, such as too many open files; empty if it is not."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The process that supervises the ranks is dead, and the ranks with it."""


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """A node is being taken back, with its ranks: they have as long as its engine grants them."""

    reason: str


Event = RankStarted | NotStarted | RankExited | Swept | Received | NodeLeaving | Lost
"""What `Workers.wait` returns. `Swept` and `Lost` are the last event of a group."""


# ------------------------------------------------------------------ the ranks of a group
class Sampler(Protocol):
    """Measures the ranks of a group. Used from one thread, which may be another than the group's."""

    def sample(self, ranks: Collection[int]) -> list[Usage]:
        """Return the usage of those of these ranks that run, about once a second."""

    def close(self) -> None:
        """Release what sampling holds. Idempotent."""


class Wakeup:
    """Ends the wait of a thread that watches it, such as `Workers.wait`, from any other."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def set(self) -> None:
        with contextlib.suppress(OSError):  # full of wakeups, or closed
            self._write.send(b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # another has read it
            self._read.recv(4096)

    def close(self) -> None:
        self._read.close()
        self._write.close()


class GivenUpError(StartError):
    """What was waited for is not wanted any more."""


class Workers(Protocol):
    """The processes of one group."""

    has_begun: bool
    """The process that supervises the ranks has answered."""

    @property
    def heard_at(self) -> float:
        """Return when the ranks of another machine were heard of last, by the monotonic clock; 0: there is no other.

        Of several machines it is the one that has been silent for longest, of those whose ranks have not all exited.
        """

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know of where the ranks run, once the store is open."""

    def open_store(self, give_up: Callable[[], bool] = lambda: False) -> Store:
        """Serve the TCPStore of the ranks until `close`.

        StartError: the system refuses. GivenUpError: `give_up` has returned True while other machines were awaited.
        """

    def start(self, environment: Callable[[int], Mapping[str, str]]) -> Sequence[Worker]:
        """Start every rank; `environment` returns the variables of a rank. StartError: the system refuses."""

    def restart(self, rank: int, environment: Mapping[str, str]) -> Worker:
        """Start a kept rank again that has exited. StartError: the system refuses."""

    def listen_to(self, wakeup: Wakeup) -> None:
        """Let another wakeup end `wait`."""

    def send_tasks(self, tasks: Sequence[Task], parcel: Sequence[int]) -> None:
        """Send each rank its task and the payload's descriptors, as fast as descriptors can travel.

        The descriptors must stay open until every rank is `Running`. Ranks that have exited get nothing.
        """

    def let_go(self, ranks: Collection[int]) -> None:
        """Let these kept ranks exit after their present tasks."""

    def dismiss(self) -> None:
        """Let the ranks exit after their present tasks, and end the group with the last of them."""

    def wait(self, seconds: float) -> Iterable[Event]:
        """Wait for events, at most `seconds` or until the wakeup; return them."""

    def drain(self) -> Iterable[Event]:
        """Return what the ranks had sent before their exit."""

    def sampler(self, device: str, env: Mapping[str, str]) -> Sampler:
        """Return what measures the ranks. May be called from any thread; the caller closes it."""

    def nudge(self) -> str | None:
        """Wake what starts the ranks, which has not answered in time. Return a note; None if the group is given up."""

    def abandon(self) -> None:
        """Kill the ranks, and the process that supervises them."""

    def close(self) -> None:
        """Release descriptors and temporary files. Idempotent."""


class Engine(Protocol):
    """Where ranks run. Thread-safe: launches run in threads of their own."""

    is_local: bool
    """Ranks run on this machine."""
    start_methods: tuple[str, ...]
    """What ``start_method=`` may be; the first lets the engine choose."""

    def machines(self, show: Callable[[str], None], give_up: Callable[[], bool] = lambda: False) -> Sequence[Machine]:
        """Return the nodes that ranks are placed on; start agents there unless they run.

        `show` gets what is awaited, such as a job in a queue.

        StartError: a node cannot be used. GivenUpError: `give_up` has returned True; what was started has been ended.
        """

    def usable(
        self,
        method: str,
        env: Mapping[str, str],
        named: Sequence[str],
        show: Callable[[str], None] = lambda text: None,
    ) -> str:
        """Return the start method that a launch uses: the engine's choice for ``auto``, else `method`.

        If ranks cannot be started that way, warn and return a substitute. `show` gets what is awaited, if that takes
        time.

        StartError: there is no substitute.
        """

    def place(self, order: Order, wakeup: Wakeup) -> Workers:
        """Get the processes that start the ranks of a group. The caller closes them. StartError: there are none."""

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules in the background, ahead of later launches in the environment of the last one."""

    def status(self) -> list[str]:
        """Return the lines of ``%distributed status`` about the engine."""

    def stop(self) -> None:
        """Kill every process of the engine, with the ranks that still run."""
