"""Measures the ranks of this machine by their pids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import psutil

from nblaunch.machine.usage import Sampler, Usage


class LocalSampler:
    """An `engines.protocol.Sampler`.

    Args:
        pid_of: Returns the pid of a rank, in any thread; 0 before it has started.
        device: The device of the ranks.
        env: The environment of the ranks.
    """

    def __init__(self, pid_of: Callable[[int], int], device: str, env: Mapping[str, str]) -> None:
        self._pid_of, self._sampler = pid_of, Sampler(device, env)

    def sample(self, ranks: Collection[int]) -> list[Usage]:
        """Return the usage of those of these ranks that have a process."""
        pids = {rank: self._pid_of(rank) for rank in ranks}
        return self._sampler.sample({rank: pid for rank, pid in pids.items() if pid and psutil.pid_exists(pid)})

    def close(self) -> None:
        """Shut NVML down."""
        self._sampler.close()
