"""A rank's process: its start, its tasks one after the other, its exit.

The start methods meet here. `forked` runs in a child of a reaper, `spawned` in a fresh interpreter; from `_Rank` on
they are the same.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import contextlib
import errno
import faulthandler
import inspect
import linecache
import logging
import multiprocessing.process
import multiprocessing.util
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import CodeType
from typing import Any, NoReturn

from nblaunch.machine import named_resources, processes
from nblaunch.ranks import (
    environment,
    error_report,
    main_module,
    process_group,
    rank_display,
    stack_dumps,
)
from nblaunch.ranks.breakpoints import Breakpoints
from nblaunch.ranks.changed_values import content_of, unreturned
from nblaunch.ranks.collective_log import collective_log, cut_kernel
from nblaunch.ranks.kernel_channel import KernelChannel
from nblaunch.ranks.namespace import Namespace
from nblaunch.ranks.profiler import Profiler
from nblaunch.ranks.report import Context, Interrupted, current, enter
from nblaunch.transfer import cell_effects, definitions, parameters
from nblaunch.transfer.parcel import pack, unpack
from nblaunch.wire import BELOW_AGENT
from nblaunch.wire.channel import Channel
from nblaunch.wire.launch_files import rank_file
from nblaunch.wire.messages import (
    Cell,
    Done,
    Failed,
    Leaving,
    Names,
    NamesTaken,
    Payload,
    Question,
    RankSpec,
    Running,
    StartRank,
    Task,
)

_log = logging.getLogger(__name__)
_VALUE = "__nblaunch_value__"
HIDES_OLDER_FRAMES = "__ipython_bottom__"
"""A value of ``__tracebackhide__`` by which IPython's debugger hides a frame and those that have called it."""
LoadPayload = Callable[[list[int]], Payload]


def prepare() -> None:
    import cloudpickle  # noqa: F401  # ranks need it at once

    environment.pools()
    environment.memory_to_keep()
    process_group.find_backends()
    main_module.get_ipython()
    forget_finalizers()


def forget_finalizers() -> None:
    """Keep ranks from undoing the preload's set-up at exit: torch takes 25 ms to deregister its operators.

    A rank without finalizers of its own does not even look through those, which would copy the pages they are on.
    """
    finalize: Any = weakref.finalize
    for finalizer in finalize._registry:
        finalizer.atexit = False
    atexit.unregister(finalize._exitfunc)
    finalize._registered_with_atexit = False  # the rank's own register it again


def _forget_the_notebooks_exit() -> None:
    """Drop the notebook's exit functions: saving its history, ending its workers, removing its files."""
    atexit._clear()
    forget_finalizers()
    util: Any = multiprocessing.util  # typeshed leaves out what follows
    util._finalizer_registry.clear()  # as multiprocessing does in its own children
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    atexit.register(util._exit_function)


def forked(spec: RankSpec, sock: socket.socket) -> NoReturn:
    _be_forked(spec, sock, _from_parcel)


def forked_with(payload: Payload) -> Callable[[RankSpec, socket.socket], NoReturn]:
    """Return the main function of a rank that shares the notebook's memory: it unpickles nothing."""

    def rank_main(spec: RankSpec, sock: socket.socket) -> NoReturn:
        _forget_the_notebooks_exit()
        definitions.mark_received(payload.anchor.__globals__)
        _be_forked(spec, sock, lambda fds: payload, in_thread=True)  # the launch's, in the kernel

    return rank_main


