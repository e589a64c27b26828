"""The kernel's end of the links to the agents of a set of nodes: one ZeroMQ socket, served by a thread.

CURVE authenticates and encrypts every connection: only an agent that was given the keys of this socket gets a message
through, and nothing is unpickled before. The socket listens on one address for as long as this object lives.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import logging
import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from nblaunch.engines.outbox import Message, Outbox, encoded
from nblaunch.errors import StartError
from nblaunch.machine import munge, timeouts
from nblaunch.machine.network import address_towards, checked_address
from nblaunch.wire.delivery import Delivery, Part, Parts
from nblaunch.wire.link_messages import Boot, Clock, Joined, Leave, Proof, Versions

_log = logging.getLogger(__name__)
JOIN = b"join"
"""Begins an agent's first message. Its versions come next, as JSON, which other releases can read; then its proof."""
_CLOCK_DRIFT_NS = 1_000_000
"""Between two questions of the time, 20 in a million: what quartz may be off."""
CLOCK_QUESTIONS = 8
"""To a new agent, to measure how far its clock is off."""
MAX_MESSAGE_BYTES = 64 << 20
"""A larger message closes its connection."""


@dataclass(slots=True)
class Peer:
    """One agent, as its connection introduces it."""

    identity: bytes
    delivery: Delivery
    outbox: Outbox
    heard_at: float = 0.0
    """By the monotonic clock."""
    offset_ns: int = 0
    """To be added to the agent's monotonic times."""
    round_trip_ns: int = 1 << 62
    """Of the measurement that `offset_ns` comes from; the shortest is the most precise."""
    clock_at: float = 0.0
    """When its clock was asked last."""
    has_joined: bool = False
    is_lost: bool = False
    connection: int = -1
    """The descriptor of its connection; -1: not known."""
    gone_at: float | None = None
    """When its connection was closed; None if it is open."""

    @classmethod
    def of(cls, identity: bytes) -> Peer:
        """Return an agent that has sent nothing yet."""
        delivery = Delivery()
        return cls(identity, delivery, Outbox(delivery))


