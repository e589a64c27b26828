"""Reports of failures: a rank's exception, or a result that cannot be pickled, as a `Failed` message. Runs in ranks."""

from __future__ import annotations

import pickle
import re
import sys
import time
import traceback
from typing import Any, Literal

from nblaunch.errors import PayloadError, text_of
from nblaunch.machine.limits import advice_on_threads, shared_memory_advice
from nblaunch.machine.own_code import PACKAGE, is_rank_runtime, is_users, users_part
from nblaunch.transfer import pickling
from nblaunch.wire.messages import Failed

_COLLECTIVE_WORDS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "pair closure", "NCCL")
_PLACES_ABOVE_C = ("torch/autograd/", "torch/nn/parallel", "torch/_ops.py", "torch/_library/")
"""Where the last frame is of a collective that C++ code calls."""
_TOOLKIT = f"{PACKAGE}training/"
_MAX_TEXT_CHARS = 100_000
_FULL_SHARED_MEMORY = re.compile(
    r"DataLoader worker .* killed by signal: Bus error|unable to (?:allocate|write|resize)[^\n]* file </torch_"
)
"""In torch's messages, and in those of its workers, which the traceback has."""
usual_hook: Any = sys.excepthook
"""The hook before the task ran, such as IPython's."""


def describe(rank: int, task: int, error: BaseException, *, was_interrupted: bool = True) -> Failed:
    """Return the message for what user code raised. Without an interrupt, KeyboardInterrupt is like any exception."""
    kind, status = _kind(error)
    if kind == "interrupt" and not was_interrupted:
        kind = "exception"
    trace = _traceback(error)
    return Failed(
        rank=rank,
        task=task,
        time_ns=time.monotonic_ns(),
        kind=kind,
        type_name=_type_name(type(error)),
        text=text_of(error)[:_MAX_TEXT_CHARS],
        traceback=trace,
        pickled=_pickled(error) if kind == "exception" and not isinstance(error, KeyboardInterrupt) else b"",
        collective=_collective(error),
        status=status,
        advice=shared_memory_advice() if _FULL_SHARED_MEMORY.search(trace) else advice_on_threads(trace),
    )


def call_hook(error: BaseException) -> None:
    """Tell exit functions that the function raised, as an interpreter does: by the hook and ``sys.last_value``.

    Python's own hook is not called: it would print the traceback, which the notebook shows.
    """
    trace = users_part(error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.last_exc = error  # type: ignore[attr-defined]  # since Python 3.12
    try:
        if sys.excepthook not in (sys.__excepthook__, usual_hook):
            sys.excepthook(type(error), error, trace)
    except BaseException:  # noqa: BLE001  # a library's or the user's hook: the interpreter, too, only prints it
        traceback.print_exc()


def unsendable_result(rank: int, task: int, result: Any, error: Exception) -> Failed:
    reason = pickling.explain(result, "result") or f"the return value cannot be pickled: {text_of(error)}"
    return Failed(rank, task, time.monotonic_ns(), "result", _type_name(type(error)), str(reason), _traceback(error))


def _type_name(kind: type) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _kind(error: BaseException) -> tuple[Literal["exception", "exit", "interrupt"], int]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupt", 0
    if isinstance(error, SystemExit):
        code = error.code
        return "exit", code if isinstance(code, int) else (0 if code is None else 1)
    return "exception", 0


def _traceback(error: BaseException) -> str:
    """Format the traceback, without the frames above the user's first."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and is_rank_runtime(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    if isinstance(error, PayloadError):
        frames = None  # nblaunch's own; its cause has the user's
    try:
        lines = traceback.format_exception(type(error), error, frames)
    except Exception:  # noqa: BLE001  # a __str__ that raises: some Pythons' traceback module lets it through
        lines = [*traceback.format_tb(frames), f"{_type_name(type(error))}: {text_of(error)}\n"]
    return "".join(lines)[-_MAX_TEXT_CHARS:]


def _pickled(error: BaseException) -> bytes:
    """Pickle the exception; return b"" if it does not unpickle. Many with a two-argument ``__init__`` do not."""
    try:
        data = pickling.dump(error)
        rebuilt = pickle.loads(data)
    except Exception:  # noqa: BLE001  # a user's __reduce__ or __init__
        return b""  # the notebook raises a RankRaisedError with the text and traceback instead
    return data if type(rebuilt) is type(error) else b""


def _collective(error: BaseException) -> str:
    """Return the call that every rank had to make; empty if the error is not a collective's.

    That is the toolkit's function that the user's innermost frame calls, else the one of torch.distributed. Decided by
    the frames: the last one must be torch.distributed's. Where collectives run in C++ and leave no frame (DDP's in
    ``backward``, those of divided tensors), the message must also look like a transport error.
    """
    name = own = last = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller, last = last, frame.f_code.co_filename.replace("\\", "/")
        function = frame.f_code.co_name
        if "torch/distributed/" in last:
            name = name or (function if function not in ("wrapper", "inner") else "")
        elif is_users(last):  # called back, as a Trainer's compute_loss is
            own = name = ""
        elif last.startswith(_TOOLKIT) and not function.startswith("_") and is_users(caller):
            own = function
    if not isinstance(error, RuntimeError):
        return ""
    if "torch/distributed/" in last:
        return own or name or "a collective"
    if any(place in last for place in _PLACES_ABOVE_C) and any(word in text_of(error) for word in _COLLECTIVE_WORDS):
        return own or name or "backward"
    return ""
