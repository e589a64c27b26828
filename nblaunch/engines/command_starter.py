"""Starts agents by commands, one for each node, such as ssh's. The keys go over the command's stdin."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO

from nblaunch.errors import StartError
from nblaunch.machine import timeouts
from nblaunch.wire.link_messages import Boot, Proof

AGENT = "nblaunch.engines.agent"
"""The module that commands run."""
_log = logging.getLogger(__name__)
_LAST_BYTES = 2000
"""Of a command's stderr, in an error."""
_NO_MODULE = re.compile(r"No module named '?(?P<module>torch|nblaunch(?P<inner>\.[\w.]+)?)(?![\w.])")
"""Said by a Python without torch or nblaunch; `inner`: it has another nblaunch."""


@dataclass(frozen=True, slots=True)
class Command:
    """What starts the agents of some nodes."""

    node: int
    """The number of the node; -1: the command starts several, which the kernel numbers by name."""
    name: str
    """For messages."""
    arguments: Sequence[str]


def python_on_nodes() -> str:
    """Return the Python that runs agents: ``NBLAUNCH_PYTHON``, else this one, by its path."""
    return os.environ.get("NBLAUNCH_PYTHON") or sys.executable


def said_in(errors: IO[bytes]) -> str:
    errors.seek(0, 2)
    errors.seek(max(0, errors.tell() - _LAST_BYTES))
    return errors.read().decode(errors="replace").strip()


class CommandStarter:
    """Runs commands, and ends them. The part of a `node_engine.Starter` that ssh and Slurm share."""

    proof: Proof = ""

    def __init__(self) -> None:
        self._running: list[tuple[Command, subprocess.Popen[bytes], IO[bytes]]] = []
        self._reported: Command | None = None
        """What `problem` has returned the reason of."""

    def run(self, commands: Sequence[Command], boot: Boot, env: Mapping[str, str] | None = None) -> None:
        try:
            for command in commands:
                errors = tempfile.TemporaryFile()
                try:
                    process = subprocess.Popen(
                        command.arguments,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                        env=env,
                        start_new_session=True,  # the notebook's Interrupt is not for it
                    )
                except OSError as error:
                    errors.close()
                    raise StartError(f"{command.name}: {error}") from error
                self._running.append((command, process, errors))
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it has exited: `problem` says why
                    process.stdin.write(json.dumps(asdict(replace(boot, node=command.node))).encode() + b"\n")
                    process.stdin.close()
        except BaseException:
            self.end(at_once=True)
            raise

    def problem(self) -> str:
        for command, process, errors in self._running:
            status = process.poll()
            if status is not None:
                self._reported = command
                return self.reason(command.name, status, said_in(errors))
        return ""

    def reason(self, name: str, status: int, said: str) -> str:
        python, details = python_on_nodes(), f": {said}" if said else ""
        if status in (126, 127) or f"{python}: No such file or directory" in said:  # srun exits with 2
            return (
                f"{name}: cannot start {python}; set NBLAUNCH_PYTHON to a Python there that has torch and "
                f"nblaunch{details}"
            )
        if missing := _NO_MODULE.search(said):
            module = "nblaunch of the notebook's version" if missing["inner"] else missing["module"]
            advice = "install it there, or set NBLAUNCH_PYTHON to a Python that has it"
            return f"{name}: {python} there has no {module}: {advice}"
        return f"{name}: the agent exited with status {status}{details}"

    def stop(self) -> None:
        """End the commands: their agents have been told to exit. Idempotent."""
        self.end()

    def end(self, *, at_once: bool = False) -> None:
        """End the commands; `at_once`, if no agent can exit by itself."""
        running, self._running = self._running, []
        failed = [] if at_once else [each for each in running if each[1].poll()]  # by themselves: none is ended yet
        processes = [process for _, process, _ in running]
        if not at_once:
            _wait_for(processes, timeouts.AGENT_EXIT_TIMEOUT_S)
        for process in processes:
            process.terminate()
        _wait_for(processes, timeouts.SERVER_KILL_TIMEOUT_S)
        for process in processes:
            process.kill()
        _wait_for(processes, timeouts.SERVER_KILL_TIMEOUT_S)  # one may wait in the operating system
        for command, process, errors in failed:
            if command != self._reported and (said := said_in(errors)):
                _log.warning("%s", self.reason(command.name, process.returncode, said))
        for _, _, errors in running:
            errors.close()


def _wait_for(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
