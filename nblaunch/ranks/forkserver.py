"""A clean process with torch imported and one thread, which forks a reaper for each launch.

Started by the kernel, one per kernel. It runs no user code and touches no CUDA. What it imports is what every
rank would import first, so that a launch costs forks and not imports. If the import brings a second thread or
CUDA, it says so instead of forking ranks: the kernel then uses ``spawn``.
"""

from __future__ import annotations

import atexit
import contextlib
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
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from nblaunch.channel import Channel
from nblaunch.messages import PROTOCOL, Hello, Importing, LeftOut, NewReaper, NotStarted, Succeed
from nblaunch.ranks import bootstrap, environment, imports, process_group, reaper, system

_LOOK_EVERY = 0.5
"""Seconds between looks at the kernel where the system has no pidfd."""
_SOON = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
"""Imported in idle moments, in steps that a launch may come between: the first optimizer or DistributedDataParallel of
a process imports torch._dynamo, which takes longer than torch itself, and then no rank has to."""
_SPARE_AFTER = 0.05
"""Seconds without a launch after which one that waits for the next is forked: the present one needs the CPUs."""
_MOST_SPARES = 8
_LAST_LAUNCHES = 2.0
"""Seconds that reapers get to end their launches when the kernel has gone, before they are ended too."""


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
    imports.note_roots()
    _serve(channel, kernel, _hello(preload), _SOON if preload else ())


def _serve(channel: Channel, kernel: int, hello: Hello, soon: tuple[str, ...]) -> NoReturn:
    system.become_subreaper()
    channel.send(hello)
    try:
        _Server(channel, kernel, hello, soon).serve()
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
        bootstrap.prepare()
    except BaseException:  # noqa: BLE001  # an import that calls sys.exit must be told of too
        problem = f"importing {', '.join(preload)} failed:\n{traceback.format_exc()}"
    problem = problem or _unfit()
    _settle()
    return Hello(PROTOCOL, os.getpid(), problem, time.monotonic() - begin)


def _hello_of_successor(channel: Channel, modules: tuple[str, ...], before: Hello) -> Hello:
    """Import what launches have used, a package at a time: the kernel knows which, should one hang or crash."""
    begin, since = time.monotonic(), imports.now()
    own = system.pidfd(os.getpid())
    channel.send(Importing("", os.getpid()), [] if own is None else [own])
    if own is not None:
        os.close(own)
    for _ in _import_soon(_SOON):  # the server that forked this one may not have come so far
        pass
    filters = list(warnings.filters)
    witness = imports.Witness()
    told, files = "", _open_files()
    for name in modules:
        if name in sys.modules:
            continue  # another has imported it, and a look takes 50 ms
        package = name.partition(".")[0]
        if package != told:
            _leave_if_unfit(channel, told, files, witness)
            channel.send(Importing(package, os.getpid()))
            told = package
        with contextlib.suppress(Exception):  # its ranks will say so if they need it
            importlib.import_module(name)
    _leave_if_unfit(channel, told, files, witness)
    witness.close()
    imports.note_filters(filters)
    os.chdir(os.sep)
    bootstrap.prepare()
    _settle()
    return replace(
        before,
        pid=os.getpid(),
        seconds=time.monotonic() - begin,
        files=imports.files(modules, since),
        not_found=witness.not_found(),
    )


def _leave_if_unfit(channel: Channel, package: str, files: int, witness: imports.Witness) -> None:
    """Leave where the package just imported makes forking unsafe, or is not for all ranks alike."""
    try:
        reason = _unfit() or _keeps(files) or witness.objection()
    except Exception as error:  # noqa: BLE001  # it may have put anything anywhere
        reason = f"it cannot be told what it does while it is imported: {error!r}"
    if reason:
        with contextlib.suppress(BaseException):  # as at an interpreter's end; first, as the kernel ends who has left
            atexit._run_exitfuncs()
        channel.send(LeftOut(package, reason))
        os._exit(1)  # a failure, so that the server ends what is left of the processes that it started


def _keeps(files: int) -> str:
    """What the process has by now that forked ranks would share, besides so many open files."""
    if _open_files() > files:
        return "it keeps files open"
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # nor did a child leave one behind: this process would have adopted that
        return ""
    return "it starts processes"


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


def _settle() -> None:
    """Keep what is imported out of the collector's way: it would write to every page that ranks share."""
    gc.collect()
    gc.freeze()


def _import_soon(names: tuple[str, ...]) -> Iterator[None]:
    """Import one module at each step; one that cannot be imported is left to the ranks."""
    for name in names:
        try:
            with _no_exit_functions():
                importlib.import_module(name)
        except Exception:  # noqa: BLE001  # whatever a module raises: its ranks will say so if they need it
            traceback.print_exc()
            return
        yield


@contextlib.contextmanager
def _no_exit_functions() -> Iterator[None]:
    """Let modules register nothing for the exit of every rank: triton's look for leaks takes each rank 4 ms."""
    register = atexit.register
    atexit.register = lambda function, *args, **kwargs: function  # type: ignore[assignment]  # what the real one gives
    try:
        yield
    finally:
        atexit.register = register


def _unfit() -> str:
    threads = system.thread_count()
    if threads > 1:
        return f"the preload left {threads} threads running, and forking them is not safe"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the preload initialised CUDA, which does not survive a fork"
    return ""


