"""A rank's process environment: variables, paths, streams, limits, threads and random states, as in the notebook.

Runs in ranks; the fork server calls some of it ahead, for what its ranks inherit.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import logging
import multiprocessing.process
import os
import random
import resource
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from nblaunch.machine import processes
from nblaunch.machine.limits import memory_left, physical_memory
from nblaunch.ranks.reaper import open_log
from nblaunch.transfer.cell_effects import set_flags
from nblaunch.wire.messages import RankSpec, Settings
from nblaunch.wire.tables import Drops, log_limit

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

_streams: dict[str, io.TextIOWrapper] = {}
_logs: list[_Log] = []
"""The files under stdout and stderr."""
_END_OF_LOG = b"nblaunch: this log ends at NBLAUNCH_MAX_LOG_BYTES: further output is dropped\n"
drops: Drops | None = None
"""Notes output that this rank could not write to its logs; None outside ranks."""
_max_log_bytes: int | None = None
_imported_filters: list[Any] = []
"""Warning filters that the fork server's imports have added, which each rank's own imports would have added."""
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
"""None with musl and on macOS. Looked up before any fork, as the loader's lock may be held at a fork."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


@functools.cache
def pools() -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def keep_filters_since(before: list[Any]) -> None:
    """Have `apply_settings` keep the entries of ``warnings.filters`` that are not in `before`."""
    _imported_filters[:0] = [entry for entry in warnings.filters if entry not in before]


def redirect(spec: RankSpec) -> None:
    """Point fds 1 and 2 at the rank's log files, and fd 0 at /dev/null. For forked ranks, and for kept ones."""
    with open_log(spec, "out") as out, open_log(spec, "err") as err, open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    for log in _logs:
        log.is_full = False


class _Log(io.FileIO):
    """Fd 1 or 2 for Python code. In a rank, output that does not fit on the disk is dropped and noted.

    C code and subprocesses write to the file directly, and get the system's error.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "wb", closefd=False)
        self.is_full = False
        """Once full, it stays full: a later, shorter write would fit and leave a gap before it."""

    def write(self, data: Any, /) -> Any:
        size = memoryview(data).nbytes
        if _max_log_bytes is not None:
            has_room = os.fstat(self.fileno()).st_size + size <= _max_log_bytes
            if not (self.is_full or has_room):
                self.is_full = True
                with contextlib.suppress(OSError):
                    super().write(b"\n" + _END_OF_LOG)
        if self.is_full:
            return self._drop(size, 0)
        try:
            return super().write(data)
        except OSError as error:
            if drops is None or error.errno not in processes.NO_ROOM:
                raise
            return self._drop(size, error.errno)

    def _drop(self, size: int, reason: int) -> int:
        if drops is not None:
            drops.note("output", reason)
        return size


def open_streams(spec: RankSpec | None = None) -> None:
    """Open line-buffered text streams on fds 0, 1 and 2, and make them ``sys.stdin`` and so on.

    Ranks keep the fork server's stream objects: modules that it imported may hold references to them.
    """
    global _streams, drops, _max_log_bytes
    if spec is not None:
        drops, _max_log_bytes = Drops(spec.scratch, spec.rank), log_limit(spec.env)
    _streams = _streams or {
        "stdin": io.TextIOWrapper(io.FileIO(0, closefd=False)),
        "stdout": _stream(1),
        "stderr": _stream(2),
    }
    for name, stream in _streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(fd: int) -> io.TextIOWrapper:
    log = _Log(fd)
    _logs.append(log)
    return io.TextIOWrapper(io.BufferedWriter(log), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def apply_spec(spec: RankSpec) -> None:
    """Apply the notebook's process environment. For forked ranks, which have inherited the fork server's."""
    os.environ.clear()
    os.environ.update(spec.env)
    time.tzset()
    os.umask(spec.process.umask)
    with contextlib.suppress(OSError):  # the directory is gone: stay here
        os.chdir(spec.process.cwd)
        # spawned children start there, and find the notebook's own modules
        multiprocessing.process.ORIGINAL_DIR = spec.process.cwd  # type: ignore[attr-defined]  # typeshed leaves it out
    apply_interpreter(spec)


def apply_interpreter(spec: RankSpec) -> None:
    """Apply the part of the environment that a fresh interpreter needs as well."""
    sys.path[:] = spec.process.sys_path
    sys.argv[:] = spec.process.argv
    for kind, soft, hard in spec.process.limits:
        with contextlib.suppress(OSError, ValueError):  # a hard limit may only be lowered
            resource.setrlimit(kind, (soft, hard))
    if spec.process.cpus:  # before the first thread, which inherits the affinity
        with contextlib.suppress(OSError):  # these CPUs have been taken from the container
            os.sched_setaffinity(0, spec.process.cpus)
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    config["tempdir"] = spec.scratch  # a killed rank would leak a directory of its own
    processes.raise_oom_score()


def keep_freed_memory(spec: RankSpec, *, in_thread: bool = False) -> None:
    """Have glibc keep freed memory for the next training step, unless the user has set malloc. Children inherit this.

    By default activations and gradients go back to the system at each step, and the next step faults every page in
    again: 5 to 25% of the CPU time of small models. Any ``MALLOC_*`` or ``glibc.malloc.*`` is the user's setting.
    `in_thread`: a thread has forked this process, so its main thread allocates from that thread's arena.
    """
    is_users = any(name.startswith("MALLOC_") for name in spec.env)
    if _mallopt is None or is_users or "glibc.malloc." in spec.env.get("GLIBC_TUNABLES", ""):
        return
    _mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # larger allocations are mappings, which end when they are freed
    if in_thread:
        _mallopt(_M_TOP_PAD, 64 << 20)  # keeps the arena's heaps, which have this size
    _mallopt(_M_TRIM_THRESHOLD, max(64 << 20, min(memory_to_keep() // spec.local_world_size, 512 << 20)))


@functools.cache  # reading a cgroup's files takes 1 ms
def memory_to_keep() -> int:
    return min(physical_memory(), memory_left()) // 16


def set_threads(threads: int) -> None:
    """Limit the rank's threads. Environment variables alone would come too late for loaded libraries."""
    import torch

    torch.set_num_threads(threads)
    pools().limit(limits=threads)


