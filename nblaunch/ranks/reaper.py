"""The reaper: the parent of one launch's ranks. It starts them, reports their exits and kills their orphans.

Runs in a reaper process, forked by the fork server (by the kernel for ``start_method="fork"``). It is the child
subreaper of its launch, so it also adopts a daemon that double-forks and calls setsid. It kills the launch when the
kernel or the fork server exits, or its control channel closes.
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

from nblaunch.machine import named_resources, processes, timeouts
from nblaunch.machine.limits import remedy
from nblaunch.wire import AGENT_FOLDER, BELOW_AGENT
from nblaunch.wire.channel import Channel
from nblaunch.wire.launch_files import rank_file
from nblaunch.wire.messages import (
    EndGroup,
    NotStarted,
    RankExited,
    RankSpec,
    RankStarted,
    ReaperStarted,
    SendSignal,
    StartRank,
    Swept,
)

_SWEEP_TIMEOUT_S = 5.0
"""For killed descendants to exit."""
_SWEEP_POLL_S = 0.02
"""Between two rounds of a sweep without a child's exit."""
_TRACKER_TIMEOUT_S = 2.0
"""For multiprocessing's resource trackers to unlink shared memory once its users are dead."""
_TRACKER_KILL_TIMEOUT_S = 0.5
"""The end of a sweep in which resource trackers are killed too."""
RankMain = Callable[[RankSpec, socket.socket], None]
"""The main function of a forked rank, called with its spec and its channel to the kernel. Does not return."""

_SPAWN = (
    "import json, sys; fd, tracker, path = json.loads(sys.argv[1]); sys.path[:] = path; del sys.argv[1:]; "
    "from nblaunch.ranks.worker import spawned; spawned(fd, tracker)"
)


def run(control: socket.socket, watched: Sequence[int], rank_main: RankMain) -> NoReturn:
    """Run a reaper; never returns. Call it in a fresh child."""
    with contextlib.suppress(PermissionError):  # already a session leader
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:  # below an agent, which decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    processes.become_subreaper()
    processes.set_name("nblaunch-reaper")
    processes.close_all_but([control.fileno()])
    reaper = _Reaper(Channel(control), watched, rank_main)
    try:
        reaper.serve()
        named_resources.remove_created(reaper.scratch)  # the kernel may be dead
        shutil.rmtree(reaper.scratch, ignore_errors=True)
        remove_files_of_killed_agent()
    except BaseException:  # noqa: BLE001  # the process must exit here in any case
        traceback.print_exc()
        os._exit(1)  # the fork server kills what is left of the launch
    os._exit(0)


def remove_files_of_killed_agent() -> None:
    """Remove the folder of the agent above if it cannot: it was killed."""
    folder, agent = os.environ.get(AGENT_FOLDER), os.environ.get(BELOW_AGENT)
    if folder and agent and not processes.alive(int(agent)):
        shutil.rmtree(folder, ignore_errors=True)


