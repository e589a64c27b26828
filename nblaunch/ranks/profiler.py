"""Records what this rank does, with torch's profiler, while its code runs on. `nblaunch.profiles` reads the recording.

A thread of its own starts the profiler for all threads of the process. Meanwhile it samples which line of the user's
the main thread executes: torch's own stacks (``with_stack``) would slow down every Python call.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import json
import linecache
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO, Any

from nblaunch.machine import processes
from nblaunch.machine.own_code import (
    COLLECTIVE_LOG,
    is_backward,
    is_collective,
    is_data_loading,
    is_file,
    is_users,
)
from nblaunch.ranks.collective_log import collective_log
from nblaunch.wire.messages import Profiled, RankSpec, StartProfile, Stepped, Task
from nblaunch.wire.tables import Begun

_SAMPLE_INTERVALS_S = 0.005, 0.015
"""By chance within these: steps of the same length would be seen at the same line."""
_PROBE_S = 0.2
_MAX_TRACE_BYTES = 16 << 20
"""A busier rank records for a shorter time. So much takes 0.1 s to stop and to save, in which the rank waits."""
_END_TIMEOUT_S = 30.0
"""For the recording of a task that has returned to be stored, or for one that another profiler has ended to stop."""
_is_users, _is_data_loading = functools.lru_cache(4096)(is_users), functools.lru_cache(4096)(is_data_loading)


class Profiler:
    """See the module. `begin` is called in the reading thread, the other methods in the main thread."""

    def __init__(self, spec: RankSpec, send: Callable[..., None]) -> None:
        self._rank, self._scratch, self._send = spec.rank, spec.scratch, send
        self._main = threading.get_native_id()  # main_thread().native_id is that of the process that was forked
        self._task = 0
        """The present task; 0: none."""
        self._ends = threading.Event()
        """The recording is to end."""
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._turn = threading.Lock()
        """Guards the three."""
        self._hook: Any = None
        self._has_stepped = False

    def begin_task(self, task: Task) -> None:
        """Prepare for the user's code. Later, another thread must not register a hook: a step may read them."""
        self._task, self._has_stepped = task.task, False
        if task.reports_step and "torch" in sys.modules:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._hook = register_optimizer_step_post_hook(self._on_step)

    def _on_step(self, *_: object) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            self._send(Stepped(self._rank, self._task))

    def end_task(self, *, waits: bool) -> None:
        """End the recording now. `waits`: until the kernel has it, which must have it before the task's result."""
        with self._turn:
            self._task = 0
            self._ends.set()
        if waits:
            self._is_idle.wait(_END_TIMEOUT_S)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def begin(self, asked: StartProfile) -> None:
        with self._turn:
            problem = "" if self._is_idle.is_set() else "it still stores an earlier profile"
            problem = problem if asked.task == self._task else "its function has ended"
            if not problem:
                self._is_idle.clear()
                self._ends.clear()
        if problem:
            self._answer(asked, problem)
            return
        try:
            _thread.start_new_thread(self._run, (asked,))  # `threading` must list the user's threads only
        except RuntimeError as error:
            self._is_idle.set()
            self._answer(asked, str(error))

    def _answer(self, asked: StartProfile, problem: str, *fds: int) -> None:
        self._send(Profiled(self._rank, asked.task, asked.number, problem=problem), *fds)

    # -------------------------------------------------------------- in a thread
    def _run(self, asked: StartProfile) -> None:
        processes.leave_signals_to_main_thread()
        try:
            with contextlib.ExitStack() as opened:
                problem, files = self._record(asked, opened)
                self._answer(asked, problem, *(file.fileno() for file in files))
        except Exception as error:  # noqa: BLE001  # a full disk, or a bug of torch: the rank's work goes on
            self._answer(asked, f"{type(error).__name__}: {error}")
        finally:
            self._is_idle.set()

    def _record(self, asked: StartProfile, opened: contextlib.ExitStack) -> tuple[str, list[IO[bytes]]]:
        """Return why there is no recording, or its files, which `opened` closes."""
        torch = sys.modules.get("torch")
        if torch is None:
            return "it has not imported torch", []
        backend: Any = sys.modules["torch.autograd.profiler"]
        try:
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        except TypeError:
            return f"torch {torch.__version__} cannot profile other threads; torch 2.8 can", []
        path = os.path.join(self._scratch, f"rank{self._rank}.trace.json")
        with _giving_way(backend, self._ends), _without_forks():
            if _is_in_use(backend):
                return "its own code uses torch.profiler, or has not left its `with` block", []
            self._send(Profiled(self._rank, asked.task, asked.number, has_begun=True))
            try:
                recording = self._trace(config, _PROBE_S, path)  # tells how much a second takes
                fitting = _MAX_TRACE_BYTES * _PROBE_S / os.path.getsize(path)
                if asked.seconds > _PROBE_S and not self._ends.is_set():  # at the same time as the other ranks
                    recording = self._trace(config, min(asked.seconds, max(_PROBE_S, fitting)), path)
                trace = opened.enter_context(open(path, "rb"))
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        about = opened.enter_context(tempfile.TemporaryFile(dir=self._scratch))
        about.write(recording.in_json(self._main))
        about.flush()
        return "", [about, trace]

    def _trace(self, config: Any, seconds: float, path: str) -> _Recording:
        """Record, and write torch's trace to a file."""
        torch: Any = sys.modules["torch"]
        backend: Any = sys.modules["torch.autograd.profiler"]
        # torch.profiler.profile would import torch._inductor, which takes a second.
        device = "cuda" if torch.cuda.is_initialized() else None
        profile = backend.profile(use_kineto=True, use_device=device, experimental_config=config)
        recording = _Recording()
        try:
            with _quiet():
                profile._prepare_trace()
            try:
                profile._start_trace()
                recording.watch(time.monotonic() + seconds, self._ends)
            finally:
                trace = torch.autograd._disable_profiler()
        finally:
            backend._run_on_profiler_stop()
        trace.save(path)
        return recording


