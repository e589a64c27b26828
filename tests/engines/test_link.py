"""The link between the kernel and its agents: who may speak, and what a broken connection costs."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq

from nblaunch.engines.link import JOIN, Link, Peer, credential, versions_here
from nblaunch.machine.inventory import Machine
from nblaunch.wire.link_messages import Boot, Joined, Leaving, Proof
from tests.conftest import eventually


class Kernel:
    """A link that notes what arrives."""

    def __init__(self, proof: Proof = "") -> None:
        self.joined: list[Peer] = []
        self.heard: list[object] = []
        self.link = Link("127.0.0.1", self._join, self._hear, self._lose, proof)
        self.lost: list[str] = []

    def _join(self, peer: Peer, versions: object, joined: object) -> None:
        self.joined.append(peer)

    def _hear(self, peer: Peer, message: object, data: object) -> None:
        self.heard.append(message)

    def _lose(self, peer: Peer, reason: str) -> None:
        self.lost.append(reason)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    made.link.close()


class Speaker:
    """An agent's end, without an agent."""

    def __init__(self, boot: Boot, keys: tuple[bytes, bytes] | None = None, rcvhwm: int = 0) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        public, secret = keys or (boot.public_key.encode(), boot.secret_key.encode())
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, boot.kernel_key.encode())
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self.identity, self.proof = os.urandom(12).hex().encode(), b""
        self.socket.setsockopt(zmq.ROUTING_ID, self.identity)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.setsockopt(zmq.RCVHWM, rcvhwm)
        self.socket.connect(boot.endpoint)

    def join(self) -> None:
        joined = pickle.dumps(Joined(Machine(0, 1, "linux", {}, name="here")))
        self.socket.send_multipart([JOIN, json.dumps(asdict(versions_here())).encode(), self.proof, joined])

    def say(self, message: object) -> None:
        self.socket.send_multipart([pickle.dumps(message)])

    def close(self, linger: int = 0) -> None:
        self.context.destroy(linger)


class Bomb:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def works(kernel: Kernel) -> None:
    """Assert that an agent is heard."""
    agent = Speaker(kernel.link.boot)
    heard = len(kernel.heard)
    agent.join()
    agent.say(Leaving("a reason"))
    eventually(lambda: kernel.heard[heard:] == [Leaving("a reason")])
    agent.close()


def test_only_the_keys_of_this_link_are_let_in(kernel: Kernel, tmp_path: Path) -> None:
    boot, bomb = kernel.link.boot, [pickle.dumps(Bomb(tmp_path / "exploded"))]
    stranger = Speaker(boot, keys=zmq.curve_keypair())
    plain = zmq.Context()
    unkeyed = plain.socket(zmq.DEALER)
    unkeyed.connect(boot.endpoint)
    for each in (stranger.socket, unkeyed):
        with suppress(zmq.Again):  # it has been refused already, and has no one to send to
            for _ in range(100):
                each.send_multipart([JOIN, b"{}", b"", *bomb], zmq.NOBLOCK)
    works(kernel)
    assert len(kernel.joined) == 1
    assert not (tmp_path / "exploded").exists()
    stranger.close()
    plain.destroy(linger=0)


def test_stolen_keys_are_not_enough_where_munge_proves_the_user(slurm_cluster: object, tmp_path: Path) -> None:
    """Slurm, whose munge runs, passes keys on in clear."""
    kernel = Kernel("munge")
    boot, bomb = kernel.link.boot, pickle.dumps(Bomb(tmp_path / "exploded"))
    thief, agent = Speaker(boot), Speaker(boot)
    versions = json.dumps(asdict(versions_here())).encode()
    stolen = credential(boot.text_to_prove(agent.identity)).encode()
    for proof in (b"", b"MUNGE:nonsense:", credential("another text").encode(), stolen):
        thief.socket.send_multipart([JOIN, versions, proof, bomb])
    thief.socket.send_multipart([bomb])
    agent.proof = credential(boot.text_to_prove(agent.identity)).encode()
    agent.join()
    agent.say(Leaving("a reason"))
    eventually(lambda: kernel.heard == [Leaving("a reason")])
    assert len(kernel.joined) == 1
    assert not (tmp_path / "exploded").exists()
    for speaker in (thief, agent):
        speaker.close()
    kernel.link.close()


def test_garbage_and_a_thousand_connections_do_not_end_it(kernel: Kernel) -> None:
    address = urlsplit(kernel.link.boot.endpoint)
    opened = []
    for number in range(300):
        made = socket.create_connection((address.hostname, address.port or 0))
        made.setblocking(False)
        with suppress(OSError):  # closed at once
            made.send(os.urandom(2000) if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
        opened.append(made)
    works(kernel)
    for made in opened:
        made.close()


def test_a_broken_connection_is_a_lost_node(kernel: Kernel) -> None:
    agent = Speaker(kernel.link.boot)
    agent.join()
    for _ in range(1000):
        agent.say(Leaving("a reason"))
    agent.close(1000)
    eventually(lambda: kernel.lost)
    assert kernel.lost == ["its agent was killed, or the network failed"]
    assert kernel.heard == [Leaving("a reason")] * 1000
    works(kernel)


def flood() -> Iterator[tuple[object, list[bytes]]]:
    while True:
        yield "data", [bytes(1 << 18)]


def test_an_urgent_message_overtakes_a_flood(kernel: Kernel) -> None:
    agent = Speaker(kernel.link.boot, rcvhwm=1)
    agent.join()
    eventually(lambda: kernel.joined)
    (peer,) = kernel.joined
    kernel.link.send_in(peer, "a lane", flood())
    agent.socket.recv_multipart()
    kernel.link.send(peer, "urgent")
    before = 0
    while pickle.loads(agent.socket.recv_multipart()[0]) != "urgent":
        before += 1
    assert before < 100
    agent.close()


def test_a_peer_that_does_not_read_stalls_no_other(kernel: Kernel) -> None:
    deaf, agent = Speaker(kernel.link.boot, rcvhwm=1), Speaker(kernel.link.boot)
    deaf.join()
    eventually(lambda: len(kernel.joined) == 1)
    agent.join()
    eventually(lambda: len(kernel.joined) == 2)
    kernel.link.send_in(kernel.joined[0], "a lane", flood())
    kernel.link.send_in(kernel.joined[1], "a lane", [(number, ()) for number in range(1000)])
    assert [pickle.loads(agent.socket.recv_multipart()[0]) for _ in range(1000)] == list(range(1000))
    for each in (deaf, agent):
        each.close()
