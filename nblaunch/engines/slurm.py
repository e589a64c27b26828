"""Nodes by Slurm: one srun gets the nodes and starts an agent on each."""

from __future__ import annotations

from collections.abc import Sequence

from nblaunch.engines.command_starter import CommandStarter
from nblaunch.errors import StartError
from nblaunch.wire.link_messages import Boot


class SlurmStarter(CommandStarter):
    """A `node_engine.Starter`.

    Args:
        words: Options of srun.
        num_nodes: The number of nodes.
    """

    def __init__(self, words: Sequence[str], num_nodes: int | None = None) -> None:
        super().__init__()
        self.name, self.count = "slurm", num_nodes or 1

    def addresses(self) -> Sequence[str]:
        """Return the nodes' addresses."""
        raise StartError("engine='slurm' is not available yet")

    def start(self, boot: Boot) -> None:
        """Run srun."""

    def state(self) -> str:
        """Return what the job waits for."""
        return ""
