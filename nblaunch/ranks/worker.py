"""A rank from its birth to its end: its process, its tasks, and what it tells the kernel.

The three start methods meet here. `forked` runs in a child of a reaper, `spawned` in a fresh interpreter; from
`_serve` on there is no difference.
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
    """What the fork server can do once for all ranks, besides importing torch."""
    import cloudpickle  # noqa: F401  # ranks need it at once

    environment.find_pools()
    process_group.find_backends()
    forget_finalizers()


def forget_finalizers() -> None:
    """Let no rank undo at its exit what the preload set up: torch takes 25 ms to deregister its operators."""
    registry: dict[weakref.finalize[..., object], object] = getattr(weakref.finalize, "_registry", {})
    for finalizer in registry:
        finalizer.atexit = False


def _forget_the_notebooks_exit() -> None:
    """Leave to the notebook what it will do at its own exit: save its history, end its workers, remove its files."""
    atexit._clear()
    forget_finalizers()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # this rank's own need it anew
    util: Any = multiprocessing.util  # typeshed leaves out what follows
    util._finalizer_registry.clear()  # as multiprocessing does in its own children
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    atexit.register(util._exit_function)


def forked(spec: RankSpec, sock: socket.socket) -> NoReturn:
    """Be a rank in a child of the fork server's reaper."""
    _be_forked(spec, sock, _from_parcel)


def forked_with(payload: Payload) -> Callable[[RankSpec, socket.socket], NoReturn]:
    """Be a rank in a process that holds the notebook's own memory (``start_method="fork"``): nothing is unpickled."""

    def rank_main(spec: RankSpec, sock: socket.socket) -> NoReturn:
        _forget_the_notebooks_exit()
        definitions.mark_received(payload.anchor.__globals__)
        _be_forked(spec, sock, lambda fds: payload)

    return rank_main


def spawned(fd: int) -> NoReturn:
    """Be a rank in a fresh interpreter, which the reaper gave its environment, folder and streams already."""
    os.set_inheritable(fd, False)  # it came through an exec, and must not go through the user's
    channel = Channel(socket.socket(fileno=fd))
    first = channel.receive()
    if first is None or not isinstance(first[0], StartRank):
        os._exit(1)
    spec = first[0].spec
    environment.open_streams(spec)
    stack_dumps.answer(spec)  # before torch is imported: that can take long
    environment.apply_interpreter(spec)
    with contextlib.suppress(ImportError):  # the function may not need torch; _serve says so if the launch does
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
    """Run tasks until no more can come; the exit status."""
    faulthandler.enable(file=2)
    spool = processes.open_log(str(rank_file(spec.log_dir, spec.rank, "spool")))
    voice = _Voice(channel, spec.rank)
    code = 0
    while (received := channel.receive()) is not None:
        task, fds = received
        if isinstance(task, Task):
            if task.acknowledge:
                voice.say(Taken(spec.rank))
            place = (spec.rank, spec.local_rank, spec.world_size)
            enter(Context(*place, task.world.device, spool, spec.log_dir, environment.drops))
            code = _run(spec, task, functools.partial(load, fds), voice)
    _await_threads()
    voice.say(Leaving(spec.rank))
    return code


def _run(spec: RankSpec, task: Task, load: Callable[[], Payload], voice: _Voice) -> int:
    """One task: join the group, rebuild what was sent, run it, send what came of it; the exit status so far."""
    try:
        result, changed = _work(spec, task, load, voice)
    except BaseException as error:  # noqa: BLE001  # whatever user code raises is for the notebook to hear
        return _tell_of(error_report.describe(spec.rank, error), voice)
    _flush()
    return _send(result, changed, spec, voice)


def _work(spec: RankSpec, task: Task, load: Callable[[], Payload], voice: _Voice) -> tuple[Any, tuple[str, ...]]:
    """The part of a task in which SIGINT raises KeyboardInterrupt."""
    voice.armed = True
    try:  # no context manager: contextlib sets __traceback__, which an exception may refuse
        environment.set_threads(task.world.threads)
        _set_device(task.world.device)
        process_group.join(task.world, spec.rank, spec.world_size)
        payload = load()
        _set_the_scene(payload)
        environment.apply_settings(payload.settings)
        voice.say(Running(spec.rank))
        return task_body.call(payload)
    finally:
        voice.armed = False


