"""Making a rank's process look as the notebook does now: environment, paths, streams, threads, random states."""

from __future__ import annotations

import contextlib
import io
import multiprocessing.process
import os
import random
import resource
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from nblaunch.machine import processes
from nblaunch.ranks.reaper import open_log
from nblaunch.wire.drops import Counter, Kind, log_limit
from nblaunch.wire.messages import RankSpec, Settings, WarningFilter

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

_pools: ThreadpoolController | None = None
_streams: dict[str, io.TextIOWrapper] = {}
drops: Counter | None = None
"""Counts what this rank's logs have no room for; None in a process that is no rank."""
_most_bytes: int | None = None
"""Where each log ends, if it is to."""
_imported_filters: list[Any] = []
"""Warning filters that the fork server's imports have added; each rank would have added them by importing."""


def find_pools() -> None:
    """Look up the libraries for BLAS and OpenMP that are loaded, once, so that forked ranks need not."""
    global _pools
    from threadpoolctl import ThreadpoolController

    _pools = ThreadpoolController()


def note_filters(before: list[Any]) -> None:
    """Note the entries of ``warnings.filters`` that are not in `before`: `apply_settings` keeps them."""
    _imported_filters[:0] = [entry for entry in warnings.filters if entry not in before]


def redirect(spec: RankSpec) -> None:
    """Make fds 1 and 2 the rank's log files, and fd 0 nothing, in a forked rank."""
    with open_log(spec, "out") as out, open_log(spec, "err") as err, open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)


class _Log(io.FileIO):
    """Fd 1 or 2, as Python code writes to it. In a rank, what there is no room for is dropped and counted.

    C code and subprocesses write to the same file without it: they get the error of the system.
    """

    def __init__(self, fd: int, kind: Kind) -> None:
        super().__init__(fd, "wb", closefd=False)
        self._kind = kind
        self._is_full = False

    def write(self, data: Any, /) -> Any:
        size = memoryview(data).nbytes
        if _most_bytes is not None:
            # A log that has reached its limit stays as it is: what is shorter would fit, and leave a hole before it.
            self._is_full = self._is_full or os.fstat(self.fileno()).st_size + size > _most_bytes
        if self._is_full:
            return self._drop(size, 0)
        try:
            return super().write(data)
        except OSError as error:
            if drops is None or error.errno not in processes.NO_ROOM:
                raise
            return self._drop(size, error.errno)

    def _drop(self, size: int, reason: int) -> int:
        if drops is not None:
            drops.add(self._kind, size, reason)
        return size


def open_streams(spec: RankSpec | None = None) -> None:
    """Put text streams over fds 0, 1 and 2: whole lines at a time, whatever bytes they hold.

    Those of the fork server are its ranks' too: what it has imported may hold them.

    Args:
        spec: The rank that this process is. Default: none.
    """
    global _streams, drops, _most_bytes
    if spec is not None:
        drops, _most_bytes = Counter(spec.scratch, spec.rank), log_limit(spec.env)
    _streams = _streams or {
        "stdin": io.TextIOWrapper(io.FileIO(0, closefd=False)),
        "stdout": _stream(1, "out"),
        "stderr": _stream(2, "err"),
    }
    for name, stream in _streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(fd: int, kind: Kind) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Log(fd, kind))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def apply_spec(spec: RankSpec) -> None:
    """Take over what the notebook's process has now; for a forked rank, whose own is the fork server's."""
    os.environ.clear()
    os.environ.update(spec.env)
    time.tzset()
    os.umask(spec.umask)
    with contextlib.suppress(OSError):  # a folder that is gone: stay where we are, as a shell would
        os.chdir(spec.cwd)
        # where children that start afresh go, and look for the notebook's own modules
        multiprocessing.process.ORIGINAL_DIR = spec.cwd  # type: ignore[attr-defined]  # typeshed leaves it out
    apply_interpreter(spec)


def apply_interpreter(spec: RankSpec) -> None:
    """The part of `apply_spec` that a fresh interpreter needs as well."""
    sys.path[:] = spec.sys_path
    sys.argv[:] = spec.argv
    for kind, soft, hard in spec.limits:
        with contextlib.suppress(OSError, ValueError):  # a hard limit may only be lowered
            resource.setrlimit(kind, (soft, hard))
    if spec.cpus:  # before any thread is started, which takes them over
        with contextlib.suppress(OSError):  # the container has lost them since
            os.sched_setaffinity(0, spec.cpus)
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    config["tempdir"] = spec.scratch  # a rank that is killed could not remove a folder of its own
    processes.raise_oom_score()


def set_threads(threads: int) -> None:
    """Give this rank its share of the CPUs; the environment alone would come too late for loaded libraries."""
    import torch

    torch.set_num_threads(threads)
    if _pools is None:
        find_pools()
    if _pools is not None:
        _pools.limit(limits=threads)


def apply_settings(settings: Settings) -> None:
    """Start from the notebook's random states, default dtype, precision and determinism; the same on every rank."""
    if settings.python_rng is not None:
        random.setstate(settings.python_rng)
    if settings.numpy_rng is not None:
        import numpy

        numpy.random.set_state(settings.numpy_rng)
    if settings.torch_rng is not None:
        _apply_torch(settings)
    if settings.warning_filters is not None:
        entries = [(f.action, f.message, _category(f), f.module, f.lineno) for f in settings.warning_filters]
        known: Any = warnings.filters  # typeshed calls it a Sequence
        own = [entry for entry in entries if entry[2] is not None]
        known[:] = [*(entry for entry in _imported_filters if entry not in own), *own]
        _filters_changed()


def _apply_torch(settings: Settings) -> None:
    import torch

    if settings.torch_seed is not None:
        # torch's own function reaches the GPUs too, as soon as they are used, which takes 3 ms to arrange
        seed = torch.manual_seed if settings.has_gpu else torch.default_generator.manual_seed
        seed(settings.torch_seed)
    torch.set_rng_state(torch.frombuffer(bytearray(settings.torch_rng or b""), dtype=torch.uint8))
    torch.set_default_dtype(getattr(torch, settings.default_dtype or "float32"))
    torch.set_float32_matmul_precision(settings.matmul_precision or "highest")
    now = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    if settings.deterministic is not None and settings.deterministic != now:  # setting it imports the compiler: 2 s
        torch.use_deterministic_algorithms(settings.deterministic[0], warn_only=settings.deterministic[1])
    if settings.cudnn is not None:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = settings.cudnn


def _category(entry: WarningFilter) -> Any:
    """The class that a filter is about; None, which drops the filter, where that cannot be had without an import.

    A class of the notebook's own is found where the function or its globals brought it along. One of a package that
    the rank has not loaded yet is not, and its filter does not come back when the function imports the package.
    """
    module, name = entry.category
    return getattr(sys.modules.get(module), name, None)


def _filters_changed() -> None:
    changed: Any = getattr(warnings, "_filters_mutated", None) or getattr(warnings, "_filters_mutated_lock_held", None)
    if changed is not None:
        changed()  # else modules that have warned already would keep to the old filters
