"""The ranks of one group on several nodes, through their agents. Times are in the kernel's clock."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nblaunch.engines.agent_files import is_rank_file
from nblaunch.engines.group_events import Descriptors, Event, LostDescriptors, NodeLeaving, Received
from nblaunch.engines.node_worker import NodeSampler, NodeSamplers, NodeWorker, append, places_in_words, ranks_in_words
from nblaunch.engines.nodes import Node, Nodes
from nblaunch.engines.protocol import GivenUpError, Order, Store, Wakeup
from nblaunch.errors import StartError
from nblaunch.machine import timeouts
from nblaunch.machine.own_modules import own_files
from nblaunch.wire.collective_table import Begun
from nblaunch.wire.delivery import Part
from nblaunch.wire.link_messages import (
    Blob,
    Closed,
    End,
    Files,
    FromAgent,
    FromGroup,
    FromRank,
    LetGo,
    Measure,
    NeedFiles,
    Observed,
    Place,
    Placed,
    Restart,
    SendTasks,
    Stacks,
    Start,
    ToGroup,
    Written,
)
from nblaunch.wire.messages import Done, Failed, NotStarted, RankExited, RankStarted, Swept, Task

_numbers = itertools.count()
_log = logging.getLogger(__name__)


class NodeWorkers:
    """An `engines.protocol.Workers`; see the module.

    Args:
        nodes: The nodes.
        order: The group to start.
        wakeup: Ends `wait`.
    """

    def __init__(self, nodes: Nodes, order: Order, wakeup: Wakeup) -> None:
        self.has_begun = False
        self._nodes, self._order, self._wakeup = nodes, order, wakeup
        self._name = f"{order.launch_id}.{next(_numbers)}"  # a launch may have several attempts
        self._used: list[Node] = nodes.joined[: len(order.ranks)]
        self._workers: dict[int, NodeWorker] = {}
        self._log_dirs = {order.log_dir}
        self._placed: dict[int, Placed] = {}
        self._heard_at = [time.monotonic()] * len(self._used)
        """When the ranks of each node were heard of last."""
        self._over: set[int] = set()
        """Nodes that are swept or lost."""
        self._stuck: list[int] = []
        self._events: deque[Event] = deque()
        self._samplers = NodeSamplers(self._measure)
        self._changed = threading.Condition()
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        self._selector.register(wakeup, selectors.EVENT_READ)
        self._is_closed = False
        self._modules = own_files()
        nodes.add(self._name, self)
        for node, ranks in zip(self._used, order.ranks, strict=True):
            self._nodes.send(
                node,
                Place(
                    self._name,
                    order.world_size,
                    ranks,
                    order.method,
                    order.process,
                    order.envs[node.index],
                    order.named,
                    order.log_dir,
                    order.is_kept,
                    serves_store=node.index == 0,
                    modules=self._modules,
                ),
            )

    # -------------------------------------------------------------- starting
    def open_store(self, give_up: Callable[[], bool] = lambda: False) -> Store:
        """Wait until every node has what starts its ranks; return the store that the first one serves."""
        deadline = time.monotonic() + timeouts.PLACED_TIMEOUT_S
        with self._changed:
            while len(self._placed) < len(self._used):
                lost = [f"node {node.machine.name} is lost: {node.lost}" for node in self._used if node.lost]
                if give_up():
                    raise GivenUpError("the ranks are not wanted any more")
                if lost or time.monotonic() > deadline:
                    waiting = [node.machine.name for node in self._used if node.index not in self._placed]
                    no_answer = (
                        f"{', '.join(waiting)}: no answer within {timeouts.PLACED_TIMEOUT_S:.0f} s. Does `import "
                        "torch` hang there? `%distributed release` frees the nodes, and the next launch starts others"
                    )
                    raise StartError(lost[0] if lost else no_answer)
                self._changed.wait(timeouts.NODES_POLL_S)
        for node in self._used:
            if refusal := self._placed[node.index].refusal:
                raise StartError(f"{node.machine.name}: {refusal}")
        self.has_begun = True
        store = self._placed[self._used[0].index].store
        assert store is not None
        return Store(*store)

    @property
    def notes(self) -> list[str]:
        """Where the ranks run, and what their agents have noted."""
        names = [node.machine.name for node in self._used]
        noted = [placed.note for placed in self._placed.values() if placed.note]
        return [places_in_words(self._order.ranks, names), *noted]

    def start(self, environment: Callable[[int], Mapping[str, str]]) -> Sequence[NodeWorker]:
        """Let each agent start its ranks."""
        for node, ranks in zip(self._used, self._order.ranks, strict=True):
            for rank in ranks:
                self._workers[rank] = self._worker(rank, node)
            self._send(node, Start(self._name, {rank: environment(rank) for rank in ranks}))
        return list(self._workers.values())

    def _worker(self, rank: int, node: Node) -> NodeWorker:
        return NodeWorker(self._name, rank, Path(self._order.log_dir), lambda message: self._nodes.send(node, message))

    def restart(self, rank: int, environment: Mapping[str, str]) -> NodeWorker:
        """Let the agent of the rank's node start it again."""
        node = self._node_of(rank)
        if node.lost:
            raise StartError(
                f"rank {rank} cannot start again: node {node.machine.name} is lost ({node.lost}). A restart of all "
                "ranks gets new nodes"
            )
        self._workers[rank] = self._worker(rank, node)
        self._send(node, Restart(self._name, rank, environment))
        return self._workers[rank]

    @property
    def heard_at(self) -> float:
        """See `engines.protocol.Workers`."""
        return min((at for node, at in enumerate(self._heard_at) if node not in self._over), default=0.0)

    def listen_to(self, wakeup: Wakeup) -> None:
        """Watch another wakeup in place of the present one."""
        with contextlib.suppress(KeyError, ValueError):  # closed meanwhile
            self._selector.unregister(self._wakeup)
        self._wakeup = wakeup
        self._selector.register(wakeup, selectors.EVENT_READ)

    def send_tasks(self, tasks: Sequence[Task], parcel: Sequence[int]) -> None:
        """Send each node its tasks, and the data that it lacks."""
        by_rank = dict(zip(self._workers, tasks, strict=True))
        for rank, task in by_rank.items():
            if task.log_dir:
                self._log_dirs.add(task.log_dir)
                self._workers[rank].turn_to(Path(task.log_dir))
        for node, ranks in zip(self._used, self._order.ranks, strict=True):
            if node.index in self._over:
                continue
            own = [by_rank[rank] for rank in ranks]

            def build(blobs: Sequence[Blob], own: Sequence[Task] = own) -> ToGroup:
                return SendTasks(self._name, own, blobs)

            fail = partial(self._fail, node)
            self._nodes.send_data(node, self._name, parcel, build, fail)

    def _send(self, node: Node, message: ToGroup) -> None:
        """Send a message behind the data that was sent before."""
        self._nodes.send_in(node, self._name, message)

    def _fail(self, node: Node, reason: str) -> None:
        """Report that a node does not get the task. In the thread of the link."""
        self._add(NotStarted(-1, f"the task could not be sent to {node.machine.name}: {reason}"))

    def _node_of(self, rank: int) -> Node:
        return next(node for node, ranks in zip(self._used, self._order.ranks, strict=True) if rank in ranks)

    def let_go(self, ranks: Collection[int]) -> None:
        """Let these ranks exit."""
        for node, own in zip(self._used, self._order.ranks, strict=True):
            chosen = [rank for rank in ranks if rank in own]
            if chosen:
                self._send(node, LetGo(self._name, chosen))

    def dismiss(self) -> None:
        """Let the ranks exit."""
        for node in self._used:
            self._send(node, End(self._name, "dismiss"))

    # -------------------------------------------------------------- events
    def wait(self, seconds: float) -> Iterable[Event]:
        """Wait for what the agents send."""
        for key, _ in self._selector.select(0.0 if self._events else seconds):
            if key.fileobj is self._read:
                with contextlib.suppress(BlockingIOError):
                    self._read.recv(4096)
            else:
                self._wakeup.clear()
        return self.drain()

    def drain(self) -> Iterable[Event]:
        """Return what has arrived: an agent sends a rank's messages before its exit."""
        while self._events:
            yield self._events.popleft()

    def _add(self, event: Event) -> None:
        with self._changed:
            is_wanted = not self._is_closed
            if is_wanted:
                self._events.append(event)
        if not is_wanted and isinstance(event, Received):
            event.parcel.close()
        self._wake()

    # -------------------------------------------------------------- in the thread of the link
    def take(self, node: int, message: FromAgent, data: Sequence[Part]) -> None:
        """See `nodes.NodeGroup`."""
        if isinstance(message, (Written, FromRank, FromGroup)):  # not `Observed`, which needs no reaper
            self._heard_at[node] = time.monotonic()
        if isinstance(message, Written):
            self._copy(message, data)
        elif isinstance(message, FromRank):
            self._take_from_rank(node, message)
        elif isinstance(message, FromGroup):
            self._take_event(node, message.event)
        elif isinstance(message, Observed):
            for rank in {*message.dropped, *message.collectives}:
                begun = message.collectives.get(rank)
                local = None if begun is None else [self._in_our_clock(node, each) for each in begun]
                self._workers[rank].take_counts(message.dropped.get(rank), local)
            self._samplers.take(message.usage or ())
        elif isinstance(message, Stacks):
            self._workers[message.rank].stacks.take(message.main, message.dump)
            self._wake()
        elif isinstance(message, NeedFiles):
            self._send_files(node, message.digests)
        elif isinstance(message, Closed):
            self._workers[message.rank].is_open = False
        else:
            with self._changed:
                self._placed[node] = message
                self._changed.notify_all()

    def _send_files(self, node: int, digests: Sequence[bytes]) -> None:
        """Answer an agent that lacks files of the user's modules."""
        paths = {file.digest: file.path for file in self._modules}
        contents = {}
        for digest in digests:
            with contextlib.suppress(OSError):  # removed meanwhile: importing it fails there
                contents[digest] = Path(paths[digest]).read_bytes()
        self._nodes.send(self._used[node], Files(self._name, contents))

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full of wakeups, or closed
            self._write.send(b"!")

    def _copy(self, message: Written, data: Sequence[Part]) -> None:
        """Append to the copies of ranks' files."""
        rest = memoryview(data[0])
        for file, size in message.files:
            own, rest = rest[:size], rest[size:]
            if message.log_dir in self._log_dirs and is_rank_file(file):
                append(os.path.join(message.log_dir, file), own)
            else:
                _log.warning("nblaunch: an agent wanted to write %s/%s", message.log_dir, file)

    def _take_from_rank(self, node: int, message: FromRank) -> None:
        inner = self._in_our_clock(node, message.message)
        if message.lost:
            self._add(LostDescriptors(message.rank, inner, OSError(message.lost)))
            return
        try:
            self._add(Received(message.rank, inner, Descriptors(self._nodes.take_parcel(message.parcel))))
        except OSError as error:
            self._add(LostDescriptors(message.rank, inner, error))

    def _take_event(self, node: int, event: object) -> None:
        if isinstance(event, (RankStarted, NotStarted)):
            self._add(event)
        elif isinstance(event, RankExited):
            self._workers[event.rank].has_exited = True
            self._workers[event.rank].is_open = False
            self._add(self._in_our_clock(node, event))
        elif isinstance(event, Swept):
            self._stuck += event.stuck
            self._end(node)
        else:  # its reaper is dead
            self._exit_all(node, "the process that supervises its ranks was killed", time.monotonic())
            self._end(node)

    def _in_our_clock(self, node: int, message: Any) -> Any:
        offset = self._used[node].peer.offset_ns
        if isinstance(message, (Done, Failed, RankExited, Begun)):
            return dataclasses.replace(message, time_ns=message.time_ns + offset)
        return message

    def lose(self, node: int, reason: str) -> None:
        """See `nodes.NodeGroup`."""
        if node >= len(self._used):
            return
        self._exit_all(node, reason, self._used[node].peer.heard_at)
        self._end(node)
        with self._changed:
            self._changed.notify_all()

    def warn(self, node: int, reason: str) -> None:
        """See `nodes.NodeGroup`."""
        self._add(NodeLeaving(reason))

    def _exit_all(self, node: int, reason: str, since: float) -> None:
        """Report the exit of every rank of a node at its last sign of life: before the errors that follow from it."""
        ranks = self._order.ranks[node]
        verb = "is" if len(ranks) == 1 else "are"
        said = f"{ranks_in_words(ranks)} {verb} lost with node {self._used[node].machine.name}: {reason}"
        for rank in ranks:
            worker = self._workers.get(rank)
            if worker is not None and not worker.has_exited:
                worker.has_exited, worker.is_open = True, False
                self._add(RankExited(rank, -signal.SIGKILL, int(since * 1e9), lost=said))

    def _end(self, node: int) -> None:
        self._over.add(node)
        if len(self._over) == len(self._used):
            self._add(Swept(tuple(self._stuck)))

    # -------------------------------------------------------------- usage
    def sampler(self, device: str, env: Mapping[str, str]) -> NodeSampler:
        """Let the agents measure."""
        return self._samplers.open(device)

    def _measure(self, device: str) -> None:
        for node in self._used:
            self._nodes.send(node, Measure(self._name, device))

    # -------------------------------------------------------------- trouble, and the end
    def nudge(self) -> str | None:
        """Nothing can be done from here."""
        return "the nodes have not answered: waiting"

    def forsake(self) -> bool:
        """The agents replace their fork servers themselves."""
        return False

    def abandon(self) -> None:
        """Let the agents kill the ranks."""
        for node in self._used:
            self._nodes.send(node, End(self._name, "abandon"))

    def close(self) -> None:
        """Let the agents release everything; ranks that still run are killed."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        for node in self._used:
            self._nodes.drop(node, self._name)
            self._nodes.send(node, End(self._name, "close"))
        self._nodes.remove(self._name)
        for event in self.drain():
            if isinstance(event, Received):
                event.parcel.close()
        self._selector.close()
        self._read.close()
        self._write.close()
