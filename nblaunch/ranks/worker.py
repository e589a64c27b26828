"""A rank's process: its start, its tasks one after the other, its exit.

The start methods meet here. `forked` runs in a child of a reaper, `spawned` in a fresh interpreter; from `_serve` on
they are the same.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import linecache
import multiprocessing.process
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from nblaunch.machine import processes
from nblaunch.machine.segments import Region
from nblaunch.ranks import (
    environment,
    error_report,
    main_module,
    notebook_stand_ins,
    process_group,
    stack_dumps,
    task_body,
)
from nblaunch.ranks.report import Context, enter
from nblaunch.transfer import definitions
from nblaunch.transfer.parcel import UncachedStore, pack, unpack
from nblaunch.wire.channel import Channel
from nblaunch.wire.launch_files import rank_file
from nblaunch.wire.messages import (
    Done,
    Failed,
    Interrupt,
    Interrupted,
    Leaving,
    Payload,
    RankSpec,
    Running,
    StartRank,
    Taken,
    Task,
)

LoadPayload = Callable[[list[int]], Payload]


def prepare() -> None:
    """Do once in the fork server what every rank needs, besides importing torch."""
    import cloudpickle  # noqa: F401  # ranks need it at once

    environment.find_pools()
    process_group.find_backends()
    forget_finalizers()


def forget_finalizers() -> None:
    """Keep ranks from undoing the preload's set-up at exit: torch takes 25 ms to deregister its operators."""
    registry: dict[weakref.finalize[..., object], object] = getattr(weakref.finalize, "_registry", {})
    for finalizer in registry:
        finalizer.atexit = False


def _forget_the_notebooks_exit() -> None:
    """Drop the notebook's exit functions: saving its history, ending its workers, removing its files."""
    atexit._clear()
    forget_finalizers()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # the rank's own finalizers must register it again
    util: Any = multiprocessing.util  # typeshed leaves out what follows
    util._finalizer_registry.clear()  # as multiprocessing does in its own children
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    atexit.register(util._exit_function)


def forked(spec: RankSpec, sock: socket.socket) -> NoReturn:
    """Run a rank in a child of the fork server's reaper."""
    _be_forked(spec, sock, _from_parcel)


def forked_with(payload: Payload) -> Callable[[RankSpec, socket.socket], NoReturn]:
    """Return the main function of a rank that shares the notebook's memory: it unpickles nothing."""

    def rank_main(spec: RankSpec, sock: socket.socket) -> NoReturn:
        _forget_the_notebooks_exit()
        definitions.mark_received(payload.anchor.__globals__)
        _be_forked(spec, sock, lambda fds: payload)

    return rank_main


def spawned(fd: int) -> NoReturn:
    """Run a rank in a fresh interpreter; the reaper has set its environment, working directory and streams."""
    os.set_inheritable(fd, False)  # inherited through our exec, and must not pass through the user's
    channel = Channel(socket.socket(fileno=fd))
    first = channel.receive()
    if first is None or not isinstance(first[0], StartRank):
        os._exit(1)
    spec = first[0].spec
    environment.open_streams(spec)
    stack_dumps.answer(spec)  # before torch is imported: that can take long
    environment.apply_interpreter(spec)
    with contextlib.suppress(ImportError):  # the task reports it, if it needs torch
        process_group.install()
    _leave(_serve(spec, channel, _from_parcel))


def _be_forked(spec: RankSpec, sock: socket.socket, load: LoadPayload) -> NoReturn:
    code = 1
    try:
        environment.redirect(spec)
        environment.open_streams(spec)
        stack_dumps.answer(spec)
        environment.apply_spec(spec)
        process_group.install()
        code = _serve(spec, Channel(sock), load)
    except BaseException:  # noqa: BLE001  # goes to the rank's log; the process must end here in any case
        traceback.print_exc()
    _leave(code)


def _from_parcel(fds: list[int]) -> Payload:
    payload: Payload = unpack(fds)
    return payload


