"""The nodes of one allocation, with an agent on each: what they are, what they have, and the groups that run there."""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nblaunch.engines.blob_store import BlobStore, parts_of
from nblaunch.engines.link import Link, Peer
from nblaunch.engines.outbox import Message
from nblaunch.engines.versions import difference, versions_here
from nblaunch.errors import StartError
from nblaunch.machine import timeouts
from nblaunch.machine.inventory import Machine
from nblaunch.wire.delivery import Part
from nblaunch.wire.link_messages import (
    Blob,
    BlobPart,
    Boot,
    Drop,
    FromAgent,
    Joined,
    Leaving,
    Proof,
    ToGroup,
    Versions,
    Want,
)

_log = logging.getLogger(__name__)
KEPT_BYTES = 4 << 30
"""Of sent data on a node, the least recently used are dropped first."""
MIN_KEPT_BYTES = 1 << 16
"""Smaller blobs are sent with each task."""


class NodeGroup(Protocol):
    """A group that runs on some of the nodes. Called in the thread of the link."""

    def take(self, node: int, message: FromAgent, data: Sequence[Part]) -> None:
        """Take a message of an agent, and the bytes beside it."""

    def lose(self, node: int, reason: str) -> None:
        """A node is lost, with its ranks."""

    def warn(self, node: int, reason: str) -> None:
        """A node will be lost soon."""


@dataclass(slots=True)
class Node:
    """One node, whose agent has joined."""

    index: int
    peer: Peer
    machine: Machine
    agent: int
    """The agent's pid."""
    number: int
    """As in `Boot`."""
    kept: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """The blobs that it has, with their sizes; the most recently used last."""
    lost: str = ""
    """Why it is lost; empty if it is not."""


