"""The nodes of one allocation, with an agent on each, and the kernel's end of the groups that run there.

Of a group's ranks the kernel has what the agents have said, and copies of their files. What travels:

* Files of ranks: the agent sends what is appended, and a launch ends once the logs have arrived.
* Data of a launch, once to each node, whose ranks map one copy of it. Blobs of 64 KB and more stay there for later
  launches: up to 4 GB, the most recently used. Results travel to the kernel only.
* The user's own modules that the notebook has imported, once to each node, which uses them if it lacks them or has
  others. Installed packages do not.
* The variables that the notebook has set since its start, and ``env=``; not those of Slurm that describe a task.
* Times that decide which rank failed first, as ages: each machine has its own clock.

Between ranks, gloo and NCCL connect as under torchrun, without nblaunch and without encryption. A lost node's ranks
count as failed at its last sign of life, so the error names them and not those whose collectives failed after it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import selectors
import signal
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from nblaunch.engines.link import (
    LINK_BEAT_S,
    LINK_SILENCE_S,
    BlobStore,
    Link,
    Message,
    Peer,
    difference,
    parts_of,
    versions_here,
)
from nblaunch.engines.protocol import (
    Descriptors,
    Event,
    GivenUpError,
    NodeLeaving,
    Received,
    Store,
    Wakeup,
)
from nblaunch.engines.rank_files import RankFiles
from nblaunch.errors import StartError
from nblaunch.machine import timeouts
from nblaunch.machine.inventory import Machine
from nblaunch.machine.own_code import own_files
from nblaunch.machine.processes import open_log
from nblaunch.machine.usage import Usage
from nblaunch.wire.link_messages import (
    Blob,
    BlobPart,
    Call,
    Drop,
    FromAgent,
    FromRank,
    Joined,
    Leaving,
    ModuleFile,
    Part,
    Place,
    Placed,
    Proof,
    Release,
    ToGroup,
    Versions,
    Written,
    in_other_clock,
)
from nblaunch.wire.messages import NotStarted, Order, RankExited, RankStarted, Swept, Task, ToRank
from nblaunch.wire.tables import Begun, Dropped

_log = logging.getLogger(__name__)
_numbers = itertools.count()
KEPT_BYTES = 4 << 30
"""Of sent data on a node, the least recently used are dropped first."""
MIN_KEPT_BYTES = 1 << 16
"""Smaller blobs are sent with each task."""
MAX_NAMED_NODES = 8
"""In the note on where ranks run."""
PLACED_TIMEOUT_S = 130.0
"""For an agent to get the processes that start ranks: its fork server may have to start first."""


@dataclass(slots=True)
class Node:
    index: int
    peer: Peer
    machine: Machine
    number: int
    """As in `Boot`."""
    kept: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """The blobs that it has, with their sizes; the most recently used last."""
    pinned: dict[str, set[str]] = field(default_factory=dict)
    """By group: the blobs of its last task, which must stay until its ranks have them."""
    sending: Counter[str] = field(default_factory=Counter)
    """How many lanes are sending a blob."""
    modules: set[bytes] = field(default_factory=set)
    """Digests of the files of the user's own modules that it was sent."""
    lost: str = ""
    """Why it is lost; empty if it is not."""
    leaving: str = ""
    """Why it will be lost soon; empty if nothing is known."""

    @property
    def problem(self) -> str:
        return self.lost or self.leaving