# ------------------------------------------------------------------ tasks
def _serve(spec: RankSpec, channel: Channel, load: LoadPayload) -> int:
    """Run tasks until EOF; return the exit status of the last."""
    faulthandler.enable(file=2)
    spool = processes.open_log(str(rank_file(spec.log_dir, spec.rank, "spool")))
    voice = _Voice(channel, spec.rank)
    code = 0
    while (received := voice.next_task()) is not None:
        task, fds = received
        if task.acknowledge:
            voice.say(Taken(spec.rank, task.task))
        place = (spec.rank, spec.local_rank, spec.world_size)
        enter(Context(*place, task.world.device, spool, spec.log_dir, environment.drops))
        code = _run(spec, task, functools.partial(load, fds), voice)
    _await_threads()
    voice.say(Leaving(spec.rank, voice.task))
    return code


def _run(spec: RankSpec, task: Task, load: Callable[[], Payload], voice: _Voice) -> int:
    """Join the group, rebuild the payload, run it and send its outcome; return the exit status so far."""
    try:
        result, changed = _work(spec, task, load, voice)
    except BaseException as error:  # noqa: BLE001  # the notebook raises whatever user code raised
        return _send_failure(error_report.describe(spec.rank, task.task, error), voice)
    _flush()
    return _send(result, changed, spec, voice)


def _work(spec: RankSpec, task: Task, load: Callable[[], Payload], voice: _Voice) -> tuple[Any, tuple[str, ...]]:
    """Run the part of a task in which SIGINT raises KeyboardInterrupt."""
    voice.armed = True
    try:  # no context manager: contextlib sets __traceback__, which an exception may refuse
        if voice.interrupted:  # since the task arrived
            raise KeyboardInterrupt
        environment.set_threads(task.world.threads)
        _set_device(task.world.device)
        process_group.join(task.world, spec.rank, spec.world_size)
        payload = load()
        _set_the_scene(payload)
        environment.apply_settings(payload.settings)
        voice.say(Running(spec.rank, task.task))
        return task_body.call(payload)
    finally:
        voice.armed = False


def _send_failure(failed: Failed, voice: _Voice) -> int:
    """Send the failure; return the exit status."""
    if voice.interrupted and failed.kind == "exception":  # the notebook raises the stop: only the log shows this
        with contextlib.suppress(Exception):  # the user may have replaced sys.stderr
            sys.stderr.write(failed.traceback)
    _flush()
    voice.say(failed)
    return failed.status if failed.kind == "exit" else 1


def _send(result: Any, changed: tuple[str, ...], spec: RankSpec, voice: _Voice) -> int:
    ended = time.monotonic_ns()
    try:
        parcel = pack(lambda found: result, UncachedStore(Path(spec.log_dir), _may_be_replaced()))
    except BaseException as error:
        if not isinstance(error, Exception):
            raise
        voice.say(error_report.unsendable_result(spec.rank, voice.task, result, error))
        return 1
    voice.say(Done(spec.rank, voice.task, ended, changed), *parcel.fds)
    parcel.close()
    return 0


def _may_be_replaced() -> Callable[[Region], bool] | None:
    """Return a test for memory whose pages the result's segments may replace; None: no memory qualifies.

    Replaced pages keep the result from being in memory twice. Only anonymous memory qualifies: files own their pages,
    and the CUDA driver knows pinned memory by its pages. None qualifies while a thread of the user runs: its
    writes during the swap would be lost.
    """
    torch = sys.modules.get("torch")
    if not processes.LINUX or _user_threads() or (torch is not None and torch.cuda.is_initialized()):
        return None
    plain = functools.cache(processes.anonymous_memory)  # called after pickling, which may make copies
    return lambda region: any(start <= region.address and region.end <= end for start, end in plain())


def _user_threads() -> bool:
    """Return True if other threads run. tqdm's monitor does not count."""
    return any(type(thread).__name__ != "TMonitor" for thread in set(threading.enumerate()) - {threading.main_thread()})


def _set_device(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))


def _set_the_scene(payload: Payload) -> None:
    """Give the rank's ``__main__`` and tracebacks the notebook's names and cell sources."""
    for filename, source in payload.sources.items():
        linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
    main_module.install(payload.anchor.__globals__, payload.main)
    notebook_stand_ins.install(payload.anchor.__globals__)


