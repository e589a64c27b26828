"""The parent of one launch's ranks: starts them, reports their ends, kills whatever is left of them.

Runs in a process of its own, forked by the fork server (or by the kernel, for ``start_method="fork"``). It is
the child subreaper of its launch, so a daemon that forks twice and calls setsid still comes to it. It ends the
launch when the kernel, the fork server or its control channel goes: whichever is first.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import BinaryIO, Literal, NoReturn

from nblaunch.machine import processes
from nblaunch.wire.channel import Channel
from nblaunch.wire.launch_files import rank_file
from nblaunch.wire.messages import (
    NewReaper,
    NotStarted,
    RankExited,
    RankSpec,
    RankStarted,
    ReaperStarted,
    SendSignal,
    StartRank,
    Swept,
)

RankMain = Callable[[RankSpec, socket.socket], None]
"""What a forked rank runs: the spec it was made from, its channel to the kernel. Never returns normally."""

_SPAWN = (
    "import json, sys; fd, path = int(sys.argv[1]), json.loads(sys.argv[2]); sys.path[:] = path; del sys.argv[1:]; "
    "from nblaunch.ranks.worker import spawned; spawned(fd)"
)
SPARE = "nblaunch-spare"
"""The name of processes that wait for a launch."""
_SWEEP_LIMIT = 5.0
"""Seconds for a launch's processes to die; trackers are killed too for the last half second of it."""
_TRACKER_LIMIT = 2.0
"""Seconds for multiprocessing's resource trackers to unlink what is in /dev/shm, once all that used it is dead."""
_LOOK_EVERY = 0.5
"""Seconds between looks at the watched processes where the system has no pidfd."""


def run(control: socket.socket, watched: Sequence[int], rank_main: RankMain, spares: int | None = None) -> NoReturn:
    """Be a reaper, to the end. Call it in a fresh child.

    Args:
        control: The channel to the kernel; of one that waits for a launch, to the fork server.
        watched: Pids whose end ends the launch.
        rank_main: What forked ranks run.
        spares: Wait for a launch, with so many processes that are ranks then. Default: the launch is there.
    """
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    processes.become_subreaper()
    processes.set_name("nblaunch-reaper")
    processes.close_all_but([control.fileno()])
    reaper = _Reaper(Channel(control), watched, rank_main)
    try:
        if spares is None or reaper.wait_for_launch(spares):
            reaper.serve()
        shutil.rmtree(reaper.scratch, ignore_errors=True)  # the kernel may not be there to do it
    except BaseException:  # noqa: BLE001  # the process must end here in any case
        traceback.print_exc()
        os._exit(1)  # the fork server kills what is left of the launch
    os._exit(0)