def spawned(fd: int, tracker: int) -> NoReturn:
    """Run a rank in a fresh interpreter; the reaper has set its environment, working directory and streams."""
    os.set_inheritable(fd, False)  # inherited through our exec, and must not pass through the user's
    named_resources.use_tracker(tracker)
    channel = Channel(socket.socket(fileno=fd))
    first = channel.receive()
    if first is None or not isinstance(first[0], StartRank):
        os._exit(1)
    spec = first[0].spec
    environment.keep_freed_memory(spec)
    environment.open_streams(spec)
    stack_dumps.answer(spec)  # before torch is imported: that can take long
    environment.apply_interpreter(spec)
    with contextlib.suppress(ImportError):  # the task reports it, if it needs torch
        process_group.install()
    link = KernelChannel(channel, spec.rank)  # open until the exit
    _leave(_Rank(spec, link, _from_parcel).serve())


def _be_forked(spec: RankSpec, sock: socket.socket, load: LoadPayload, *, in_thread: bool = False) -> NoReturn:
    code = 1
    try:
        environment.keep_freed_memory(spec, in_thread=in_thread)
        environment.redirect(spec)
        environment.open_streams(spec)
        stack_dumps.answer(spec)
        environment.apply_spec(spec)
        process_group.install()
        link = KernelChannel(Channel(sock), spec.rank)  # open until the exit
        code = _Rank(spec, link, load).serve()
    except BaseException:  # noqa: BLE001  # goes to the rank's log; the process must end here in any case
        traceback.print_exc()
    _leave(code)


def _from_parcel(fds: list[int]) -> Payload:
    if not fds:
        raise OSError(errno.EMFILE, "the task could not be received: this rank has too many open files (ulimit -n)")
    taken = fds[:]
    fds.clear()
    payload: Payload = unpack(taken)
    return payload