# ------------------------------------------------------------------ the kernel's channel, and SIGINT
class _Voice:
    """The rank's channel to the kernel, and its SIGINT handler.

    The first SIGINT of a task, and only the first, raises KeyboardInterrupt: editors signal every descendant, then
    the kernel does, and a second KeyboardInterrupt would cut a ``finally`` in the middle of a checkpoint.

    A SIGINT carries no task, and may arrive late. So the kernel sends `Interrupt` first: a SIGINT that belongs to an
    earlier task is dropped.
    """

    def __init__(self, channel: Channel, rank: int) -> None:
        self.channel = channel
        self.rank = rank
        self.owner = os.getpid()
        self.task = 0
        """The task that runs, or ran last."""
        self.armed = False
        """Whether SIGINT raises KeyboardInterrupt now."""
        self._tasks: deque[tuple[Task, list[int]]] = deque()
        """Tasks that arrived while the handler read the channel."""
        self._asked = 0
        """The last task that the kernel has announced a SIGINT for."""
        self._seen = 0
        """The last task whose SIGINT has arrived."""
        self._arrived = 0
        """SIGINTs that are not attributed to a task yet."""
        self._answered = 0
        """The last task whose SIGINT was acknowledged."""
        self._speaking = False
        self._reading = False
        signal.signal(signal.SIGINT, self._on_interrupt)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @property
    def interrupted(self) -> bool:
        """Return True if the current task has got its SIGINT."""
        return 0 < self.task == self._seen

    def next_task(self) -> tuple[Task, list[int]] | None:
        """Wait for the next task and its descriptors; None at EOF."""
        self._reading = True  # the handler must not read in the middle of a message
        try:
            while not self._tasks:
                received = self.channel.receive()
                if received is None:
                    return None
                self._sort(*received)
            task, fds = self._tasks.popleft()
            if self._arrived:  # between two tasks: the SIGINT was for the one before
                self._seen = max(self._seen, min(self._asked, task.task - 1))
            self.task, self._arrived = task.task, 0
            return task, fds
        finally:
            self._reading = False

    def _sort(self, message: object, fds: list[int]) -> None:
        if isinstance(message, Task):
            self._tasks.append((message, fds))
        elif isinstance(message, Interrupt):
            self._asked = max(self._asked, message.task)

    def say(self, message: object, *fds: int) -> None:
        """Send a message. An interrupt meanwhile takes effect right after it: a handler cannot send in its middle.

        Blocking the signal would not do: if another thread takes it, Python still runs the handler in this one.

        Raises:
            KeyboardInterrupt: The rank was interrupted meanwhile.
        """
        if os.getpid() != self.owner:
            return  # a forked child, such as a DataLoader worker, must not speak for its rank
        self._speaking = True
        try:
            with contextlib.suppress(OSError):  # the kernel is gone; the reaper is about to end this process
                self.channel.send(message, fds)
        finally:
            self._speaking = False
            if self._answered < self._seen == self.task:
                self._answer()

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._arrived += 1
        if self._reading:
            return
        while self._arrived and self._seen < self.task:
            self._read_announcements()
            self._arrived -= 1
            is_stale = self._seen < self._asked < self.task
            self._seen = self._asked if is_stale else self.task
        self._arrived = 0
        if self._answered < self._seen == self.task and not self._speaking:
            self._answer()

    def _read_announcements(self) -> None:
        """Read what the kernel has sent so far. Each `Interrupt` arrives before its SIGINT."""
        if os.getpid() != self.owner or self.channel.closed:
            return
        self._reading = True
        try:
            with contextlib.suppress(OSError):  # user code has closed the descriptor
                self.channel.poll()
                for message, fds in self.channel.drain():
                    self._sort(message, fds)
        finally:
            self._reading = False

    def _answer(self) -> None:
        """Acknowledge the interrupt, and let it take effect."""
        self._answered = self._seen
        self.say(Interrupted(self.rank, self._seen))
        if self.armed:
            raise KeyboardInterrupt


# ------------------------------------------------------------------ the end
def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the user may have replaced or closed it
            stream.flush()


def _await_threads() -> None:
    """Join non-daemon threads, as an interpreter's exit does, while the process group they may use still exists."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # executors register their shutdown here
    except BaseException:  # noqa: BLE001  # the interpreter, too, only prints an executor's error
        traceback.print_exc()


def _leave(code: int) -> NoReturn:
    """Exit as an interpreter would: exit functions, streams. Every result was sent before."""
    with contextlib.suppress(BaseException):  # a broken group is not this rank's failure
        process_group.leave()
    enter(None)
    try:
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001  # the interpreter, too, only prints it
        traceback.print_exc()
    _flush()
    os._exit(code & 0xFF)
