"""Nodes as an engine: an engine of the cluster starts one agent on each, and ranks run through the agents.

The nodes are held between launches, with their agents and fork servers warm, until they are released or the kernel
ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from nblaunch.engines.nodes import Nodes, NodeWorkers
from nblaunch.engines.protocol import GivenUpError, Wakeup
from nblaunch.errors import StartError
from nblaunch.machine import timeouts
from nblaunch.machine.inventory import Machine, address_towards, checked_address
from nblaunch.wire.link_messages import Boot, Preload, Proof
from nblaunch.wire.messages import Order

NODES_START_TIMEOUT_S = 120.0
"""For the agents of a set of nodes to join, once the nodes are there: they import torch."""


class Starter(Protocol):
    """Starts and ends agents: all that is asked of Slurm, Ray or ssh. Used from one thread at a time.

    If `Boot.node` is -1, the kernel numbers the nodes by their host names. An agent keeps neither stdin nor stdout
    open. What it writes to stderr before it has joined is the only explanation of a failure: `problem` returns it.
    """

    count: int
    """The number of nodes."""
    proof: Proof
    """What agents prove themselves with, if others may read what `start` hands over; empty: nothing."""

    @property
    def name(self) -> str:
        """Its name, and that of what it holds, for messages."""

    def addresses(self, check: Callable[[], None]) -> Sequence[str]:
        """Return the addresses or names of the nodes, as far as they are known: the kernel must be reached from them.

        `check` is called now and then if it takes long; what it raises ends the wait.

        StartError: it cannot be used.
        """

    def start(self, boot: Boot) -> None:
        """Start the agents, without waiting for them. StartError: it cannot be used."""

    def state(self) -> str:
        """Return what it waits for, such as a job in a queue; empty: for the agents."""

    def problem(self) -> str:
        """Return why agents cannot join any more; empty if they may."""

    def stop(self) -> None:
        """End what it has started, and free the nodes. Idempotent."""


class NodeEngine:
    """An `engines.protocol.Engine`; see the module."""

    is_local = False
    start_methods: tuple[str, ...] = ("auto", "forkserver", "spawn")

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self._nodes: Nodes | None = None
        self._lock = threading.Lock()
        self._stops = 0
        """A wait for nodes ends if this is raised."""
        self._owner = os.getpid()

    @property
    def is_busy(self) -> bool:
        """Return True if a launch runs on the nodes, or waits for them."""
        return self._lock.locked() or (self._nodes is not None and bool(self._nodes.groups))

    # -------------------------------------------------------------- the nodes
    def machines(self, show: Callable[[str], None], give_up: Callable[[], bool] = lambda: False) -> Sequence[Machine]:
        """Start the agents, unless they run; return their nodes, with the variables that the notebook has set."""
        changed = changed_variables()
        return [replace(each, env={**each.env, **changed}) for each in self._held(show, give_up)]

    def _held(self, show: Callable[[str], None], give_up: Callable[[], bool]) -> list[Machine]:
        stops = self._stops

        def check() -> None:
            if give_up() or self._stops != stops:
                raise GivenUpError(f"{self._starter.name}: the wait for nodes was cancelled")

        while not self._lock.acquire(timeout=timeouts.NODES_POLL_S):
            check()
            show(f"{self._starter.name}: another launch is starting agents on these nodes")
        try:
            check()
            if self._nodes is not None and not self._nodes.is_whole:
                if self._nodes.groups:
                    lost = [f"node {n.machine.name} is lost: {n.problem}" for n in self._nodes.joined if n.problem]
                    raise StartError(f"{'; '.join(lost)}; launches or sessions still run on the others: end them first")
                self._release()
            if self._nodes is None:
                self._start(show, check)
            assert self._nodes is not None
            return [node.machine for node in self._nodes.joined]
        finally:
            self._lock.release()

    def _start(self, show: Callable[[str], None], check: Callable[[], None]) -> None:
        try:
            address = address_for(self._starter.addresses(check))
            check()
            nodes = self._nodes = Nodes(address, self._starter.count, self._starter.proof)
            self._starter.start(nodes.link.boot)
            deadline = time.monotonic() + NODES_START_TIMEOUT_S
            said, many = "", "1 node" if nodes.count == 1 else f"{nodes.count} nodes"
            while True:
                check()
                if queued := self._starter.state():
                    deadline = time.monotonic() + NODES_START_TIMEOUT_S
                state = queued or f"{self._starter.name}: starting agents on {many}"
                if state != said:
                    said = state
                    show(state)
                problem = self._starter.problem() or (self._late(nodes) if time.monotonic() > deadline else "")
                if nodes.wait(timeouts.NODES_POLL_S):
                    break
                if problem:
                    raise StartError(problem)
            check()
        except BaseException:  # an interrupt, too: a queued job must not come later
            self._release()
            raise

    def _late(self, nodes: Nodes) -> str:
        joined = ", ".join(node.machine.name for node in nodes.joined) or "none"
        return (
            f"{self._starter.name}: only {len(nodes.joined)} of {nodes.count} nodes responded within "
            f"{NODES_START_TIMEOUT_S:.0f} s ({joined}). Can the others reach {nodes.link.boot.endpoint}? "
            "Set NBLAUNCH_ADDRESS to use another address of this machine"
        )

    def _release(self) -> None:
        nodes, self._nodes = self._nodes, None
        try:
            if nodes is not None:
                nodes.close()
        finally:
            self._starter.stop()

    def usable(self, method: str, *_: object) -> str:
        """Return the method: each agent chooses a substitute itself."""
        return method

    # -------------------------------------------------------------- starting
    def place(self, order: Order, wakeup: Wakeup) -> NodeWorkers:
        nodes = self._nodes
        if nodes is None or not nodes.is_whole:
            raise StartError(f"{self._starter.name}: the nodes are gone; the next launch starts new agents")
        return NodeWorkers(nodes, order, wakeup)

    def preload(self, modules: Sequence[str]) -> None:
        """Let the agents do it, each in the environment that ranks had there."""
        if (nodes := self._nodes) is not None:
            for node in nodes.joined:
                nodes.link.send(node.peer, Preload(modules))

    def status(self) -> list[str]:
        nodes = self._nodes
        if nodes is None:
            return []
        names = ", ".join(node.machine.name + (" (lost)" if node.problem else "") for node in nodes.joined)
        state = self._starter.state()  # first: it may find the job that the name has
        return [f"{self._starter.name}: {names or state or 'starting'}"]

    def stop(self) -> None:
        """Free the nodes; ranks that run there are killed."""
        if os.getpid() == self._owner:
            self._stops += 1
            if self._lock.acquire(timeout=timeouts.NODES_CANCEL_TIMEOUT_S):  # else a wait for nodes ends by itself
                try:
                    self._release()
                finally:
                    self._lock.release()


def changed_variables() -> dict[str, str]:
    """Return the environment variables that this process has set since its start."""
    try:
        pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    born = dict(pair.partition(b"=")[::2] for pair in pairs if pair)
    return {name: value for name, value in os.environ.items() if born.get(os.fsencode(name)) != os.fsencode(value)}


def address_for(nodes: Iterable[str]) -> str:
    """Return the address of this machine that reaches the nodes: ``NBLAUNCH_ADDRESS``, else the usual route's.

    StartError: a name does not resolve, or there is no route.
    """
    chosen = os.environ.get("NBLAUNCH_ADDRESS")
    if chosen:
        return checked_address("NBLAUNCH_ADDRESS", chosen)
    found, failed = [], ""
    for node in nodes:
        try:
            found.append(address_towards(node))
        except OSError as error:
            failed = failed or f"no route to {node}: {error}"
    if not found:
        raise StartError(
            f"{failed}. Check the name, or set NBLAUNCH_ADDRESS to an address of this machine that nodes can reach"
        )
    return max(set(found), key=found.count)
