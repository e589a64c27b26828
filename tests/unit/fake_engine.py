"""An engine without processes: a test scripts what each rank writes, sends and does on a signal."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nblaunch.engines.protocol import Descriptors, Event, Received, Store, Stream, Wakeup
from nblaunch.machine.inventory import Machine
from nblaunch.machine.usage import Usage
from nblaunch.wire.messages import (
    Done,
    Failed,
    Interrupted,
    Leaving,
    NotStarted,
    Order,
    RankExited,
    RankStarted,
    Running,
    Swept,
    Task,
    ToRank,
)
from nblaunch.wire.tables import Begun, Dropped

FAKE_PID = 1000
"""Of rank 0; no test may signal it."""


class FakeLog:
    """What a rank has written."""

    name = "a fake log"

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def read(self, start: int, end: int) -> bytes:
        return bytes(self._data[start:end])


@dataclass
class FakeSampler:
    """Measures scripted ranks: each uses as many bytes as its pid."""

    workers: Sequence[FakeWorker]
    is_closed: bool = False

    def sample(self, ranks: Collection[int]) -> list[Usage]:
        return [
            Usage(worker.rank, 0.0, FAKE_PID + worker.rank, None, None)
            for worker in self.workers
            if worker.rank in ranks and not worker.has_exited
        ]

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeStackDumps:
    """Answers at once with `answer`, if there is one."""

    answer: str | None = None
    main: str = "0x1"
    dump: str | None = None
    is_ready: bool = True

    def ask(self, signal_at: float) -> None:
        self.dump = self.answer

    def look(self, now: float) -> bool:
        return self.dump is not None


@dataclass
class FakeWorker:
    """One rank: its methods in the present tense are what the rank does, the rest is the kernel's."""

    rank: int
    events: deque[Event] = field(default_factory=deque)
    clock: Callable[[], float] = lambda: 0.0
    is_open: bool = True
    task: int = 1
    stacks: FakeStackDumps = field(default_factory=FakeStackDumps)
    written: dict[Stream, bytearray] = field(
        default_factory=lambda: {"out": bytearray(), "err": bytearray(), "spool": bytearray()}
    )
    signals: list[int] = field(default_factory=list)
    """The signals that it was sent."""
    has_exited: bool = False

    # -------------------------------------------------------------- what the rank does
    def sends(self, message: object, *fds: int) -> None:
        self.events.append(Received(self.rank, message, Descriptors(fds)))

    def runs(self) -> None:
        self.sends(Running(self.rank, self.task))

    def prints(self, text: str) -> None:
        self.written["out"] += text.encode()

    def returns(self, *fds: int) -> None:
        self.sends(Done(self.rank, self.task, self.now_ns), *fds)

    def raises(self, kind: Literal["exception", "result"] = "exception") -> None:
        self.sends(Failed(self.rank, self.task, self.now_ns, kind, "ValueError", "no", ""))

    def acknowledges(self) -> None:
        self.sends(Interrupted(self.rank, self.task))

    def exits(self, status: int = 0) -> None:
        if not self.has_exited:
            self.has_exited, self.is_open = True, False
            self.events.append(RankExited(self.rank, status, self.now_ns))

    def returns_and_exits(self) -> None:
        self.returns()
        self.sends(Leaving(self.rank, self.task))
        self.exits()

    @property
    def now_ns(self) -> int:
        return math.ceil(self.clock() * 1e9)

    # -------------------------------------------------------------- what the kernel asks
    def interrupt(self, task: int) -> None:
        self.signal(signal.SIGINT)

    def free(self, task: int) -> None:
        """It waits in no collective."""

    def tell(self, message: ToRank) -> None:
        """No debugger is open in it."""

    def signal(self, signum: int, group: bool = False) -> None:
        self.signals.append(signum)
        if signum == signal.SIGKILL:
            self.exits(-signal.SIGKILL)

    def log(self, stream: Stream) -> FakeLog:
        return FakeLog(self.written[stream])

    def output(self, key: str, mime: str) -> Path:
        raise AssertionError("it displays nothing")

    def dropped(self) -> Dropped:
        return Dropped()

    def collectives(self) -> Sequence[Begun]:
        return ()


class FakeWorkers:
    """The ranks of a group. Nothing waits: `wait` returns what has been scripted so far."""

    def __init__(self, world_size: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.events: deque[Event] = deque()
        self.ranks = [FakeWorker(rank, self.events, clock) for rank in range(world_size)]
        self.has_begun = True
        self.heard_at = 0.0
        self.tasks: list[Task] = []
        self.samplers: list[FakeSampler] = []
        self.is_closed = False
        self.hint: str | None = "waiting"

    notes = ()

    def open_store(self, give_up: Callable[[], bool] = lambda: False) -> Store:
        return "127.0.0.1", 1

    def start(self, environment: Callable[[int], Mapping[str, str]]) -> Sequence[FakeWorker]:
        self.events.extend(RankStarted(worker.rank, FAKE_PID + worker.rank) for worker in self.ranks)
        return self.ranks

    def refuses(self, rank: int, reason: str) -> None:
        self.events.append(NotStarted(rank, reason))

    def sweeps(self, *stuck: int) -> None:
        self.events.append(Swept(stuck))

    def restart(self, rank: int, environment: Mapping[str, str]) -> FakeWorker:
        self.ranks[rank] = FakeWorker(rank, self.events, self.ranks[rank].clock)
        self.events.append(RankStarted(rank, FAKE_PID + rank))
        return self.ranks[rank]

    def listen_to(self, wakeup: Wakeup) -> None:
        """Nothing waits."""

    def let_go(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self.ranks[rank].exits()

    def send_tasks(self, tasks: Sequence[Task], parcel: Sequence[int]) -> None:
        self.tasks += tasks
        for worker, task in zip(self.ranks, tasks, strict=True):
            worker.task = task.task

    def dismiss(self) -> None:
        """The test says when ranks exit."""

    def wait(self, seconds: float) -> Iterable[Event]:
        while self.events:
            yield self.events.popleft()

    def drain(self) -> Iterable[Event]:
        return self.wait(0.0)

    def sampler(self, device: str, env: Mapping[str, str]) -> FakeSampler:
        self.samplers.append(FakeSampler(self.ranks))
        return self.samplers[-1]

    def nudge(self) -> str | None:
        return self.hint

    def abandon(self) -> None:
        """No process holds on."""

    def close(self) -> None:
        self.is_closed = True


class FakeEngine:
    """Places `workers`, whatever is ordered."""

    def __init__(self, workers: FakeWorkers) -> None:
        self.workers = workers
        self.orders: list[Order] = []

    start_methods: tuple[str, ...] = ("auto", "scripted")
    is_local = True

    def machines(self, show: Callable[[str], None], give_up: Callable[[], bool] = lambda: False) -> Sequence[Machine]:
        return [Machine(0, 2, "linux", {})]

    def usable(
        self,
        method: str,
        env: Mapping[str, str],
        named: Sequence[str],
        show: Callable[[str], None] = lambda text: None,
    ) -> str:
        return "scripted"

    def place(self, order: Order, wakeup: Wakeup) -> FakeWorkers:
        self.orders.append(order)
        return self.workers

    def preload(self, modules: Sequence[str]) -> None:
        """Nothing to import."""

    def status(self) -> list[str]:
        return ["scripted ranks"]

    def stop(self) -> None:
        """Nothing to kill."""
