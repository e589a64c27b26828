"""The fork server: a single-threaded process with torch imported, which forks a reaper for each launch.

Runs in the fork server. It runs no user code and does not initialise CUDA. Its imports are those that every rank would
do first, so a launch costs forks instead of imports. If they leave a second thread or initialise CUDA, the server says
so and forks no ranks; the kernel falls back to ``spawn``, or starts a server without the package at fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Collection, Sequence
from typing import NoReturn

from nblaunch.machine import named_resources, processes, timeouts
from nblaunch.machine.inventory import has_used_cuda
from nblaunch.machine.limits import remedy
from nblaunch.machine.packages import edited, package_of
from nblaunch.ranks import environment, process_group, reaper, worker
from nblaunch.wire import BELOW_AGENT
from nblaunch.wire.channel import Channel
from nblaunch.wire.messages import PROTOCOL, Hello, Importing, NewReaper, NotStarted

_KERNEL_EXIT_TIMEOUT_S = 2.0
"""After the kernel's exit for reapers to exit before the fork server kills them."""
_KERNEL_EXIT_POLL_S = 0.1
"""Between checks for their exits."""
NAME = "nblaunch-server"
_MADV_COLLAPSE = 25
"""Rejected by older kernels."""
_HUGE = 2 << 20


def main(fd: int, kernel: int, tracker: int, preload: Sequence[str], ahead: Sequence[str], cwd: str) -> NoReturn:
    """Run the fork server; never returns. `ahead`, in the folder `cwd`, it imports what ranks can import themselves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if ahead:  # which may hang; the thread that has started this process waits for the end of it
        processes.die_with_parent(kernel)
    if BELOW_AGENT in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # reapers and ranks inherit that
    channel = Channel(socket.socket(fileno=fd))
    named_resources.use_tracker(tracker)
    environment.open_streams()
    processes.set_name(NAME)
    kernel_pidfd = processes.pidfd(kernel)
    processes.become_subreaper()
    hello = _imported(channel, preload, ahead, cwd)
    processes.outlive_parent()
    channel.send(hello)
    try:
        _Server(channel, kernel, kernel_pidfd).serve()
    except BaseException:  # noqa: BLE001  # the kernel reads the log and starts another server; reapers see the exit
        traceback.print_exc()
        os._exit(1)
    reaper.remove_files_of_killed_agent()
    os._exit(0)


def _imported(channel: Channel, preload: Sequence[str], ahead: Sequence[str], cwd: str) -> Hello:
    begin, package, packages = time.monotonic(), "", frozenset[str]()
    problem = ""
    gc.disable()  # imports make hardly any garbage, and looking for it takes a sixth of the time
    try:
        for name in preload:
            importlib.import_module(name)
            if "torch" in sys.modules:
                process_group.install()  # before any module can bind torch's own init_process_group
        problem = fork_problem()
        if ahead and not problem:
            present = set(map(package_of, sys.modules))
            package, problem = _import_ahead(channel, ahead, cwd)
            packages = frozenset(map(package_of, sys.modules.copy())) - present
        if "torch" in sys.modules:  # else it only starts fresh interpreters
            worker.prepare()
    except BaseException:  # noqa: BLE001  # an import may call sys.exit
        problem = problem or f"importing {', '.join(preload)} failed:\n{traceback.format_exc()}"
    gc.freeze()  # else a collection would write to every page that ranks share
    gc.enable()
    if ahead:  # in the background, where it delays no launch
        _collapse_heap()
    return Hello(PROTOCOL, problem, time.monotonic() - begin, packages, package)


def _collapse_heap() -> None:
    """Collapse this process's memory into huge pages, where the system can: Linux 6.1.

    A fork copies the page table, and importing torch fills 270 MB of small pages. A launch of two ranks is three forks
    and three exits: 80 ms with huge pages, 127 without. A write in a child splits the page, and still copies 4 KB.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as maps:  # no /proc
        for line in maps.read().splitlines():
            span, mode, _, _, inode, *name = line.split(maxsplit=5)
            begin, end = (int(part, 16) for part in span.split(b"-"))
            if (mode, inode) == (b"rw-p", b"0") and name in ([], [b"[heap]"]):
                for address in range(-(-begin // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
                    libc.madvise(address, _HUGE, _MADV_COLLAPSE)


def _import_ahead(channel: Channel, modules: Sequence[str], cwd: str) -> tuple[str, str]:
    """Import modules that ranks can import for themselves; return the package at fault and the problem, if any.

    A package that hangs or crashes is known by the last `Importing`.
    """
    filters, known, package = list(warnings.filters), set(sys.modules), ""
    with contextlib.suppress(OSError):  # the directory is gone; ranks will report it
        os.chdir(cwd)
    try:
        for name in modules:
            if package_of(name) != package:
                package = package_of(name)
                channel.send(Importing(package))
            try:
                importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001  # whatever a module raises, SystemExit too
                what = "it" if name == package else name  # what a part has half imported, ranks would inherit
                return package, f"importing {what} raises {type(error).__name__}: {error}"
            new = sys.modules.keys() - known
            known |= new
            problem = fork_problem()
            if file := edited(new):
                problem = problem or f"it imports {file}, which may be edited between launches"
            if problem:
                return package, problem
    finally:
        os.chdir(os.sep)
        environment.keep_filters_since(filters)
    return "", ""


def fork_problem() -> str:
    threads = processes.thread_count()
    if threads > 1:
        return f"preloading left {threads} threads running, and forking a multi-threaded process is unsafe"
    if has_used_cuda():
        return "preloading initialized CUDA, which cannot be used after a fork"
    return ""


class _Server:
    def __init__(self, channel: Channel, kernel: int, kernel_pidfd: int | None) -> None:
        self.channel = channel
        self.kernel = kernel
        self.kernel_pidfd = kernel_pidfd
        self.parent = os.getppid()
        self.reapers: set[int] = set()
        self.last_used = time.monotonic()
        self.children = processes.ChildWatch()
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ)
        self.selector.register(self.children, selectors.EVENT_READ)
        if self.kernel_pidfd is not None:
            self.selector.register(self.kernel_pidfd, selectors.EVENT_READ)

    def serve(self) -> None:
        """Fork reapers until the kernel closes its channel, then stay for those that run, which it must outlive."""
        while self.reapers or not self.channel.closed:
            ready = {key.fileobj for key, _ in self.selector.select(self.select_timeout())}
            if not ready and self.is_idle():
                self.channel.sock.shutdown(socket.SHUT_RD)  # Linux still reads a launch that came just now
            if self.is_orphan(ready):
                self.shut_down()
                return
            if self.channel in ready:
                self.channel.poll()
                for message, fds in self.channel.drain():
                    if isinstance(message, NewReaper):
                        self.start_reaper(fds[0])
                if self.channel.closed:
                    self.selector.unregister(self.channel)
            self.reap()
        reaper.kill_descendants(self.children, self.is_reaper, lambda: None)

    def is_orphan(self, ready: Collection[object]) -> bool:
        return self.kernel_pidfd in ready if self.kernel_pidfd is not None else os.getppid() != self.parent

    def select_timeout(self) -> float | None:
        due = [] if self.kernel_pidfd is not None else [timeouts.WATCH_POLL_S]
        if self.ends_when_idle():
            due.append(max(0.0, self.last_used + timeouts.SERVER_IDLE_TIMEOUT_S - time.monotonic()))
        return min(due, default=None)

    def ends_when_idle(self) -> bool:
        """Return True without launches. Below an agent no cell would start another server."""
        return not (self.reapers or BELOW_AGENT in os.environ)

    def is_idle(self) -> bool:
        """Return True if nothing has used this server for long."""
        return self.ends_when_idle() and time.monotonic() >= self.last_used + timeouts.SERVER_IDLE_TIMEOUT_S

    def start_reaper(self, control: int) -> None:
        with socket.socket(fileno=control) as sock:
            watched = [self.kernel, os.getpid()]
            try:
                pid = os.fork()
            except OSError as error:
                with contextlib.suppress(OSError):  # the kernel has abandoned this launch
                    Channel(sock).send(NotStarted(-1, f"the fork server failed to fork: {error}{remedy(error)}"))
                return
            if pid == 0:
                self.children.close()
                reaper.run(sock, watched, worker.forked)
            self.reapers.add(pid)

    def reap(self) -> None:
        """Read children's exits. Kill the orphans of a failed reaper or an unknown child."""
        has_strays = False
        for pid, returncode in self.children.ended():
            self.last_used = time.monotonic()
            has_strays = has_strays or returncode != 0 or pid not in self.reapers
            self.reapers.discard(pid)
        if has_strays:
            reaper.kill_descendants(self.children, self.is_reaper, lambda: None)

    def is_reaper(self, pid: int) -> bool:
        return pid in self.reapers

    def shut_down(self) -> None:
        """Wait for reapers, which see the kernel's exit themselves; then kill what is left."""
        deadline = time.monotonic() + _KERNEL_EXIT_TIMEOUT_S
        while self.reapers and time.monotonic() < deadline:
            with selectors.DefaultSelector() as exits:
                exits.register(self.children, selectors.EVENT_READ)
                exits.select(_KERNEL_EXIT_POLL_S)
            self.reap()
        reaper.kill_descendants(self.children, None, lambda: None)
