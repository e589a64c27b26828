"""What is said of commands that should start agents, and have exited: real commands, without agents."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch.engines.command_starter import AGENT, Command, CommandStarter
from nblaunch.engines.ssh import SshStarter
from nblaunch.wire.link_messages import Boot
from tests.conftest import eventually

BOOT = Boot("tcp://127.0.0.1:9", "kernel key", "public key", "secret key")


@pytest.fixture
def starter() -> Iterator[CommandStarter]:
    made = CommandStarter()
    yield made
    made.end(at_once=True)


@pytest.fixture(autouse=True)
def _python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_PYTHON", "/opt/python")


def problem_of(starter: CommandStarter, *arguments: str) -> str:
    """Return what is said once the command has exited."""
    starter.run([Command(0, "gpu1", arguments)], BOOT)
    eventually(lambda: starter.problem() != "")
    return starter.problem()


def shell(said: str, status: int) -> tuple[str, ...]:
    return "sh", "-c", f"printf '%s\\n' \"$0\" >&2; exit {status}", said


WAY_OUT = "install it there, or set NBLAUNCH_PYTHON to a Python that has it"
RUNPY = "/opt/python: Error while finding module specification for 'nblaunch.engines.agent' (ModuleNotFoundError: "


@pytest.mark.parametrize(
    ("said", "status", "problem"),
    [
        (
            "Traceback (most recent call last):\n  File \"agent.py\"\nModuleNotFoundError: No module named 'torch'",
            1,
            f"/opt/python there has no torch: {WAY_OUT}",
        ),
        (
            f"{RUNPY}No module named 'nblaunch.engines')",
            1,
            f"/opt/python there has no nblaunch of the notebook's version: {WAY_OUT}",
        ),
        (
            "ModuleNotFoundError: No module named 'torch.xpu'",
            1,
            "the agent exited with status 1: ModuleNotFoundError: No module named 'torch.xpu'",
        ),
        (
            "bash: line 1: /opt/python: No such file or directory",
            127,
            "cannot start /opt/python; set NBLAUNCH_PYTHON to a Python there that has torch and nblaunch: "
            "bash: line 1: /opt/python: No such file or directory",
        ),
        (
            "slurmstepd: error: execve(): /opt/python: No such file or directory\nsrun: error: n1: task 0: Exited",
            2,
            "cannot start /opt/python; set NBLAUNCH_PYTHON to a Python there that has torch and nblaunch: "
            "slurmstepd: error: execve(): /opt/python: No such file or directory\nsrun: error: n1: task 0: Exited",
        ),
        ("out of memory", 3, "the agent exited with status 3: out of memory"),
    ],
)
def test_the_problem_says_what_to_do(starter: CommandStarter, said: str, status: int, problem: str) -> None:
    assert problem_of(starter, *shell(said, status)) == f"gpu1: {problem}"


def test_a_real_python_without_nblaunch_is_named(starter: CommandStarter, tmp_path: Path) -> None:
    bare = problem_of(starter, "env", "-C", str(tmp_path), sys.executable, "-IS", "-m", AGENT)
    assert bare == f"gpu1: /opt/python there has no nblaunch: {WAY_OUT}"


def test_a_failure_of_ssh_says_what_must_work() -> None:
    starter = SshStarter(["-F", "my config", "gpu1"])
    try:
        assert problem_of(starter, *shell("no.", 255)) == (
            "gpu1: ssh failed: no. `ssh -F 'my config' gpu1 true` must work in a terminal of this machine, without "
            "a password or other prompt"
        )
    finally:
        starter.end(at_once=True)


def test_only_a_command_that_failed_is_logged(
    starter: CommandStarter, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    subprocess.run(["mkfifo", fifo], check=True)
    # Says something, waits to be ended, and then exits as ssh does.
    waits = f"trap 'exit 255' TERM; echo connected >&2; echo > {fifo}; while :; do sleep 0.05; done"
    commands = {
        "healthy": ("sh", "-c", waits),
        "silent": shell("", 1),
        "done": shell("bye", 0),
        "failed": shell("out of memory", 3),
    }
    starter.run([Command(number, name, each) for number, (name, each) in enumerate(commands.items())], BOOT)
    fifo.read_text()
    eventually(lambda: sum(process.poll() is not None for _, process, _ in starter._running) == 3)
    with caplog.at_level(logging.WARNING):
        starter.end()
    assert [record.message for record in caplog.records] == ["failed: the agent exited with status 3: out of memory"]
