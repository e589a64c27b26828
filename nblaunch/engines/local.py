"""This machine as an engine: ranks of a fork server, fresh interpreters, or forks of the kernel."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from nblaunch.engines import kernel_fork
from nblaunch.engines.fork_servers import Where, servers
from nblaunch.engines.local_workers import LocalWorkers
from nblaunch.engines.protocol import Order, Wakeup
from nblaunch.errors import ArgumentError
from nblaunch.machine.inventory import Machine, this_machine, this_process
from nblaunch.wire.messages import Method


class LocalEngine:
    """An `engines.protocol.Engine`.

    Args:
        platform: Decides which start methods are safe. Default: this machine's.
    """

    start_methods = ("auto", "forkserver", "spawn", "fork")

    def __init__(self, platform: str = sys.platform) -> None:
        self._is_linux = platform == "linux"

    is_local = True

    def machines(
        self, show: Callable[[str], None] = lambda text: None, give_up: Callable[[], bool] = lambda: False
    ) -> Sequence[Machine]:
        """Return this machine, at once."""
        return [this_machine()]

    # -------------------------------------------------------------- start methods
    def resolve(self, method: str) -> Method:
        """Return ``forkserver`` for ``auto`` on Linux, ``spawn`` elsewhere."""
        if method == "forkserver" and not self._is_linux:
            raise ArgumentError("start_method='forkserver': fork is safe on Linux only; use start_method='spawn'")
        if method == "auto":
            return "forkserver" if self._is_linux else "spawn"
        return cast("Method", method)

    def check_kept(self, method: str) -> None:
        """Refuse forks of the kernel: they have its memory as it was then."""
        if method == "fork":
            raise ArgumentError(
                "start_method='fork': a session's ranks are not forks of the notebook; use 'forkserver' or 'spawn'"
            )

    def usable(
        self,
        method: str,
        env: Mapping[str, str],
        named: Sequence[str],
        cuda_cell: Callable[[], str],
        show: Callable[[str], None] = lambda text: None,
    ) -> Method:
        """Return `method`, or ``spawn`` with a warning if the fork server cannot fork ranks."""
        if method == "fork":
            kernel_fork.check_fork(cuda_cell())
        return servers.usable(cast("Method", method), Where(env, os.sep, named), show)

    def shares_memory(self, method: str) -> bool:
        """Return True for a fork of the kernel."""
        return method == "fork"

    # -------------------------------------------------------------- starting
    def place(self, order: Order, wakeup: Wakeup) -> LocalWorkers:
        """Ask for a reaper, without waiting for it."""
        if order.method == "fork":
            assert order.payload is not None
            reaper = kernel_fork.fork_kernel(order.payload)
        else:
            where = Where(order.envs[0], order.process.cwd, order.named)
            reaper = servers.reaper(cast("Method", order.method), where)
        return LocalWorkers(order, reaper, wakeup)

    def prepare_next(self) -> None:
        """Build the fork server that the next launch can use."""
        servers.build_soon()

    # -------------------------------------------------------------- between launches
    def warm_up(self) -> None:
        """Start the fork server, on Linux."""
        if self._is_linux:
            servers.warm_up()

    def refresh(self) -> None:
        """Replace a fork server that is out of date."""
        servers.refresh()

    def preload(self, modules: Sequence[str], env: Mapping[str, str] | None = None, named: Sequence[str] = ()) -> None:
        """Build a fork server that has imported these modules."""
        where = None if env is None else Where(env, this_process().cwd, named)
        servers.preload(modules, where, again=where is not None)

    def status(self) -> list[str]:
        """Return lines about the fork servers."""
        return servers.status()

    def stop(self) -> None:
        """Kill every fork server."""
        servers.stop()
