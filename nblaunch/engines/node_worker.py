"""The kernel's end of ranks on other nodes: what their agents have said of them, and copies of their files."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from nblaunch.engines.protocol import Stream
from nblaunch.engines.rank_files import LogFile, OutputFile
from nblaunch.machine.usage import Usage
from nblaunch.wire.collective_table import Begun
from nblaunch.wire.debug_messages import ToDebugger
from nblaunch.wire.delivery import Part
from nblaunch.wire.display_records import SUFFIXES
from nblaunch.wire.drops import Dropped
from nblaunch.wire.launch_files import output_file, rank_file
from nblaunch.wire.link_messages import AskStacks, Signal, ToGroup, ToRank
from nblaunch.wire.messages import Free, Interrupt

_log = logging.getLogger(__name__)
MAX_NAMED_NODES = 8
"""In the note on where ranks run."""
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def append(path: str, data: Part) -> None:
    """Append to the copy of a rank's file."""
    try:
        fd = os.open(path, _APPENDING, 0o600)
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
    except OSError as error:  # a full disk here: the file on the node is complete
        _log.warning("nblaunch: the copy of %s is incomplete: %s", path, error)


def ranks_in_words(ranks: range) -> str:
    """Return the ranks of a node in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def places_in_words(ranks: Sequence[range], nodes: Sequence[str]) -> str:
    """Return which ranks run on which node, in words."""
    where = [f"{ranks_in_words(own)} on {node}" for own, node in zip(ranks, nodes, strict=True)]
    more = [f"… on {len(nodes)} nodes"] if len(nodes) > MAX_NAMED_NODES else []
    return ", ".join(where[:MAX_NAMED_NODES] + more)


class NodeStacks:
    """An `engines.protocol.StackDumps` that asks over the link."""

    def __init__(self, ask: Callable[[float], None]) -> None:
        self.main = ""
        self.dump: str | None = None
        self.is_ready = False
        self._ask = ask

    def ask(self, signal_at: float) -> None:
        """Ask the agent."""
        self.dump = None
        self._ask(max(0.0, signal_at - time.monotonic()))

    def look(self, now: float) -> bool:
        """Return True if the answer has come."""
        return self.dump is not None

    def take(self, main: str, dump: str | None) -> None:
        """Note what the agent has answered."""
        self.is_ready, self.main = True, main
        if dump is not None:
            self.dump = dump


class NodeWorker:
    """One rank of another node, an `engines.protocol.Worker`.

    Args:
        group: The id of its group.
        rank: The rank.
        log_dir: The copies of what it writes, until the first task says otherwise.
        send: Sends a message to the agent of the rank's node.
    """

    def __init__(self, group: str, rank: int, log_dir: Path, send: Callable[[ToGroup], None]) -> None:
        self.rank, self.log_dir = rank, log_dir
        self.stacks = NodeStacks(lambda after: send(AskStacks(group, rank, after)))
        self.is_open = True
        self.has_exited = False
        self._group, self._send = group, send
        self._dropped = Dropped()
        self._begun: Sequence[Begun] = ()

    def interrupt(self, task: int) -> None:
        """See `engines.protocol.Worker`, as for all below."""
        self._send(ToRank(self._group, self.rank, Interrupt(task)))

    def free(self, task: int) -> None:
        """Ask the agent."""
        self._send(ToRank(self._group, self.rank, Free(task)))

    def tell(self, message: ToDebugger) -> None:
        """Ask the agent."""
        self._send(ToRank(self._group, self.rank, message))

    def signal(self, signum: int, group: bool = False) -> None:
        """Ask the agent."""
        self._send(Signal(self._group, self.rank, signum, group))

    def turn_to(self, log_dir: Path) -> None:
        """Follow another task's files and counters."""
        self.log_dir, self._dropped = log_dir, Dropped()

    def log(self, stream: Stream) -> LogFile:
        """Return the copy here of what the rank writes."""
        return LogFile(rank_file(self.log_dir, self.rank, stream))

    def output(self, key: str, mime: str) -> OutputFile:
        """Return the copy here; it comes before the record that refers to it."""
        return OutputFile(output_file(self.log_dir, self.rank, key, SUFFIXES[mime]))

    def dropped(self) -> Dropped:
        """Return what the agent has read last."""
        return self._dropped

    def collectives(self) -> Sequence[Begun]:
        """Return what the agent has read last, half a second ago at most."""
        return self._begun

    def take_counts(self, dropped: Dropped | None, begun: Sequence[Begun] | None) -> None:
        """Note what the agent has read."""
        self._dropped = self._dropped if dropped is None else dropped
        self._begun = self._begun if begun is None else begun


class NodeSampler:
    """An `engines.protocol.Sampler`: the agents measure, and this returns what they have sent last."""

    def __init__(self, end: Callable[[NodeSampler], None]) -> None:
        self.latest: dict[int, Usage] = {}
        self._end = end

    def sample(self, ranks: Collection[int]) -> list[Usage]:
        """Return the last usage of these ranks."""
        return [usage for rank, usage in sorted(self.latest.items()) if rank in ranks]

    def close(self) -> None:
        """Let the agents measure no more. Idempotent."""
        self._end(self)


class NodeSamplers:
    """The samplers of a group, for which its agents measure.

    Args:
        measure: Lets them begin, on a device, or end: empty.
    """

    def __init__(self, measure: Callable[[str], None]) -> None:
        self._open: list[NodeSampler] = []
        self._measure = measure

    def open(self, device: str) -> NodeSampler:
        """Return another sampler."""
        if device != "cpu" or not self._open:
            self._measure(device)
        sampler = NodeSampler(self._end)
        self._open.append(sampler)
        return sampler

    def _end(self, sampler: NodeSampler) -> None:
        if sampler in self._open:
            self._open.remove(sampler)
            if not self._open:
                self._measure("")

    def take(self, usages: Iterable[Usage]) -> None:
        """Note what an agent has measured."""
        latest = {usage.rank: usage for usage in usages}
        for sampler in self._open:
            sampler.latest.update(latest)
