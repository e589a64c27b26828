"""A cell that waits for nodes: what it shows, and how it is cancelled. An `ssh` that never comes through stands in."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import LONG, eventually
from tests.kernel.harness import Kernel

SSH = """#!/bin/sh
case "$*" in *-G*) echo "hostname 127.0.0.1";; *) exec sleep 1000;; esac
"""
CELL = "notebook_launcher(lambda: None, engine='ssh gpu1 gpu2')"


@pytest.fixture
def waiting(panel_kernel: Kernel, tmp_path: Path) -> Iterator[Kernel]:
    """A kernel whose PATH has that `ssh`."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    path = panel_kernel.ask("__import__('os').environ['PATH']")
    panel_kernel.run(f"import os; os.environ['PATH'] = {f'{tmp_path}:{path}'!r}").check()
    yield panel_kernel
    panel_kernel.run(f"os.environ['PATH'] = {path!r}").check()


def sleepers(kernel: Kernel) -> list[psutil.Process]:
    return [child for child in psutil.Process(kernel.pid).children() if child.name() == "sleep"]


def test_a_click_cancels(waiting: Kernel) -> None:
    widgets = waiting.ask("len(__import__('ipywidgets').widgets.widget._instances)")
    request = waiting.start_cell(CELL)
    waiting.follow_cell(request, until="ssh gpu1 gpu2: starting agents on 2 nodes")
    (button,) = [
        message["content"]["comm_id"]
        for message in waiting.cells[request].messages
        if message["msg_type"] == "comm_open" and message["content"]["data"]["state"].get("description") == "Cancel"
    ]
    eventually(lambda: len(sleepers(waiting)) == 2)
    data = {"method": "custom", "content": {"event": "click"}}
    client = waiting.client
    client.shell_channel.send(client.session.msg("comm_msg", {"comm_id": button, "data": data}))
    cell = waiting.finish_cell(request)
    assert cell.error == "LaunchStoppedError: cancelled while waiting for nodes"
    assert not sleepers(waiting)
    assert waiting.ask("len(__import__('ipywidgets').widgets.widget._instances)") == widgets
    shown = [m["content"]["data"] for m in cell.messages if m["msg_type"].endswith("display_data")]
    assert shown[-1] == {"text/plain": ""}


def test_the_cell_says_again_that_it_is_busy_and_an_interrupt_cancels(waiting: Kernel) -> None:
    request = waiting.start_cell(CELL)
    cell = waiting.follow_cell(request, until="starting agents on 2 nodes")

    def busy() -> int:
        return sum(m["msg_type"] == "status" and m["content"]["execution_state"] == "busy" for m in cell.messages)

    while busy() < 2:  # a page whose widgets open has been told "idle" meanwhile
        waiting.take_message(time.monotonic() + LONG)
    waiting.interrupt()
    waiting.finish_cell(request)
    assert cell.error == "KeyboardInterrupt: interrupted while waiting for nodes: everything started was stopped"
    assert len(cell.traceback.splitlines()) == 1
    assert not sleepers(waiting)


def test_an_ssh_that_ends_is_the_error(waiting: Kernel) -> None:
    request = waiting.start_cell(CELL)
    waiting.follow_cell(request, until="starting agents on 2 nodes")
    eventually(lambda: len(sleepers(waiting)) == 2)
    sleepers(waiting)[0].kill()
    cell = waiting.finish_cell(request)
    assert re.match(r"StartError: gpu[12]: the agent exited with status -9", cell.error)
    assert not sleepers(waiting)