def apply_settings(settings: Settings) -> None:
    if settings.authkey is not None:
        multiprocessing.process.current_process().authkey = settings.authkey
    if settings.python_rng is not None:
        random.setstate(settings.python_rng)
    if settings.numpy_rng is not None:
        import numpy

        numpy.random.set_state(settings.numpy_rng)
    if settings.torch_rng is not None:
        import torch

        if settings.torch_seed is not None:
            # torch.manual_seed seeds GPUs too, on their first use; setting that up takes 3 ms
            seed = torch.manual_seed if settings.has_gpu else torch.default_generator.manual_seed
            seed(settings.torch_seed)
        torch.set_rng_state(torch.frombuffer(bytearray(settings.torch_rng), dtype=torch.uint8))
    set_flags(settings.flags)
    if (given := settings.logging) is not None:
        root = logging.getLogger()
        root.setLevel(given.level)
        if given.has_handler and not root.handlers:  # a package that is imported here may have set its own
            stream = sys.stdout if given.is_stdout else sys.stderr
            logging.basicConfig(stream=stream, format=given.format, datefmt=given.datefmt, style=given.style)
    if settings.warning_filters is not None:
        # A filter for a class of a package that this rank has not imported yet is lost, also once it imports it.
        found = ((f, getattr(sys.modules.get(f.category[0]), f.category[1], None)) for f in settings.warning_filters)
        own = [(f.action, f.message, kind, f.module, f.lineno) for f, kind in found if kind is not None]
        filters: Any = warnings.filters  # typeshed calls it a Sequence
        filters[:] = [*(entry for entry in _imported_filters if entry not in own), *own]
        reset = getattr(warnings, "_filters_mutated", None) or getattr(warnings, "_filters_mutated_lock_held", None)
        if reset is not None:  # modules that have warned already must apply the new filters
            reset()