class Link:
    """See the module. Thread-safe.

    Args:
        address: The address to listen on.
        on_join: Called with a new agent, its versions, and what loads its message, which only the same release can.
            In the thread of the link, as the others.
        on_message: Called with each message of an agent that has joined, and the bytes beside it.
        on_lost: Called once if an agent is gone, or has been silent for too long, with the reason.
        proof: See `Boot`.

    Raises:
        StartError: The address cannot be listened on.
    """

    def __init__(
        self,
        address: str,
        on_join: Callable[[Peer, Versions, Callable[[], Joined]], None],
        on_message: Callable[[Peer, object, Parts], None],
        on_lost: Callable[[Peer, str], None],
        proof: Proof = "",
    ) -> None:
        self._on_join, self._on_message, self._on_lost = on_join, on_message, on_lost
        self._peers: dict[bytes, Peer] = {}
        self._requests: deque[tuple[Callable[[], None], Sequence[Peer]]] = deque()
        self._due: dict[bytes, Peer] = {}
        """Agents that may get something now: it was queued, or they have confirmed something."""
        self._is_closing = False
        self._owner = os.getpid()
        public, secret = zmq.curve_keypair()
        self._client_public, self._client_secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        try:
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind("inproc://zeromq.zap.01")  # where libzmq asks about each connection, before any message
            self._socket = self._listening(secret, public, address)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartError(
                f"cannot listen on {address}: {error}; NBLAUNCH_ADDRESS chooses another address"
            ) from error
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        client = self._client_public.decode(), self._client_secret.decode()
        self.boot = Boot(endpoint, public.decode(), *client, proof=proof)
        self._thread = threading.Thread(target=self._serve, name="nblaunch-link", daemon=True)
        self._thread.start()

    def _listening(self, secret: bytes, public: bytes, address: str) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.ROUTER)
        made.setsockopt(zmq.CURVE_SERVER, 1)
        made.setsockopt(zmq.CURVE_SECRETKEY, secret)
        made.setsockopt(zmq.CURVE_PUBLICKEY, public)
        made.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an agent that reconnects takes its old connection's place
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        made.setsockopt(zmq.HANDSHAKE_IVL, int(timeouts.LINK_HANDSHAKE_TIMEOUT_S * 1000))
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, 0)  # `Outbox` limits what is under way
        made.setsockopt(zmq.RCVHWM, 0)
        heartbeats(made)
        made.bind(f"tcp://{address}:0")
        return made

    # -------------------------------------------------------------- sending, from any thread
    def send(self, peer: Peer, message: object) -> None:
        """Send an urgent message."""
        parts = encoded(message)  # here, where an error reaches the caller
        self.act(lambda: peer.outbox.put_encoded(parts), peer)

    def send_in(
        self,
        peer: Peer,
        lane: str,
        messages: Iterable[Message],
        on_error: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Send messages in the order of their lane, as fast as the agent takes them; see `Outbox.put_in`."""
        self.act(lambda: peer.outbox.put_in(lane, messages, on_error), peer)

    def drop(self, peer: Peer, lane: str) -> None:
        """Send no more of what a lane holds."""
        self.act(lambda: peer.outbox.drop(lane), peer)

    def act(self, act: Callable[[], None], *peers: Peer) -> None:
        """Do something in the thread of the link, and then send what these agents may get."""
        self._requests.append((act, peers))
        try:
            self._wake_write.send(b"!")
        except OSError:
            return  # full of wakeups, or closed

    def close(self) -> None:
        """Tell the agents to exit, and stop listening. Idempotent."""
        if os.getpid() != self._owner or not self._thread.is_alive():
            return
        self.act(self._take_leave)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _take_leave(self) -> None:
        for peer in self._peers.values():
            peer.outbox.put(Leave())
        self._due.update(self._peers)
        self._is_closing = True  # in the thread of the link, or it could end before it has sent them

    # -------------------------------------------------------------- the thread
    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._zap, self._monitor, self._wake_read):
            poller.register(source, zmq.POLLIN)
        beat_at = woken_at = time.monotonic()
        try:
            while not self._is_closing or self._requests or self._owes():
                ready = dict(poller.poll(int(timeouts.LINK_POLL_S * 1000)))
                if self._zap in ready:
                    self._authenticate()
                while self._monitor.poll(0):
                    self._note_closed(recv_monitor_message(self._monitor)["value"])
                if self._wake_read.fileno() in ready:
                    self._wake_read.recv(4096)
                while self._requests:
                    act, peers = self._requests.popleft()
                    act()
                    self._due.update((peer.identity, peer) for peer in peers)
                self._receive()
                was_away = time.monotonic() - woken_at > timeouts.LINK_AWAY_S  # also by what it has received
                woken_at = time.monotonic()
                if woken_at >= beat_at:
                    beat_at = woken_at + timeouts.LINK_BEAT_S
                    self._beat(woken_at, was_away)
                while self._due:
                    self._flush(self._due.popitem()[1])
        except Exception:  # noqa: BLE001  # nothing else may end the thread: nodes would be silent
            _log.exception("nblaunch: the link to the nodes has failed")
        finally:
            for peer in self._peers.values():
                if peer.has_joined and not peer.is_lost:
                    peer.is_lost = True
                    self._on_lost(peer, "its nodes were released" if self._is_closing else "the link to it has failed")
            self._context.destroy(linger=int(timeouts.LINK_CLOSE_S * 1000))
            self._wake_read.close()
            self._wake_write.close()

    def _owes(self) -> bool:
        return any(not peer.outbox.is_empty for peer in self._peers.values() if not peer.is_lost)

    def _authenticate(self) -> None:
        """Answer libzmq's question about a connection, as in https://rfc.zeromq.org/spec/27."""
        version, request, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        is_ours = mechanism == b"CURVE" and hmac.compare_digest(credentials[0], z85.decode(self._client_public))
        status = (b"200", b"OK") if is_ours else (b"400", b"")
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _note_closed(self, connection: int) -> None:
        for peer in self._peers.values():
            if peer.connection == connection:
                peer.connection, peer.gone_at = -1, time.monotonic()

    def _receive(self) -> None:
        """Read what has arrived, for a while: what is to be sent waits meanwhile."""
        until = time.monotonic() + timeouts.LINK_POLL_S
        while time.monotonic() < until:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity, *parts = frames[0].bytes, *(frame.buffer for frame in frames[1:])
            peer = self._peers.get(identity) or self._peers.setdefault(identity, Peer.of(identity))
            peer.heard_at = time.monotonic()
            self._due[identity] = peer
            peer.connection, peer.gone_at = frames[-1].get(zmq.SRCFD), None
            try:
                self._take(peer, parts)
            except Exception:  # noqa: BLE001  # a message of one agent must not end the link to the others
                _log.exception("nblaunch: a message of a node could not be read")

    def _take(self, peer: Peer, parts: Sequence[Part]) -> None:
        if parts and parts[0] == JOIN:
            self._join(peer, parts)
            return
        if not peer.has_joined:  # it may have the keys from the network, and has not proved itself
            return
        kind = peer.delivery.take(parts)
        if kind == "request":
            for again in peer.delivery.again():
                self._send(peer, again)
        elif kind == "new":
            message = pickle.loads(parts[1])
            if peer.is_lost:  # its ranks are given up: it has been told to leave
                return
            if isinstance(message, Clock):
                self._set_clock(peer, message)
            else:
                self._on_message(peer, message, parts[2:])
        if peer.delivery.owes_confirmation:
            self._send(peer, peer.delivery.confirmation())

    def _join(self, peer: Peer, parts: Sequence[Part]) -> None:
        if peer.has_joined:
            return
        if self.boot.proof and not munge.is_own(bytes(parts[2]).decode(), self.boot.text_to_prove(peer.identity)):
            _log.warning("nblaunch: an agent could not prove that it is one of yours, and was not let in")
            return
        peer.has_joined = True
        said = json.loads(bytes(parts[1]))
        versions = Versions(**{each.name: said.get(each.name, "?") for each in dataclasses.fields(Versions)})
        self._on_join(peer, versions, lambda: pickle.loads(parts[3]))
        for _ in range(CLOCK_QUESTIONS):
            peer.outbox.put(Clock(time.monotonic_ns()))

    def _set_clock(self, peer: Peer, answer: Clock) -> None:
        now = time.monotonic_ns()
        if now - answer.asked_ns < peer.round_trip_ns:
            peer.round_trip_ns = now - answer.asked_ns
            peer.offset_ns = (answer.asked_ns + now) // 2 - answer.time_ns

    def _beat(self, now: float, was_away: bool) -> None:
        """Give a sign of life; note agents that give none, unless this thread has not run either."""
        self._due.update(self._peers)
        for peer in list(self._peers.values()):
            if peer.delivery.is_behind:
                self._send(peer, peer.delivery.request())
            else:
                self._send(peer, peer.delivery.confirmation())
            if was_away:
                peer.heard_at, peer.gone_at = now, None if peer.gone_at is None else now
            if now - peer.clock_at > timeouts.CLOCK_INTERVAL_S and peer.has_joined:
                peer.clock_at = now
                peer.round_trip_ns += _CLOCK_DRIFT_NS  # clocks drift: an old measurement counts less
                peer.outbox.put(Clock(time.monotonic_ns()))
            reason = _reason(peer, now)
            if peer.has_joined and reason and not peer.is_lost:
                peer.is_lost = True
                peer.outbox.put(Leave())  # in case it comes back
                self._on_lost(peer, reason)

    def _flush(self, peer: Peer) -> None:
        for parts in peer.outbox.due():
            self._send(peer, parts)

    def _send(self, peer: Peer, parts: Parts) -> None:
        self._socket.send_multipart([peer.identity, *parts], zmq.NOBLOCK, copy=True)


def _reason(peer: Peer, now: float) -> str:
    """Return why an agent counts as lost; empty if it does not."""
    if peer.gone_at is not None and now - peer.gone_at > timeouts.NODE_GONE_S:
        return "its agent was killed, or its network was cut"
    if now - peer.heard_at > timeouts.NODE_LOST_S:
        return f"it has given no sign of life for {timeouts.NODE_LOST_S:.0f} s"
    return ""


def heartbeats(link: zmq.Socket[bytes]) -> None:
    """Let ZeroMQ's own thread notice a dead connection: it needs no Python, which may be busy."""
    link.setsockopt(zmq.HEARTBEAT_IVL, int(timeouts.LINK_BEAT_S * 1000))
    link.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(timeouts.LINK_SILENCE_S * 1000))
    link.setsockopt(zmq.HEARTBEAT_TTL, int(timeouts.LINK_SILENCE_S * 1000))


def address_for(nodes: Iterable[str]) -> str:
    """Return the address of this machine that reaches the nodes: ``NBLAUNCH_ADDRESS``, else the usual route's.

    Args:
        nodes: The nodes' addresses or names.

    Raises:
        StartError: A name does not resolve, or there is no route.
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
            f"{failed}. Is the name right? NBLAUNCH_ADDRESS names the address of this machine that nodes reach"
        )
    return max(set(found), key=found.count)
