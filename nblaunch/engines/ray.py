"""Nodes by Ray: an actor on each node starts an agent."""

from __future__ import annotations

from collections.abc import Sequence

from nblaunch.engines.command_starter import CommandStarter
from nblaunch.errors import StartError
from nblaunch.wire.link_messages import Boot


class RayStarter(CommandStarter):
    """A `node_engine.Starter`.

    Args:
        words: Options of the engine.
        num_nodes: The number of nodes.
    """

    def __init__(self, words: Sequence[str], num_nodes: int | None = None) -> None:
        super().__init__()
        self.name, self.count = "ray", num_nodes or 1

    def addresses(self) -> Sequence[str]:
        """Return the nodes' addresses."""
        raise StartError("engine='ray' is not available yet")

    def start(self, boot: Boot) -> None:
        """Start the actors."""

    def state(self) -> str:
        """Return what the placement group waits for."""
        return ""
