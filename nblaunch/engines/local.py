"""This machine as an engine: ranks of a fork server, fresh interpreters, or forks of the kernel.

A reaper starts and signals the ranks of a group, because it knows which pids are still its children. Each rank has a
channel to the kernel, which waits for all events with one selector.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from nblaunch.engines.fork_servers import Reaper, Where, servers
from nblaunch.engines.protocol import (
    Descriptors,
    Event,
    Lost,
    Received,
    Sampler,
    Store,
    Wakeup,
)
from nblaunch.engines.rank_files import RankFiles, StackFile
from nblaunch.errors import StartError, warn
from nblaunch.machine import named_resources, timeouts
from nblaunch.machine.inventory import LOOPBACK, Machine, has_used_cuda, this_machine, this_process
from nblaunch.machine.limits import refused_threads, remedy
from nblaunch.wire.channel import Channel, LostDescriptorsError, channel_pair, must_be_read, readable
from nblaunch.wire.launch_files import rank_file
from nblaunch.wire.messages import (
    EndGroup,
    Free,
    Interrupt,
    Method,
    NotStarted,
    Order,
    Payload,
    RankExited,
    RankSpec,
    RankStarted,
    ReaperStarted,
    SendSignal,
    StartRank,
    Swept,
    Task,
)
from nblaunch.wire.tables import Begun, Dropped, RankTable

_OWN_THREADS = 6
"""Of this process: the rendezvous', the panel's, the cache's, pyzmq's, and two to spare. If the first is refused, torch
aborts the process."""
_RANK_THREADS = 6
"""Of a rank that has joined its group, its own included."""
_REAPER_READ_TIMEOUT_S = 10.0
"""For the reaper to read what it was sent before."""
_RENDEZVOUS_TIMEOUT_S = 300.0
"""For an operation on a group's TCPStore."""


class LocalEngine:
    """An `engines.protocol.Engine`. `platform` decides which start methods are safe."""

    is_local = True

    def __init__(self, platform: str = sys.platform) -> None:
        self._is_linux = platform == "linux"
        own = ("forkserver",) if self._is_linux else ()
        self.start_methods: tuple[str, ...] = ("auto", *own, "spawn", "fork")

    def machines(
        self, show: Callable[[str], None] = lambda text: None, give_up: Callable[[], bool] = lambda: False
    ) -> Sequence[Machine]:
        return [this_machine()]

    def usable(
        self,
        method: str,
        env: Mapping[str, str],
        named: Sequence[str],
        show: Callable[[str], None] = lambda text: None,
    ) -> str:
        """Return ``forkserver`` for ``auto`` on Linux, else ``spawn``; with a warning if the server cannot fork."""
        if method == "auto":
            method = "forkserver" if self._is_linux else "spawn"
        if method == "fork":
            check_fork()
        return servers.usable(cast("Method", method), Where(env, os.sep, named), show)

    def place(self, order: Order, wakeup: Wakeup) -> LocalWorkers:
        """Ask for a reaper, without waiting for it."""
        if order.method == "fork":
            assert order.payload is not None
            reaper = fork_kernel(order.payload)
        else:
            where = Where(order.envs[0], order.process.cwd, order.named)
            reaper = servers.reaper(cast("Method", order.method), where)
        return LocalWorkers(order, reaper, wakeup)

    def warm_up(self) -> None:
        if self._is_linux:
            servers.warm_up()

    def refresh(self) -> None:
        """Replace a fork server that is out of date. Called after each cell. StartError: the system refuses."""
        servers.refresh()

    def preload(self, modules: Sequence[str], env: Mapping[str, str] | None = None, named: Sequence[str] = ()) -> None:
        """Import modules; with `env`, of which the user has set `named`, also try again what could not be imported."""
        servers.preload(modules, None if env is None else Where(env, this_process().cwd, named))

    def status(self) -> list[str]:
        return servers.status()

    def stop(self) -> None:
        servers.stop()


# ------------------------------------------------------------------ start_method="fork"
_fork_lock = threading.Lock()
"""``catch_warnings`` is not thread-safe: two at a time may restore the wrong filters."""