class Nodes:
    """See the module. Thread-safe.

    Args:
        address: The address to listen on.
        count: The number of nodes.
        proof: See `Boot`.

    Attributes:
        boot: What an agent must be given to join.
        problems: Why agents were refused, by node.
    """

    def __init__(self, address: str, count: int, proof: Proof = "") -> None:
        self.count = count
        self.problems: dict[str, str] = {}
        self._joined: list[Node] = []
        self._by_peer: dict[bytes, Node] = {}
        self._groups: dict[str, NodeGroup] = {}
        self._blobs = BlobStore()
        self._wanted: dict[str, int] = {}
        """Descriptors of blobs that a node may ask for, by key."""
        self._changed = threading.Condition()
        self._link = Link(address, self._join, self._take, self._lose, proof)
        self.boot: Boot = self._link.boot

    # -------------------------------------------------------------- joining
    def wait(self, is_off: Callable[[], str], poll: Callable[[], None]) -> list[Node]:
        """Wait until every agent has joined; return the nodes in their order.

        Args:
            is_off: Returns why no agent will join any more; empty: they may.
            poll: Called meanwhile, a few times a second.

        Raises:
            StartError: They will not, or a node cannot be used.
        """
        with self._changed:
            while len(self._joined) < self.count and not self.problems:
                problem = is_off()
                if problem:
                    raise StartError(problem)
                self._changed.wait(timeouts.NODES_POLL_S)
                poll()
            if self.problems:
                raise StartError("; ".join(self.problems.values()))
            return list(self._joined)

    @property
    def joined(self) -> list[Node]:
        """The nodes that have joined, in their order."""
        with self._changed:
            return list(self._joined)

    @property
    def is_whole(self) -> bool:
        """Return True if every node has joined, and none is lost."""
        with self._changed:
            return len(self._joined) == self.count and not any(node.lost for node in self._joined)

    def _join(self, peer: Peer, versions: Versions, joined: Joined | None) -> None:
        name = joined.machine.name if joined is not None else "a node"
        problem = difference(versions, versions_here())
        with self._changed:
            if problem:
                self.problems[name] = f"{name} {problem}"
            elif joined is not None:
                self._joined.append(Node(0, peer, joined.machine, joined.pid, joined.node))
                self._joined.sort(key=lambda node: (node.number, _natural(node.machine.name)))
                for index, node in enumerate(self._joined):
                    node.index = index
                self._by_peer = {node.peer.identity: node for node in self._joined}
            self._changed.notify_all()

    # -------------------------------------------------------------- groups
    def add(self, name: str, group: NodeGroup) -> None:
        """Pass on to a group what agents say of it."""
        self._groups[name] = group

    @property
    def has_groups(self) -> bool:
        """Return True if a group runs, or a session has its ranks here."""
        return bool(self._groups)

    def remove(self, name: str) -> None:
        """End that, and forget the results that it has not taken."""
        self._groups.pop(name, None)
        self._link.act(lambda: self._blobs.drop_of(f"{name}:"))

    def send(self, node: Node, message: ToGroup) -> None:
        """Send an urgent message."""
        self._link.send(node.peer, message)

    def send_data(self, node: Node, lane: str, fds: Sequence[int], build: Callable[[Sequence[Blob]], ToGroup]) -> None:
        """Send a message with files, and only the files that the node does not have.

        Args:
            node: The node.
            lane: Names the messages that keep their order.
            fds: The files, which are immutable. They are duplicated.
            build: Returns the message.
        """
        own = [os.dup(fd) for fd in fds]
        messages = self._with_data(node, own, build)
        weakref.finalize(messages, _close, own)  # also if the lane is dropped before it comes to them
        self._link.send_in(node.peer, lane, messages)

    def drop(self, node: Node, lane: str) -> None:
        """Send no more of what a lane holds."""
        self._link.drop(node.peer, lane)

    def _with_data(
        self, node: Node, fds: Sequence[int], build: Callable[[Sequence[Blob]], ToGroup]
    ) -> Iterator[Message]:
        blobs = [_blob_of(fd) for fd in fds]
        yield from self._make_room(node, blobs)
        for fd, blob in zip(fds, blobs, strict=True):
            if blob.key in node.kept:
                node.kept.move_to_end(blob.key)
            elif blob.path:  # perhaps on a disk that the node shares: it asks if it is not
                self._wanted[blob.key] = os.dup(fd)
            else:
                yield from parts_of(fd, blob.key, blob.size)
            node.kept[blob.key] = blob.size
        yield build(blobs), ()

    def _make_room(self, node: Node, blobs: Sequence[Blob]) -> Iterator[Message]:
        """Let a node forget small blobs, and the least recently used beyond the limit."""
        needed = {blob.key for blob in blobs}
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
            if message.key.partition(":")[0] in self._groups:  # else it has been closed, and will take none
                self._blobs.add(message, data[0])
        elif isinstance(message, Want):
            self._link.send_in(peer, message.key, self._wanted_parts(message.key))
        elif isinstance(message, Leaving):
            for group in list(self._groups.values()):
                group.warn(node.index, f"{node.machine.name}: {message.reason}")
        else:
            group_of = self._groups.get(message.group)  # type: ignore[attr-defined]  # every other message has one
            if group_of is not None:
                group_of.take(node.index, message, data)  # type: ignore[arg-type]  # as above

    def _wanted_parts(self, key: str) -> Iterator[Message]:
        fd = self._wanted.pop(key)
        try:
            yield from parts_of(fd, key, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def take_parcel(self, parcel: Sequence[Blob]) -> list[int]:
        """Return the descriptors of a parcel that has arrived; the caller closes them."""
        return [self._blobs.take(blob.key) for blob in parcel]

    def _lose(self, peer: Peer, reason: str) -> None:
        node = self._by_peer.get(peer.identity)
        if node is None:
            return
        with self._changed:
            node.lost = reason
            self._changed.notify_all()
        for group in list(self._groups.values()):
            group.lose(node.index, node.lost)

    def close(self) -> None:
        """Let the agents exit, with their ranks, and stop listening. Idempotent."""
        self._link.close()
        self._blobs.close()
        for fd in self._wanted.values():
            os.close(fd)
        self._wanted.clear()


def _natural(name: str) -> tuple[str | int, ...]:
    """Return a key that sorts n2 before n10."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _blob_of(fd: int) -> Blob:
    """Return the identity of an immutable file: a file in memory has a number that no other gets while it is open."""
    about = os.fstat(fd)
    key = f"{about.st_dev}:{about.st_ino}:{about.st_ctime_ns}:{about.st_size}"
    path = _path_of(fd)
    return Blob(key, about.st_size, path, about.st_mtime_ns if path else 0)


def _path_of(fd: int) -> str:
    """Return the path of a user's file; empty for a file without a name."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
    return path if Path(path).is_file() else ""
