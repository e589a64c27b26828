"""Measures the ranks of this machine by their pids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from nblaunch.machine import processes
from nblaunch.machine.usage import Sampler, Usage


class LocalSampler:
    """An `engines.protocol.Sampler`.

    Args:
        pid_of: Returns the pid of a rank, in any thread; 0 before it has started.
        device: The device of the ranks.
        env: The environment of the ranks.
        first: The first rank of this machine, which has the first GPU.
    """

    def __init__(self, pid_of: Callable[[int], int], device: str, env: Mapping[str, str], first: int) -> None:
        self._pid_of, self._sampler, self._first = pid_of, Sampler(device, env), first

    def sample(self, ranks: Collection[int]) -> list[Usage]:
        """Return the usage of those of these ranks that have a process."""
        pids = {rank - self._first: self._pid_of(rank) for rank in ranks}
        usage = self._sampler.sample({local: pid for local, pid in pids.items() if pid and processes.alive(pid)})
        return [replace(each, rank=each.rank + self._first) for each in usage]

    def close(self) -> None:
        """Shut NVML down."""
        self._sampler.close()
