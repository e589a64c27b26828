"""Records what this rank does, with torch's profiler, while its code runs on. `nblaunch.profiles` reads the recording.

A thread of its own starts the profiler for all threads of the process. Meanwhile it samples which line of the user's
the main thread executes: torch's own stacks (``with_stack``) would slow down every Python call.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import json
import linecache
import os
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
from nblaunch.wire.messages import Profiled, RankSpec, StartProfile
from nblaunch.wire.tables import Begun

_SAMPLE_INTERVAL_S = 0.01
_STEP_POLL_S = 0.05
_PROBE_S = 0.1
_MAX_TRACE_BYTES = 32 << 20
"""A busier rank records for a shorter time: so much takes 0.1 s to stop, and a second to read."""
_END_TIMEOUT_S = 30.0
"""For the recording of a task that has returned to be stored."""
_STDERR = 2
_is_users, _is_data_loading = functools.lru_cache(4096)(is_users), functools.lru_cache(4096)(is_data_loading)


class Profiler:
    """See the module. `begin` is called in the reading thread, `end_task` in the main thread."""

    def __init__(self, spec: RankSpec, send: Callable[..., None]) -> None:
        self._rank, self._scratch, self._send = spec.rank, spec.scratch, send
        self._main = threading.get_native_id()  # main_thread().native_id is that of the process that was forked
        self._ends = threading.Event()
        """The task has ended."""
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._hook: Any = None

    def begin(self, asked: StartProfile) -> None:
        if not self._is_idle.is_set():
            self._answer(asked, "it still stores an earlier profile")
            return
        self._is_idle.clear()
        self._ends.clear()
        try:
            _thread.start_new_thread(self._run, (asked,))  # `threading` must list the user's threads only
        except RuntimeError as error:
            self._is_idle.set()
            self._answer(asked, str(error))

    def end_task(self, *, waits: bool) -> None:
        """End the recording now. `waits`: until the kernel has it, which must have it before the task's result."""
        self._ends.set()
        if waits:
            self._is_idle.wait(_END_TIMEOUT_S)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

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
        if backend._is_profiler_enabled:
            return "its own code runs torch.profiler at this moment", []
        try:
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        except TypeError:
            return f"torch {torch.__version__} cannot profile other threads; torch 2.8 can", []
        if asked.after_step and not self._await_step():
            return "it has ended without an optimizer step", []
        self._send(Profiled(self._rank, asked.task, asked.number, has_begun=True))
        path = os.path.join(self._scratch, f"rank{self._rank}.trace.json")
        try:
            self._trace(config, _PROBE_S, path)  # tells how much a second takes
            fitting = _MAX_TRACE_BYTES * _PROBE_S / os.path.getsize(path)
            recording = self._trace(config, min(asked.seconds, max(fitting, _PROBE_S)), path)
            trace = opened.enter_context(open(path, "rb"))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        about = opened.enter_context(tempfile.TemporaryFile(dir=self._scratch))
        about.write(recording.in_json(self._rank, self._main))
        about.flush()
        return "", [about, trace]

    def _trace(self, config: Any, seconds: float, path: str) -> _Recording:
        torch: Any = sys.modules["torch"]
        backend: Any = sys.modules["torch.autograd.profiler"]
        # torch.profiler.profile would import torch._inductor, which takes a second.
        device = "cuda" if torch.cuda.is_initialized() else None
        profile = backend.profile(use_kineto=True, use_device=device, experimental_config=config)
        recording = _Recording()
        with _quiet(), _without_forks():
            profile._prepare_trace()
        with _without_forks():
            try:
                profile._start_trace()
                recording.watch(time.monotonic() + seconds, self._ends)
            finally:
                trace = torch.autograd._disable_profiler()
                backend._run_on_profiler_stop()
        trace.save(path)
        return recording

    def _await_step(self) -> bool:
        """Wait for an optimizer's step. Return False if the task ends first."""
        stepped = threading.Event()
        optimizers: Any = sys.modules["torch.optim.optimizer"]
        # It stays until the end of the task: to remove it here would change a dictionary that the step may read.
        self._hook = optimizers.register_optimizer_step_post_hook(lambda *_: stepped.set())
        while not stepped.wait(_STEP_POLL_S):
            if self._ends.is_set():
                return False
        return True