class _Server:
    def __init__(self, channel: Channel, kernel: int, hello: Hello, soon: tuple[str, ...]) -> None:
        self.channel = channel
        self.kernel = kernel
        self.parent = os.getppid()
        self.hello = hello
        self.reapers: set[int] = set()
        """Children that are left alone: the reapers, and the successor."""
        self.spares: int | None = None
        """How many ranks wait with the reaper that waits for the next launch; None before the first."""
        self.spare: tuple[int, Channel] | None = None
        """The pid of that reaper, and the channel to it."""
        self.tidying: Iterator[object] | None = self.tidy(soon)
        self.children = system.ChildWatch()
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ)
        self.selector.register(self.children, selectors.EVENT_READ)
        self.death = system.pidfd(kernel)
        if self.death is not None:
            self.selector.register(self.death, selectors.EVENT_READ)

    def serve(self) -> None:
        """Fork reapers for as long as the kernel may ask, and stay while a launch runs: its end would end that too."""
        while (self.reapers or not self.channel.closed) and os.getppid() == self.parent:
            ready = {key.fileobj for key, _ in self.selector.select(self.patience())}
            if not ready:
                self.use_idle_moment()
            if self.death in ready:
                break
            if self.channel in ready:
                self.channel.poll()
                for message, fds in self.channel.drain():
                    if isinstance(message, NewReaper):
                        self.start_reaper(message, fds[0])
                    elif isinstance(message, Succeed):
                        self.fork_successor(message, fds[0])
                if self.channel.closed:
                    self.selector.unregister(self.channel)
                    self.dismiss_spare()
            self.collect()
        self.end()

    def tidy(self, soon: tuple[str, ...]) -> Iterator[None]:
        """What makes later launches faster, a step for each idle moment."""
        for _ in _import_soon(soon):
            if problem := _unfit():
                self.hello = replace(self.hello, problem=problem)
                with contextlib.suppress(OSError):  # it is retired, and stays for the launches that it has
                    self.channel.send(self.hello)  # the kernel has launches spawn their ranks from now on
                return
            yield
        bootstrap.forget_finalizers()
        _settle()
        yield from system.collapse_heap()

    def patience(self) -> float | None:
        """Seconds to wait for something to do: none while there is tidying left for idle moments."""
        if self.tidying:
            return 0.0
        if self.wants_spare():
            return _SPARE_AFTER
        return None if self.death is not None else _LOOK_EVERY

    def use_idle_moment(self) -> None:
        if self.tidying:
            if next(self.tidying, self) is self:
                self.tidying = None
        elif self.wants_spare():
            here, there = socket.socketpair()
            with contextlib.suppress(OSError):  # no more processes: the next launch will say so
                pid = self.fork_reaper(there, self.spares)
                self.spare = pid, Channel(here)
            there.close()

    def wants_spare(self) -> bool:
        """Whether there is no reaper that waits for the next launch; from the first launch on there is to be one."""
        return self.spares is not None and self.spare is None and not self.channel.closed and not self.hello.problem

    def dismiss_spare(self) -> None:
        if self.spare is not None:
            self.spare[1].close()
            self.spare = None

    def start_reaper(self, message: NewReaper, control: int) -> None:
        self.spares = min(message.ranks, _MOST_SPARES)
        with socket.socket(fileno=control) as sock:
            if not self.hello.problem and self.give_to_spare(message, control):
                return
            try:
                if self.hello.problem:  # the kernel asked before it was told
                    raise OSError(f"{self.hello.problem}; the next launch will spawn its ranks")
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
            reaper.run(control, watched, bootstrap.forked, spares)
        self.reapers.add(pid)
        return pid

    def fork_successor(self, message: Succeed, channel: int) -> None:
        """Fork one that has more modules. It imports them in a process of its own: who knows what they do."""
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            traceback.print_exc()
            pid = -1
        if pid == 0:
            system.die_with_parent(parent)  # while it imports it watches nobody
            system.become_subreaper()  # so that it sees the daemons that a package starts
            self.become_successor(message, Channel(socket.socket(fileno=channel)))
        os.close(channel)  # without a successor the kernel hears the end of its channel
        if pid > 0:
            self.reapers.add(pid)

    def become_successor(self, message: Succeed, channel: Channel) -> NoReturn:
        """In the child: import, and be a fork server."""
        self.children.close()
        self.selector.close()
        self.channel.close()
        system.close_all_but([channel.fileno()])
        os.environ.clear()
        os.environ.update(message.env)
        with contextlib.suppress(OSError):  # it is gone, and its ranks will be told
            os.chdir(message.cwd)
        hello = _hello_of_successor(channel, message.modules, self.hello)
        _serve(channel, self.kernel, hello, ())

    def collect(self) -> None:
        """Read the ends of children; a reaper that was killed leaves its launch's descendants to us."""
        strays = False
        for pid, returncode in self.children.ended():
            strays = strays or returncode != 0 or pid not in self.reapers
            self.reapers.discard(pid)
            if self.spare is not None and pid == self.spare[0]:
                self.dismiss_spare()
        if strays:
            reaper.kill_descendants(self.children, self.reapers, lambda: None)

    def end(self) -> None:
        """The kernel is gone. Reapers see that themselves; kill what they have not within the limit."""
        deadline = time.monotonic() + _LAST_LAUNCHES
        while self.reapers and time.monotonic() < deadline:
            with selectors.DefaultSelector() as ends:
                ends.register(self.children, selectors.EVENT_READ)
                ends.select(0.1)
            self.collect()
        reaper.kill_descendants(self.children, (), lambda: None)
