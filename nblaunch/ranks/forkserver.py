"""The fork server: a single-threaded process with torch imported, which forks a reaper for each launch.

Runs in the fork server, one per kernel. It runs no user code and does not initialise CUDA. Its imports are those that
every rank would do first, so a launch costs forks instead of imports. If they leave a second thread or initialise
CUDA, the server says so and forks no ranks; the kernel falls back to ``spawn``.

A server never changes once it serves. To import more, it forks a successor, which builds itself in the background
(`nblaunch.ranks.server_builder`) and outlives this process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Collection, Sequence
from typing import NoReturn

from nblaunch.machine import named_resources, processes, timeouts
from nblaunch.machine.limits import remedy
from nblaunch.ranks import environment, process_group, reaper, server_builder, worker
from nblaunch.wire import rank_variables
from nblaunch.wire.channel import Channel, readable
from nblaunch.wire.messages import PROTOCOL, Hello, NewReaper, NotStarted, Succeed

NAME = "nblaunch-server"
"""The process name of fork servers. A server that adopts a predecessor's children recognises other servers by it."""
BUILDER = "nblaunch-build"
"""The process name of successors while they build; processes forked by a package inherit it."""
_MAX_SPARES = 8


def main(fd: int, kernel: int, tracker: int, preload: Sequence[str]) -> NoReturn:
    """Run the fork server; never returns.

    Args:
        fd: The channel to the kernel.
        kernel: The kernel's pid.
        tracker: The descriptor of the kernel's resource tracker.
        preload: Modules to import first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if rank_variables.BELOW_AGENT in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # reapers and ranks inherit that
    channel = Channel(socket.socket(fileno=fd))
    named_resources.use_tracker(tracker)
    environment.open_streams()
    processes.set_name(NAME)
    kernel_pidfd = processes.pidfd(kernel)
    hello = _preload(preload)
    processes.become_subreaper()
    server: _Server | None = _Server(channel, kernel, kernel_pidfd, hello)
    try:
        while server is not None:
            server.channel.send(server.hello)
            server = server.serve()
    except BaseException:  # noqa: BLE001  # the kernel reads the log and starts another server; reapers see the exit
        traceback.print_exc()
        os._exit(1)
    reaper.remove_files_of_killed_agent()
    os._exit(0)


def _preload(modules: Sequence[str]) -> Hello:
    """Import the modules; return the Hello that reports the result to the kernel."""
    begin = time.monotonic()
    problem = ""
    gc.disable()  # imports make hardly any garbage, and looking for it takes a sixth of the time
    try:
        for name in modules:
            importlib.import_module(name)
            process_group.install()  # before any module can bind torch's own init_process_group
        worker.prepare()
    except BaseException:  # noqa: BLE001  # an import may call sys.exit
        problem = f"importing {', '.join(modules)} failed:\n{traceback.format_exc()}"
    problem = problem or server_builder.fork_problem()
    gc.freeze()  # as `server_builder.freeze_heap`, without looking for garbage
    gc.enable()
    return Hello(PROTOCOL, os.getpid(), problem, time.monotonic() - begin)


class _Server:
    """The state of one fork server process. `serve` runs until it exits; a successor starts inside it too.

    Args:
        channel: To the kernel.
        kernel: The kernel's pid.
        kernel_pidfd: The kernel's pidfd; None where the system has none.
        hello: The message that reports this server ready.
        spare_ranks: Spare ranks to fork ahead of the first launch. Default: none before the first launch.
    """

    def __init__(
        self, channel: Channel, kernel: int, kernel_pidfd: int | None, hello: Hello, spare_ranks: int | None = None
    ) -> None:
        self.channel = channel
        self.kernel = kernel
        self.kernel_pidfd = kernel_pidfd
        self.hello = hello
        self.spare_ranks = spare_ranks
        """Ranks to fork with the spare reaper; None for no spare reaper."""
        self.parent = os.getppid()
        self.reapers: set[int] = set()
        self.successors: set[int] = set()
        """Children that are fork servers or builders, adopted ones included."""
        self.spare: tuple[int, Channel] | None = None
        """The spare reaper's pid and the channel to it."""
        self.last_launch = self.last_used = time.monotonic()
        self.children = processes.ChildWatch()
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ)
        self.selector.register(self.children, selectors.EVENT_READ)
        if self.kernel_pidfd is not None:
            self.selector.register(self.kernel_pidfd, selectors.EVENT_READ)

    def serve(self) -> _Server | None:
        """Fork reapers until the kernel closes its channel, then wait for running launches: they end with this process.

        Returns:
            None in this process; in a forked successor its own server, so that the stack does not grow from one
            successor to the next.
        """
        while self.reapers or not self.channel.closed:
            ready = {key.fileobj for key, _ in self.selector.select(self.select_timeout())}
            if not ready:
                self.update_spare()
                if self.is_idle():
                    return None
            if self.is_orphan(ready):
                self.shut_down()
                return None
            if self.channel in ready:
                self.channel.poll()
                for message, fds in self.channel.drain():
                    if isinstance(message, NewReaper):
                        self.start_reaper(message, fds[0])
                    elif isinstance(message, Succeed):
                        successor = self.fork_successor(message, fds[0])
                        if successor is not None:
                            return successor
                if self.channel.closed:
                    self.selector.unregister(self.channel)
                    self.dismiss_spare()
            self.reap()
        reaper.kill_descendants(self.children, self.is_independent, lambda: None)
        return None

    def is_orphan(self, ready: Collection[object]) -> bool:
        """Return True if the kernel has exited. Without pidfds, a successor whose predecessor exited counts too."""
        return self.kernel_pidfd in ready if self.kernel_pidfd is not None else os.getppid() != self.parent

    def select_timeout(self) -> float | None:
        """Return the seconds until `update_spare` or the next check of the kernel is due; None: wait for events."""
        due = [] if self.kernel_pidfd is not None else [timeouts.WATCH_POLL_S]
        if self.needs_spare():
            due.append(timeouts.SPARE_DELAY_S)
        elif self.spare is not None:
            due.append(max(0.0, self.last_launch + timeouts.SPARE_IDLE_TIMEOUT_S - time.monotonic()))
        elif self.ends_when_idle():
            due.append(max(0.0, self.last_used + timeouts.SERVER_IDLE_TIMEOUT_S - time.monotonic()))
        return min(due, default=None)

    def ends_when_idle(self) -> bool:
        """Return True without children, spares included. Below an agent no cell would start another server."""
        return not (self.reapers or self.successors or rank_variables.BELOW_AGENT in os.environ)

    def is_idle(self) -> bool:
        """Return True if nothing has used this server for long. A launch that comes now gets another."""
        is_late = time.monotonic() >= self.last_used + timeouts.SERVER_IDLE_TIMEOUT_S
        return is_late and self.ends_when_idle() and not readable(self.channel)

    def update_spare(self) -> None:
        """Fork a spare reaper if one is due, or dismiss an idle one."""
        if self.needs_spare():
            here, there = socket.socketpair()
            with contextlib.suppress(OSError):  # the process limit is reached: the next launch will report it
                pid = self.fork_reaper(there, self.spare_ranks)
                self.spare = pid, Channel(here)
            there.close()
        elif self.spare is not None and time.monotonic() >= self.last_launch + timeouts.SPARE_IDLE_TIMEOUT_S:
            self.spare_ranks = None
            self.dismiss_spare()

    def needs_spare(self) -> bool:
        return self.spare_ranks is not None and self.spare is None and not self.channel.closed

    def dismiss_spare(self) -> None:
        if self.spare is not None:
            self.spare[1].close()
            self.spare = None

    def start_reaper(self, message: NewReaper, control: int) -> None:
        self.last_launch, self.spare_ranks = time.monotonic(), min(message.ranks, _MAX_SPARES)
        with socket.socket(fileno=control) as sock:
            if self.hand_to_spare(message, control):
                return
            try:
                self.fork_reaper(sock, None)
            except OSError as error:
                with contextlib.suppress(OSError):  # the kernel has abandoned this launch
                    Channel(sock).send(NotStarted(-1, f"the fork server could not fork: {error}{remedy(error)}"))

    def hand_to_spare(self, message: NewReaper, control: int) -> bool:
        """Give this launch to the spare reaper. Return False if there is none."""
        if self.spare is None:
            return False
        try:
            self.spare[1].send(message, [control])
        except OSError:  # it was killed
            return False
        finally:
            self.dismiss_spare()
        return True

    def fork_reaper(self, control: socket.socket, spare_ranks: int | None) -> int:
        """Fork a reaper and return its pid. With `spare_ranks` it is a spare, and forks this many spare ranks."""
        watched = [self.kernel, os.getpid()]
        pid = os.fork()
        if pid == 0:
            self.children.close()
            reaper.run(control, watched, worker.forked, spare_ranks)
        self.reapers.add(pid)
        return pid

    def fork_successor(self, message: Succeed, channel: int) -> _Server | None:
        """Fork the next server. Return it in the child, None in this process.

        If the fork fails, the kernel reads EOF from the successor's channel.
        """
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            traceback.print_exc()
            pid = -1
        if pid == 0:
            return self.become_successor(message, parent, Channel(socket.socket(fileno=channel)))
        os.close(channel)
        if pid > 0:
            self.successors.add(pid)
        return None

    def become_successor(self, message: Succeed, parent: int, channel: Channel) -> _Server:
        """Build the next server. Called in the child."""
        os.setsid()
        processes.set_name(BUILDER)
        processes.die_with_parent(parent)  # it does not watch the kernel while it builds
        processes.become_subreaper()  # to see the daemons that a package starts
        self.children.close()
        self.selector.close()
        self.channel.close()
        self.dismiss_spare()
        inherited = [] if self.kernel_pidfd is None else [self.kernel_pidfd]
        processes.close_all_but([channel.fileno(), *inherited])
        hello = server_builder.build(message, channel, self.hello)
        processes.set_name(NAME)
        processes.outlive_parent()  # from here on it watches the kernel's pidfd
        return _Server(channel, self.kernel, self.kernel_pidfd, hello, message.spares)

    def reap(self) -> None:
        """Read children's exits. Kill the orphans of a failed reaper or an unknown child."""
        has_strays = False
        for pid, returncode in self.children.ended():
            self.last_used = time.monotonic()
            if pid not in self.reapers:  # a dead server's successors became our children before its exit was read
                self.successors.update(
                    each for each in processes.children(os.getpid()) if processes.name_of(each) == NAME
                )
            has_strays = has_strays or returncode != 0 or pid not in self.reapers | self.successors
            self.reapers.discard(pid)
            self.successors.discard(pid)
            if self.spare is not None and pid == self.spare[0]:
                self.dismiss_spare()
                self.spare_ranks = None  # until the next launch: another might fare no better
        if has_strays:
            reaper.kill_descendants(self.children, self.is_independent, lambda: None)

    def is_independent(self, pid: int) -> bool:
        """Return True for a reaper, a server or a successor: each ends its own descendants."""
        return pid in self.reapers or pid in self.successors or processes.name_of(pid) == NAME

    def shut_down(self) -> None:
        """Wait for reapers and successors, which see the kernel's exit themselves; then kill what is left."""
        deadline = time.monotonic() + timeouts.KERNEL_EXIT_TIMEOUT_S
        while (self.reapers or self.successors) and time.monotonic() < deadline:
            with selectors.DefaultSelector() as exits:
                exits.register(self.children, selectors.EVENT_READ)
                exits.select(timeouts.KERNEL_EXIT_POLL_S)
            self.reap()
        reaper.kill_descendants(self.children, None, lambda: None)
