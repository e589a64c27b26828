"""Measures the ranks of a launch or a session, also after a restart has replaced their group."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nblaunch.engines.protocol import Sampler, Workers
from nblaunch.machine.usage import Usage


class UsageMeter:
    """See the module. Used from one thread.

    Args:
        device: The device of the ranks.
        env: The environment of the ranks.
    """

    def __init__(self, device: str, env: Mapping[str, str]) -> None:
        self._device, self._env = device, env
        self._workers: Workers | None = None
        self._sampler: Sampler | None = None

    def sample(self, workers: Workers | None, ranks: Collection[int]) -> list[Usage]:
        """Return the usage of these ranks, as far as they run.

        Args:
            workers: The present group; None before there is one.
            ranks: The ranks to measure.
        """
        if workers is not self._workers:
            self.close()
            self._workers = workers
            self._sampler = None if workers is None else workers.sampler(self._device, self._env)
        return [] if self._sampler is None else self._sampler.sample(ranks)

    def close(self) -> None:
        """Release the group. Idempotent."""
        if self._sampler is not None:
            self._sampler.close()
        self._workers = self._sampler = None
