"""Starts agents by commands, one for each node, such as ssh's. The keys go over the command's stdin."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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
    """Return the end of a command's stderr."""
    errors.seek(0, 2)
    errors.seek(max(0, errors.tell() - _LAST_BYTES))
    return errors.read().decode(errors="replace").strip()


class CommandStarter:
    """Runs commands, and ends them. The part of a `node_engine.Starter` that ssh and Slurm share."""

    proof: Proof = ""

    def __init__(self) -> None:
        self._running: list[tuple[Command, subprocess.Popen[bytes], IO[bytes]]] = []

    def run(self, commands: Sequence[Command], boot: Boot) -> None:
        """Start the commands.

        Raises:
            StartError: One cannot be started.
        """
        try:
            for command in commands:
                errors = tempfile.TemporaryFile()
                try:
                    process = subprocess.Popen(
                        command.arguments,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
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
        """Return what the first command that has exited said; empty if all run."""
        for command, process, errors in self._running:
            status = process.poll()
            if status is not None:
                said = said_in(errors)
                return f"{command.name}: the agent has exited with status {status}" + (f": {said}" if said else "")
        return ""

    def stop(self) -> None:
        """End the commands: their agents have been told to exit. Idempotent."""
        self.end()

    def end(self, *, at_once: bool = False) -> None:
        """End the commands.

        Args:
            at_once: Whether no agent can exit by itself. Default: False.
        """
        running, self._running = self._running, []
        processes = [process for _, process, _ in running]
        if not at_once:
            _wait_for(processes, timeouts.AGENT_EXIT_TIMEOUT_S)
        for process in processes:
            process.terminate()
        _wait_for(processes, timeouts.SERVER_KILL_TIMEOUT_S)
        for process in processes:
            process.kill()
        _wait_for(processes, timeouts.SERVER_KILL_TIMEOUT_S)  # one may wait in the operating system
        for command, process, errors in running:
            if process.returncode and not at_once:
                _log.warning("%s: the agent has exited with %s: %s", command.name, process.returncode, said_in(errors))
            errors.close()


def _wait_for(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all have exited, for `seconds` in all."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
