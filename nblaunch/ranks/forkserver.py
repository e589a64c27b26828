"""A clean process with torch imported and one thread, which forks a reaper for each launch.

Started by the kernel, one per kernel. It runs no user code and touches no CUDA. What it imports is what every
rank would import first, so that a launch costs forks and not imports. If the import brings a second thread or
CUDA, it says so instead of forking ranks: the kernel then uses ``spawn``.

It never changes once it serves. To import more, it forks its successor, which builds itself in the background
(`nblaunch.ranks.server_builder`) and lives on when this process ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Collection
from typing import NoReturn

from nblaunch.machine import processes
from nblaunch.ranks import environment, process_group, reaper, server_builder, worker
from nblaunch.wire.channel import Channel
from nblaunch.wire.messages import PROTOCOL, Hello, NewReaper, NotStarted, Succeed

_LOOK_EVERY = 0.5
"""Seconds between looks at the kernel where the system has no pidfd."""
_SPARE_AFTER = 0.05
"""Seconds without a launch after which one that waits for the next is forked: the present one needs the CPUs."""
_SPARES_STAY = 60.0
"""Seconds without a launch after which those that wait for the next end; the next launch forks others."""
_MOST_SPARES = 8
_LAST_LAUNCHES = 2.0
"""Seconds that reapers get to end their launches when the kernel has gone, before they are ended too."""


NAME = "nblaunch-server"
"""The name of fork servers in the system's lists. They know each other by it: when one ends, another adopts those that
it has forked."""
BUILDER = "nblaunch-build"
"""The name of those that do not serve yet: a package may fork processes there, which have its name too."""


def main(fd: int, kernel: int, preload: tuple[str, ...]) -> NoReturn:
    """Be the fork server, to the end.

    Args:
        fd: The channel to the kernel.
        kernel: The kernel's pid.
        preload: Modules to import first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    environment.open_streams()
    processes.set_name(NAME)
    death = processes.pidfd(kernel)
    hello = _hello(preload)
    processes.become_subreaper()
    server: _Server | None = _Server(channel, kernel, death, hello)
    try:
        while server is not None:
            server.channel.send(server.hello)
            server = server.serve()
    except BaseException:  # noqa: BLE001  # the kernel reads it and starts another; reapers see this one's end
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _hello(preload: tuple[str, ...]) -> Hello:
    begin = time.monotonic()
    problem = ""
    try:
        for name in preload:
            importlib.import_module(name)
            process_group.install()  # before anything can bind torch's own init_process_group
        worker.prepare()
    except BaseException:  # noqa: BLE001  # an import that calls sys.exit must be told of too
        problem = f"importing {', '.join(preload)} failed:\n{traceback.format_exc()}"
    problem = problem or server_builder.unfit()
    server_builder.settle()
    return Hello(PROTOCOL, os.getpid(), problem, time.monotonic() - begin)