# ------------------------------------------------------------------ tasks
class _Rank:
    """This rank, from its first task to its last."""

    def __init__(self, spec: RankSpec, link: KernelChannel, load: LoadPayload) -> None:
        self.spec, self.link, self.load = spec, link, load
        self.home = Namespace(spec.rank) if spec.is_kept else None
        self.breakpoints = Breakpoints(link.keyboard)
        self.profiler = Profiler(spec, link.send)
        link.profile = self.profiler.begin
        if self.home is not None:
            self.home.examine = self.breakpoints.examine
            processes.become_subreaper()  # another rank's death must not cost this rank's orphans
        self.spool = processes.open_log(str(rank_file(spec.log_dir, spec.rank, "spool")))

    def serve(self) -> int:
        """Run tasks until EOF; return the exit status of the last."""
        spec, link = self.spec, self.link
        place = (spec.rank, spec.local_rank, spec.world_size)
        faulthandler.enable(file=2)
        named_resources.record_created(spec.scratch)
        collective_log.open(spec.scratch, spec.rank, spec.world_size)
        code, is_last = 0, False
        while not is_last and (received := link.next_task()) is not None:
            task, fds = received
            is_last = task.is_last
            if task.log_dir not in ("", self.spec.log_dir):
                self.turn_to(task.log_dir)
            device, log_dir = task.world.device, self.spec.log_dir
            enter(Context(*place, device, self.spool, log_dir, environment.drops, link.defer))
            code = self.run(task, fds)
            for fd in fds:  # the task has ended before it was loaded
                os.close(fd)
        _await_threads()
        link.send(Leaving(spec.rank, link.task))
        return code

    def turn_to(self, log_dir: str) -> None:
        """Write output and reports to another log directory from now on."""
        _flush()
        self.spec = replace(self.spec, log_dir=log_dir)
        with contextlib.suppress(OSError):  # the directory was removed, or user code has closed a descriptor
            environment.redirect(self.spec)
            rank_display.begin()
            opened = processes.open_log(str(rank_file(log_dir, self.spec.rank, "spool")))
            os.dup2(opened, self.spool, inheritable=False)  # same number: workers of DataLoaders report to it
            os.close(opened)

    def run(self, task: Task, fds: list[int]) -> int:
        """Join the group, rebuild the payload, run it and send its outcome; return the exit status so far."""
        self.breakpoints.begin_task(task.debugging)
        self.profiler.begin_task(task)
        try:
            result, changed = self.work(task, fds)
        except BaseException as error:  # noqa: BLE001  # the notebook raises whatever user code raised
            self.profiler.end_task(waits=False)
            cut_kernel(error)
            failed = error_report.describe(self.spec.rank, task.task, error, was_interrupted=self.link.is_stopping)
            self.breakpoints.end_task()
            if self.home is not None and isinstance(error, Exception):
                self.home.keep_error(error)
            if task.debugging.post_mortem and isinstance(error, Exception) and not self.link.is_stopping:
                self.examine(error)
            self.send_names(task)
            code = self.send_failure(failed)
            if self.home is None and failed.kind != "exit":
                error_report.call_hook(error)
            return code
        self.breakpoints.end_task()
        self.profiler.end_task(waits=not self.link.is_stopping)
        _flush()
        self.send_names(task)
        return self.send_result(result, changed)

    def work(self, task: Task, fds: list[int]) -> tuple[Any, tuple[str, ...]]:
        """Run the part of a task in which SIGINT raises KeyboardInterrupt."""
        link, home = self.link, self.home
        link.armed = True
        try:  # no context manager: contextlib sets __traceback__, which an exception may refuse
            if link.interrupted:  # since the task arrived
                raise KeyboardInterrupt
            if home is None or not home.is_set_up:
                environment.set_threads(task.world.threads)
                if task.world.device.startswith("cuda"):
                    sys.modules["torch"].cuda.set_device(task.world.device)
            if task.joins:
                collective_log.begin_task()
                process_group.join(task.world, self.spec.rank, self.spec.world_size)
            sys.path[:0] = [entry for entry in task.path if entry not in sys.path]
            if not task.takes_part:
                link.send(Running(self.spec.rank, task.task))
                return None, ()
            payload = self.load(fds)
            labels = {file: source.label for file, source in payload.sources.items() if source.label}
            self.breakpoints.labels = labels
            taken = NamesTaken() if home is None else home.take(payload)
            _set_the_scene(payload, home)
            error_report.usual_hook = sys.excepthook
            cell_effects.import_here(payload.imports)  # before the settings: a module may seed, too
            if home is None or home.takes_settings(payload.settings):
                environment.apply_settings(payload.settings)
            cell_effects.set_here(payload.attributes, is_kept=home is not None)
            link.send(Running(self.spec.rank, task.task, taken))
            return _call(payload, home)
        finally:
            link.armed = False

    def examine(self, error: Exception) -> None:
        """Let the user examine an exception before the kernel learns of it, and stops the other ranks."""
        _flush()
        self.link.armed = True
        try:
            if not self.link.interrupted:  # before it was armed
                self.breakpoints.examine(error)
        except KeyboardInterrupt:
            pass  # the exception, too, ends the task
        except Exception:  # noqa: BLE001  # a bug of the debugger must not hide the user's exception
            traceback.print_exc()
        finally:
            self.link.armed = False

    def send_names(self, task: Task) -> None:
        if self.home is not None:
            self.home.end_task()
            names, private, lost = self.home.describe(), self.home.private(), definitions.take_lost_keys()
            self.link.send(Names(self.spec.rank, task.task, names, private, collective_log.begun(), lost))

    def send_failure(self, failed: Failed) -> int:
        if self.link.interrupted and failed.kind == "exception":  # the notebook raises the stop: only the log has this
            with contextlib.suppress(Exception):  # the user may have replaced sys.stderr
                sys.stderr.write(failed.traceback)
        _flush()
        self.link.send(failed)
        return failed.status if failed.kind == "exit" else 1

    def send_result(self, result: Any, changed: tuple[str, ...]) -> int:
        rank, task, ended = self.spec.rank, self.link.task, time.monotonic_ns()
        try:
            at_home = self.home if isinstance(result, Payload) else None  # what a restarted rank is to have
            is_here = BELOW_AGENT not in os.environ
            parcel = pack(lambda found: result, home=at_home, is_here=is_here)
        except Exception as error:  # noqa: BLE001  # a user's __reduce__
            self.link.send(error_report.unsendable_result(rank, task, result, error))
            return 1
        self.link.send(Done(rank, task, ended, changed, isinstance(result, Interrupted)), *parcel.fds)
        parcel.close()
        return 0


