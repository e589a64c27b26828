"""The messages between the kernel and the agent of another node.

Bytes travel beside a message, not in it: those of logs, displays, and the parcels of tasks and results.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nblaunch.machine.inventory import Machine
from nblaunch.machine.own_code import OwnFile
from nblaunch.wire.messages import Done, Failed, Order, RankExited
from nblaunch.wire.tables import Begun

Part = bytes | memoryview
"""Of a message."""
Proof = Literal["", "munge"]
LINK_PROTOCOL = 7
"""Bump it whenever one of these messages changes."""


# ------------------------------------------------------------------ the node
@dataclass(frozen=True, slots=True)
class Boot:
    """Engine -> agent, as a line of JSON on its stdin: where the kernel is, and the keys."""

    endpoint: str
    kernel_key: str
    """The kernel's public key."""
    public_key: str
    secret_key: str
    node: int = -1
    """The number of the node; -1: the kernel numbers nodes by their names."""
    proof: Proof = ""
    """What an agent proves itself with, as others may have read the keys on their way; empty: the keys are enough."""

    def text_to_prove(self, identity: bytes) -> str:
        """Return the text of an agent's credential, which no other agent can use."""
        return f"nblaunch {identity.decode(errors='replace')} {self.kernel_key}"


@dataclass(frozen=True, slots=True)
class Versions:
    """Agent -> kernel, as JSON in its first message: what must be the same on every node."""

    protocol: int
    nblaunch: str
    python: str
    torch: str
    cloudpickle: str
    host: str = ""
    """Whose versions they are."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Agent -> kernel, as its first message, once it can start ranks."""

    machine: Machine
    node: int = -1
    """As in `Boot`."""


@dataclass(frozen=True, slots=True)
class Preload:
    """Kernel -> agent: import these modules ahead of later launches."""

    modules: Sequence[str]


@dataclass(frozen=True, slots=True)
class Leaving:
    """Agent -> kernel: the node is being taken back, and this agent exits soon."""

    reason: str


# ------------------------------------------------------------------ data
@dataclass(frozen=True, slots=True)
class BlobPart:
    """Either way: bytes of an immutable file, beside the message. The last part completes it."""

    key: str
    offset: int
    size: int
    """Of the whole file."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A file that a parcel holds, by its key."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Kernel -> agent: forget these blobs."""

    keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """Kernel -> agent: a file of the user's own modules, beside the message, for this and later groups."""

    digest: bytes


# ------------------------------------------------------------------ groups, kernel -> agent
@dataclass(frozen=True, slots=True)
class Place:
    """Get the processes that start the ranks of a group on this node."""

    group: str
    order: Order
    """Of the ranks of this node. Its directory is the kernel's, which names the agent's own."""
    serves_store: bool
    modules: Sequence[OwnFile]
    """The user's own, which the ranks may import. `ModuleFile` came before for those that the node never had."""


@dataclass(frozen=True, slots=True)
class Call:
    """To an agent: call a method of its `AgentGroup`, else of the `Workers` or the `Worker` that it has.

    To the kernel: call ``on_<method>`` of its `NodeWorkers`, with the number of the node.
    """

    group: str
    method: str
    arguments: Sequence[Any] = ()
    rank: int | None = None
    """The rank that it is about; None: all."""


@dataclass(frozen=True, slots=True)
class Release:
    """Release everything of a group; ranks that still run are killed."""

    group: str


ToGroup = Place | Call | Release


# ------------------------------------------------------------------ groups, agent -> kernel
@dataclass(frozen=True, slots=True)
class Placed:
    """The group has processes on this node, or cannot have any. Travels in a `Call`."""

    refusal: str = ""
    """Why not; empty if it has."""
    store: tuple[str, int] | None = None
    """The address and port of the TCPStore, if this node serves it."""
    note: str = ""
    """For the user."""


@dataclass(frozen=True, slots=True)
class FromGroup:
    """An event of the group: `RankStarted`, `NotStarted`, `RankExited`, `Swept` or `Lost`."""

    group: str
    event: object


@dataclass(frozen=True, slots=True)
class FromRank:
    """A message of a rank. The blobs of its parcel came before."""

    group: str
    rank: int
    message: object
    parcel: Sequence[Blob] = ()
    lost: str = ""
    """Why the parcel is missing; empty if it is not."""


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes that ranks have appended to their files, one after the other beside the message."""

    group: str
    log_dir: str
    """The kernel's."""
    files: Sequence[tuple[str, int]]
    """The name of each file, and how many of the bytes are its own."""


FromAgent = Call | FromGroup | FromRank | Written


def in_other_clock(message: Any) -> Any:
    """Return a message with the age of its event in place of the time, or the other way round: clocks differ."""
    if isinstance(message, (Done, Failed, RankExited, Begun)):
        return replace(message, time_ns=time.monotonic_ns() - message.time_ns)
    return message
