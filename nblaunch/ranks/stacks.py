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
from types import FrameType

from nblaunch.messages import RankSpec
from nblaunch.ranks import system

_SIGNAL: int = getattr(signal, "SIGINFO", 0) or signal.SIGRTMIN + 13
"""Not SIGUSR1 or SIGUSR2: Slurm, Lightning and torch's elastic agent use those. The ends of the real-time signals
belong to language runtimes and to Valgrind; their middle is nobody's. macOS has none of them, but SIGINFO."""
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
_MOST_CALLS = 100
"""As faulthandler has it."""
BEGIN, WHOLE = "(answer)\n", "(whole)\n"
"""The ends of an answer. It is appended in one write, while faulthandler may be writing around it."""


def answer(spec: RankSpec) -> None:
    """Have this process write its stacks to ``rank<n>.stacks`` when it is asked, as the file's first line says how.

    The file has its name only once all is in place: whoever finds it may send the signal, which would end a process
    without the handler.
    """
    path = f"{spec.log_dir}/rank{spec.rank}.stacks"
    pipe = f"{spec.scratch}/rank{spec.rank}.ask"
    with contextlib.suppress(OSError, RuntimeError):  # a rank that cannot be asked runs all the same
        dumps = system.open_log(f"{path}.new")
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
    while frame is not None and len(lines) < _MOST_CALLS:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}\n')
        frame = frame.f_back
    return "".join(lines) + ("  ...\n" if frame is not None else "")
