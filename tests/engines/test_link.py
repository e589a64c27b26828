"""The link between the kernel and its agents: who may speak, and what a broken connection costs."""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq

from nblaunch.engines.link import JOIN, Link, Peer
from nblaunch.engines.versions import versions_here
from nblaunch.machine import munge
from nblaunch.machine.inventory import Machine
from nblaunch.wire.delivery import Delivery
from nblaunch.wire.link_messages import Boot, Joined, Proof, Want
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

    def __init__(self, boot: Boot, endpoint: str | None = None, keys: tuple[bytes, bytes] | None = None) -> None:
        self.context, self.delivery = zmq.Context(), Delivery()
        self.socket = self.context.socket(zmq.DEALER)
        public, secret = keys or (boot.public_key.encode(), boot.secret_key.encode())
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, boot.kernel_key.encode())
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self.identity, self.proof = os.urandom(12).hex().encode(), b""
        self.socket.setsockopt(zmq.ROUTING_ID, self.identity)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.connect(endpoint or boot.endpoint)

    def join(self) -> None:
        joined = pickle.dumps(Joined(Machine(0, 1, "linux", {}, name="here")))
        self.socket.send_multipart([JOIN, json.dumps(asdict(versions_here())).encode(), self.proof, joined])

    def say(self, message: object) -> None:
        self.socket.send_multipart(self.delivery.wrap([pickle.dumps(message)]))

    def close(self) -> None:
        self.context.destroy(linger=0)


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
    agent.say(Want("a key"))
    eventually(lambda: kernel.heard[heard:] == [Want("a key")])
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
    stolen = munge.credential(boot.text_to_prove(agent.identity)).encode()
    for proof in (b"", b"MUNGE:nonsense:", munge.credential("another text").encode(), stolen):
        thief.socket.send_multipart([JOIN, versions, proof, bomb])
    thief.socket.send_multipart(thief.delivery.wrap([bomb]))
    agent.proof = munge.credential(boot.text_to_prove(agent.identity)).encode()
    agent.join()
    agent.say(Want("a key"))
    eventually(lambda: kernel.heard == [Want("a key")])
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


class Recorder:
    """A proxy that records what a client sends."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.recorded: list[bytes] = []
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                kernel = socket.create_connection(self._target)
                self._sockets += [client, kernel]
                threading.Thread(target=self._pump, args=(client, kernel, self.recorded), daemon=True).start()
                threading.Thread(target=self._pump, args=(kernel, client, []), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, record: list[bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                record.append(data)
                target.sendall(data)

    def cut(self) -> None:
        """Close the connections; another may be made."""
        for made in self._sockets[1:]:
            with suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)
            made.close()
        del self._sockets[1:]

    def close(self) -> None:
        self.cut()
        self._server.close()


@pytest.fixture
def recorder(kernel: Kernel) -> Iterator[Recorder]:
    address = urlsplit(kernel.link.boot.endpoint)
    made = Recorder((address.hostname or "", address.port or 0))
    yield made
    made.close()


def test_a_replay_of_an_agents_bytes_says_nothing(kernel: Kernel, recorder: Recorder) -> None:
    agent = Speaker(kernel.link.boot, recorder.endpoint)
    agent.join()
    agent.say(Want("a key"))
    eventually(lambda: kernel.heard == [Want("a key")])
    assert b"a key" not in b"".join(recorder.recorded)  # it is encrypted
    agent.close()
    address = urlsplit(kernel.link.boot.endpoint)
    with socket.create_connection((address.hostname, address.port or 0)) as replay:
        with suppress(OSError):
            replay.sendall(b"".join(recorder.recorded))
            replay.settimeout(5)
            while replay.recv(4096):  # until the kernel closes it
                pass
    works(kernel)
    assert kernel.heard == [Want("a key")] * 2  # the second is of `works`


def test_messages_survive_a_connection_that_breaks(kernel: Kernel, recorder: Recorder) -> None:
    agent = Speaker(kernel.link.boot, recorder.endpoint)
    agent.join()
    for number in range(2000):
        agent.say(Want(str(number)))
        if number % 400 == 399:
            recorder.cut()
            agent.join()  # as agents do: the first may have been lost
    keys = [str(number) for number in range(2000)]

    def heard() -> bool:
        while agent.socket.poll(0):
            if agent.delivery.take(agent.socket.recv_multipart()) == "request":
                for again in agent.delivery.again():
                    agent.socket.send_multipart(again)
        if not agent.socket.poll(20):
            if not kernel.heard:
                agent.join()
            agent.socket.send_multipart(agent.delivery.confirmation())
        return wanted(kernel.heard) == keys

    eventually(heard, otherwise=lambda: f"{len(kernel.heard)} messages")
    agent.close()


def wanted(messages: Sequence[object]) -> list[str]:
    return [message.key for message in messages if isinstance(message, Want)]
