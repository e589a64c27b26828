"""A starter for tests: agents on the machines of a `Cluster`, with no Slurm, Ray or ssh between."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nblaunch.engines import current
from nblaunch.engines.command_starter import Command, CommandStarter
from nblaunch.errors import LaunchStoppedError
from nblaunch.wire.link_messages import Boot
from tests.conftest import MARK, eventually
from tests.engines.machines import KnownMachine

AGENT = f"""
from nblaunch.engines import fork_servers
fork_servers._OWN_ENVIRONMENT["{MARK}"] = ""  # as the agent: the ranks' environment has it
fork_servers._PRELOAD += ("pytest",)  # each rank imports a test file
from nblaunch.engines.agent import main
main()
"""


class MachineStarter(CommandStarter):
    """A `node_engine.Starter` over these machines."""

    name = "machines"

    def __init__(self, machines: Sequence[KnownMachine]) -> None:
        super().__init__()
        self._machines, self.count = machines, len(machines)
        self.queue = ""
        """What `state` returns."""

    def addresses(self, check: Callable[[], None]) -> Sequence[str]:
        return [machine.address for machine in self._machines]

    def start(self, boot: Boot) -> None:
        # Unmarked: they stay between tests, and build other fork servers meanwhile. `settle` finds what is left.
        env = ["env", "-u", MARK, "TMPDIR=/tmp"]
        self.run(
            [
                Command(n, machine.name, [*env, *machine.inside(sys.executable, "-c", AGENT)])
                for n, machine in enumerate(self._machines)
            ],
            boot,
        )

    def state(self) -> str:
        return self.queue


def have_begun() -> bool:
    """Return True if both ranks of the only launch of a test have printed ``begun``."""
    return [log.read_text() for log in _logs("out")] == ["begun\n"] * 2


def what_is_there() -> str:
    """What the nodes and the ranks of a test have said, for its failure."""
    said = [f"{log.name}: {log.read_text()[-2000:]!r}" for stream in ("out", "err") for log in _logs(stream)]
    return "\n".join([*current.status(), *said])


def _logs(stream: str) -> list[Path]:
    return sorted(Path(os.environ["NBLAUNCH_STATE_DIR"]).glob(f"*/rank*.{stream}"))


def check_that_a_stop_lets_ranks_finish(launch: Callable[..., Any]) -> None:
    """Stop a launch of two ranks, and assert that both have run their ``finally``."""

    def work() -> None:
        print("begun", flush=True)
        try:
            time.sleep(600)
        finally:
            print("saved")

    running = launch(work, block=False)
    eventually(lambda: have_begun() or running.done, otherwise=what_is_there)
    assert not running.done, running.result()  # which raises why not
    running.stop()
    with pytest.raises(LaunchStoppedError) as caught:
        running.result()
    files = caught.value._nblaunch_files  # type: ignore[attr-defined]
    assert [files.out(rank).read_text() for rank in (0, 1)] == ["begun\nsaved\n"] * 2
