"""The ranks of one group on this machine: a reaper starts and signals them, each has a channel to the kernel.

A single selector waits for all events. Signals go through the reaper, which knows which pids are still its children.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nblaunch.engines.fork_servers import Reaper, servers
from nblaunch.engines.local_worker import LocalWorker
from nblaunch.engines.protocol import Descriptors, Event, Lost, LostDescriptors, Order, Received, Store, Wakeup
from nblaunch.engines.rendezvous import Rendezvous
from nblaunch.errors import StartError
from nblaunch.machine import named_resources, timeouts
from nblaunch.machine.inventory import LOOPBACK
from nblaunch.machine.limits import refused_threads, remedy
from nblaunch.wire.channel import LostDescriptorsError, channel_pair, must_be_read, readable
from nblaunch.wire.launch_files import rank_file
from nblaunch.wire.messages import (
    EndGroup,
    Method,
    NotStarted,
    RankExited,
    RankSpec,
    RankStarted,
    ReaperStarted,
    StartRank,
    Swept,
    Taken,
    Task,
)
from nblaunch.wire.tables import CollectiveTable, DropTable

if TYPE_CHECKING:
    from nblaunch.engines.local_sampler import LocalSampler

_log = logging.getLogger(__name__)
_OWN_THREADS = 6
"""Of this process: the rendezvous', the panel's, the cache's, pyzmq's, and two to spare. If the first is refused, torch
aborts the process."""
_RANK_THREADS = 6
"""Of a rank that has joined its group, its own included."""
MAX_FDS_IN_FLIGHT = 100
"""Descriptors in flight for a group, or for one rank if it needs more. Linux limits a user's to ``ulimit -n``."""


