"""A rank's default process group: initialized before the function runs, replaced when the user initializes one.

Runs in ranks; the fork server calls `install` and `find_backends` ahead. `install` wraps
``torch.distributed.init_process_group`` right after torch's import, before any module can bind the original. In a
rank, the wrapper

* destroys nblaunch's default group when user code initializes its own;
* gives every ``env://`` and ``tcp://`` initialization at a loopback address the launch's store, which no one else can
  occupy or reach from outside, under a prefix of its own. Otherwise a second group would read the stale addresses of
  the first, and all ranks fail after 41 s;
* refuses a group of all ranks while one of them is dead, in a session. Torch would wait for it for 30 minutes.

Everything else (a store of the user's, ``file://``, another host's address) goes to torch unchanged.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from nblaunch.errors import RankError
from nblaunch.machine import processes, timeouts
from nblaunch.machine.processes import LINUX
from nblaunch.ranks.collective_log import collective_log, install_kernels

if TYPE_CHECKING:
    from torch.distributed import Store

    from nblaunch.wire.messages import World

_FORK_WAIT_S = 0.5
"""For a library's threads to go idle before a rank forks."""
_MIN_FORK_WAIT_S = 0.01
"""The same for threads that never go idle, after repeated timeouts."""
_FORK_POLL_S = 0.0005
"""Between checks of these threads."""
_ABORT_TIMEOUT_S = 2.0
"""For the communicators of a rank's GPU to end. Its connections are cut then, too."""
_GPU_WORK_TIMEOUT_S = 10.0
"""For a rank's GPU to finish before its process group is replaced. Then a collective counts as one that never ends."""
_DEBUGGED_COLLECTIVE_TIMEOUT_S = 86400.0
"""torch's own limit where the user may debug a rank: one that has begun cannot be extended."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(slots=True)
class _Home:
    world: World
    rank: int
    world_size: int
    ours: Any = None
    """The default group that `join` initialized, until the user replaces it."""
    created: dict[tuple[str, int], int] = field(default_factory=dict)
    """The number of groups initialized at each (host, port)."""


_home: _Home | None = None


def install() -> None:
    """Wrap ``init_process_group``, and what makes each process group.

    Nothing happens if they are wrapped already, or if torch was built without distributed.
    """
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.init_process_group, "__nblaunch__"):
        return
    wrapper = _wrap(dist.init_process_group)
    dist.init_process_group = wrapper
    dist.distributed_c10d.init_process_group = wrapper
    mesh: Any = sys.modules.get("torch.distributed.device_mesh")  # it has bound the original with torch's import
    if hasattr(mesh, "init_process_group"):
        mesh.init_process_group = wrapper
    module: Any = dist.distributed_c10d
    make = getattr(module, "_new_process_group_helper", None)
    if make is not None:
        module._new_process_group_helper = _watching(make)
    if not hasattr(dist.ProcessGroup, "register_pre_hook"):
        install_kernels()


def find_backends() -> None:
    """Load torch's backend registry once for all forked ranks: torch 2.15 reads every package's metadata for it."""
    import torch.distributed as dist

    ensure = getattr(dist.Backend, "_ensure_backend_registered", None)  # older versions have none
    if ensure is not None:
        for name in ("gloo", "nccl"):
            ensure(name)


def join(world: World, rank: int, world_size: int) -> None:
    """Initialize this rank's default group, before user code runs.

    A later task keeps the group of the previous one, unless the generation has changed. While a rank is missing there
    is no group.
    """
    global _home
    import torch.distributed as dist

    if _home is None or _home.world.generation != world.generation:
        if _home is not None:  # else the group is the notebook's, of a fork of the kernel: destroying it would hang
            leave()
        _home = _Home(world, rank, world_size)
    elif dist.is_initialized():
        return
    if world.no_group:
        return
    limit = _limit(world)
    dist.init_process_group(world.backend, timeout=None if limit is None else timedelta(seconds=limit))
    _home.ours = dist.group.WORLD
    guard.install()


def _limit(world: World) -> float | None:
    """Return how long torch lets a collective wait, in seconds; None: torch's default.

    Where the user may debug, the kernel ends a task that gets no further in place of torch, if it sees that ranks wait
    in a collective. It does not with NCCL, whose calls return at once.
    """
    if not world.waits_for_user:
        return None
    return timeouts.COLLECTIVE_TIMEOUT_S if "nccl" in world.backend else _DEBUGGED_COLLECTIVE_TIMEOUT_S


def leave(*, is_last: bool = False) -> None:
    """Destroy the default group, if any. May hang: send every message before. At a rank's exit its log stays."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        if not is_last:
            finish_on_gpus()
        dist.destroy_process_group()
    if not is_last:
        collective_log.end_groups()