class _Recording:
    """What torch's profiler does not tell: the user's lines, and the numbers of the collectives."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], int] = {}
        self._samples: list[tuple[int, int, str]] = []
        self._collectives: list[Begun] = []
        self._before = Begun()
        """Of the default group, when the recording began."""
        self._begin = self._end = 0

    def watch(self, deadline: float, ends: threading.Event) -> None:
        main, dice = threading.main_thread().ident or 0, random.Random()
        self._before = collective_log.begun().last
        self._begin = time.time_ns()
        collective_log.listener = lambda begun, on_cpu: self._collectives.append(begun) if on_cpu else None
        try:
            while time.monotonic() < deadline and not ends.wait(dice.uniform(*_SAMPLE_INTERVALS_S)):
                # No name for the frame: it would keep the user's tensors alive until the next sample.
                self._samples.append((time.time_ns(), *self._look(sys._current_frames().get(main))))
        finally:
            collective_log.listener = None
            self._end = time.time_ns()

    def _look(self, frame: FrameType | None) -> tuple[int, str]:
        """Return the number of the user's innermost line, -1 for none, and what the thread does, as in `_activity`."""
        place, doing = -1, "" if frame is None else _activity(frame.f_code.co_filename, frame.f_lineno or 0)
        while frame is not None:
            file = frame.f_code.co_filename
            if place < 0 and file.startswith("<frozen importlib"):
                doing = "python"  # also if the module is of torch.distributed
            if place < 0 and _is_users(file):
                place = self._places.setdefault((file, frame.f_lineno or 0), len(self._places))
            if _is_data_loading(file):
                return place, "data"
            frame = frame.f_back
        return place, doing

    def in_json(self, main: int) -> bytes:
        """Return it with times in nanoseconds since the epoch, as those of the trace."""
        offset = time.time_ns() - time.monotonic_ns()
        before, *begun = [
            (each.time_ns + offset, each.group, each.members, each.count, each.call, each.detail, each.file, each.line)
            for each in (self._before, *self._collectives)
            if not each.is_transfer
        ]
        about = {
            "main": main,
            "host": socket.gethostname(),
            "begin": self._begin,
            "end": self._end,
            "places": list(self._places),
            "samples": self._samples,
            "before": before,
            "collectives": begun,
        }
        return json.dumps(about).encode()


@functools.lru_cache(4096)
def _activity(file: str, line: int) -> str:
    """Return what a thread does whose innermost call is at this line: ``communication``, ``python`` or unknown."""
    if is_collective(file) or is_file(file, COLLECTIVE_LOG):
        return "communication"
    return "" if is_backward(file) or ".wait(" in linecache.getline(file, line) else "python"


# ------------------------------------------------------------------ torch has one profiler
def _is_in_use(backend: Any) -> bool:
    """Return True if the rank's own code profiles, or will at a later step."""
    return backend._is_profiler_enabled or "ProfilerStep" in backend.KinetoStepTracker._step_dict


@contextlib.contextmanager
def _giving_way(backend: Any, ends: threading.Event) -> Iterator[None]:
    """End this recording before another profiler of the process begins: torch has one, and would crash."""
    own, is_over, prepare = _thread.get_ident(), threading.Event(), backend._prepare_profiler

    def prepare_next(*args: Any, **options: Any) -> Any:
        if _thread.get_ident() != own:
            ends.set()
            is_over.wait(_END_TIMEOUT_S)
        return prepare(*args, **options)

    backend._prepare_profiler = prepare_next
    try:
        yield
    finally:
        backend._prepare_profiler = prepare
        is_over.set()


# ------------------------------------------------------------------ its side effects
_is_recording = False


@contextlib.contextmanager
def _without_forks() -> Iterator[None]:
    """Record for this process alone: a DataLoader's worker that is forked meanwhile would record to its end."""
    global _is_recording
    _is_recording = True
    try:
        yield
    finally:
        _is_recording = False


def _forget() -> None:
    if _is_recording:
        sys.modules["torch"]._C._autograd._clear_callbacks()


os.register_at_fork(after_in_child=_forget)


_has_started = False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Kineto from writing to stderr when it starts, once in a process, as in another thread than its own.

    A variable that it reads then stops its messages. One line goes to the stream of C code all the same.
    """
    global _has_started
    if _has_started or sys.platform != "linux":  # macOS has another name for the stream
        yield
        return
    _has_started = True
    has_level, libc = "KINETO_LOG_LEVEL" in os.environ, ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p.in_dll(libc, "stderr")
    before, nowhere = stream.value, libc.fopen(os.devnull.encode(), b"w")
    if not has_level:
        os.putenv("KINETO_LOG_LEVEL", "99")
    stream.value = nowhere or before
    try:
        yield
    finally:
        stream.value = before  # the other is not closed: a thread may just write to it
        if not has_level:
            os.unsetenv("KINETO_LOG_LEVEL")