def _set_the_scene(payload: Payload, home: Namespace | None) -> None:
    """Give the rank's ``__main__`` and tracebacks the notebook's names and cell sources."""
    for filename, source in payload.sources.items():
        linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
    names, more = (payload.anchor.__globals__, payload.main) if home is None else (home.names, home.main)
    if home is None or not home.is_set_up:
        main_module.install(names, more)
    if home is not None:
        home.is_set_up = True
    main_module.install_shell(names)


# ------------------------------------------------------------------ the body of a task
def _call(payload: Payload, home: Namespace | None = None) -> tuple[Any, tuple[str, ...]]:
    """Run the payload. Return its value, and the names of arguments and globals that it changed but did not return."""
    __tracebackhide__ = HIDES_OLDER_FRAMES
    context = current()
    assert context is not None
    before = {name: content_of(value, is_deep=False) for name, value in payload.watched.items()}
    if home is not None:
        home.names.update(_own_values(context))
    if isinstance(payload.function, Cell):
        result = _run_cell(payload.function, payload.anchor.__globals__ if home is None else home.names, context)
    elif isinstance(payload.function, Question):
        assert home is not None
        result = home.answer(payload.function)
    else:
        args, kwargs = parameters.complete(payload.function, payload.args, payload.kwargs, _own_values(context))
        result = payload.function(*args, **kwargs)
    main_module.after_task()
    try:
        return result, unreturned(payload.watched, before, result)
    except Exception:  # noqa: BLE001  # a user's module or container
        _log.info("cannot check whether the task modified the notebook's values", exc_info=True)
        return result, ()


def _own_values(context: Context) -> dict[str, Any]:
    import torch

    return {
        "rank": context.rank,
        "world_size": context.world_size,
        "local_rank": context.local_rank,
        "device": torch.device(context.device),
    }


def _run_cell(cell: Cell, namespace: dict[str, Any], context: Context) -> Any:
    """Run the cell's source; return the value of its last expression, or None."""
    __tracebackhide__ = HIDES_OLDER_FRAMES
    namespace.update(_own_values(context))
    if cell.ranks is not None and context.rank not in cell.ranks:
        return None
    linecache.cache[cell.filename] = (len(cell.source), None, cell.source.splitlines(keepends=True), cell.filename)
    main_module.get_ipython().begin_cell(cell.source)
    tree = ast.parse(cell.source, cell.filename)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):  # in one code with the rest: a debugger steps from line to line
        target = ast.copy_location(ast.Name(_VALUE, ast.Store()), last)
        tree.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
    code = compile(tree, cell.filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    try:
        if code.co_flags & inspect.CO_COROUTINE:
            error = asyncio.run(_awaited(code, namespace))
            if error is not None:
                raise error  # here, so that the traceback has no frames of asyncio
        else:
            exec(code, namespace)
    finally:
        value = namespace.pop(_VALUE, None)
    if cell.shows_value and context.rank != cell.value_rank and value is not None:
        main_module.get_ipython().displayhook(value)
    return None if cell.keeps_value else value


async def _awaited(code: CodeType, namespace: dict[str, Any]) -> Exception | None:
    """Run code that awaits at the top level. Return its exception."""
    __tracebackhide__ = HIDES_OLDER_FRAMES
    try:
        await eval(code, namespace)
    except Exception as error:  # noqa: BLE001  # the notebook raises whatever user code raised
        return error
    return None


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
        process_group.leave(is_last=True)
    enter(None)
    try:
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001  # the interpreter, too, only prints it
        traceback.print_exc()
    _flush()
    os._exit(code & 0xFF)