def check_fork() -> None:
    """Refuse a fork of the kernel if CUDA is initialized; else warn about its risks."""
    if has_used_cuda():
        raise StartError(
            "start_method='fork': the notebook has used CUDA, which fails after a fork: use start_method='auto'"
        )
    warn(
        "start_method='fork' copies a multithreaded process: ranks hang if a thread holds a lock, or if the notebook "
        "has used OpenMP. start_method='auto' is as fast, and safe"
    )


def fork_kernel(payload: Payload) -> Reaper:
    """Fork a reaper from the kernel. Its ranks share the notebook's memory, copy-on-write.

    Import before the fork: another thread may hold an import lock, which the child would never see released.
    """
    from nblaunch.ranks import reaper, worker

    if "IPython" in sys.modules:
        importlib.import_module("nblaunch.ranks.rank_shell")

    named_resources.tracker()  # the ranks inherit it
    here, there = channel_pair()
    kernel = os.getpid()
    with _fork_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # duplicates our own warning
        pid = os.fork()
    if pid == 0:
        try:
            reaper.run(there, [kernel], worker.forked_with(payload))
        finally:
            os._exit(1)
    there.close()
    return Reaper(here, pid)


# ------------------------------------------------------------------ the rendezvous
def serve_store(world_size: int, address: str = LOOPBACK) -> tuple[Store, object]:
    """Serve a TCPStore; return its address, and what serves it until it is deleted, after the ranks have exited.

    torch's TCPStore listens on every interface, whatever MASTER_ADDR says, and a port that is chosen before it is bound
    can be taken meanwhile. So the address and a free port are bound here, and the store gets the listening socket.

    Loopback keeps other machines out, but not other users of this one. torch offers no way to: its client takes only a
    host and a port, which rules out a Unix socket, and its server has no authentication. Closing the listener once all
    ranks are connected would break ``Store.clone``. gloo would stay open in any case: it accepts the first connection
    that sends the number of a pair, a small integer.
    """
    from torch.distributed import TCPStore

    with socket.socket(socket.AF_INET) as listener:
        listener.bind((address, 0))
        listener.listen(max(128, 4 * world_size))
        port: int = listener.getsockname()[1]
        return (address, port), TCPStore(
            address,
            port,
            world_size,
            is_master=True,
            timeout=datetime.timedelta(seconds=_RENDEZVOUS_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),  # the store closes it, perhaps before an interrupt is raised
            use_libuv=True,
        )


# ------------------------------------------------------------------ one rank
class LocalWorker(RankFiles):
    """The kernel's end of one rank of this machine, an `engines.protocol.Worker`: its channel and its files."""

    def __init__(
        self,
        rank: int,
        channel: Channel,
        log_dir: Path,
        reaper: Callable[[object], None],
        table: RankTable,
        is_kept: bool,
    ) -> None:
        super().__init__(rank, log_dir)
        self.channel = channel
        self.stacks = StackFile(rank_file(log_dir, rank, "stacks"), self.signal)
        self.pid = 0
        """0 before the rank has started."""
        self.has_exited = self.is_shut = False
        self._reaper, self._table, self._is_kept = reaper, table, is_kept

    @property
    def is_open(self) -> bool:
        return not self.channel.closed

    def interrupt(self, task: int) -> None:
        """Ask the rank's reading thread; a rank that has only one task is sent the signal as well."""
        self.tell(Interrupt(task))
        if not self._is_kept:
            self.signal(signal.SIGINT)

    def free(self, task: int) -> None:
        self.tell(Free(task))

    def tell(self, message: object) -> None:
        if not self.is_shut:
            with contextlib.suppress(OSError):  # already exited; RankExited will report it
                self.channel.send(message)

    def turn_to(self, log_dir: str) -> None:
        self.log_dir = Path(log_dir)
        self._table.clear_dropped(self.rank)

    def shut(self) -> None:
        """Send no more messages: the rank reads EOF."""
        self.is_shut = True
        with contextlib.suppress(OSError):  # already exited
            self.channel.sock.shutdown(socket.SHUT_WR)

    def signal(self, signum: int, group: bool = False) -> None:
        self._reaper(SendSignal(self.rank, signum, group))

    def dropped(self) -> Dropped:
        return self._table.dropped(self.rank)

    def collectives(self) -> Sequence[Begun]:
        return self._table.begun(self.rank)