class Nodes:
    """See the module. Thread-safe. Listens on an address for the agents of `count` nodes."""

    def __init__(self, address: str, count: int, proof: Proof = "") -> None:
        self.count = count
        self._problems: dict[str, str] = {}
        """Why agents were refused, by node."""
        self._joined: list[Node] = []
        self._by_peer: dict[bytes, Node] = {}
        self.groups: dict[str, NodeWorkers] = {}
        """The groups that have their ranks here, by their names in messages."""
        self._blobs = BlobStore()
        self._changed = threading.Condition()
        self.link = Link(address, self._join, self._take, self._lose, proof)

    # -------------------------------------------------------------- joining
    def wait(self, seconds: float) -> bool:
        """Wait for an agent; return True if every one has joined. StartError: one was refused."""
        with self._changed:
            if len(self._joined) < self.count and not self._problems:
                self._changed.wait(seconds)
            if self._problems:
                raise StartError("; ".join(self._problems.values()))
            return len(self._joined) == self.count

    @property
    def joined(self) -> list[Node]:
        with self._changed:
            return list(self._joined)

    @property
    def is_whole(self) -> bool:
        with self._changed:
            return len(self._joined) == self.count and not any(node.problem for node in self._joined)

    def _join(self, peer: Peer, versions: Versions, load: Callable[[], Joined]) -> None:
        problem = difference(versions, versions_here())
        with self._changed:
            if problem:
                self._problems[versions.host] = f"{versions.host} {problem}"
            else:
                joined = load()
                self._joined.append(Node(0, peer, joined.machine, joined.node))
                self._joined.sort(key=lambda node: (node.number, _natural(node.machine.name)))
                for index, node in enumerate(self._joined):
                    node.index = index
                self._by_peer = {node.peer.identity: node for node in self._joined}
            self._changed.notify_all()

    # -------------------------------------------------------------- groups
    def remove(self, name: str) -> None:
        """Forget a group, and the results that it has not taken."""
        self.groups.pop(name, None)
        self.link.act(lambda: self._forget(name))

    def _forget(self, name: str) -> None:
        """Release what a group has held. In the thread of the link, as all that touches blobs."""
        self._blobs.drop_of(f"{name}:")
        for node in self._joined:
            node.pinned.pop(name, None)

    def forget_data(self, node: Node, group: str) -> None:
        """Let the next launch send a node again what this group has needed: it could not keep all of it."""
        keys = node.pinned.pop(group, set()).difference(*node.pinned.values())
        for key in keys:
            node.kept.pop(key, None)
        node.peer.outbox.put(Drop(list(keys)))

    def send_data(
        self,
        node: Node,
        lane: str,
        fds: Sequence[int],
        build: Callable[[Sequence[Blob]], ToGroup],
        on_error: Callable[[str], None],
    ) -> None:
        """Send the message that `build` returns in its lane, behind those of the files that the node does not have."""
        own = [os.dup(fd) for fd in fds]
        messages = self._with_data(node, lane, own, build)
        weakref.finalize(messages, Descriptors(own).close)  # also if the lane is dropped before it comes to them
        self.link.send_in(node.peer, lane, messages, on_error)

    def _with_data(
        self, node: Node, group: str, fds: Sequence[int], build: Callable[[Sequence[Blob]], ToGroup]
    ) -> Iterator[Message]:
        blobs = [_blob_of(fd) for fd in fds]
        node.pinned[group] = {blob.key for blob in blobs}
        yield from self._make_room(node, blobs)
        for fd, blob in zip(fds, blobs, strict=True):
            if blob.key in node.kept:
                node.kept.move_to_end(blob.key)
            else:
                yield from self._parts_to(node, fd, blob)
            node.kept[blob.key] = blob.size
        yield build(blobs), ()

    @staticmethod
    def _parts_to(node: Node, fd: int, blob: Blob) -> Iterator[Message]:
        """Yield the parts of a blob. If they are not all sent, the node forgets those that were."""
        node.sending[blob.key] += 1
        is_whole = False
        try:
            yield from parts_of(fd, blob.key, blob.size)
            is_whole = True
        finally:
            node.sending[blob.key] -= 1
            if not (is_whole or node.sending[blob.key] or blob.key in node.kept):
                node.peer.outbox.put(Drop([blob.key]))

    def _make_room(self, node: Node, blobs: Sequence[Blob]) -> Iterator[Message]:
        """Let a node forget small blobs, and the least recently used beyond the limit."""
        needed = {blob.key for blob in blobs}.union(*node.pinned.values())
        left, dropped = KEPT_BYTES - sum(blob.size for blob in blobs), []
        for key, size in reversed(list(node.kept.items())):
            if key in needed:
                continue
            left -= size
            if left < 0 or size < MIN_KEPT_BYTES:
                dropped.append(key)
        for key in dropped:
            del node.kept[key]
        if dropped:
            yield Drop(dropped), ()

    # -------------------------------------------------------------- in the thread of the link
    def _take(self, peer: Peer, message: object, data: Sequence[Part]) -> None:
        node = self._by_peer.get(peer.identity)
        if node is None:
            return
        if isinstance(message, BlobPart):
            if message.key.partition(":")[0] in self.groups:  # else it has been closed, and will take none
                self._blobs.add(message, data[0])
        elif isinstance(message, Leaving):
            node.leaving = message.reason
            for group in list(self.groups.values()):
                group.add(NodeLeaving(f"{node.machine.name}: {message.reason}"))
        else:
            workers = self.groups.get(message.group)  # type: ignore[attr-defined]  # every other message has one
            if workers is not None:
                workers.take(node.index, message, data)  # type: ignore[arg-type]  # as above

    def take_parcel(self, parcel: Sequence[Blob]) -> tuple[Descriptors, str]:
        """Return a parcel, and why it is missing; empty if it is not."""
        if all(blob.key in self._blobs for blob in parcel):
            return Descriptors([self._blobs.take(blob.key) for blob in parcel]), ""
        self._blobs.drop([blob.key for blob in parcel])
        return Descriptors(), "the notebook's machine had no space for the result"

    def _lose(self, peer: Peer, reason: str) -> None:
        node = self._by_peer.get(peer.identity)
        if node is None:
            return
        with self._changed:
            node.lost = node.leaving or reason
            self._changed.notify_all()
        for group in list(self.groups.values()):
            group.lose(node.index, node.lost)

    def close(self) -> None:
        """Let the agents exit, with their ranks, and stop listening. Idempotent."""
        self.link.close()
        self._blobs.close()


