"""The link between the kernel and the agents of a set of nodes: one ZeroMQ connection for each agent.

CURVE authenticates and encrypts every connection: only an agent that was given the keys of this link gets a message
through, and nothing is unpickled before. TCP keeps the order of messages. A node whose connection ends is lost. ZeroMQ
ends one that is silent, from a thread of its own that needs no Python, which may be busy.

The kernel listens on one IPv4 address and a free port: the address of the route to the nodes, or ``NBLAUNCH_ADDRESS``.
Agents listen nowhere. The keys of a link reach an agent as a line on its stdin (`Boot`): no command line and no
environment has them. Their way is the cluster's: ssh encrypts it, srun does not, Ray only with TLS. The kernel
unpickles what an agent sends, so with Slurm an agent also sends a credential of munge, bound to its connection's
identity: the keys alone open nothing. Without munge, and with Ray without TLS, who reads the keys can pose as an agent.

Data and logs travel in pieces, and ZeroMQ holds few messages for each agent: what waits is not yet read from its file.
Urgent messages, such as an interrupt, pass all others, and so does what must not wait behind logs. Each group has a
lane, where a rank's last lines come before its result. Lanes take turns.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from nblaunch.engines.protocol import Wakeup
from nblaunch.errors import StartError
from nblaunch.machine import segments, timeouts
from nblaunch.machine.segments import Draft
from nblaunch.wire.link_messages import LINK_PROTOCOL, BlobPart, Boot, Joined, Part, Proof, Versions

_log = logging.getLogger(__name__)
JOIN = b"join"
"""Begins an agent's first message. Its versions come next, as JSON, which other releases can read; then its proof."""
MAX_MESSAGE_BYTES = 64 << 20
"""A larger message closes its connection."""
MAX_WAITING = 4
"""Messages to one peer that ZeroMQ holds: an urgent one waits behind them."""
Message = tuple[object, Sequence[Part]]
"""A message, and the bytes beside it."""
Source = tuple[Iterator[Message], Callable[[str], None]]
"""Of messages, and what is called with the reason if it fails."""
LINK_BEAT_S = 1.0
"""Between two of ZeroMQ's heartbeats on a link between machines, in both directions."""
LINK_CONNECT_TIMEOUT_S = 20.0
"""For an agent to connect to the kernel, and to prove itself."""
LINK_SILENCE_S = 4.0
"""Without an answer to a heartbeat before ZeroMQ ends a connection, and its node is lost."""
LINK_READ_S = 0.05
"""Longest time that the thread of a link reads without sending."""
LINK_RETRY_S = 0.002
"""Before messages are sent that ZeroMQ has not taken."""


def encoded(message: object, buffers: Sequence[Part] = ()) -> list[Part]:
    return [pickle.dumps(message, protocol=5), *buffers]


def configure(link: zmq.Socket[bytes]) -> None:
    link.setsockopt(zmq.SNDHWM, MAX_WAITING)
    link.setsockopt(zmq.RCVHWM, 0)  # a socket that is full would not hear heartbeats
    link.setsockopt(zmq.HEARTBEAT_IVL, int(LINK_BEAT_S * 1000))
    link.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(LINK_SILENCE_S * 1000))
    link.setsockopt(zmq.HEARTBEAT_TTL, int(LINK_SILENCE_S * 1000))