# ------------------------------------------------------------------ the ranks of a group
class LocalWorkers:
    """The ranks of one group, an `engines.protocol.Workers`. Their reaper may not have answered yet."""

    heard_at = 0.0
    notes: Sequence[str] = ()

    def __init__(self, order: Order, reaper: Reaper, wakeup: Wakeup) -> None:
        self.has_begun = False
        self.is_kept = order.is_kept
        self._order, self._reaper, self._wakeup = order, reaper, wakeup
        self._control = reaper.channel
        self._reaper_pidfd: int | None = None
        self._ranks = order.ranks[0]
        self._workers: dict[int, LocalWorker] = {}
        self._taskless: deque[LocalWorker] = deque()
        """Ranks whose task is posted and not sent."""
        self._is_dismissed = False
        self._events: deque[Event] = deque()
        self._has_ended = False
        """`Swept` or `Lost` was reported."""
        self._opened = contextlib.ExitStack()
        self._store: object | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable while `wait` has something to return; for an agent, which polls."""
        return self._selector.fileno()

    # -------------------------------------------------------------- starting
    def open_store(self, give_up: Callable[[], bool] = lambda: False, address: str = LOOPBACK) -> Store:
        """Serve the store on an address of this machine, at once."""
        if refused := refused_threads(_OWN_THREADS + _RANK_THREADS * len(self._ranks)):
            raise StartError(f"the ranks could not be started: {refused}")
        try:
            store, self._store = serve_store(self._order.world_size, address)
            return store
        except OSError as error:
            raise StartError(f"cannot serve the rendezvous of the ranks: {error}{remedy(error)}") from error

    def start(self, environment: Callable[[int], Mapping[str, str]]) -> Sequence[LocalWorker]:
        try:
            self._selector = self._opened.enter_context(selectors.DefaultSelector())
            name = f"nbl-{secrets.token_urlsafe(8)}"  # short: paths of sockets are limited
            self._scratch = os.path.join(tempfile.gettempdir(), name)
            self._opened.callback(shutil.rmtree, self._scratch, ignore_errors=True)  # first: an interrupt may follow
            self._opened.callback(named_resources.remove_created, self._scratch)  # before that: the reaper may be dead
            os.mkdir(self._scratch, 0o700)
            self._table = RankTable(self._scratch, self._order.world_size)
            self._opened.callback(self._table.close)
        except OSError as error:
            hint = remedy(error) or ": free space there, or set TMPDIR to another directory"
            raise StartError(f"cannot create temporary files for the ranks: {error}{hint}") from error
        self._watch(self._control, self._read_control)
        self._watch(self._wakeup, self._wakeup.clear)
        try:
            for rank in self._ranks:
                self._start(rank, environment(rank))
        except OSError as error:  # out of descriptors, or the reaper does not read
            raise StartError(f"the ranks could not be started: {error}{remedy(error)}") from error
        return list(self._workers.values())

    def restart(self, rank: int, environment: Mapping[str, str]) -> LocalWorker:
        old = self._workers[rank]
        self._table.clear_begun(rank)
        self._unwatch(old.channel)
        old.channel.close()
        rank_file(self._order.log_dir, rank, "stacks").unlink(missing_ok=True)  # until the new process can answer
        try:
            return self._start(rank, environment)
        except OSError as error:
            raise StartError(f"rank {rank} could not be started: {error}{remedy(error)}") from error

    def listen_to(self, wakeup: Wakeup) -> None:
        self._unwatch(self._wakeup)
        self._wakeup = wakeup
        self._watch(wakeup, wakeup.clear)

    def _start(self, rank: int, env: Mapping[str, str]) -> LocalWorker:
        channel, there = channel_pair()
        log_dir = self._order.log_dir
        worker = LocalWorker(rank, channel, Path(log_dir), self.send_to_reaper, self._table, self.is_kept)
        self._workers[rank] = worker
        error_file = str(rank_file(log_dir, rank, "error.json"))
        spec = RankSpec(
            rank=rank,
            local_rank=rank - self._ranks.start,
            world_size=self._order.world_size,
            local_world_size=len(self._ranks),
            method=cast("Method", self._order.method),
            env={**env, "TORCHELASTIC_ERROR_FILE": error_file},  # where torch's ``@record`` writes an exception
            process=self._order.process,
            log_dir=log_dir,
            scratch=self._scratch,
            is_kept=self.is_kept,
        )
        with there:
            self.send_to_reaper(StartRank(spec), [there.fileno()])
        if spec.method == "spawn":  # a fresh interpreter does not inherit it from the reaper
            with contextlib.suppress(ConnectionError):  # already exited; RankExited will report it
                channel.send(StartRank(spec))
        self._watch(channel, partial(self._read_rank, worker))
        return worker

    def send_tasks(self, tasks: Sequence[Task], parcel: Sequence[int]) -> None:
        """Send all tasks at once, unless too many descriptors are in flight: then `wait` sends the rest."""
        for worker, task in zip(self._workers.values(), tasks, strict=True):
            if worker.has_exited:
                continue
            if task.log_dir:
                worker.turn_to(task.log_dir)
            worker.channel.post(task, parcel)
            self._taskless.append(worker)
        try:
            self._hand_out()
        except OSError as error:
            raise StartError(f"the task could not be sent to the ranks: {error}{remedy(error)}") from error

    def _hand_out(self) -> None:
        while self._taskless and self.has_begun:  # the reaper's own descriptor must come through first
            worker = self._taskless[0]
            with contextlib.suppress(ConnectionError):  # already exited; RankExited will report it
                if not worker.channel.flush():
                    return
            if self._is_dismissed:
                worker.shut()
            self._taskless.popleft()

    def let_go(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._workers[rank].shut()

    def dismiss(self) -> None:
        self._is_dismissed = True
        for worker in self._workers.values():
            if worker not in self._taskless:
                worker.shut()
        if self.is_kept:
            self.send_to_reaper(EndGroup())

    def send_to_reaper(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send a message to the reaper. Read its messages first: it reads nothing while its own buffer is full."""
        while not self._control.closed and must_be_read(self._control, _REAPER_READ_TIMEOUT_S):
            self._read_control()
        with contextlib.suppress(ConnectionError):  # already exited; `Lost` reports it
            self._control.send(message, fds)

    # -------------------------------------------------------------- events
    def wait(self, seconds: float) -> Iterable[Event]:
        for key, _ in self._selector.select(0.0 if self._events else seconds):
            key.data()
        self._hand_out()
        return self._take_events()

    def drain(self) -> Iterable[Event]:
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
                self._events.append(Received(worker.rank, message, Descriptors(fds)))
        except LostDescriptorsError as error:
            self._events.append(Received(worker.rank, error.message, Descriptors(), str(error.strerror)))
        if worker.channel.closed:
            self._unwatch(worker.channel)

    def _read_rest(self, worker: LocalWorker) -> None:
        while not worker.channel.closed and readable(worker.channel):
            self._read_rank(worker)

    def sampler(self, device: str, env: Mapping[str, str]) -> Sampler:
        from nblaunch.machine import usage  # without a panel, psutil is not needed

        return usage.Sampler(lambda rank: self._workers[rank].pid, device, env, self._ranks.start)

    # -------------------------------------------------------------- trouble, and the end
    def nudge(self) -> str | None:
        """Kill a fork of the kernel, which may be deadlocked; wake a fork server, which is only slow."""
        server = self._reaper.server
        if server is None:
            self.abandon()
            return None
        server.wake()
        return (
            f"no response from the fork server (pid {server.process.pid}) for {timeouts.GROUP_BEGIN_TIMEOUT_S:.0f} s: "
            "still waiting (is the machine out of memory?)"
        )

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
        for worker in self._workers.values():
            worker.channel.close()
        self._control.close()
        if self._reaper_pidfd is not None:
            os.close(self._reaper_pidfd)
            self._reaper_pidfd = None
        if self._reaper.child is not None:
            with contextlib.suppress(ChildProcessError):  # user code has collected it
                os.waitpid(self._reaper.child, 0)
        self._opened.close()  # late: ranks may still use the scratch directory
        self._store = None