def _natural(name: str) -> tuple[str | int, ...]:
    """Return a key that sorts n2 before n10."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))


def _blob_of(fd: int) -> Blob:
    """Return the identity of an immutable file: a file in memory has a number that no other gets while it is open."""
    about = os.fstat(fd)
    return Blob(f"{about.st_dev}:{about.st_ino}:{about.st_ctime_ns}:{about.st_size}", about.st_size)


# ------------------------------------------------------------------ the ranks of a group
def append(path: str, data: Part) -> None:
    try:
        fd = open_log(path)
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
    except OSError as error:  # a full disk here: the file on the node is complete
        _log.warning("nblaunch: the copy of %s is incomplete: %s", path, error)


def ranks_in_words(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _placing(node: Node, place: Place) -> Iterator[Message]:
    """Yield the modules that the node was not sent, and the order."""
    for file in place.modules:
        if file.digest not in node.modules:
            with contextlib.suppress(OSError):  # removed meanwhile: importing it fails there
                yield ModuleFile(file.digest), [Path(file.path).read_bytes()]
                node.modules.add(file.digest)
    yield place, ()


class NodeStacks:
    """An `engines.protocol.StackDumps` that asks over the link."""

    def __init__(self, ask: Callable[[float], None]) -> None:
        self.main = ""
        self.dump: str | None = None
        self.is_ready = False
        self._ask = ask

    def ask(self, signal_at: float) -> None:
        self.dump = None
        self._ask(max(0.0, signal_at - time.monotonic()))

    def look(self, now: float) -> bool:
        return self.dump is not None

    def take(self, main: str, dump: str | None) -> None:
        self.is_ready, self.main = True, main
        if dump is not None:
            self.dump = dump


class NodeWorker(RankFiles):
    """One rank of another node, an `engines.protocol.Worker`. `call` calls a method of the agent's, for the rank."""

    def __init__(self, rank: int, log_dir: Path, call: Callable[..., None]) -> None:
        super().__init__(rank, log_dir)
        self.stacks = NodeStacks(partial(call, "ask_stacks"))
        self.is_open = True
        self.has_exited = False
        self._call = call
        self.counted: tuple[Dropped, Sequence[Begun]] = Dropped(), ()
        """What the agent has read last, half a second ago at most."""

    def interrupt(self, task: int) -> None:
        self._call("interrupt", task)

    def free(self, task: int) -> None:
        self._call("free", task)

    def tell(self, message: ToRank) -> None:
        self._call("tell", message)

    def signal(self, signum: int, group: bool = False) -> None:
        self._call("signal", signum, group)

    def turn_to(self, log_dir: Path) -> None:
        self.log_dir, self.counted = log_dir, (Dropped(), self.counted[1])

    def dropped(self) -> Dropped:
        return self.counted[0]

    def collectives(self) -> Sequence[Begun]:
        return self.counted[1]


