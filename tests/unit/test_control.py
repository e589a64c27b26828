"""The socket of a detached run: who may connect, and that nothing that a peer sends ends the service."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nblaunch.launch.control import ControlLink, ControlServer
from nblaunch.launch.debug_console import DebugConsole
from tests.conftest import eventually


class FakeLaunch:
    """Notes what it is asked for."""

    done = False

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.console = DebugConsole(1, {})

    def stop(self) -> None:
        self.asked.append("stop")

    def kill(self) -> None:
        self.asked.append("kill")

    def ask_stacks(self) -> None:
        self.asked.append("stacks")


def was_asked(launch: FakeLaunch, last: str) -> bool:
    return launch.asked[-1:] == [last]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    made = ControlServer(tmp_path)
    yield made
    made.close()
    assert not (tmp_path / "control").exists()


def test_several_processes_control_a_launch(server: ControlServer, tmp_path: Path) -> None:
    launch, links = FakeLaunch(), [ControlLink(tmp_path), ControlLink(tmp_path)]
    server.control(launch)
    for asked, link in zip(("stacks", "stop", "kill"), (*links, links[0]), strict=True):
        link.send({"do": asked})
        eventually(partial(was_asked, launch, asked))
    links[0].disconnect()
    links[1].send({"do": "stop"})
    eventually(lambda: launch.asked == ["stacks", "stop", "kill", "stop"])
    links[1].disconnect()


def test_a_stop_before_there_is_a_launch_stops_it(server: ControlServer, tmp_path: Path) -> None:
    launch, link = FakeLaunch(), ControlLink(tmp_path)
    link.send({"do": "stop"})
    eventually(lambda: server._is_stopped)
    server.control(launch)
    assert launch.asked == ["stop"]
    link.disconnect()


@pytest.mark.parametrize(
    "sent", [b"\xff\0\n", b"[]\n", b'{"do": ["stop"]}\n', b'{"do": "look"}\n', b'{"do": "look", "rank": "x"}\n']
)
def test_what_a_peer_of_another_version_sends_does_not_end_the_service(
    sent: bytes, server: ControlServer, tmp_path: Path
) -> None:
    launch = FakeLaunch()
    server.control(launch)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(tmp_path / "control"))
        peer.sendall(sent)
        link = ControlLink(tmp_path)
        link.send({"do": "stop"})
        eventually(lambda: launch.asked == ["stop"], 10.0)
        link.disconnect()


def test_another_user_is_refused(server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, user = FakeLaunch(), os.getuid()
    server.control(launch)
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(tmp_path / "control"))
        peer.settimeout(10.0)
        assert peer.recv(1) == b""
        with pytest.raises(OSError, match="Broken pipe"):
            peer.sendall(json.dumps({"do": "stop"}).encode() + b"\n")
    assert launch.asked == []


def test_a_folder_with_a_long_path_has_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    server, launch = ControlServer(folder), FakeLaunch()
    server.control(launch)
    link: Any = ControlLink(folder)
    link.send({"do": "kill"})
    eventually(lambda: launch.asked == ["kill"])
    link.disconnect()
    server.close()
    assert [*folder.iterdir()] == []