def _tell_of(failed: Failed, voice: _Voice) -> int:
    """Say what failed; the exit status."""
    if voice.seen and failed.kind == "exception":  # then the notebook raises the stop, and only the log has this
        with contextlib.suppress(Exception):  # the user may have put anything there
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
        voice.say(error_report.unsendable_result(spec.rank, result, error))
        return 1
    voice.say(Done(spec.rank, ended, changed), *parcel.fds)
    parcel.close()
    return 0


def _may_be_replaced() -> Callable[[Region], bool] | None:
    """Of which memory the result's segments may take the place, so that it is not there twice while it travels.

    Only of plain memory: that of files is theirs, and CUDA's pinned memory is known to the driver by its pages. And of
    none while a thread of the user's runs: what that writes at that moment would be lost to it.
    """
    torch = sys.modules.get("torch")
    if not processes.LINUX or _user_threads() or (torch is not None and torch.cuda.is_initialized()):
        return None
    plain = functools.cache(processes.anonymous_memory)  # asked when all is pickled, which may make copies
    return lambda region: any(start <= region.address and region.end <= end for start, end in plain())


def _user_threads() -> bool:
    """Whether there are threads besides this one; that of tqdm, which looks at progress bars, is none of the user's."""
    return any(type(thread).__name__ != "TMonitor" for thread in set(threading.enumerate()) - {threading.main_thread()})


def _set_device(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))


def _set_the_scene(payload: Payload) -> None:
    """Let the rank's ``__main__`` and tracebacks know what the notebook knows."""
    for filename, source in payload.sources.items():
        linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
    main_module.install(payload.anchor.__globals__, payload.main)
    notebook_stand_ins.install(payload.anchor.__globals__)


# ------------------------------------------------------------------ speaking, and being interrupted
class _Voice:
    """Speaks to the kernel, and turns the first SIGINT, and only that, into KeyboardInterrupt.

    Editors signal every descendant of the kernel, and then the kernel asks the reaper to: a second
    KeyboardInterrupt would cut a ``finally`` in the middle of a checkpoint.
    """

    def __init__(self, channel: Channel, rank: int) -> None:
        self.channel = channel
        self.rank = rank
        self.owner = os.getpid()
        self.seen = False
        self.answered = False
        self.speaking = False
        self.armed = False
        """Whether SIGINT raises KeyboardInterrupt now."""
        signal.signal(signal.SIGINT, self._on_interrupt)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def say(self, message: object, *fds: int) -> None:
        """Send a message. An interrupt meanwhile takes effect right after it: a handler cannot send in its middle.

        Blocking the signal would not do: where another thread takes it, Python still runs the handler in this one.

        Raises:
            KeyboardInterrupt: The rank was interrupted meanwhile.
        """
        if os.getpid() != self.owner:
            return  # a child, such as a DataLoader worker, has this handler and channel: it must not speak for its rank
        self.speaking = True
        try:
            with contextlib.suppress(OSError):  # the kernel is gone; the reaper is about to end this process
                self.channel.send(message, fds)
        finally:
            self.speaking = False
            if self.seen and not self.answered:
                self._answer()

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.seen:
            return
        self.seen = True
        if not self.speaking:
            self._answer()

    def _answer(self) -> None:
        """Acknowledge the interrupt, and let it take effect."""
        self.answered = True
        self.say(Interrupted(self.rank))
        if self.armed:
            raise KeyboardInterrupt


# ------------------------------------------------------------------ the end
def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the user may have put anything there, and closed it
            stream.flush()


def _await_threads() -> None:
    """Wait for threads that are not daemons, as an interpreter's exit does: before the group that they may use goes."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joining them is not enough: executors must be told
    except BaseException:  # noqa: BLE001  # an executor's own trouble: the interpreter too only prints it
        traceback.print_exc()


def _leave(code: int) -> NoReturn:
    """End the process as an interpreter would: exit functions, streams. All that matters was sent before."""
    with contextlib.suppress(BaseException):  # torch's own clean-up; a broken group is not this rank's failure
        process_group.leave()
    enter(None)
    try:
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001  # an exit function's own trouble: the interpreter too only prints it
        traceback.print_exc()
    _flush()
    os._exit(code & 0xFF)
