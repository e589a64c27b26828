"""Stacks of a rank, dumped to a file on request.

A thread answers whenever it gets the GIL: during Python code, collectives and waits. It interrupts no call. If C code
holds the GIL, faulthandler answers a signal instead. faulthandler reads frames without the GIL, which can crash Python
while another thread runs (seen on 3.11 after about 60 dumps of a training loop); with the GIL held, none runs.

The thread waits on a FIFO, not on the channel to the kernel: a spawned rank must answer while it imports torch, which
can take long, and has no thread that reads the channel before.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import os
import signal
import sys
import threading
from types import FrameType

from nblaunch.machine import processes
from nblaunch.wire.launch_files import BEGIN, WHOLE, DumpHead, rank_file, stacks_pipe
from nblaunch.wire.messages import RankSpec

_SIGNAL: int = getattr(signal, "SIGINFO", 0) or signal.SIGRTMIN + 13
"""Not SIGUSR1 or SIGUSR2: Slurm, Lightning and torch's elastic agent use them. Language runtimes and Valgrind use the
first and last real-time signals. macOS has no real-time signals, but SIGINFO."""
_MAX_CALLS = 100


def answer(spec: RankSpec) -> None:
    """Write this process's stacks to ``rank<n>.stacks`` on request. The file's first line says how to request them.

    The file is renamed into place after the handler is installed: before that, the signal would kill the process.
    """
    path = str(rank_file(spec.log_dir, spec.rank, "stacks"))
    pipe = str(stacks_pipe(spec.scratch, spec.rank))
    with contextlib.suppress(OSError, RuntimeError):  # best effort: must never fail the rank
        dumps = processes.open_log(f"{path}.new")
        faulthandler.register(_SIGNAL, file=dumps, all_threads=True, chain=False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(pipe)  # of a process that this one replaces
        os.mkfifo(pipe, 0o600)
        questions = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)  # O_RDWR: no EOF when a reader of stacks closes it
        _thread.start_new_thread(_answer_questions, (questions, dumps))  # `threading` must list the user's threads only
        main = f"0x{threading.main_thread().ident or 0:016x}"
        os.write(dumps, DumpHead(int(_SIGNAL), pipe, main).to_line())
        os.rename(f"{path}.new", path)


def _answer_questions(questions: int, dumps: int) -> None:
    processes.leave_signals_to_main_thread()
    with contextlib.suppress(OSError):  # user code closed the descriptor
        while os.read(questions, 1024):
            with contextlib.suppress(OSError):  # the disk is full; the next answer may fit
                os.write(dumps, dump().encode("ascii", "backslashreplace"))


def dump() -> str:
    """Return the stacks of all other threads in faulthandler's format. Take no lock: its holder may be stuck."""
    names = {ident: thread.name for ident, thread in list(threading._active.items())}  # type: ignore[attr-defined]
    own = _thread.get_ident()
    threads = [
        f"Thread 0x{ident:016x} [{names.get(ident, '')}] (most recent call first):\n{_calls(frame)}\n"
        for ident, frame in sys._current_frames().items()
        if ident != own
    ]
    return "".join([BEGIN, *threads, WHOLE])


def _calls(frame: FrameType | None) -> str:
    lines: list[str] = []
    while frame is not None and len(lines) < _MAX_CALLS:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}\n')
        frame = frame.f_back
    return "".join([*lines, *(["  ...\n"] if frame is not None else [])])
