"""The connections of this rank's process groups: cutting them frees a call that waits for a peer.

SIGINT, ``abort`` and timeouts do not end a collective of gloo that waits. Shutting down its TCP connections makes the
call raise RuntimeError within milliseconds, and a new group can be made in the same process. Listening sockets stay
open: gloo ends the process if one fails. Runs in a kept rank's reader thread.

A rank is freed when it has not responded to an interrupt for 0.5 s (0.1 s after another rank's failure), or, if it has
and is in its ``finally``, once another rank has left the task, or after half of the grace period. The next task makes
the process group again, under a new generation.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from nblaunch.machine import processes, timeouts

_turn = threading.Lock()
_is_joining = False


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """Let `hush` discard stderr until the end of the block: torch writes C++ stacks about connections that are cut."""
    global _is_joining
    stderr = os.dup(2)
    _is_joining = True
    try:
        yield
    finally:
        with _turn:
            _is_joining = False
            os.dup2(stderr, 2)
        os.close(stderr)


def hush() -> None:
    """Discard stderr while this rank joins its group: a stop is about to cut connections, here or in other ranks."""
    with _turn, open(os.devnull, "w") as null:
        if _is_joining:
            os.dup2(null.fileno(), 2)


def cut() -> None:
    """Shut down the connections to the other ranks and to the rendezvous; abort communicators on GPUs."""
    _abort_on_gpus()
    store = None
    with contextlib.suppress(KeyError, ValueError):  # user code has changed them
        store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    siblings = set(processes.children(os.getppid())) - {os.getpid()}
    peers = {(own, other) for pid in siblings for _, own, other in _connections(pid)}
    for fd, own, other in _connections(os.getpid()):
        if fd >= 0 and (other == store or (other, own) in peers):
            with contextlib.suppress(OSError):  # closed meanwhile
                with socket.socket(fileno=os.dup(fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def _connections(pid: int) -> list[tuple[int, Any, Any]]:
    """Return descriptor, own address and peer's address of each established TCP connection of a process."""
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
    deadline = time.monotonic() + timeouts.ABORT_TIMEOUT_S
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
        if not ended.acquire(timeout=timeouts.GPU_WORK_TIMEOUT_S):
            _abort_on_gpus()


def _begin(call: Callable[[], None]) -> threading.Lock:
    """Call a function in another thread, and return a lock that is released at its end."""
    ended = threading.Lock()
    ended.acquire()
    _thread.start_new_thread(_run, (call, ended))  # `threading` must list the user's threads only
    return ended


def _run(call: Callable[[], None], ended: threading.Lock) -> None:
    processes.leave_signals_to_main_thread()
    try:
        with contextlib.suppress(Exception):  # CUDA's errors; a group that was aborted before, or by torch's watchdog
            call()
    finally:
        ended.release()
