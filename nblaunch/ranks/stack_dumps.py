"""Letting the notebook see what this rank is doing, whatever it is doing.

A thread answers for as long as it can have the GIL: in Python code, in collectives, in waits of any kind. It stops
nothing, and no call of the rank's is interrupted. Where C code keeps the GIL, faulthandler answers to a signal: it
reads the frames of threads without asking them, which crashes Python if one runs meanwhile (seen after some 60 times
in a training loop, on 3.11), but then none does.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from nblaunch.machine import processes
from nblaunch.wire.launch_files import rank_file, stacks_pipe
from nblaunch.wire.messages import RankSpec

_SIGNAL: int = getattr(signal, "SIGINFO", 0) or signal.SIGRTMIN + 13
"""Not SIGUSR1 or SIGUSR2: Slurm, Lightning and torch's elastic agent use those. The ends of the real-time signals
belong to language runtimes and to Valgrind; their middle is nobody's. macOS has none of them, but SIGINFO."""
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
_MOST_CALLS = 100
"""As faulthandler has it."""
_LOADERS_WAIT = ("torch/utils/data/dataloader.py", "_try_get_data")
_SLOW_TO_BEGIN_S = 2.0
"""A worker that is forked begins within milliseconds."""
BEGIN, WHOLE = "(answer)\n", "(whole)\n"
"""The ends of an answer. It is appended in one write, while faulthandler may be writing around it."""


def answer(spec: RankSpec) -> None:
    """Have this process write its stacks to ``rank<n>.stacks`` when it is asked, as the file's first line says how.

    The file has its name only once all is in place: whoever finds it may send the signal, which would end a process
    without the handler.
    """
    path = str(rank_file(spec.log_dir, spec.rank, "stacks"))
    pipe = str(stacks_pipe(spec.scratch, spec.rank))
    with contextlib.suppress(OSError, RuntimeError):  # a rank that cannot be asked runs all the same
        dumps = processes.open_log(f"{path}.new")
        faulthandler.register(_SIGNAL, file=dumps, all_threads=True, chain=False)
        os.mkfifo(pipe, 0o600)
        questions = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)  # to write as well: else each asker's close would be an end
        _thread.start_new_thread(
            _answer_questions, (questions, dumps)
        )  # not in threading's lists, which are the user's
        main = f"0x{threading.main_thread().ident or 0:016x}"
        os.write(dumps, (json.dumps({"signal": int(_SIGNAL), "pipe": pipe, "main": main}) + "\n").encode())
        os.rename(f"{path}.new", path)


def _answer_questions(questions: int, dumps: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _CRASHES)  # they are the main thread's
    with contextlib.suppress(OSError):  # user code has closed what it did not open
        while os.read(questions, 1024):
            with contextlib.suppress(OSError):  # the disk is full: the next answer may find room
                os.write(dumps, dump().encode("ascii", "backslashreplace"))


def dump() -> str:
    """What every other thread is doing, as faulthandler writes it. It takes no lock: somebody may hold it for ever."""
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
    workers: list[str] = []
    while frame is not None and len(lines) < _MOST_CALLS:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}\n')
        if code.co_filename.endswith(_LOADERS_WAIT[0]) and code.co_name == _LOADERS_WAIT[1]:
            workers += _never_begun(frame.f_locals.get("self"))
        frame = frame.f_back
    return "".join([*lines, *(["  ...\n"] if frame is not None else []), *workers])


def _never_begun(loader: object) -> Iterator[str]:
    """A line for each worker that a DataLoader waits for and that has run none of its code."""
    for number, worker in enumerate(getattr(loader, "_workers", ())):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or there is no /proc
            if (age := _age_of_unbegun(worker.pid)) > _SLOW_TO_BEGIN_S:
                yield f"  Worker {number} pid {worker.pid} never began in {age:.0f} s\n"


def _age_of_unbegun(pid: int) -> float:
    """Seconds since a DataLoader's worker was forked; 0 for one that handles SIGTERM, which is the first that it does.

    Raises:
        OSError: There is no such process.
    """
    with open(f"/proc/{pid}/status") as file:
        status = dict(line.split(":", 1) for line in file)
    if "Z" in status["State"] or int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1:
        return 0.0
    with open(f"/proc/{pid}/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # since the machine's start
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
