"""The kernel's end of one rank on this machine: its channel, its files, and signals through the reaper."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from nblaunch.engines.protocol import Stream
from nblaunch.engines.rank_files import LogFile, OutputFile
from nblaunch.engines.stack_files import StackFile
from nblaunch.wire.channel import Channel
from nblaunch.wire.display_records import SUFFIXES
from nblaunch.wire.launch_files import output_file, rank_file
from nblaunch.wire.messages import Free, Interrupt, SendSignal
from nblaunch.wire.tables import Begun, CollectiveTable, Dropped, DropTable


class LocalWorker:
    """One rank of this machine, an `engines.protocol.Worker`.

    Args:
        rank: The rank.
        channel: Its channel to the kernel.
        log_dir: Where it writes until the first task says otherwise.
        reaper: Sends a message to the reaper.
        drops: What it could not write; None: not noted.
        collectives: What it has begun; None: not logged.
        is_kept: Whether the rank stays for many tasks.
    """

    def __init__(
        self,
        rank: int,
        channel: Channel,
        log_dir: Path,
        reaper: Callable[[object], None],
        drops: DropTable | None,
        collectives: CollectiveTable | None,
        is_kept: bool,
    ) -> None:
        self.rank = rank
        self.channel = channel
        self.stacks = StackFile(rank_file(log_dir, rank, "stacks"), self.signal)
        self.pid = 0
        """0 before the rank has started."""
        self.has_exited = self.is_shut = False
        self.owes = False
        """The rank was sent descriptors that it has not taken yet."""
        self.log_dir = log_dir  # where the present task writes
        self._reaper, self._drops, self._is_kept = reaper, drops, is_kept
        self._collectives = collectives

    @property
    def is_open(self) -> bool:
        """See `engines.protocol.Worker`, as for all below."""
        return not self.channel.closed

    def interrupt(self, task: int) -> None:
        """Ask the rank's reading thread; a rank that has only one task is sent the signal as well."""
        self.tell(Interrupt(task))
        if not self._is_kept:
            self.signal(signal.SIGINT)

    def free(self, task: int) -> None:
        """Ask the rank's reading thread."""
        self.tell(Free(task))

    def tell(self, message: object) -> None:
        """Send a message to the reading thread."""
        if not self.is_shut:
            with contextlib.suppress(OSError):  # already exited; RankExited will report it
                self.channel.send(message)

    def turn_to(self, log_dir: str) -> None:
        """Follow another task's files."""
        self.log_dir = Path(log_dir)
        if self._drops is not None:
            self._drops.clear(self.rank)

    def shut(self) -> None:
        """Send no more messages: the rank reads EOF."""
        self.is_shut = True
        with contextlib.suppress(OSError):  # already exited
            self.channel.sock.shutdown(socket.SHUT_WR)

    def signal(self, signum: int, group: bool = False) -> None:
        """Ask the reaper to send a signal."""
        self._reaper(SendSignal(self.rank, signum, group))

    def log(self, stream: Stream) -> LogFile:
        """Return the file that the rank writes."""
        return LogFile(rank_file(self.log_dir, self.rank, stream))

    def output(self, key: str, mime: str) -> OutputFile:
        """Return the file that the rank has written beside its spool."""
        return OutputFile(output_file(self.log_dir, self.rank, key, SUFFIXES[mime]))

    def dropped(self) -> Dropped:
        """Read the rank's flags."""
        return self._drops.read(self.rank) if self._drops is not None else Dropped()

    def collectives(self) -> Sequence[Begun]:
        """Read the rank's rows of the table."""
        return self._collectives.read(self.rank) if self._collectives is not None else ()