class Outbox:
    """What waits to be sent to one peer: urgent messages first, then the lanes in turn. Used from one thread.

    A lane keeps the order of its messages. What it holds is read when its turn comes: a result of 1 GB is never in
    memory twice, and a peer that does not read stalls nothing else.
    """

    def __init__(self) -> None:
        self._urgent: deque[list[Part]] = deque()
        self._lanes: dict[str, deque[Source]] = {}

    def put(self, message: object) -> None:
        self.put_encoded(encoded(message))

    def put_encoded(self, parts: list[Part]) -> None:
        """Queue an urgent message, which overtakes those in lanes."""
        self._urgent.append(parts)

    def put_in(
        self,
        lane: str,
        messages: Iterable[Message],
        on_error: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Queue messages behind those that the lane holds.

        The source is read when its turn comes. If it fails, `on_error` is called with the reason.
        """
        self._lanes.setdefault(lane, deque()).append((iter(messages), on_error))

    def drop(self, lane: str) -> None:
        self._lanes.pop(lane, None)

    @property
    def is_empty(self) -> bool:
        return not (self._urgent or self._lanes)

    def flush(self, send: Callable[[list[Part]], None]) -> None:
        """Send a few messages, as far as `send` does not raise `zmq.Again`."""
        for _ in range(MAX_WAITING):
            parts = self._next()
            if parts is None:
                return
            try:
                send(parts)
            except zmq.Again:
                self._urgent.appendleft(parts)
                return

    def _next(self) -> list[Part] | None:
        if self._urgent:
            return self._urgent.popleft()
        while self._lanes:
            name, lane = next(iter(self._lanes.items()))
            self._lanes[name] = self._lanes.pop(name)  # the other lanes come first next time
            source, on_error = lane[0]
            try:
                return encoded(*next(source))
            except StopIteration:
                lane.popleft()
            except Exception as error:  # noqa: BLE001  # a source that fails must not end the link, or a node is lost
                _log.exception("nblaunch: a message could not be sent over a link")
                lane.popleft()
                on_error(f"{type(error).__name__}: {error}")
            if not lane:
                self._lanes.pop(name, None)
        return None


# ------------------------------------------------------------------ blobs
PART_BYTES = 1 << 18
"""Of a file in one message. ZeroMQ takes a connection that brings no whole message for 4 s for dead."""


@dataclass(slots=True)
class _Arriving:
    draft: Draft
    offsets: set[int] = field(default_factory=set)
    """Of the parts that have arrived: one may come twice, if two launches send the same data."""
    received: int = 0


class BlobStore:
    """Immutable files that another machine has sent, in this machine's memory: the parcels of tasks and results.

    Used from one thread.
    """

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        """Blobs that cannot be kept here, and why: until they are dropped, what comes of them is ignored."""
        self._arriving: dict[str, _Arriving] = {}
        self._complete: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._complete

    def add(self, part: BlobPart, data: Part) -> bool:
        """Add a part; return True if its blob is complete now, or lost."""
        if part.key in self._complete or part.key in self.lost:
            return False
        try:
            if part.key not in self._arriving:
                self._arriving[part.key] = _Arriving(segments.create_file())
            blob = self._arriving[part.key]
            if part.offset not in blob.offsets:
                blob.draft.write(data, part.offset)
                blob.offsets.add(part.offset)
                blob.received += len(data)
            if blob.received < part.size:
                return False
            self._complete[part.key] = self._arriving.pop(part.key).draft.seal()
        except OSError as error:  # no room, or no descriptors
            self.drop([part.key])
            self.lost[part.key] = str(error)
        return True

    def descriptor(self, key: str) -> int:
        return self._complete[key]

    def take(self, key: str) -> int:
        return self._complete.pop(key)

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.lost.pop(key, None)
            if key in self._complete:
                os.close(self._complete.pop(key))
            if key in self._arriving:
                self._arriving.pop(key).draft.close()

    def drop_of(self, prefix: str) -> None:
        self.drop([key for key in (*self._complete, *self._arriving, *self.lost) if key.startswith(prefix)])

    def close(self) -> None:
        self.drop_of("")


def parts_of(fd: int, key: str, size: int) -> Iterator[tuple[BlobPart, Sequence[Part]]]:
    """Yield the parts of a file, read one at a time."""
    for offset in range(0, size, PART_BYTES) or (0,):
        yield BlobPart(key, offset, size), [os.pread(fd, min(PART_BYTES, size - offset), offset)]


# ------------------------------------------------------------------ the kernel's end
@dataclass(slots=True)
class Peer:
    """One agent that has joined."""

    identity: bytes
    connection: int = -1
    """The descriptor of its connection."""
    heard_at: float = 0.0
    """By the monotonic clock."""
    outbox: Outbox = field(default_factory=Outbox)


class Link:
    """The kernel's end: a socket that a thread serves, and that listens as long as this object lives. Thread-safe.

    In that thread, `on_join` is called with a new agent, its versions, and what loads its message, which only the same
    release can; `on_message` with each message, and the bytes beside it; `on_lost` with the reason, once an agent's
    connection has ended. StartError: the address cannot be listened on.
    """

    def __init__(
        self,
        address: str,
        on_join: Callable[[Peer, Versions, Callable[[], Joined]], None],
        on_message: Callable[[Peer, object, Sequence[Part]], None],
        on_lost: Callable[[Peer, str], None],
        proof: Proof = "",
    ) -> None:
        self._on_join, self._on_message, self._on_lost = on_join, on_message, on_lost
        self._peers: dict[bytes, Peer] = {}
        self._gone: deque[int] = deque()
        """Connections that have ended, while what they have brought is not yet read."""
        self._requests: deque[Callable[[], None]] = deque()
        self._is_closing = False
        self._owner = os.getpid()
        public, secret = zmq.curve_keypair()
        self._client_public, self._client_secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._wake = Wakeup()
        try:
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind("inproc://zeromq.zap.01")  # where libzmq asks about each connection, before any message
            self._socket = listening = self._context.socket(zmq.ROUTER)
            listening.setsockopt(zmq.CURVE_SERVER, 1)
            listening.setsockopt(zmq.CURVE_SECRETKEY, secret)
            listening.setsockopt(zmq.CURVE_PUBLICKEY, public)
            listening.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so if an agent takes no more
            listening.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            listening.setsockopt(zmq.HANDSHAKE_IVL, int(LINK_CONNECT_TIMEOUT_S * 1000))
            configure(listening)
            listening.bind(f"tcp://{address}:0")
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartError(f"cannot listen on {address}: {error}; set NBLAUNCH_ADDRESS to another address") from error
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        client = self._client_public.decode(), self._client_secret.decode()
        self.boot = Boot(endpoint, public.decode(), *client, proof=proof)
        self._thread = threading.Thread(target=self._serve, name="nblaunch-link", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------- sending, from any thread
    def send(self, peer: Peer, message: object) -> None:
        parts = encoded(message)  # here, where an error reaches the caller
        self.act(lambda: peer.outbox.put_encoded(parts))

    def send_in(
        self,
        peer: Peer,
        lane: str,
        messages: Iterable[Message],
        on_error: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Send messages in the order of their lane, as fast as the agent takes them; see `Outbox.put_in`."""
        self.act(lambda: peer.outbox.put_in(lane, messages, on_error))

    def act(self, act: Callable[[], None]) -> None:
        self._requests.append(act)
        self._wake.set()

    def close(self) -> None:
        """End every connection, so that the agents exit, and stop listening. Idempotent."""
        if os.getpid() != self._owner or not self._thread.is_alive():
            return
        self._is_closing = True
        self.act(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -------------------------------------------------------------- the thread
    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._zap, self._monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_closing:
                waits = any(not peer.outbox.is_empty for peer in self._peers.values())
                ready = dict(poller.poll(int(LINK_RETRY_S * 1000) if waits else None))
                if self._zap in ready:
                    self._authenticate()
                while self._monitor.poll(0):
                    self._gone.append(recv_monitor_message(self._monitor)["value"])
                self._wake.clear()
                while self._requests:
                    self._requests.popleft()()
                if self._receive():
                    while self._gone:
                        self._lose(self._gone.popleft())
                for peer in self._peers.values():
                    peer.outbox.flush(partial(self._send, peer))
        except Exception:  # noqa: BLE001  # nothing else may end the thread: nodes would be silent
            _log.exception("nblaunch: the link to the nodes has failed")
        finally:
            for peer in self._peers.values():
                self._on_lost(peer, "its nodes were released" if self._is_closing else "the link to it has failed")
            self._socket.disable_monitor()  # while its other end is open: libzmq would wait to tell it of the end
            self._context.destroy(linger=0)
            self._wake.close()

    def _authenticate(self) -> None:
        """Answer libzmq's question about a connection, as in https://rfc.zeromq.org/spec/27."""
        version, request, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        is_ours = mechanism == b"CURVE" and hmac.compare_digest(credentials[0], z85.decode(self._client_public))
        status = (b"200", b"OK") if is_ours else (b"400", b"")
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _receive(self) -> bool:
        """Read what has arrived, for a while: what is to be sent waits meanwhile. Return True if that was all."""
        until = time.monotonic() + LINK_READ_S
        while time.monotonic() < until:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            identity, *parts = frames[0].bytes, *(frame.buffer for frame in frames[1:])
            try:
                self._take(identity, frames[-1].get(zmq.SRCFD), parts)
            except Exception:  # noqa: BLE001  # a message of one agent must not end the link to the others
                _log.exception("nblaunch: a message from a node could not be read")
        return False

    def _take(self, identity: bytes, connection: int, parts: Sequence[Part]) -> None:
        peer = self._peers.get(identity)
        if peer is not None:
            peer.heard_at = time.monotonic()
            self._on_message(peer, pickle.loads(parts[0]), parts[1:])
        elif parts and parts[0] == JOIN:  # nothing else is read: it may have the keys from the network
            self._join(Peer(identity, connection, time.monotonic()), parts)

    def _join(self, peer: Peer, parts: Sequence[Part]) -> None:
        if self.boot.proof and not is_own_credential(bytes(parts[2]).decode(), self.boot.text_to_prove(peer.identity)):
            _log.warning("nblaunch: rejected an agent that failed to authenticate")
            return
        self._peers[peer.identity] = peer
        said = json.loads(bytes(parts[1]))
        versions = Versions(**{each.name: said.get(each.name, "?") for each in dataclasses.fields(Versions)})
        self._on_join(peer, versions, lambda: pickle.loads(parts[3]))

    def _lose(self, connection: int) -> None:
        """Note the end of a connection: of the first agent that had it, because another may have the number now."""
        for peer in self._peers.values():
            if peer.connection == connection:
                del self._peers[peer.identity]
                self._on_lost(peer, "its agent was killed, or the network failed")
                return

    def _send(self, peer: Peer, parts: Sequence[Part]) -> None:
        try:
            self._socket.send_multipart([peer.identity, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # else the connection has ended, and the monitor says so
                raise


# ------------------------------------------------------------------ credentials and versions
# munge, https://github.com/dun/munge, encrypts with a key that all machines of a cluster share, for one reader.
def has_munge() -> bool:
    return shutil.which("munge") is not None and _program(["munge", "--no-input", "--no-output"], "") is not None


def credential(text: str) -> str:
    """Return a credential with a text; empty if this machine makes none."""
    return (_program(["munge"], text) or "").strip()


def is_own_credential(made: str, text: str) -> bool:
    """Return True if a process of this user has made a credential with this text. A second look returns False."""
    said = _program(["unmunge", "--numeric"], made)
    if said is None:
        return False
    head, _, body = said.partition("\n\n")
    fields = dict(line.partition(":")[::2] for line in head.splitlines())
    return fields.get("UID", "").strip() == str(os.getuid()) and body == text


def _program(command: list[str], text: str) -> str | None:
    """Return what a command prints; None if it fails."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=timeouts.PROGRAM_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def versions_here() -> Versions:
    python = ".".join(map(str, sys.version_info[:2]))
    packages = _version_of("torch"), _version_of("cloudpickle")
    return Versions(LINK_PROTOCOL, _version_of("nblaunch"), python, *packages, host=socket.gethostname())


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from its sources
        return "none"


def difference(there: Versions, here: Versions) -> str:
    """Return how a node differs from the notebook, and what to do; empty if it does not."""
    for name in ("nblaunch", "protocol", "python", "torch", "cloudpickle"):
        theirs, ours = getattr(there, name), getattr(here, name)
        if theirs != ours:
            advice = "install the same version there, or set NBLAUNCH_PYTHON to a Python there that has it"
            return f"has {name} {theirs}, but the notebook has {ours}: {advice}"
    return ""