class LocalWorkers:
    """The ranks of one group, an `engines.protocol.Workers`.

    Args:
        order: The group to start.
        reaper: The parent of the ranks, which may not have answered yet.
        wakeup: Ends `wait`.
    """

    def __init__(self, order: Order, reaper: Reaper, wakeup: Wakeup) -> None:
        self.has_begun = False
        self.heard_at = 0.0
        self.is_kept = order.is_kept
        self.drops: DropTable | None = None
        self.collectives: CollectiveTable | None = None
        self._order, self._reaper, self._wakeup = order, reaper, wakeup
        self._control = reaper.channel
        self._reaper_pidfd: int | None = None
        self._ranks = order.ranks[0]
        self._workers: dict[int, LocalWorker] = {}
        self._taskless: deque[LocalWorker] = deque()
        """Ranks whose task is posted and not sent."""
        self._fds_each = 0
        self._is_careful = self._is_dismissed = False
        self._events: deque[Event] = deque()
        self._has_ended = False
        """`Swept` or `Lost` was reported."""
        self._opened = contextlib.ExitStack()

    @property
    def notes(self) -> Sequence[str]:
        """Nothing: ranks run where the notebook does."""
        return ()

    def fileno(self) -> int:
        """Return a descriptor that is readable while `wait` has something to return; for an agent, which polls."""
        return self._selector.fileno()

    # -------------------------------------------------------------- starting
    def open_store(self, give_up: Callable[[], bool] = lambda: False, address: str = LOOPBACK) -> Store:
        """Serve the store on an address of this machine, at once."""
        if refused := refused_threads(_OWN_THREADS + _RANK_THREADS * len(self._ranks)):
            raise StartError(f"the ranks could not be started: {refused}")
        try:
            return self._opened.enter_context(Rendezvous(self._order.world_size, address)).store
        except OSError as error:
            raise StartError(f"cannot serve the rendezvous of the ranks: {error}{remedy(error)}") from error

    def start(self, environment: Callable[[int], Mapping[str, str]]) -> Sequence[LocalWorker]:
        """Ask the reaper to start the ranks."""
        try:
            self._selector = self._opened.enter_context(selectors.DefaultSelector())
            name = f"nbl-{secrets.token_urlsafe(8)}"  # short: paths of sockets are limited
            self._scratch = os.path.join(tempfile.gettempdir(), name)
            self._opened.callback(shutil.rmtree, self._scratch, ignore_errors=True)  # first: an interrupt may follow
            self._opened.callback(named_resources.remove_created, self._scratch)  # before that: the reaper may be dead
            os.mkdir(self._scratch, 0o700)
        except OSError as error:
            hint = remedy(error) or ": free space there, or set TMPDIR to another directory"
            raise StartError(f"cannot create temporary files for the ranks: {error}{hint}") from error
        try:
            self.drops = DropTable(self._scratch, self._order.world_size)
        except OSError as error:
            _log.warning("nblaunch: output that ranks cannot write will not be counted: %s", error)
        try:
            self.collectives = CollectiveTable(self._scratch, self._order.world_size)
        except OSError as error:
            _log.warning("nblaunch: nothing will explain why ranks wait in a collective: %s", error)
        self._watch(self._control, self._read_control)
        self._watch(self._wakeup, self._wakeup.clear)
        try:
            for rank in self._ranks:
                self._start(rank, environment(rank))
        except OSError as error:  # out of descriptors, or the reaper does not read
            raise StartError(f"the ranks could not be started: {error}{remedy(error)}") from error
        return list(self._workers.values())

    def restart(self, rank: int, environment: Mapping[str, str]) -> LocalWorker:
        """Ask the reaper for another process in the place of one that has exited."""
        old = self._workers[rank]
        if self.collectives is not None:
            self.collectives.clear(rank)
        self._unwatch(old.channel)
        old.channel.close()
        rank_file(self._order.log_dir, rank, "stacks").unlink(missing_ok=True)  # until the new process can answer
        try:
            return self._start(rank, environment)
        except OSError as error:
            raise StartError(f"rank {rank} could not be started: {error}{remedy(error)}") from error

    def listen_to(self, wakeup: Wakeup) -> None:
        """Watch another wakeup in place of the present one."""
        self._unwatch(self._wakeup)
        self._wakeup = wakeup
        self._watch(wakeup, wakeup.clear)

    def _start(self, rank: int, env: Mapping[str, str]) -> LocalWorker:
        channel, there = channel_pair()
        tables = self.drops, self.collectives
        worker = LocalWorker(rank, channel, Path(self._order.log_dir), self.send_to_reaper, *tables, self.is_kept)
        self._workers[rank] = worker
        spec = self._spec(rank, env)
        with there:
            self.send_to_reaper(StartRank(spec), [there.fileno()])
        if spec.method == "spawn":  # a fresh interpreter does not inherit it from the reaper
            with contextlib.suppress(ConnectionError):  # already exited; RankExited will report it
                channel.send(StartRank(spec))
        self._watch(channel, partial(self._read_rank, worker))
        return worker

    def _spec(self, rank: int, env: Mapping[str, str]) -> RankSpec:
        order, process = self._order, self._order.process
        error_file = str(rank_file(order.log_dir, rank, "error.json"))
        return RankSpec(
            rank=rank,
            local_rank=rank - self._ranks.start,
            world_size=order.world_size,
            local_world_size=len(self._ranks),
            method=cast("Method", order.method),
            env={**env, "TORCHELASTIC_ERROR_FILE": error_file},  # where torch's ``@record`` writes an exception
            cwd=process.cwd,
            sys_path=process.sys_path,
            argv=process.argv,
            umask=process.umask,
            limits=process.limits,
            cpus=process.cpus,
            log_dir=order.log_dir,
            scratch=self._scratch,
            is_kept=order.is_kept,
        )

    def send_tasks(self, tasks: Sequence[Task], parcel: Sequence[int]) -> None:
        """Send all tasks at once, unless too many descriptors would be in flight."""
        self._fds_each = len(parcel)
        is_careful = len(parcel) * len(tasks) > MAX_FDS_IN_FLIGHT
        for worker, task in zip(self._workers.values(), tasks, strict=True):
            if worker.has_exited:
                continue
            if task.log_dir:
                worker.turn_to(task.log_dir)
            worker.channel.post(replace(task, acknowledge=is_careful), parcel)
            self._taskless.append(worker)
        self._is_careful = is_careful
        try:
            self._hand_out()
        except OSError as error:
            raise StartError(f"the task could not be sent to the ranks: {error}{remedy(error)}") from error

    def _hand_out(self) -> None:
        while self._taskless and (not self._is_careful or self._may_send_to(self._taskless[0])):
            worker = self._taskless[0]
            with contextlib.suppress(ConnectionError):  # already exited; RankExited will report it
                if not worker.channel.flush():
                    return
            if self._is_dismissed:
                worker.shut()
            worker.owes = self._is_careful
            self._taskless.popleft()

    def _may_send_to(self, worker: LocalWorker) -> bool:
        """Return True if the rank runs and its descriptors fit the limit of those in flight."""
        owing = [each for each in self._workers.values() if each.owes and not each.has_exited and each.is_open]
        return worker.pid > 0 and (len(owing) + 1) * self._fds_each <= max(MAX_FDS_IN_FLIGHT, self._fds_each)

    def let_go(self, ranks: Collection[int]) -> None:
        """Let these ranks exit."""
        for rank in ranks:
            self._workers[rank].shut()

    def dismiss(self) -> None:
        """Let the ranks exit."""
        self._is_dismissed = True
        for worker in self._workers.values():
            if worker not in self._taskless:
                worker.shut()
        if self.is_kept:
            self.send_to_reaper(EndGroup())

    def send_to_reaper(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send a message to the reaper. Read its messages first: it reads nothing while its own buffer is full."""
        while not self._control.closed and must_be_read(self._control, timeouts.REAPER_READ_TIMEOUT_S):
            self._read_control()
        with contextlib.suppress(ConnectionError):  # already exited; `Lost` reports it
            self._control.send(message, fds)

    # -------------------------------------------------------------- events
    def wait(self, seconds: float) -> Iterable[Event]:
        """Wait for messages and exits."""
        for key, _ in self._selector.select(0.0 if self._events else seconds):
            key.data()
        self._hand_out()
        return self._take_events()

    def drain(self) -> Iterable[Event]:
        """Read every channel to its end."""
        for worker in self._workers.values():
            self._read_rest(worker)
        return self._take_events()

    def _take_events(self) -> Iterable[Event]:
        while self._events:
            yield self._events.popleft()

    def _watch(self, source: Any, react: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, react)

    def _unwatch(self, source: Any) -> None:
        if source in self._selector.get_map():
            self._selector.unregister(source)

    def _read_control(self) -> None:
        self._control.poll()
        try:
            for message, fds in self._control.drain():
                self._take_from_reaper(message, fds)
        except LostDescriptorsError as error:  # without the reaper's pidfd, its death would go unnoticed
            raise StartError(f"the ranks could not be started: {error}") from error
        if self._control.closed:
            self._reaper_ended()

    def _take_from_reaper(self, message: object, fds: list[int]) -> None:
        if isinstance(message, ReaperStarted):
            self.has_begun = True
            if fds:
                self._reaper_pidfd = fds[0]
                self._watch(fds[0], self._reaper_ended)
        elif isinstance(message, NotStarted):
            if message.rank >= 0:
                self._workers[message.rank].has_exited = True
            self._events.append(message)
        elif isinstance(message, RankStarted):
            self._workers[message.rank].pid = message.pid
            self._events.append(message)
        elif isinstance(message, RankExited):
            worker = self._workers[message.rank]
            self._read_rest(worker)
            if not worker.has_exited:
                worker.has_exited = True
                self._events.append(message)
        elif isinstance(message, Swept):
            self._end(message)

    def _reaper_ended(self) -> None:
        """Handle the reaper's exit. The channel may still hold messages."""
        if self._reaper_pidfd is not None:
            self._unwatch(self._reaper_pidfd)
            os.close(self._reaper_pidfd)
            self._reaper_pidfd = None
            self._read_control()
        self._unwatch(self._control)
        self._end(Lost())

    def _end(self, event: Swept | Lost) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._events.append(event)

    def _read_rank(self, worker: LocalWorker) -> None:
        worker.channel.poll()
        try:
            for message, fds in worker.channel.drain():
                if isinstance(message, Taken):
                    worker.owes = False
                else:
                    self._events.append(Received(worker.rank, message, Descriptors(fds)))
        except LostDescriptorsError as error:
            self._events.append(LostDescriptors(worker.rank, error.message, error))
        if worker.channel.closed:
            self._unwatch(worker.channel)

    def _read_rest(self, worker: LocalWorker) -> None:
        while not worker.channel.closed and readable(worker.channel):
            self._read_rank(worker)

    def sampler(self, device: str, env: Mapping[str, str]) -> LocalSampler:
        """Measure by pid."""
        from nblaunch.engines.local_sampler import LocalSampler  # without a panel, psutil is not needed

        return LocalSampler(lambda rank: self._workers[rank].pid, device, env, self._ranks.start)

    # -------------------------------------------------------------- trouble, and the end
    def nudge(self) -> str | None:
        """Kill a fork of the kernel, which may be deadlocked; wake a fork server, which is only slow."""
        server = self._reaper.server
        if server is None:
            self.abandon()
            return None
        server.wake()
        return (
            f"the fork server (pid {server.process.pid}) has not answered for {timeouts.GROUP_BEGIN_TIMEOUT_S:.0f} s: "
            "waiting (is the machine short of memory?)"
        )

    def forsake(self) -> bool:
        """Replace a fork server that died before it forked the reaper."""
        if self._reaper.server is not None:
            servers.give_up(self._reaper.server)
        return self._reaper.server is not None

    def abandon(self) -> None:
        """Kill the reaper: its ranks die with it."""
        with contextlib.suppress(ProcessLookupError):
            if self._reaper_pidfd is not None:
                signal.pidfd_send_signal(self._reaper_pidfd, signal.SIGKILL)
            elif self._reaper.child is not None:
                os.kill(self._reaper.child, signal.SIGKILL)

    def close(self) -> None:
        """Close the channels. A reaper that still runs then kills its ranks."""
        for event in self._take_events():
            if isinstance(event, Received):
                event.parcel.close()
        for table in (self.drops, self.collectives):
            if table is not None:
                table.close()
        for worker in self._workers.values():
            worker.channel.close()
        self._control.close()
        if self._reaper_pidfd is not None:
            os.close(self._reaper_pidfd)
            self._reaper_pidfd = None
        if self._reaper.child is not None:
            with contextlib.suppress(ChildProcessError):  # user code has collected it
                os.waitpid(self._reaper.child, 0)
        self._opened.close()  # last: ranks may still use the scratch directory
