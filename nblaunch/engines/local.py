"""This machine as an engine: ranks of a fork server, fresh interpreters, or forks of the kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from nblaunch.engines import kernel_fork
from nblaunch.engines.generations import servers
from nblaunch.engines.import_environment import Where
from nblaunch.engines.local_workers import LocalWorkers
from nblaunch.engines.protocol import Order, Wakeup
from nblaunch.wire.messages import Method


class LocalEngine:
    """An `engines.protocol.Engine`."""

    def usable(
        self, method: Method, env: Mapping[str, str], named: Sequence[str], cuda_cell: Callable[[], str]
    ) -> Method:
        """Return `method`, or ``spawn`` with a warning if the fork server cannot fork ranks."""
        if method == "fork":
            kernel_fork.check_fork(cuda_cell())
        return servers.usable(method, Where(env, os.sep, named))

    def shares_memory(self, method: Method) -> bool:
        """Return True for a fork of the kernel."""
        return method == "fork"

    def place(self, order: Order, wakeup: Wakeup) -> LocalWorkers:
        """Ask for a reaper, without waiting for it."""
        if order.method == "fork":
            assert order.payload is not None
            reaper = kernel_fork.fork_kernel(order.payload)
        else:
            where = Where(order.env, order.process.cwd, order.named)
            reaper = servers.reaper(order.method, order.launch_id, order.world_size, where)
        return LocalWorkers(order, reaper, wakeup)

    def prepare_next(self) -> None:
        """Build the fork server that the next launch can use."""
        servers.build_soon()


engine = LocalEngine()
