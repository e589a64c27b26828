"""The socket of a detached run: who may connect, and that nothing that a peer sends ends the service."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nblaunch.launch.control import ControlLink, ControlServer
from nblaunch.launch.debug_console import DebugConsole, RemoteConsole
from nblaunch.launch.run_folders import write_facts
from nblaunch.wire.messages import Asked, Typed
from tests.conftest import eventually
from tests.unit.test_debug_console import Ranks


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

    def ask_stacks(self, timeout: float = 0.0) -> None:
        self.asked.append(f"stacks in {timeout} s")

    def ask_profile(self, seconds: float = 0.0) -> None:
        self.asked.append(f"a profile of {seconds} s")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    write_facts(tmp_path, "1-1-abcdef", "train", "")
    made = ControlServer(tmp_path)
    yield made
    made.close()
    assert not (tmp_path / "control").exists()


def test_several_processes_control_a_launch(server: ControlServer, tmp_path: Path) -> None:
    launch, links = FakeLaunch(), [ControlLink(tmp_path), ControlLink(tmp_path)]
    server.control(launch)
    for request, link in (({"do": "stacks", "timeout": 7.0}, links[0]), ({"do": "stop"}, links[1])):
        link.send(request)
    links[0].send({"do": "kill"})
    eventually(lambda: launch.asked == ["stacks in 7.0 s", "stop", "kill"])


def test_two_processes_see_a_console_and_one_line_answers_its_prompt(server: ControlServer, tmp_path: Path) -> None:
    ranks, launch = Ranks(), FakeLaunch()
    launch.console = ranks.console
    server.control(launch)
    first, second = ControlLink(tmp_path), ControlLink(tmp_path)
    ranks.stops(0)
    for link, other in ((first, "-> x = 1"), (second, "-> x = 1"), (second, "")):
        assert link.poll()
        text = link.console.take_text()
        assert other in text if other else text == ""
        assert len(link.console.states) == 1
    prompt, stale = first.console.prompt, second.console.prompt
    assert prompt is not None
    assert stale is not None
    first.console.type(prompt, "n")
    second.console.type(stale, "c")
    assert second.poll()
    assert [typed.line for _, typed in ranks.console.outgoing() if isinstance(typed, Typed)] == ["n"]
    ranks.prints(0, "-> y = 2\n")
    ranks.asks(0)
    for link in (first, second, ControlLink(tmp_path)):
        assert link.poll()
        text = link.console.take_text()
        assert "-> y = 2" in text
        assert "-> x = 1" not in text
        assert link.console.prompt not in (None, prompt, stale)


def test_a_long_text_reaches_who_has_seen_its_begin(server: ControlServer, tmp_path: Path) -> None:
    ranks, launch, text = Ranks(), FakeLaunch(), "x" * 20_000
    launch.console = ranks.console
    server.control(launch)
    links = [ControlLink(tmp_path), ControlLink(tmp_path)]
    ranks.stops(0, "")
    assert [link.poll() for link in links] == [True, True]
    ranks.prints(0, text)
    links[0].poll()
    assert text in links[0].console.take_text()
    prompt = links[0].console.prompt
    assert prompt is not None
    links[0].console.type(prompt, "n")  # the other has not seen the text yet
    late = ControlLink(tmp_path)
    for link in (links[1], late):
        link.poll()
    assert text in links[1].console.take_text()
    assert late.console.take_text() == ""


def test_a_file_system_that_gives_no_answer_ends_nothing(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, asked = FakeLaunch(), threading.Event()
    server.control(launch)

    def stale(path: Any) -> None:
        asked.set()
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "stat", stale)
    assert asked.wait(10.0)
    monkeypatch.undo()
    assert ControlLink(tmp_path).poll()
    assert launch.asked == []


def test_a_runner_of_another_version_has_not_ended(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = ControlLink(tmp_path)
    monkeypatch.setattr(server, "_usage", lambda: [{"of_another": "version"}])
    assert link.poll()
    assert link.usages == []


def test_a_prompt_that_is_answered_is_not_asked_again() -> None:
    console, asked = RemoteConsole(lambda request: None), dataclasses.asdict(Asked(0, 1, 1, ""))
    shown = {"is_open": True, "has_examined": False, "states": [], "text": ""}
    here = {"text": "(Pdb) ", "asked": asked}

    def asks(prompt: Mapping[str, Any] | None) -> bool:
        console.take({**shown, "prompt": prompt})
        return console.prompt is not None

    assert asks(here)
    assert console.prompt is not None
    console.type(console.prompt, "c")
    assert not asks(here)  # the runner's answer was on its way
    assert not asks(None)
    assert asks(here)  # by a rank that was started again


def test_a_stop_before_there_is_a_launch_stops_it(server: ControlServer, tmp_path: Path) -> None:
    launch, link = FakeLaunch(), ControlLink(tmp_path)
    link.send({"do": "stop"})
    eventually(lambda: server._is_stopped)
    server.control(launch)
    assert launch.asked == ["stop"]


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
        eventually(lambda: launch.asked == ["stop"])


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
    write_facts(folder, "1-1-abcdef", "train", "")
    server, launch = ControlServer(folder), FakeLaunch()
    server.control(launch)
    link: Any = ControlLink(folder)
    link.send({"do": "kill"})
    eventually(lambda: launch.asked == ["kill"])
    server.close()
    assert [path.name for path in folder.iterdir()] == ["run.json"]