def _watching(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        with contextlib.suppress(Exception):  # torch's own function, which may change: nothing is logged then
            ranks = args[2] if len(args) > 2 else kwargs["global_ranks_in_group"]
            collective_log.watch(made[0] if isinstance(made, tuple) else made, ranks)
        return made

    return new_process_group_helper


def _wrap(original: Callable[..., None]) -> Callable[..., None]:
    import torch.distributed as dist

    @functools.wraps(original)
    def init_process_group(
        backend: Any = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Store | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        home = _home
        if home is None:
            original(backend, init_method, timeout, world_size, rank, store, *args, **kwargs)
            return
        if home.ours is not None and dist.is_initialized() and dist.group.WORLD is home.ours:
            dist.destroy_process_group()
        home.ours = None
        rendezvous = _rendezvous(home, init_method, world_size, rank) if store is None else None
        if rendezvous is None:
            with _without_agent_store():
                original(backend, init_method, timeout, world_size, rank, store, *args, **kwargs)
            return
        address, world_size, rank = rendezvous
        if home.world.no_group and world_size >= home.world_size:
            raise RankError(home.world.no_group)
        prefixed = _store(home, address, timeout)
        original(backend, None, timeout, world_size, rank, prefixed, *args, **kwargs)
        # A rank that leaves early would break connections that its peers are still making.
        if prefixed.add("joined", 1) == world_size:
            prefixed.set("all joined", "")
        prefixed.wait(["all joined"])

    init_process_group.__nblaunch__ = True  # type: ignore[attr-defined]  # checked by install
    return init_process_group


def _rendezvous(
    home: _Home, init_method: str | None, world_size: int, rank: int
) -> tuple[tuple[str, int], int, int] | None:
    """Return address, world size and rank of an initialization that uses our store; None if torch must handle it."""
    url = urlparse(init_method or "env://")
    if url.scheme not in ("env", "tcp") or url.query:
        return None
    try:
        if url.scheme == "env":
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            world_size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
            rank = int(os.environ["RANK"]) if rank < 0 else rank
        else:
            host, port = url.hostname or "", int(url.port or 0)
    except (KeyError, ValueError):
        return None  # torch's own error names what is missing
    if world_size < 1 or rank < 0 or port == 0:
        return None
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    if is_loopback or (host, port) == (home.world.master_addr, home.world.master_port):
        if is_loopback and world_size < home.world_size:  # a group of each node's own
            host = f"{host} of node {os.environ.get('GROUP_RANK', '0')}"
        return (host, port), world_size, rank
    return None


@contextlib.contextmanager
def _without_agent_store() -> Iterator[None]:
    """Hide torchrun's agent store variable, which would make every rank a client of a store that has no server."""
    value = os.environ.pop(_AGENT_STORE, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[_AGENT_STORE] = value


def _store(home: _Home, address: tuple[str, int], timeout: timedelta | None) -> Store:
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import default_pg_timeout

    count = home.created[address] = home.created.get(address, 0) + 1
    world, wait = home.world, timeout or default_pg_timeout
    store = TCPStore(world.master_addr, world.master_port, timeout=wait, wait_for_workers=False, use_libuv=True)
    return PrefixStore(f"nblaunch/{world.generation}/{address[0]}:{address[1]}/{count}", store)


# ------------------------------------------------------------------ connections
# The connections of this rank's process groups: cutting them frees a call that waits for a peer.
#
# SIGINT, ``abort`` and timeouts do not end a collective of gloo that waits. Shutting down its TCP connections makes the
# call raise RuntimeError within milliseconds, and a new group can be made in the same process. Listening sockets stay
# open: gloo ends the process if one fails. Runs in a kept rank's reader thread.
#
# A rank is freed when it has not responded to an interrupt for 0.5 s (0.1 s after another rank's failure), or, if it
# has and is in its ``finally``, once another rank has left the task, or after half of the grace period. The next task
# makes the process group again, under a new generation.


def cut() -> None:
    """Shut down the connections to the other ranks and to the rendezvous; abort communicators on GPUs."""
    _abort_on_gpus()
    store = None if _home is None else (_home.world.master_addr, _home.world.master_port)
    siblings = set(processes.children(os.getppid())) - {os.getpid()}
    peers = {(own, other) for pid in siblings for _, own, other in _connections(pid)}
    for fd, own, other in _connections(os.getpid()):
        if fd >= 0 and (other == store or (other, own) in peers):
            with contextlib.suppress(OSError):  # closed meanwhile
                with socket.socket(fileno=os.dup(fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def _connections(pid: int) -> list[tuple[int, Any, Any]]:
    import psutil

    try:
        process = psutil.Process(pid)
        connections = getattr(process, "net_connections", None) or process.connections  # its name before psutil 6
        return [(each.fd, _plain(each.laddr), _plain(each.raddr)) for each in connections(kind="tcp") if each.raddr]
    except (psutil.Error, OSError):  # it has exited
        return []


def _plain(address: Any) -> tuple[str, int]:
    """Return an address without the prefix of an IPv4 address on an IPv6 socket, such as the store's."""
    return address.ip.removeprefix("::ffff:"), address.port


def _abort_on_gpus() -> None:
    """Abort the communicators of all process groups, each in a thread.

    One after the other, an abort may wait for another rank's abort of the next one:
    https://github.com/pytorch/pytorch/issues/119797
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    ended = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(Exception):  # a group without a backend on a GPU
            backend = group._get_backend(sys.modules["torch"].device("cuda"))
            backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
            abort = getattr(backend, "abort", None)  # old versions of torch have none
            if abort is not None:
                ended.append(_begin(abort))
    deadline = time.monotonic() + _ABORT_TIMEOUT_S
    for lock in ended:
        lock.acquire(timeout=max(0.0, deadline - time.monotonic()))


def finish_on_gpus() -> None:
    """Wait until this rank's GPU has nothing left to do; if that takes too long, abort the communicators.

    While a collective of NCCL waits for a rank that never calls it, a process group cannot be destroyed: NCCL waits for
    the collective, and holds a lock that keeps an abort out.
    """
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return
    with contextlib.suppress(Exception):  # CUDA's errors, of calls before: the user has seen them
        ended = _begin(functools.partial(torch.cuda.synchronize, torch.cuda.current_device()))
        if not ended.acquire(timeout=_GPU_WORK_TIMEOUT_S):
            _abort_on_gpus()


def _begin(call: Callable[[], None]) -> threading.Lock:
    """Call a function in another thread, and return a lock that is released at its end."""
    ended = threading.Lock()
    ended.acquire()

    def run() -> None:
        try:
            processes.leave_signals_to_main_thread()
            with contextlib.suppress(Exception):  # CUDA's errors; a group aborted before, or by torch's watchdog
                call()
        finally:
            ended.release()

    _thread.start_new_thread(run, ())  # `threading` must list the user's threads only
    return ended


# ------------------------------------------------------------------ forks
# A guard for a rank's forks, such as of DataLoader workers: it delays a fork until libraries' threads are idle.
#
# Runs in ranks and their children. Before 3.13, CPython's forked child takes the lock of the thread list before it
# re-creates that lock (``_PyEval_ReInitThreads``). A child forked while another thread holds the lock hangs before its
# first line. Python's own threads take the lock with the GIL held, as the forking thread does. Threads of libraries do
# not: after each collective a gloo thread enters Python to drop tensors.

_IDLE_STATES = b"StTXZI"
"""All but R (runnable) and D (uninterruptible: a page fault, or disk I/O)."""


class ForkGuard:
    """Waits for other threads before each fork of this process.

    Threads that compute all the time never go idle: each timeout halves the next wait.
    """

    def __init__(self) -> None:
        self._max_wait_s = _FORK_WAIT_S
        self._is_installed = False
        self._forking: list[_thread.LockType] = []
        """Locks that are held until the fork is over."""

    def install(self) -> None:
        """Wait at each fork from now on, on Pythons that need it; children inherit the guard.

        Covers ``os.fork``, multiprocessing, and subprocess with a ``preexec_fn``. Without one, a child of subprocess
        runs no Python before its program.
        """
        if LINUX and sys.version_info < (3, 13) and not self._is_installed:
            self._is_installed = True
            os.register_at_fork(
                before=self.wait, after_in_parent=self._release_locks, after_in_child=self._forking.clear
            )

    def wait(self) -> None:
        """Wait until no library's thread runs, or until the timeout. Releases the GIL meanwhile."""
        if not _library_thread_runs():
            self._max_wait_s = _FORK_WAIT_S
            return
        deadline = time.monotonic() + self._max_wait_s
        with self._interrupts_deferred():
            while _library_thread_runs():
                if time.monotonic() >= deadline:
                    self._max_wait_s = max(self._max_wait_s / 2, _MIN_FORK_WAIT_S)
                    return
                time.sleep(_FORK_POLL_S)

    @contextlib.contextmanager
    def _interrupts_deferred(self) -> Iterator[None]:
        """Deliver SIGINT after the fork: Python only prints an exception raised in a fork hook."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            yield
            return
        seen: list[int] = []
        signal.signal(signal.SIGINT, lambda signum, frame: seen.append(signum))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            if seen:
                self._forking.append(_thread.allocate_lock())
                self._forking[-1].acquire()
                _thread.start_new_thread(_interrupt_after, (self._forking[-1], _thread.get_ident()))

    def _release_locks(self) -> None:
        while self._forking:
            self._forking.pop().release()


guard = ForkGuard()


def _interrupt_after(forking: _thread.LockType, thread: int) -> None:
    forking.acquire()
    signal.pthread_kill(thread, signal.SIGINT)


def _library_thread_runs() -> bool:
    # without threading's lock, which the forking thread may hold
    known = [thread for thread in list(threading._active.values()) if type(thread) is not threading._DummyThread]  # type: ignore[attr-defined]
    own = {threading.get_native_id(), *(thread.native_id for thread in known)}
    try:
        return any(_state(task) not in _IDLE_STATES for task in os.listdir("/proc/self/task") if int(task) not in own)
    except OSError:  # no /proc
        return False


def _state(task: str) -> bytes:
    try:
        with open(f"/proc/self/task/{task}/stat", "rb", buffering=0) as file:
            return file.read(512).rpartition(b") ")[2][:1]
    except OSError:
        return b"X"