class _Reaper:
    """See the module. Its whole life is `serve`."""

    def __init__(self, control: Channel, watched: Sequence[int], rank_main: RankMain) -> None:
        self.control = control
        self.rank_main = rank_main
        self.ranks: dict[int, int] = {}  # pid -> rank
        self.spares: list[tuple[int, Channel]] = []
        """Processes that wait to be ranks, and the channels to them."""
        self.started, self.expected = 0, 1
        self.scratch = ""
        self.children = processes.ChildWatch()
        self.watched = list(watched)
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.selector.register(self.children, selectors.EVENT_READ)
        self.deaths = [fd for fd in map(processes.pidfd, watched) if fd is not None]
        for fd in self.deaths:
            self.selector.register(fd, selectors.EVENT_READ)

    def wait_for_launch(self, spares: int) -> bool:
        """Fork what a launch will need, so that it need not wait for that; whether one has come."""
        processes.set_name(SPARE)
        for _ in range(spares):
            here, there = socket.socketpair()
            pid = self.fork_child(there.fileno(), lambda there=there: self.be_spare(there))  # type: ignore[misc]
            there.close()
            self.spares.append((pid, Channel(here)))
        while not self.control.closed:
            ready = {key.fileobj for key, _ in self.selector.select(_LOOK_EVERY if self.looks() else None)}
            if self.bereft(ready):
                break
            bereaved = self.children in ready and bool(self.children.ended())
            if self.control in ready or bereaved:  # the launch may have come since
                self.control.poll()
                for message, fds in self.control.drain():
                    if isinstance(message, NewReaper):
                        self.take_launch(Channel(socket.socket(fileno=fds[0])), message.ranks)
                        return True
            if bereaved:
                break  # somebody has killed one: the fork server forks others
        kill_descendants(self.children, None, lambda: None)
        return False

    def take_launch(self, control: Channel, ranks: int) -> None:
        self.selector.unregister(self.control)
        self.control.close()
        self.control = control
        self.selector.register(control, selectors.EVENT_READ)
        processes.set_name("nblaunch-reaper")
        while len(self.spares) > ranks:
            self.spares.pop()[1].close()  # it leaves

    def be_spare(self, sock: socket.socket) -> None:
        """In a child: wait until this is a rank, or not needed."""
        processes.set_name(SPARE)
        received = Channel(sock).receive()
        if received is not None and isinstance(received[0], StartRank):
            processes.set_name("nblaunch-rank")
            sock.close()
            self.rank_main(received[0].spec, socket.socket(fileno=received[1][0]))

    def serve(self) -> None:
        own = processes.pidfd(os.getpid())
        self.tell(ReaperStarted(os.getpid()), [] if own is None else [own])
        while self.wanted():
            ready = {key.fileobj for key, _ in self.selector.select(_LOOK_EVERY if self.looks() else None)}
            if self.bereft(ready):
                # Their ends are not reported: that what watched over them died tells more than the SIGKILL from here.
                kill_descendants(self.children, None, lambda: None, self.ranks)
                return
            if self.control in ready:
                self.control.poll()
                for message, fds in self.control.drain():
                    self.obey(message, fds)
            self.report_ends()
        self.tell(Swept(tuple(kill_descendants(self.children, None, self.report_ends, self.ranks))))

    def wanted(self) -> bool:
        """Whether the kernel is there and a rank is left, or none has been started yet."""
        return not self.control.closed and (bool(self.ranks) or self.started < self.expected)

    def bereft(self, ready: Collection[object]) -> bool:
        """Whether the kernel or the fork server has ended."""
        return any(fd in ready for fd in self.deaths) or (self.looks() and not all(map(processes.alive, self.watched)))

    def looks(self) -> bool:
        return len(self.deaths) < len(self.watched)

    def obey(self, message: object, fds: list[int]) -> None:
        if isinstance(message, StartRank):
            self.try_to_start(message.spec, fds[0])
        elif isinstance(message, SendSignal):
            for pid, rank in self.ranks.items():
                if rank == message.rank:
                    processes.kill(pid, message.signum)
                    if (
                        message.group and not processes.LINUX
                    ):  # on Linux the sweep finds what is left, and spares trackers
                        processes.kill(pid, message.signum, group=True)

    def try_to_start(self, spec: RankSpec, fd: int) -> None:
        try:
            self.start(spec, fd)
        except Exception as error:  # noqa: BLE001  # a variable that is too long, no memory, no log folder
            self.tell(NotStarted(spec.rank, f"{type(error).__name__}: {error}"))

    def start(self, spec: RankSpec, fd: int) -> None:
        self.started, self.expected = self.started + 1, spec.local_world_size
        self.scratch = spec.scratch
        pid = self.spawn(spec, fd) if spec.method == "spawn" else self.fork(spec, fd)
        os.close(fd)
        self.ranks[pid] = spec.rank
        self.tell(RankStarted(spec.rank, pid))

    def fork(self, spec: RankSpec, fd: int) -> int:
        while self.spares:
            pid, channel = self.spares.pop(0)
            try:
                channel.send(StartRank(spec), [fd])
            except OSError:  # somebody has killed it
                continue
            finally:
                channel.close()
            return pid
        return self.fork_child(fd, lambda: self.rank_main(spec, socket.socket(fileno=fd)))

    def fork_child(self, fd: int, run: Callable[[], None]) -> int:
        """Fork a child with this descriptor alone."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # here too: a signal to the group must not come before it exists
            return pid
        try:
            os.setpgid(0, 0)
            processes.die_with_parent(parent)
            self.children.close()
            processes.close_all_but([fd])
            processes.forget_resource_tracker()
            processes.set_name("nblaunch-rank")
            run()
        finally:
            os._exit(1)

    def spawn(self, spec: RankSpec, fd: int) -> int:
        parent = os.getpid()
        command = [sys.executable, "-c", _SPAWN, str(fd), json.dumps(spec.sys_path)]

        def prepare() -> None:
            os.setpgid(0, 0)
            os.umask(spec.umask)
            processes.die_with_parent(parent)

        cwd = spec.cwd if os.path.isdir(spec.cwd) else None
        with open_log(spec, "out") as out, open_log(spec, "err") as err:
            process = subprocess.Popen(
                command,
                env=spec.env,
                cwd=cwd,
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=prepare,  # this process has one thread, so it is safe here
            )
        process.returncode = 0  # its end is read by ChildWatch, not by Popen
        return process.pid

    def report_ends(self) -> None:
        for pid, returncode in self.children.ended():
            rank = self.ranks.pop(pid, None)
            if rank is not None:
                if not processes.LINUX:  # there the sweep finds all that it left
                    processes.kill(pid, signal.SIGKILL, group=True)
                self.tell(RankExited(rank, returncode, time.monotonic_ns()))

    def tell(self, message: object, fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # the kernel is gone; the loop will notice
            self.control.send(message, fds)


def kill_descendants(
    children: processes.ChildWatch,
    spare: Callable[[int], bool] | None,
    on_end: Callable[[], None],
    groups: Collection[int] = (),
) -> list[int]:
    """Kill this process's descendants until none is left, reading their ends.

    Resource trackers come last: each unlinks what the others leave in /dev/shm, and ends, when no writer of its pipe
    is left.

    Args:
        children: This process's watch.
        spare: Tells whom to leave alone, with all that is theirs. It is asked again each time, as such a process may
            come here when its parent ends. None: nobody, and the ends of all children are read.
        on_end: Called when a child has ended, to report it before its end is read here.
        groups: Process groups to kill as well, for systems that cannot list descendants.

    Returns:
        The pids that did not die within the limit.
    """
    deadline = time.monotonic() + _SWEEP_LIMIT
    used = time.monotonic()  # when something that a tracker waits for was last seen
    while spare is not None or processes.has_children():
        if not processes.LINUX:
            for pid in groups:
                processes.kill(pid, signal.SIGKILL, group=True)
        left = processes.descendants(os.getpid(), spare)
        trackers = set(filter(processes.is_resource_tracker, left))
        now = time.monotonic()
        used = used if trackers.issuperset(left) else now
        patient = now < min(used + _TRACKER_LIMIT, deadline - 0.5)
        for pid in left:
            if not (patient and pid in trackers):
                processes.kill(pid, signal.SIGKILL)
        on_end()
        if spare is None:
            children.ended()
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not left and (processes.LINUX or not groups):
            return []
        if time.monotonic() > deadline:
            return left
        with selectors.DefaultSelector() as ends:
            ends.register(children, selectors.EVENT_READ)
            ends.select(0.02)
    return []


def open_log(spec: RankSpec, stream: Literal["out", "err"]) -> BinaryIO:
    """The file that is a rank's fd 1 (``out``) or 2 (``err``): appended to, so that all its children may write."""
    return open(processes.open_log(str(rank_file(spec.log_dir, spec.rank, stream))), "wb", buffering=0)
