"""The seam between tasks and processes: what `nblaunch.launch` needs from an engine.

An engine places the ranks of a group and runs them. `Workers` are the processes of one group, a `Worker` is one rank,
wherever it runs. A caller uses a group from one thread, and learns what happens as events from `Workers.wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from nblaunch.machine.process_state import Process
from nblaunch.wire.drops import Dropped
from nblaunch.wire.messages import Method, NotStarted, Payload, RankExited, RankStarted, Swept, Task

Stream = Literal["out", "err", "spool"]
"""What a rank writes: stdout, stderr, and its reports as JSON lines."""


# ------------------------------------------------------------------ events
@dataclass(frozen=True, slots=True)
class Received:
    """A rank has sent a message. The receiver closes its descriptors."""

    rank: int
    message: object
    fds: list[int]


@dataclass(frozen=True, slots=True)
class LostDescriptors:
    """A message has arrived without its descriptors: this process may not open that many."""

    rank: int
    message: object
    error: OSError


@dataclass(frozen=True, slots=True)
class Lost:
    """The process that watched the ranks is gone, and the ranks with it."""


Event = RankStarted | NotStarted | RankExited | Swept | Received | LostDescriptors | Lost
"""`Swept` and `Lost` are the last event of a group."""


# ------------------------------------------------------------------ one rank
class Log(Protocol):
    """What a rank has written to one stream so far."""

    @property
    def name(self) -> str:
        """Where it is, for messages to the user."""

    def size(self) -> int:
        """Return the number of bytes written so far; 0 before the first."""

    def read(self, start: int, end: int) -> bytes:
        """Return these bytes; fewer if the log was truncated meanwhile."""

    def close(self) -> None:
        """Release it. Idempotent."""


class StackDumps(Protocol):
    """Asks one rank for the stacks of its threads."""

    @property
    def main(self) -> str:
        """The main thread, as dumps name it."""

    @property
    def dump(self) -> str | None:
        """The answer to the last question, in faulthandler's format."""

    @property
    def is_ready(self) -> bool:
        """Return True if the rank can answer: it has installed its handlers."""

    def ask(self, signal_at: float) -> None:
        """Ask, unless an earlier question is still open. A rank that has not answered by then gets a signal."""

    def look(self, now: float) -> bool:
        """Return True if the answer is complete."""


class Worker(Protocol):
    """One rank. After its exit, sending and signalling do nothing."""

    @property
    def rank(self) -> int:
        """Its number."""

    @property
    def stacks(self) -> StackDumps:
        """What asks it for its stacks."""

    @property
    def is_open(self) -> bool:
        """Return True if messages may still come: the rank runs, and has not called exec."""

    def interrupt(self, task: int) -> None:
        """Send SIGINT, which has no effect in a later task."""

    def signal(self, signum: int, group: bool = False) -> None:
        """Send a signal to the rank, or to its process group."""

    def log(self, stream: Stream) -> Log:
        """Open one stream of the rank's output. The caller closes it."""

    def dropped(self) -> Dropped:
        """Return how much the rank could not write so far."""


# ------------------------------------------------------------------ the ranks of a group
class Wakeup(Protocol):
    """What another thread uses to end `Workers.wait` early."""

    def fileno(self) -> int:
        """Return a descriptor that is readable once there is something to do."""

    def clear(self) -> None:
        """Make it unreadable again."""


@dataclass(frozen=True, slots=True)
class Order:
    """What an engine needs to know of a group before it starts the ranks."""

    launch_id: str
    world_size: int
    method: Method
    process: Process
    env: Mapping[str, str]
    """The ranks' environment, without the variables that differ by rank."""
    named: Sequence[str]
    """Variables that the user has set with ``env=``."""
    log_dir: str
    payload: Payload | None = None
    """For an engine whose ranks share the notebook's memory."""


class Workers(Protocol):
    """The processes of one group."""

    @property
    def has_begun(self) -> bool:
        """Return True if what starts the ranks has answered."""

    def start(self, environment: Callable[[int], Mapping[str, str]]) -> Sequence[Worker]:
        """Start every rank; `environment` is that of one rank.

        Raises:
            StartError: The system refuses.
        """

    def send_tasks(self, tasks: Sequence[Task], parcel: Sequence[int], *, last: bool) -> None:
        """Send each rank its task and the payload's descriptors, as fast as descriptors can travel.

        The descriptors must stay open until every rank is `Running`.

        Args:
            tasks: One for each rank.
            parcel: The payload's descriptors.
            last: Whether the ranks leave after it.
        """

    def dismiss(self) -> None:
        """Let the ranks leave after the tasks that they have: no more will come."""

    def wait(self, seconds: float) -> Iterable[Event]:
        """Wait for events, at most `seconds` or until the wakeup; return those that have come."""

    def drain(self) -> Iterable[Event]:
        """Return what the ranks had sent before their exit."""

    def nudge(self) -> str | None:
        """Wake what should start the ranks, if nothing has begun for long.

        Returns:
            What to tell the user while waiting; None if waiting is useless: the group is given up.
        """

    def forsake(self) -> bool:
        """Stop using what failed to start the ranks; return True if another try may succeed."""

    def abandon(self) -> None:
        """Kill the group without its cooperation."""

    def close(self) -> None:
        """Release descriptors and temporary files. Idempotent."""


class Engine(Protocol):
    """Where ranks run."""

    def usable(
        self, method: Method, env: Mapping[str, str], named: Sequence[str], cuda_cell: Callable[[], str]
    ) -> Method:
        """Return `method`, or a substitute with a warning if ranks cannot be started that way.

        Args:
            method: The start method of the plan.
            env: The ranks' environment.
            named: Variables that the user has set with ``env=``.
            cuda_cell: Returns the cell that started CUDA in the notebook; empty if unknown.

        Raises:
            StartError: There is no substitute.
        """

    def shares_memory(self, method: Method) -> bool:
        """Return True if ranks inherit the notebook's memory, so that no payload is sent."""

    def place(self, order: Order, wakeup: Wakeup) -> Workers:
        """Reserve what starts the ranks of a group. The caller closes it.

        Raises:
            StartError: Nothing could be reserved.
        """

    def prepare_next(self) -> None:
        """Prepare for the next launch in the background. Called after each one."""
