"""Reports of a rank's exception, for odd exceptions too."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from nblaunch.errors import text_of
from nblaunch.machine.own_code import PACKAGE, RANK_WORKER
from nblaunch.ranks.error_report import describe, unsendable_result
from nblaunch.transfer import pickling
from nblaunch.wire.messages import Failed


def raised(act: Callable[[], object]) -> BaseException:
    """The exception of an act, with its traceback from the act on."""
    try:
        act()
    except BaseException as error:
        frames = error.__traceback__
        return error.with_traceback(None if frames is None else frames.tb_next)
    raise AssertionError("it did not raise")


def said_of(error: BaseException) -> Failed:
    def act() -> None:
        raise error

    return describe(1, 1, raised(act))


class TwoArgumentsError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class HoldsALockError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class BecomesAnotherError(Exception):
    def __reduce__(self) -> Any:
        return ValueError, ("another",)


class SilentError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


class NoTextError(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]  # a mistake of its author's


class OfTheBase(BaseException):
    pass


class DetailedError(ValueError):
    def __init__(self, text: str, *, layer: int = 0) -> None:
        super().__init__(text)
        self.layer = layer


# ------------------------------------------------------------------ exceptions
def test_an_exception_is_described_and_can_be_rebuilt() -> None:
    before = time.monotonic_ns()
    failed = said_of(DetailedError("shapes differ", layer=3))
    assert (failed.rank, failed.kind, failed.text, failed.collective) == (1, "exception", "shapes differ", "")
    assert failed.type_name == "tests.unit.test_error_report.DetailedError"
    assert before <= failed.time_ns <= time.monotonic_ns()
    rebuilt = pickle.loads(failed.pickled)
    assert (type(rebuilt), rebuilt.args, rebuilt.layer) == (DetailedError, ("shapes differ",), 3)


def test_a_cells_exception_keeps_its_plain_name_and_class() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("class Mine(Exception): pass", names)
    failed = said_of(names["Mine"]("x"))
    assert failed.type_name == "Mine"
    assert type(pickle.loads(failed.pickled)) is names["Mine"]


@pytest.mark.parametrize(
    ("error", "text", "is_sent"),
    [
        (TwoArgumentsError(3, "why"), "3: why", False),
        (HoldsALockError("held"), "held", False),
        (BecomesAnotherError("x"), "x", False),
        (SilentError(), "<its __str__ raised KeyError>", True),
        (NoTextError(), "<its __str__ raised TypeError>", True),
    ],
)
def test_an_unpicklable_exception_keeps_text_and_traceback(error: Exception, text: str, is_sent: bool) -> None:
    failed = said_of(error)
    assert failed.kind == "exception"
    assert failed.text == text
    assert type(error).__name__ in failed.traceback
    assert "in act" in failed.traceback
    assert bool(failed.pickled) == is_sent


def test_a_base_exception_of_the_users_is_an_exception() -> None:
    failed = said_of(OfTheBase("out"))
    assert (failed.kind, failed.text, failed.status) == ("exception", "out", 0)
    assert type(pickle.loads(failed.pickled)) is OfTheBase


def test_a_recursion_error_is_described() -> None:
    def endless(n: int) -> int:
        return endless(n + 1)

    failed = describe(0, 1, raised(lambda: endless(0)))
    assert (failed.kind, failed.type_name) == ("exception", "RecursionError")
    assert "maximum recursion depth exceeded" in failed.text
    assert isinstance(pickle.loads(failed.pickled), RecursionError)
    assert "Previous line repeated" in failed.traceback


def test_a_text_of_megabytes_is_cut() -> None:
    failed = said_of(ValueError("x" * 3_000_000))
    assert len(failed.text) == len(failed.traceback) == 100_000
    assert text_of(ValueError("short")) == "short"


# ------------------------------------------------------------------ ends that are no failure of code
@pytest.mark.parametrize(
    ("code", "status", "text"), [(0, 0, "0"), (None, 0, ""), (7, 7, "7"), ("no data", 1, "no data"), (True, 1, "True")]
)
def test_sys_exit_is_an_exit_with_its_status(code: Any, status: int, text: str) -> None:
    failed = describe(0, 1, raised(lambda: sys.exit(code)))
    assert (failed.kind, failed.status, failed.text, failed.pickled) == ("exit", status, text, b"")


def test_a_keyboard_interrupt_is_an_interrupt() -> None:
    failed = said_of(KeyboardInterrupt())
    assert (failed.kind, failed.pickled) == ("interrupt", b"")


# ------------------------------------------------------------------ frames
def in_file(filename: str, function: str, inner: Callable[[], object]) -> Callable[[], object]:
    """A function that calls `inner`, as if it stood in a file of this name."""
    names: dict[str, Any] = {"inner": inner}
    exec(compile(f"def {function}():\n    return inner()", filename, "exec"), names)
    call: Callable[[], object] = names[function]
    return call


def error_of(error: BaseException, *stack: tuple[str, str]) -> BaseException:
    """The error as raised in the last of these (file, function) frames."""
    names: dict[str, Any] = {"error": error}
    (filename, function), *outer = reversed(stack)
    exec(compile(f"def {function}():\n    raise error", filename, "exec"), names)
    call: Callable[[], object] = names[function]
    for filename, function in outer:
        call = in_file(filename, function, call)
    return raised(call)


CELL = ("<cell>", "train")
COLLECTIVES = "/site-packages/torch/distributed/distributed_c10d.py"
LOGGER = "/site-packages/torch/distributed/c10d_logger.py"
AUTOGRAD = "/site-packages/torch/autograd/graph.py"
DIVIDED = ("/site-packages/torch/distributed/tensor/_api.py", "full_tensor")
TYPED = ("<ipython-input-1>", "train")
OURS = f"{PACKAGE}training/collectives.py"
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("error", "stack", "collective"),
    [
        (RuntimeError(CLOSED), [CELL, (LOGGER, "wrapper"), (COLLECTIVES, "all_reduce")], "all_reduce"),
        (RuntimeError("anything"), [CELL, (LOGGER, "wrapper"), (COLLECTIVES, "barrier")], "barrier"),
        (
            RuntimeError("x"),
            [CELL, (COLLECTIVES, "all_gather_object"), (COLLECTIVES, "all_gather")],
            "all_gather_object",
        ),
        (RuntimeError(CLOSED), [CELL, (AUTOGRAD, "_engine_run_backward")], "backward"),
        (RuntimeError("a user's hook"), [CELL, (AUTOGRAD, "_engine_run_backward")], ""),
        (RuntimeError(CLOSED), [CELL, ("/site-packages/torch/nn/parallel/distributed.py", "forward")], "backward"),
        (RuntimeError(CLOSED), [CELL], ""),
        (RuntimeError("x"), [("/torch/distributed/fsdp.py", "forward"), ("<cell>", "forward")], ""),
        (ValueError("wrong op"), [CELL, (COLLECTIVES, "all_reduce")], ""),
        (RuntimeError("x"), [CELL, (r"C:\torch\distributed\distributed_c10d.py", "broadcast")], "broadcast"),
        (RuntimeError("x"), [CELL, (LOGGER, "wrapper")], "a collective"),
        (RuntimeError(CLOSED), [CELL, DIVIDED, ("/site-packages/torch/_ops.py", "__call__")], "full_tensor"),
        (RuntimeError("shapes"), [CELL, DIVIDED, ("/site-packages/torch/_ops.py", "__call__")], ""),
        (RuntimeError("x"), [TYPED, (OURS, "gather"), (OURS, "_gather"), (COLLECTIVES, "all_gather")], "gather"),
        (RuntimeError("x"), [TYPED, (OURS, "fit"), TYPED, (COLLECTIVES, "all_reduce")], "all_reduce"),
        (RuntimeError("x"), [TYPED, (OURS, "fit"), TYPED, (OURS, "gather"), (COLLECTIVES, "all_gather")], "gather"),
        (RuntimeError("x"), [CELL, (OURS, "run"), (COLLECTIVES, "all_gather")], "all_gather"),
    ],
)
def test_a_collectives_error_is_recognized_by_its_frames(
    error: Exception, stack: list[tuple[str, str]], collective: str
) -> None:
    assert describe(0, 1, error_of(error, *stack)).collective == collective


def test_the_launchers_own_frames_are_left_out_of_the_traceback() -> None:
    own = (RANK_WORKER, "_run")
    traceback = describe(0, 1, error_of(ValueError("x"), own, own, CELL)).traceback
    assert "worker.py" not in traceback
    assert 'File "<cell>", line 2, in train' in traceback
    assert traceback.startswith("Traceback (most recent call last):")


def test_an_error_of_the_launchers_own_keeps_a_frame() -> None:
    own = (RANK_WORKER, "_run")
    assert "worker.py" in describe(0, 1, error_of(ValueError("x"), own)).traceback


# ------------------------------------------------------------------ results
def test_a_result_that_cannot_travel_is_named_by_its_part() -> None:
    result = {"model": [1, threading.Lock()]}
    error = raised(lambda: pickling.dump(result))
    assert isinstance(error, Exception)
    failed = unsendable_result(2, 1, result, error)
    assert (failed.rank, failed.kind) == (2, "result")
    assert failed.text.startswith("result['model'][1], a thread lock, which cannot be sent to another process")


def test_an_unsendable_whole_of_sendable_parts_shows_the_error() -> None:
    assert unsendable_result(0, 1, 1, MemoryError("full")).text == "the return value cannot be pickled: full"


FULL, LIMIT = "/dev/shm holds ", "no more processes or threads can be started ("


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (RuntimeError("DataLoader worker (pid 41) is killed by signal: Bus error. It is possible that"), FULL),
        (RuntimeError("unable to write to file </torch_41_1954506624>"), FULL),
        (RuntimeError("unable to allocate shared memory(shm) for file </torch_41_12_0>: No space left"), FULL),
        (RuntimeError("DataLoader worker (pid 41) is killed by signal: Killed."), ""),
        (RuntimeError("No space left on device"), ""),
        (RuntimeError("can't start new thread"), LIMIT),
        (RuntimeError("Resource temporarily unavailable"), LIMIT),
        (BlockingIOError(11, "Resource temporarily unavailable"), ""),  # of a lock or a socket
        (RuntimeError("std::system_error: Resource temporarily unavailable"), LIMIT),
        (OSError("in pytorch_fork_step(): Resource temporarily unavailable"), ""),
    ],
)
def test_a_limit_of_the_system_brings_advice(error: Exception, advice: str) -> None:
    found = said_of(error).advice
    assert found.startswith(advice) if advice else not found
