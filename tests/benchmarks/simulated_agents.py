"""Agents of nodes that do not exist: they speak the real protocol over real links, for ranks that are only numbers.

A rank prints and reports at a steady rate until it is interrupted; then it returns a small result and exits. All agents
are in this process, in one thread. Their messages are those of real agents, which look at the files of their ranks 20
times a second and at the ranks' collectives twice.

Usage: python -m tests.benchmarks.simulated_agents COUNT LINES_A_SECOND FILE, with `Boot` as a line of JSON on
stdin. In the end it writes the messages and bytes a second that all have sent while their ranks ran.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import zmq

from nblaunch.engines.agent import AGENT_OBSERVE_S, AGENT_POLL_S
from nblaunch.engines.link import JOIN, Message, Outbox, configure, parts_of, versions_here
from nblaunch.machine.inventory import Machine
from nblaunch.transfer.parcel import pack
from nblaunch.wire.launch_files import RankFile, rank_file
from nblaunch.wire.link_messages import (
    Blob,
    Boot,
    Call,
    FromGroup,
    FromRank,
    Joined,
    Part,
    Place,
    Placed,
    Release,
    Written,
    in_other_clock,
)
from nblaunch.wire.messages import Done, Interrupted, RankExited, RankStarted, Running, Swept, Task
from nblaunch.wire.tables import Begun, Dropped

_LINE = b"step 123456: loss 0.123456 accuracy 0.987654 lr 0.001\n"


class SimulatedAgent:
    """One agent, with ranks that are only numbers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], boot: Boot, number: int, lines: float) -> None:
        self._outbox = Outbox()
        self._boot, self._number, self._lines = boot, number, lines
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, boot.kernel_key.encode())
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, boot.public_key.encode())
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, boot.secret_key.encode())
        self.socket.setsockopt(zmq.ROUTING_ID, os.urandom(12).hex().encode())
        configure(self.socket)
        self.socket.connect(boot.endpoint)
        self.messages = self.bytes = 0
        """Sent while ranks ran."""
        self.seconds = 0.0
        """From their start to their end."""
        self._place: Place | None = None
        self._tasks: dict[int, Task] = {}
        """Of the ranks that run."""
        self._swept_after = 0
        self._due: dict[int, float] = {}
        """Lines that each rank has printed and this agent has not sent."""
        self._collectives = 0
        self._looked_at = time.monotonic() + random.random() * AGENT_POLL_S
        self._observed_at = self._reported_at = self._looked_at + random.random()

    def join(self) -> None:
        """Send the first message."""
        machine = Machine(
            0, 8, "linux", {}, name=f"n{self._number}", address=f"10.0.0.{self._number}", interface="eth0"
        )
        joined = pickle.dumps(Joined(machine, self._number), protocol=5)
        self.socket.send_multipart([JOIN, json.dumps(asdict(versions_here())).encode(), b"", joined])

    def receive(self) -> None:
        """Take what has arrived."""
        while self.socket.poll(0):
            self._take(pickle.loads(self.socket.recv_multipart()[0]))

    def _take(self, message: object) -> None:
        if isinstance(message, Place):
            self._place, self._swept_after = message, len(message.order.ranks[0])
            placed = Placed(store=("10.0.0.0", 1) if message.serves_store else None)
            self._outbox.put(Call(message.group, "placed", [placed]))
        elif isinstance(message, Call) and message.method == "start":
            for rank in message.arguments[0]:
                self._send((FromGroup(message.group, RankStarted(rank, 1000 + rank)), ()))
        elif isinstance(message, Call) and message.method == "send_tasks":
            self.seconds -= time.monotonic()
            for rank, task in zip(self._ranks, message.arguments[0], strict=True):
                self._tasks[rank] = task
                self._send((FromRank(message.group, rank, Running(rank, task.task)), ()))
        elif isinstance(message, Call) and message.method == "interrupt" and message.rank in self._tasks:
            self._outbox.put_in(message.group, self._end(message.group, message.rank))
        elif isinstance(message, Release) or (isinstance(message, Call) and message.method == "abandon"):
            self._tasks.clear()

    @property
    def _ranks(self) -> range:
        assert self._place is not None
        return self._place.order.ranks[0]

    def _send(self, *messages: Message) -> None:
        assert self._place is not None
        self._outbox.put_in(self._place.group, messages)

    def _end(self, group: str, rank: int) -> Iterator[Message]:
        """Let a rank return a small result, and exit."""
        task = self._tasks.pop(rank).task
        if not self._tasks:
            self.seconds += time.monotonic()
        yield FromRank(group, rank, Interrupted(rank, task)), ()
        parcel = pack(lambda found: rank)
        blob = Blob(f"{group}:{self._number}:{rank}", os.fstat(parcel.fds[0]).st_size)
        yield from parts_of(parcel.fds[0], blob.key, blob.size)
        parcel.close()
        yield FromRank(group, rank, in_other_clock(Done(rank, task, time.monotonic_ns())), [blob]), ()
        yield Call(group, "closed", [rank]), ()
        yield FromGroup(group, in_other_clock(RankExited(rank, 0, time.monotonic_ns()))), ()
        self._swept_after -= 1
        if not self._swept_after:
            yield FromGroup(group, Swept()), ()

    def step(self, now: float) -> None:
        """Send on what the ranks have printed, reported and begun since the last call."""
        if now - self._looked_at >= AGENT_POLL_S:
            lines, self._looked_at = self._lines * (now - self._looked_at), now
            self._print(lines)
        if now - self._reported_at >= 1.0:
            self._reported_at = now
            record = {"time": time.time(), "step": 123456, "metrics": {"loss": 0.123456, "accuracy": 0.987654}}
            line = json.dumps(record).encode() + b"\n"
            self._write("spool", dict.fromkeys(self._tasks, line))
        if now - self._observed_at >= AGENT_OBSERVE_S and self._tasks:
            self._observed_at = now
            self._observe()
        self._outbox.flush(self._write_out)

    def _write_out(self, parts: Sequence[Part]) -> None:
        self.socket.send_multipart(parts, zmq.NOBLOCK)
        if self._tasks:
            self.messages += 1
            self.bytes += sum(map(len, parts))

    def _print(self, lines: float) -> None:
        printed: dict[int, bytes] = {}
        for rank in self._tasks:
            self._due[rank] = self._due.get(rank, random.random()) + lines
            whole = int(self._due[rank])
            if whole:
                self._due[rank] -= whole
                printed[rank] = _LINE * whole
        self._write("out", printed)

    def _write(self, stream: RankFile, data: Mapping[int, bytes]) -> None:
        if data and self._place is not None:
            files = [(rank_file("", rank, stream).name, len(each)) for rank, each in data.items()]
            self._send((Written(self._place.group, self._place.order.log_dir, files), [b"".join(data.values())]))

    def _observe(self) -> None:
        assert self._place is not None
        self._collectives += 10
        begun = Begun(
            self._collectives, 12, time.monotonic_ns(), "0", "", "allreduce", "25557032 float32", "<a cell of the user>"
        )
        counted = {rank: Dropped() for rank in self._tasks}, {rank: [in_other_clock(begun)] for rank in self._tasks}
        observed = Call(self._place.group, "observed", [*counted, None])
        self._outbox.put_in(f"{self._place.group} at once", [(observed, ())])


def main() -> None:
    """Serve the kernel until it ends every connection."""
    boot = Boot(**json.loads(sys.stdin.readline()))
    context = zmq.Context()
    agents = [SimulatedAgent(context, boot, number, float(sys.argv[2])) for number in range(int(sys.argv[1]))]
    poller = zmq.Poller()
    by_socket = {}
    for agent in agents:
        agent.join()
        by_socket[agent.socket] = agent
        poller.register(agent.socket, zmq.POLLIN)
    ended = agents[0].socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    while not ended.poll(0):
        for socket, _ in poller.poll(5):
            by_socket[socket].receive()
        now = time.monotonic()
        for agent in agents:
            agent.step(now)
    context.destroy(linger=0)
    rates = [sum(getattr(agent, of) / agent.seconds for agent in agents) for of in ("messages", "bytes")]
    Path(sys.argv[3]).write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