class _Server:
    """What forks, in one process. Its whole life is `serve`; a successor's begins there too.

    Args:
        channel: To the kernel.
        kernel: Its pid.
        death: Its pidfd; None where the system has none.
        hello: What this process is fit for.
        spares: How many ranks to fork ahead of the first launch. Default: none before there was a launch.
    """

    def __init__(
        self, channel: Channel, kernel: int, death: int | None, hello: Hello, spares: int | None = None
    ) -> None:
        self.channel = channel
        self.kernel = kernel
        self.death = death
        self.hello = hello
        self.spares = spares
        """How many ranks wait with the reaper that waits for the next launch; None where none is to wait."""
        self.parent = os.getppid()
        self.reapers: set[int] = set()
        self.successors: set[int] = set()
        """Children that are fork servers too, or are becoming it; with those of successors that have ended."""
        self.spare: tuple[int, Channel] | None = None
        """The pid of the reaper that waits, and the channel to it."""
        self.asked = time.monotonic()
        """When the last launch came."""
        self.children = processes.ChildWatch()
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ)
        self.selector.register(self.children, selectors.EVENT_READ)
        if self.death is not None:
            self.selector.register(self.death, selectors.EVENT_READ)

    def serve(self) -> _Server | None:
        """Fork reapers for as long as the kernel may ask, and stay while a launch runs: its end would end that too.

        Returns:
            In a forked child, the server that it is now: ranks of each in a line have as many frames. Else None.
        """
        while self.reapers or not self.channel.closed:
            ready = {key.fileobj for key, _ in self.selector.select(self.patience())}
            if not ready:
                self.use_idle_moment()
            if self.is_orphan(ready):
                self.end()
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
            self.collect()
        reaper.kill_descendants(self.children, self.lives_on, lambda: None)
        return None

    def is_orphan(self, ready: Collection[object]) -> bool:
        """Return True if the kernel has ended. The parent of a successor is the server before it, which may end."""
        return self.death in ready if self.death is not None else os.getppid() != self.parent

    def patience(self) -> float | None:
        """Seconds until `use_idle_moment` is due, or the kernel is to be looked at; None: only events matter."""
        due = [] if self.death is not None else [_LOOK_EVERY]
        if self.wants_spare():
            due.append(_SPARE_AFTER)
        elif self.spare is not None:
            due.append(max(0.0, self.asked + _SPARES_STAY - time.monotonic()))
        return min(due, default=None)

    def use_idle_moment(self) -> None:
        """Fork who waits for the next launch, or let it go after a minute."""
        if self.wants_spare():
            here, there = socket.socketpair()
            with contextlib.suppress(OSError):  # no more processes: the next launch will say so
                pid = self.fork_reaper(there, self.spares)
                self.spare = pid, Channel(here)
            there.close()
        elif self.spare is not None and time.monotonic() >= self.asked + _SPARES_STAY:
            self.spares = None
            self.dismiss_spare()

    def wants_spare(self) -> bool:
        """Return True if a reaper is to wait for the next launch, and none does."""
        return self.spares is not None and self.spare is None and not self.channel.closed

    def dismiss_spare(self) -> None:
        if self.spare is not None:
            self.spare[1].close()
            self.spare = None

    def start_reaper(self, message: NewReaper, control: int) -> None:
        self.asked, self.spares = time.monotonic(), min(message.ranks, _MOST_SPARES)
        with socket.socket(fileno=control) as sock:
            if self.give_to_spare(message, control):
                return
            try:
                self.fork_reaper(sock, None)
            except OSError as error:
                with contextlib.suppress(OSError):  # the kernel has given this launch up
                    Channel(sock).send(NotStarted(-1, f"the fork server could not fork: {error}"))

    def give_to_spare(self, message: NewReaper, control: int) -> bool:
        """Have the reaper that waits take this launch; whether there is one."""
        if self.spare is None:
            return False
        try:
            self.spare[1].send(message, [control])
        except OSError:  # somebody has killed it
            return False
        finally:
            self.dismiss_spare()
        return True

    def fork_reaper(self, control: socket.socket, spares: int | None) -> int:
        """Fork a reaper: of a launch, or one that waits for a launch with so many spares."""
        watched = [self.kernel, os.getpid()]
        pid = os.fork()
        if pid == 0:
            self.children.close()
            reaper.run(control, watched, worker.forked, spares)
        self.reapers.add(pid)
        return pid

    def fork_successor(self, message: Succeed, channel: int) -> _Server | None:
        """Fork the process that becomes the next server, which is returned there; None here.

        Without one the kernel hears the end of its channel.
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
        """In the child: build."""
        os.setsid()
        processes.set_name(BUILDER)
        processes.die_with_parent(parent)  # while it builds it watches nothing
        processes.become_subreaper()  # so that it sees the daemons that a package starts
        self.children.close()
        self.selector.close()
        self.channel.close()
        self.dismiss_spare()
        processes.close_all_but([channel.fileno(), *([] if self.death is None else [self.death])])
        hello = server_builder.build(message, channel, self.hello)
        processes.set_name(NAME)
        processes.outlive_parent()  # from here on the kernel's pidfd tells when to end
        return _Server(channel, self.kernel, self.death, hello, message.spares)

    def collect(self) -> None:
        """Read the ends of children; a reaper that was killed leaves its launch's descendants to us."""
        strays = False
        for pid, returncode in self.children.ended():
            if pid not in self.reapers:  # what a server has forked was ours before its end could be read
                self.successors.update(
                    each for each in processes.children(os.getpid()) if processes.name_of(each) == NAME
                )
            strays = strays or returncode != 0 or pid not in self.reapers | self.successors
            self.reapers.discard(pid)
            self.successors.discard(pid)
            if self.spare is not None and pid == self.spare[0]:
                self.dismiss_spare()
        if strays:
            reaper.kill_descendants(self.children, self.lives_on, lambda: None)

    def lives_on(self, pid: int) -> bool:
        """Return True for a descendant that looks after itself: our own, and the servers that are or will be."""
        return pid in self.reapers or pid in self.successors or processes.name_of(pid) == NAME

    def end(self) -> None:
        """The kernel is gone. Reapers and successors see that themselves; kill those that have not within the limit."""
        deadline = time.monotonic() + _LAST_LAUNCHES
        while (self.reapers or self.successors) and time.monotonic() < deadline:
            with selectors.DefaultSelector() as ends:
                ends.register(self.children, selectors.EVENT_READ)
                ends.select(0.1)
            self.collect()
        reaper.kill_descendants(self.children, None, lambda: None)
