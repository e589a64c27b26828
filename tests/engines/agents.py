"""A starter for tests: agents on the machines of a `Cluster`, with no Slurm, Ray or ssh between."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nblaunch.engines.command_starter import Command, CommandStarter
from nblaunch.wire.link_messages import Boot
from tests.conftest import MARK
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
    logs = sorted(Path(os.environ["NBLAUNCH_STATE_DIR"]).glob("*/rank*.out"))
    return [log.read_text() for log in logs] == ["begun\n"] * 2