class NodeSampler:
    """An `engines.protocol.Sampler`: the agents measure, and this returns what they have sent last."""

    def __init__(self, end: Callable[[NodeSampler], None]) -> None:
        self.latest: dict[int, Usage] = {}
        self._end = end

    def sample(self, ranks: Collection[int]) -> list[Usage]:
        return [usage for rank, usage in sorted(self.latest.items()) if rank in ranks]

    def close(self) -> None:
        self._end(self)


class NodeWorkers:
    """The ranks of one group, through their agents: an `engines.protocol.Workers`. Times are in the kernel's clock."""

    def __init__(self, nodes: Nodes, order: Order, wakeup: Wakeup) -> None:
        self.has_begun = False
        self._nodes, self._order, self._wakeup = nodes, order, wakeup
        self._name = f"{order.launch_id}.{next(_numbers)}"  # a launch may have several attempts
        self._used: list[Node] = nodes.joined[: len(order.ranks)]
        self._ranks = list(zip(self._used, order.ranks, strict=True))
        self._workers: dict[int, NodeWorker] = {}
        self._log_dirs = {order.log_dir}
        self._placed: dict[int, Placed] = {}
        self._heard_at = [time.monotonic()] * len(self._used)
        """When the ranks of each node were heard of last."""
        self._over: set[int] = set()
        """Nodes that are swept or lost."""
        self._stuck: list[int] = []
        self._events: deque[Event] = deque()
        self._samplers: list[NodeSampler] = []
        self._changed = threading.Condition()
        self._wake = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(wakeup, selectors.EVENT_READ)
        self._is_closed = False
        nodes.groups[self._name] = self
        modules = own_files()
        for node, ranks in self._ranks:
            own = replace(order, ranks=[ranks], envs=[order.envs[node.index]], payload=None)
            place = Place(self._name, own, node.index == 0, modules)
            nodes.link.send_in(node.peer, self._name, _placing(node, place))

    # -------------------------------------------------------------- starting
    def open_store(self, give_up: Callable[[], bool] = lambda: False) -> Store:
        """Wait until every node has what starts its ranks; return the store that the first one serves."""
        deadline = time.monotonic() + PLACED_TIMEOUT_S
        with self._changed:
            while len(self._placed) < len(self._used):
                lost = [f"node {node.machine.name} is lost: {node.lost}" for node in self._used if node.lost]
                if give_up():
                    raise GivenUpError("the launch was cancelled")
                if lost or time.monotonic() > deadline:
                    waiting = [node.machine.name for node in self._used if node.index not in self._placed]
                    no_answer = (
                        f"{', '.join(waiting)}: no response within {PLACED_TIMEOUT_S:.0f} s. Does `import torch` hang "
                        "there? `%distributed release` releases the nodes, and the next launch starts new agents"
                    )
                    raise StartError(lost[0] if lost else no_answer)
                self._changed.wait(timeouts.NODES_POLL_S)
        for node in self._used:
            if refusal := self._placed[node.index].refusal:
                raise StartError(f"{node.machine.name}: {refusal}")
        self.has_begun = True
        store = self._placed[self._used[0].index].store
        assert store is not None
        return store

    @property
    def notes(self) -> list[str]:
        places = [f"{ranks_in_words(ranks)} on {node.machine.name}" for node, ranks in self._ranks]
        more = [f"… on {len(places)} nodes"] if len(places) > MAX_NAMED_NODES else []
        noted = [placed.note for placed in self._placed.values() if placed.note]
        return [", ".join(places[:MAX_NAMED_NODES] + more), *noted]

    def start(self, environment: Callable[[int], Mapping[str, str]]) -> Sequence[NodeWorker]:
        for node, ranks in self._ranks:
            for rank in ranks:
                self._workers[rank] = self._worker(rank, node)
            self._call(node, "start", {rank: environment(rank) for rank in ranks})
        for node in self._used:
            self._report_loss(node)
        return list(self._workers.values())

    def _worker(self, rank: int, node: Node) -> NodeWorker:
        return NodeWorker(rank, Path(self._order.log_dir), partial(self._call, node, rank=rank))

    def restart(self, rank: int, environment: Mapping[str, str]) -> NodeWorker:
        node = next(node for node, ranks in self._ranks if rank in ranks)
        if node.lost:
            raise StartError(
                f"rank {rank} cannot be restarted: node {node.machine.name} is lost ({node.lost}). Restart all ranks "
                "to get new nodes"
            )
        self._workers[rank] = self._worker(rank, node)
        self._call(node, "restart", environment, rank=rank, in_order=True)
        self._report_loss(node)
        return self._workers[rank]

    def _report_loss(self, node: Node) -> None:
        """Report the exits of a node's new ranks if it was lost before they had a worker here: nobody else would."""
        if node.lost:
            self.lose(node.index, node.lost)

    @property
    def heard_at(self) -> float:
        return min((at for node, at in enumerate(self._heard_at) if node not in self._over), default=0.0)

    def listen_to(self, wakeup: Wakeup) -> None:
        with contextlib.suppress(KeyError, ValueError):  # closed meanwhile
            self._selector.unregister(self._wakeup)
        self._wakeup = wakeup
        self._selector.register(wakeup, selectors.EVENT_READ)

    def send_tasks(self, tasks: Sequence[Task], parcel: Sequence[int]) -> None:
        by_rank = dict(zip(self._workers, tasks, strict=True))
        for rank, task in by_rank.items():
            if task.log_dir:
                self._log_dirs.add(task.log_dir)
                self._workers[rank].turn_to(Path(task.log_dir))
        for node, ranks in self._ranks:
            if node.index in self._over:
                continue
            own = [by_rank[rank] for rank in ranks]
            build = partial(self._task_call, own)
            self._nodes.send_data(node, self._name, parcel, build, partial(self._fail, node))

    def _task_call(self, tasks: Sequence[Task], blobs: Sequence[Blob]) -> Call:
        return Call(self._name, "send_tasks", [tasks, blobs])

    def _call(
        self, node: Node, method: str, *arguments: object, rank: int | None = None, in_order: bool = False
    ) -> None:
        """Let an agent call a method, at once or after what was sent before `in_order`."""
        call = Call(self._name, method, arguments, rank)
        if in_order:
            self._nodes.link.send_in(node.peer, self._name, [(call, ())])
        else:
            self._nodes.link.send(node.peer, call)

    def _fail(self, node: Node, reason: str) -> None:
        """Report that a node does not get the task. In the thread of the link."""
        self.add(NotStarted(-1, f"the task could not be sent to {node.machine.name}: {reason}"))

    def let_go(self, ranks: Collection[int]) -> None:
        for node, own in self._ranks:
            if chosen := [rank for rank in ranks if rank in own]:
                self._call(node, "let_go", chosen, in_order=True)

    def dismiss(self) -> None:
        for node in self._used:
            self._call(node, "dismiss", in_order=True)

    # -------------------------------------------------------------- events
    def wait(self, seconds: float) -> Iterable[Event]:
        for key, _ in self._selector.select(0.0 if self._events else seconds):
            key.fileobj.clear()  # type: ignore[union-attr]  # both are wakeups
        return self.drain()

    def drain(self) -> Iterable[Event]:
        """Return what has arrived: an agent sends a rank's messages before its exit."""
        while self._events:
            yield self._events.popleft()

    def add(self, event: Event) -> None:
        with self._changed:
            is_wanted = not self._is_closed
            if is_wanted:
                self._events.append(event)
        if not is_wanted and isinstance(event, Received):
            event.parcel.close()
        self._wake.set()

    # -------------------------------------------------------------- in the thread of the link
    def take(self, node: int, message: FromAgent, data: Sequence[Part]) -> None:
        if isinstance(message, Call):
            getattr(self, f"on_{message.method}")(node, *message.arguments)
            return
        self._heard_at[node] = time.monotonic()  # not for calls, which need no reaper
        if isinstance(message, Written):
            self._copy(message, data)
        elif isinstance(message, FromRank):
            parcel, lost = self._nodes.take_parcel(message.parcel)
            self.add(Received(message.rank, in_other_clock(message.message), parcel, message.lost or lost))
        else:
            self._take_event(node, message.event)

    def on_placed(self, node: int, placed: Placed) -> None:
        with self._changed:
            self._placed[node] = placed
            self._changed.notify_all()

    def on_observed(
        self,
        node: int,
        dropped: Mapping[int, Dropped],
        begun: Mapping[int, Sequence[Begun]],
        usage: Sequence[Usage] | None,
    ) -> None:
        for rank, each in begun.items():
            self._workers[rank].counted = dropped[rank], list(map(in_other_clock, each))
        for sampler in self._samplers:
            sampler.latest.update({each.rank: each for each in usage or ()})

    def on_stacks(self, node: int, rank: int, main: str, dump: str | None) -> None:
        self._workers[rank].stacks.take(main, dump)
        self._wake.set()

    def on_closed(self, node: int, rank: int) -> None:
        """Note that a rank runs no code of ours any more: it has closed its end."""
        self._workers[rank].is_open = False

    def _copy(self, message: Written, data: Sequence[Part]) -> None:
        rest = memoryview(data[0])
        for file, size in message.files:
            own, rest = rest[:size], rest[size:]
            if message.log_dir in self._log_dirs and file == os.path.basename(file) and file.startswith("rank"):
                append(os.path.join(message.log_dir, file), own)
            else:
                _log.warning("nblaunch: an agent may not write %s/%s: refused", message.log_dir, file)

    def _take_event(self, node: int, event: object) -> None:
        if isinstance(event, (RankStarted, NotStarted)):
            if isinstance(event, NotStarted):
                self._nodes.forget_data(self._used[node], self._name)
            self.add(event)
        elif isinstance(event, RankExited):
            self._workers[event.rank].has_exited = True
            self._workers[event.rank].is_open = False
            self.add(in_other_clock(event))
        elif isinstance(event, Swept):
            self._stuck += event.stuck
            self._end(node)
        else:  # its reaper is dead
            self._exit_all(node, "the parent process of its ranks was killed", time.monotonic())
            self._end(node)

    def lose(self, node: int, reason: str) -> None:
        if node >= len(self._used):
            return
        silent_since = time.monotonic() - LINK_BEAT_S - LINK_SILENCE_S
        self._exit_all(node, reason, max(silent_since, self._used[node].peer.heard_at))
        self._end(node)
        with self._changed:
            self._changed.notify_all()

    def _exit_all(self, node: int, reason: str, since: float) -> None:
        """Report the exit of every rank of a node at its last sign of life: before the errors that follow from it."""
        ranks = self._order.ranks[node]
        verb = "is" if len(ranks) == 1 else "are"
        said = f"{ranks_in_words(ranks)} {verb} lost with node {self._used[node].machine.name}: {reason}"
        for rank in ranks:
            worker = self._workers.get(rank)
            if worker is not None and not worker.has_exited:
                worker.has_exited, worker.is_open = True, False
                self.add(RankExited(rank, -signal.SIGKILL, int(since * 1e9), lost=said))

    def _end(self, node: int) -> None:
        self._over.add(node)
        if len(self._over) == len(self._used):
            self.add(Swept(tuple(self._stuck)))

    # -------------------------------------------------------------- usage
    def sampler(self, device: str, env: Mapping[str, str]) -> NodeSampler:
        sampler = NodeSampler(self._end_sampler)
        if device != "cpu" or not self._samplers:
            self._measure(device)
        self._samplers.append(sampler)
        return sampler

    def _end_sampler(self, sampler: NodeSampler) -> None:
        if sampler in self._samplers:
            self._samplers.remove(sampler)
            if not self._samplers:
                self._measure("")

    def _measure(self, device: str) -> None:
        for node in self._used:
            self._call(node, "measure", device)

    # -------------------------------------------------------------- trouble, and the end
    def nudge(self) -> str | None:
        return "no response from the nodes: still waiting"

    def abandon(self) -> None:
        for node in self._used:
            self._call(node, "abandon")

    def close(self) -> None:
        """Let the agents release everything; ranks that still run are killed."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        for node in self._used:
            self._nodes.link.act(partial(node.peer.outbox.drop, self._name))
            self._nodes.link.send(node.peer, Release(self._name))
        self._nodes.remove(self._name)
        for event in self.drain():
            if isinstance(event, Received):
                event.parcel.close()
        self._selector.close()
        self._wake.close()