class _Reaper:
    def __init__(self, control: Channel, watched: Sequence[int], rank_main: RankMain) -> None:
        self.control = control
        self.rank_main = rank_main
        self.ranks: dict[int, int] = {}  # pid -> rank
        self.started, self.expected = 0, 1
        self.keeps = False
        """Kept ranks: more may be started, until `EndGroup`."""
        self.scratch = ""
        self.children = processes.ChildWatch()
        self.watched = list(watched)
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.selector.register(self.children, selectors.EVENT_READ)
        self.pidfds = [fd for fd in map(processes.pidfd, watched) if fd is not None]
        for fd in self.pidfds:
            self.selector.register(fd, selectors.EVENT_READ)

    def serve(self) -> None:
        """Run the launch: start ranks, forward signals, report exits, sweep."""
        own = processes.pidfd(os.getpid())
        self.send(ReaperStarted(), [] if own is None else [own])
        while not self.control.closed and (self.ranks or self.started < self.expected or self.keeps):
            ready = self.select()
            if self.is_orphan(ready):
                # Report no exits: the death of the watching process is the cause, not the SIGKILL from here.
                kill_descendants(self.children, None, lambda: None, self.ranks)
                return
            if self.control in ready:
                self.control.poll()
                for message, fds in self.control.drain():
                    self.handle(message, fds)
            self.report_exits()
        left = kill_descendants(self.children, None, self.report_exits, self.ranks)
        named_resources.remove_created(self.scratch)
        self.send(Swept(tuple(left)))

    def select(self) -> set[object]:
        """Wait for events; return the ready file objects, none when watched processes must be polled."""
        timeout = timeouts.WATCH_POLL_S if len(self.pidfds) < len(self.watched) else None
        return {key.fileobj for key, _ in self.selector.select(timeout)}

    def is_orphan(self, ready: Collection[object]) -> bool:
        if any(fd in ready for fd in self.pidfds):
            return True
        return len(self.pidfds) < len(self.watched) and not all(map(processes.alive, self.watched))

    def handle(self, message: object, fds: list[int]) -> None:
        if isinstance(message, StartRank):
            try:
                self.start(message.spec, fds[0])
            except Exception as error:  # noqa: BLE001  # E2BIG, ENOMEM, a missing log directory
                hint = remedy(error) if isinstance(error, OSError) else ""
                self.send(NotStarted(message.spec.rank, f"{type(error).__name__}: {error}{hint}"))
        elif isinstance(message, EndGroup):
            self.keeps = False
        elif isinstance(message, SendSignal):
            # If it finds them, the sweep kills the rest of the group, and leaves resource trackers time to unlink.
            is_for_group = message.group and not processes.finds_orphans()
            for pid, rank in self.ranks.items():
                if rank == message.rank:
                    processes.kill(pid, message.signum)
                    if is_for_group:
                        processes.kill(pid, message.signum, group=True)

    def start(self, spec: RankSpec, fd: int) -> None:
        self.started, self.expected = self.started + 1, spec.local_world_size
        self.keeps = self.keeps or (spec.is_kept and self.started <= self.expected)
        self.scratch = spec.scratch
        pid = self.spawn(spec, fd) if spec.method == "spawn" else self.fork(spec, fd)
        os.close(fd)
        self.ranks[pid] = spec.rank
        self.send(RankStarted(spec.rank, pid))

    def fork(self, spec: RankSpec, fd: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # in both processes, so the group exists before the first signal to it
            return pid
        try:
            with contextlib.suppress(OSError):  # a sandbox; signals are for the rank alone then
                os.setpgid(0, 0)
            processes.die_with_parent(parent)
            self.children.close()
            processes.close_all_but([fd])
            processes.set_name("nblaunch-rank")
            self.rank_main(spec, socket.socket(fileno=fd))
        finally:
            os._exit(1)

    def spawn(self, spec: RankSpec, fd: int) -> int:
        parent = os.getpid()
        tracker = named_resources.tracker()
        command = [sys.executable, "-c", _SPAWN, json.dumps([fd, tracker, spec.process.sys_path])]

        def prepare() -> None:
            os.setpgid(0, 0)
            os.umask(spec.process.umask)
            processes.die_with_parent(parent)

        cwd = spec.process.cwd if os.path.isdir(spec.process.cwd) else None
        with open_log(spec, "out") as out, open_log(spec, "err") as err:
            process = subprocess.Popen(
                command,
                env=spec.env,
                cwd=cwd,
                pass_fds=[fd, tracker],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=prepare,  # safe: this process has one thread
            )
        process.returncode = 0  # ChildWatch reads its exit, not Popen
        return process.pid

    def report_exits(self) -> None:
        ended = [(pid, returncode) for pid, returncode in self.children.ended() if pid in self.ranks]
        for pid, returncode in ended:  # at once: the time tells who failed first
            self.send(RankExited(self.ranks.pop(pid), returncode, time.monotonic_ns()))
            if not processes.finds_orphans():  # else the sweep finds the rank's orphans
                processes.kill(pid, signal.SIGKILL, group=True)
        if ended and self.keeps:
            self.kill_orphans()

    def kill_orphans(self) -> None:
        """Kill the orphans of exited ranks. Live kept ranks are subreapers, so their orphans do not come here."""
        for pid in processes.descendants(os.getpid(), self.ranks.__contains__):
            if not processes.is_resource_tracker(pid):  # it unlinks shared memory, and exits
                processes.kill(pid, signal.SIGKILL)

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # the kernel is dead; `serve` will notice
            self.control.send(message, fds)


def kill_descendants(
    children: processes.ChildWatch,
    spare: Callable[[int], bool] | None,
    on_exit: Callable[[], None],
    groups: Collection[int] = (),
) -> list[int]:
    """Kill and reap this process's descendants until none is left.

    Resource trackers come last: each unlinks leaked shared memory and exits once the last writer of its pipe is dead.
    `spare` is asked in every round, as a process may be adopted at any time; without it, the exits of all children are
    read. `on_exit` reports exits before they are read. `groups` are killed where descendants cannot be listed. Returned
    are the pids that did not exit within the timeout.
    """
    deadline = time.monotonic() + _SWEEP_TIMEOUT_S
    trackers_kill_time = deadline - _TRACKER_KILL_TIMEOUT_S
    finds_orphans = processes.finds_orphans()
    trackers_busy = time.monotonic()  # when a process that trackers may serve was last seen
    while spare is not None or processes.has_children():
        if not finds_orphans:
            for pid in groups:
                processes.kill(pid, signal.SIGKILL, group=True)
        left = processes.descendants(os.getpid(), spare)
        trackers = set(filter(processes.is_resource_tracker, left))
        now = time.monotonic()
        trackers_busy = trackers_busy if trackers.issuperset(left) else now
        waits_for_trackers = now < min(trackers_busy + _TRACKER_TIMEOUT_S, trackers_kill_time)
        for pid in left:
            if not (waits_for_trackers and pid in trackers):
                processes.kill(pid, signal.SIGKILL)
        on_exit()
        if spare is None:
            children.ended()
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not left and (finds_orphans or not groups):
            return []
        if time.monotonic() > deadline:
            return left
        with selectors.DefaultSelector() as exits:
            exits.register(children, selectors.EVENT_READ)
            exits.select(_SWEEP_POLL_S)
    return []


def open_log(spec: RankSpec, stream: Literal["out", "err"]) -> BinaryIO:
    """Open the file that is a rank's fd 1 (``out``) or 2 (``err``), in append mode: its children write to it too."""
    return open(processes.open_log(str(rank_file(spec.log_dir, spec.rank, stream))), "wb", buffering=0)
