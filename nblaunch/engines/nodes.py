"""The nodes of one allocation, with an agent on each: what they are, what they have, and the groups that run there."""

from __future__ import annotations

import errno
import os
import re
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nblaunch.engines.blob_store import BlobStore, parts_of
from nblaunch.engines.link import Link, Message, Peer, difference, versions_here
from nblaunch.errors import StartError
from nblaunch.machine import timeouts
from nblaunch.machine.inventory import Machine
from nblaunch.wire.link_messages import (
    Blob,
    BlobPart,
    Boot,
    Drop,
    FromAgent,
    Joined,
    Leaving,
    Part,
    Preload,
    Proof,
    ToGroup,
    Versions,
)

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
    number: int
    """As in `Boot`."""
    kept: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """The blobs that it has, with their sizes; the most recently used last."""
    pinned: dict[str, set[str]] = field(default_factory=dict)
    """By group: the blobs of its last task, which must stay until its ranks have them."""
    sending: Counter[str] = field(default_factory=Counter)
    """How many lanes are sending a blob."""
    lost: str = ""
    """Why it is lost; empty if it is not."""
    leaving: str = ""
    """Why it will be lost soon; empty if nothing is known."""

    @property
    def problem(self) -> str:
        """Why no other group may use it; empty if one may."""
        return self.lost or self.leaving


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
        self._changed = threading.Condition()
        self._link = Link(address, self._join, self._take, self._lose, proof)
        self.boot: Boot = self._link.boot

    # -------------------------------------------------------------- joining
    def wait(self, problem_of: Callable[[], str], poll: Callable[[], None]) -> None:
        """Wait until every agent has joined.

        Args:
            problem_of: Returns why no agent will join any more; empty: they may.
            poll: Called meanwhile, a few times a second; what it raises ends the wait.

        Raises:
            StartError: They will not, or a node cannot be used.
        """
        while True:
            problem = problem_of()  # and `poll`: without the lock, for which the thread of the link must not wait
            poll()
            with self._changed:
                if self.problems:
                    raise StartError("; ".join(self.problems.values()))
                if len(self._joined) == self.count:
                    return
                if problem:
                    raise StartError(problem)
                self._changed.wait(timeouts.NODES_POLL_S)

    @property
    def joined(self) -> list[Node]:
        """The nodes that have joined, in their order."""
        with self._changed:
            return list(self._joined)

    @property
    def is_whole(self) -> bool:
        """Return True if every node has joined, and none is lost or will be."""
        with self._changed:
            return len(self._joined) == self.count and not any(node.problem for node in self._joined)

    def _join(self, peer: Peer, versions: Versions, load: Callable[[], Joined]) -> None:
        problem = difference(versions, versions_here())
        with self._changed:
            if problem:
                self.problems[versions.host] = f"{versions.host} {problem}"
            else:
                joined = load()
                self._joined.append(Node(0, peer, joined.machine, joined.node))
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
        self._link.act(lambda: self._forget(name))

    def _forget(self, name: str) -> None:
        """Release what a group has held. In the thread of the link, as all that touches blobs."""
        self._blobs.drop_of(f"{name}:")
        for node in self._joined:
            node.pinned.pop(name, None)

    def send(self, node: Node, message: ToGroup | Preload) -> None:
        """Send an urgent message."""
        self._link.send(node.peer, message)

    def send_in(self, node: Node, lane: str, message: ToGroup) -> None:
        """Send a message behind those that the lane holds."""
        self._link.send_in(node.peer, lane, [(message, ())])

    def send_data(
        self,
        node: Node,
        lane: str,
        fds: Sequence[int],
        build: Callable[[Sequence[Blob]], ToGroup],
        on_error: Callable[[str], None],
    ) -> None:
        """Send a message with files, and only the files that the node does not have.

        Args:
            node: The node.
            lane: Names the messages that keep their order: the group.
            fds: The files, which are immutable. They are duplicated.
            build: Returns the message.
            on_error: Called with the reason if a file cannot be read.
        """
        own = [os.dup(fd) for fd in fds]
        messages = self._with_data(node, lane, own, build)
        weakref.finalize(messages, _close, own)  # also if the lane is dropped before it comes to them
        self._link.send_in(node.peer, lane, messages, on_error)

    def drop(self, node: Node, lane: str) -> None:
        """Send no more of what a lane holds."""
        self._link.act(lambda: node.peer.outbox.drop(lane))

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
            if message.key.partition(":")[0] in self._groups:  # else it has been closed, and will take none
                self._blobs.add(message, data[0])
        elif isinstance(message, Leaving):
            node.leaving = message.reason
            for group in list(self._groups.values()):
                group.warn(node.index, f"{node.machine.name}: {message.reason}")
        else:
            group_of = self._groups.get(message.group)  # type: ignore[attr-defined]  # every other message has one
            if group_of is not None:
                group_of.take(node.index, message, data)  # type: ignore[arg-type]  # as above

    def take_parcel(self, parcel: Sequence[Blob]) -> list[int]:
        """Return the descriptors of a parcel that has arrived; the caller closes them.

        Raises:
            OSError: A part of it is missing: there was no room.
        """
        if not all(blob.key in self._blobs for blob in parcel):
            self._blobs.drop([blob.key for blob in parcel])
            raise OSError(errno.ENOSPC, "there was no room for the result on the notebook's machine")
        return [self._blobs.take(blob.key) for blob in parcel]

    def _lose(self, peer: Peer, reason: str) -> None:
        node = self._by_peer.get(peer.identity)
        if node is None:
            return
        with self._changed:
            node.lost = node.leaving or reason
            self._changed.notify_all()
        for group in list(self._groups.values()):
            group.lose(node.index, node.lost)

    def close(self) -> None:
        """Let the agents exit, with their ranks, and stop listening. Idempotent."""
        self._link.close()
        self._blobs.close()


def _natural(name: str) -> tuple[str | int, ...]:
    """Return a key that sorts n2 before n10."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _blob_of(fd: int) -> Blob:
    """Return the identity of an immutable file: a file in memory has a number that no other gets while it is open."""
    about = os.fstat(fd)
    return Blob(f"{about.st_dev}:{about.st_ino}:{about.st_ctime_ns}:{about.st_size}", about.st_size)