class _Recording:
    """What torch's profiler does not tell: the user's lines, and the numbers of the collectives."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], int] = {}
        self._samples: list[tuple[int, int, str]] = []
        self._collectives: list[Begun] = []
        self._begin = self._end = 0

    def watch(self, deadline: float, ends: threading.Event) -> None:
        main = threading.main_thread().ident or 0
        self._begin = time.time_ns()
        collective_log.listener = self._collectives.append
        try:
            while time.monotonic() < deadline and not ends.wait(_SAMPLE_INTERVAL_S):
                frame = sys._current_frames().get(main)
                self._samples.append((time.time_ns(), *self._look(frame)))
        finally:
            collective_log.listener = None
            self._end = time.time_ns()

    def _look(self, frame: FrameType | None) -> tuple[int, str]:
        """Return the number of the user's innermost line, -1 for none, and what the thread does, as in `_doing`."""
        place, doing = -1, "" if frame is None else _doing(frame.f_code.co_filename, frame.f_lineno or 0)
        while frame is not None:
            file = frame.f_code.co_filename
            if place < 0 and _is_users(file):
                place = self._places.setdefault((file, frame.f_lineno or 0), len(self._places))
            if _is_data_loading(file):
                return place, "data"
            frame = frame.f_back
        return place, doing

    def in_json(self, rank: int, main: int) -> bytes:
        """Return it with times in nanoseconds since the epoch, as those of the trace."""
        offset = time.time_ns() - time.monotonic_ns()
        begun = [
            (each.time_ns + offset, each.group, each.members, each.count, each.call, each.detail, each.file, each.line)
            for each in self._collectives
            if not each.is_transfer
        ]
        about = {
            "rank": rank,
            "main": main,
            "begin": self._begin,
            "end": self._end,
            "places": list(self._places),
            "samples": self._samples,
            "collectives": begun,
        }
        return json.dumps(about).encode()


@functools.lru_cache(4096)
def _doing(file: str, line: int) -> str:
    """Return what a thread does whose innermost call is at this line: ``communication``, ``python`` or unknown."""
    if is_collective(file) or is_file(file, COLLECTIVE_LOG):
        return "communication"
    return "" if is_backward(file) or ".wait(" in linecache.getline(file, line) else "python"


# ------------------------------------------------------------------ the profiler's side effects
_is_recording = False
_has_begun = False


@contextlib.contextmanager
def _without_forks() -> Iterator[None]:
    """Record for this process alone: a DataLoader's worker that is forked meanwhile would record to its end."""
    global _is_recording, _has_begun
    if not _has_begun:
        os.register_at_fork(after_in_child=_forget)
    _is_recording = _has_begun = True
    try:
        yield
    finally:
        _is_recording = False


def _forget() -> None:
    if _is_recording:
        sys.modules["torch"]._C._autograd._clear_callbacks()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop the lines that Kineto writes to stderr at its start, and no other lines."""
    if _has_begun:
        yield
        return
    if "KINETO_LOG_LEVEL" not in os.environ:
        os.putenv("KINETO_LOG_LEVEL", "99")  # read once
    with tempfile.TemporaryFile() as held, os.fdopen(os.dup(_STDERR), "wb") as stderr:
        os.dup2(held.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(stderr.fileno(), _STDERR)
            if "KINETO_LOG_LEVEL" not in os.environ:
                os.unsetenv("KINETO_LOG_LEVEL")
            held.seek(0)
            stderr.writelines(line for line in held if not line.startswith(b"ERROR: External init callback"))
