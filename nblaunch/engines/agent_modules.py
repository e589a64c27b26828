"""The user's own modules on an agent's node: those that it lacks or has otherwise come from the notebook's machine."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

from nblaunch.engines.agent_files import AgentFiles
from nblaunch.errors import StartError
from nblaunch.machine import timeouts
from nblaunch.machine.own_modules import digest_of
from nblaunch.wire.link_messages import Files, NeedFiles, Place


class AgentModules:
    """See the module. Threads that place groups wait here; the agent's loop asks the kernel for them.

    Args:
        wake: Lets the loop look at `asked`.

    Attributes:
        asked: What the loop is to send to the kernel.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.asked: deque[NeedFiles] = deque()
        self._wake = wake
        self._contents: dict[bytes, bytes] = {}
        """Files by digest."""
        self._awaited: dict[str, queue.SimpleQueue[Files]] = {}
        """By group: where a thread waits."""

    def path_for(self, message: Place, files: AgentFiles) -> list[str]:
        """Return what comes first in the ranks' ``sys.path``: a directory with the modules that differ here.

        Of a package that differs, all files are taken from the notebook's machine.

        Raises:
            StartError: The kernel does not send them.
        """
        differing = {file.package for file in message.modules if digest_of(file.path) != file.digest}
        wanted = [file for file in message.modules if file.package in differing]
        if not wanted:
            return []
        lacking = {file.digest for file in wanted} - self._contents.keys()
        if lacking:
            arrived: queue.SimpleQueue[Files] = queue.SimpleQueue()
            self._awaited[message.group] = arrived
            self.asked.append(NeedFiles(message.group, sorted(lacking)))
            self._wake()
            try:
                self._contents.update(arrived.get(timeout=timeouts.PROGRAM_TIMEOUT_S).contents)
            except queue.Empty:
                raise StartError(
                    f"the notebook's own modules have not come within {timeouts.PROGRAM_TIMEOUT_S:.0f} s: is the link "
                    "slow? Launch again"
                ) from None
            finally:
                del self._awaited[message.group]
        return [files.write_modules(wanted, self._contents)]

    def take(self, message: Files) -> None:
        """Give files to the thread that waits for them."""
        arrived = self._awaited.get(message.group)
        if arrived is not None:
            arrived.put(message)
