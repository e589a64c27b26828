"""The notebook raises the first failure: the rank's own exception if it unpickles, else a clear substitute."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nblaunch.errors import (
    CollectiveError,
    RankDiedError,
    RankLostError,
    RankRaisedError,
    ResultError,
)
from nblaunch.launch.failures import RankTraceback
from nblaunch.machine import timeouts
from tests.conftest import eventually
from tests.processes.conftest import Launcher

SOON = 25.0
"""Seconds; half a minute and more pass where something waits for what is stuck."""


# ------------------------------------------------------------------ exceptions that ranks raise
class TwoArgumentsError(Exception):
    """It pickles, and does not unpickle."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class WithDetailsError(ValueError):
    """An exception with more than its text."""

    def __init__(self, text: str = "", details: dict[str, int] | None = None) -> None:
        super().__init__(text)
        self.details = details or {}


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Refuses every attribute, even ``__traceback__``, which contextlib sets."""

    code: int


# ------------------------------------------------------------------ what ranks run
def raise_on_rank_1(error: Callable[[], BaseException], rank: int) -> None:
    """Rank 1 raises, and the others wait for it in a collective."""
    if rank == 1:
        raise error()
    dist.all_reduce(torch.ones(1))


def die(way: str, rank: int) -> None:
    """Rank 1 ends in some way of its own; rank 0 waits for it in a collective."""
    if rank == 1:
        sys.stdout.write("last words\n")
        ENDS[way]()
    dist.all_reduce(torch.ones(1))


def _segfault() -> None:
    ctypes.string_at(0)


ENDS: dict[str, Callable[[], Any]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": _segfault,
    "SIGABRT": os.abort,
    "SIGBUS": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit('m')": lambda: sys.exit("disk full"),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
}


def die_after_returning(way: str, rank: int) -> int:
    if rank == 1:
        atexit.register(ENDS[way])
    return rank


def die_after_returning_before_the_other_returns(rank: int) -> int:
    """Rank 0 returns long after rank 1's process has crashed."""
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        atexit.register(os.abort)
        return rank
    eventually(lambda: not Path(f"/proc/{pids[1]}").exists())
    time.sleep(0.5)  # longer than it takes to stop a rank
    return rank


def fail_once_the_other_returned(fail: Callable[[], Any], rank: int) -> str:
    """Rank 1 returns, and rank 0 fails when rank 1 has left."""
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        eventually(lambda: not Path(f"/proc/{pids[1]}").exists())
        fail()
    return f"value of {rank}"


def _raise(error: BaseException) -> None:
    raise error


def _kill_the_reaper_and_wait() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def finish_early(rank: int) -> str:
    if rank == 1:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
        return "never"
    dist.all_reduce(torch.ones(1))
    return "done"


def return_unsendable(rank: int) -> Any:
    """The rank whose result can be sent returns it when the other has gone."""
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        return {"model": [1, threading.Lock()]}
    eventually(lambda: not Path(f"/proc/{pids[1]}").exists())
    return f"value of {rank}"


class Vanishing:
    """It leaves its rank, and cannot be rebuilt in the notebook."""

    def __reduce__(self) -> Any:
        return _appear, (os.getpid(),)


def _appear(home: int) -> Any:
    if os.getpid() != home:
        raise LookupError("only in its rank")
    return Vanishing()


def return_vanishing(rank: int) -> Any:
    return Vanishing() if rank == 0 else "survives"


def raise_with_a_stuck_thread(rank: int) -> None:
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("before the thread")


def raise_with_a_stuck_exit_function(rank: int) -> None:
    atexit.register(threading.Event().wait)
    raise ValueError("before the exit function")


def return_a_lock_with_a_stuck_exit_function(rank: int) -> Any:
    dist.barrier()
    if rank == 0:
        return "whole"
    atexit.register(threading.Event().wait)
    return threading.Lock()


def catch_the_echo_and_raise(rank: int) -> None:
    """Rank 1 leaves; rank 0 turns the collective's error into its own, chained to it."""
    if rank == 1:
        raise LookupError("the first to fail")
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise ValueError("training failed") from error


# ------------------------------------------------------------------ the user's exception
def test_the_users_exception_is_raised_with_rank_and_traceback(launch: Launcher) -> None:
    with pytest.raises(WithDetailsError, match=r"^learning rate is NaN$") as caught:
        launch(raise_on_rank_1, (lambda: WithDetailsError("learning rate is NaN", {"step": 7}),))
    error: Any = caught.value
    assert error.rank == 1
    assert error.details == {"step": 7}
    assert isinstance(error.__cause__, RankTraceback)
    shown = str(error.__cause__)
    assert "on rank 1:" in shown
    assert f'File "{__file__}", line' in shown
    assert "in raise_on_rank_1\n    raise error()" in shown
    assert shown.rstrip().endswith("WithDetailsError: learning rate is NaN")
    assert "nblaunch/ranks" not in shown
    lines = error._render_traceback_()
    assert lines[:3] == ["WithDetailsError: learning rate is NaN", "", "On rank 1 of raise_on_rank_1:"]
    assert any("raise error()" in line for line in lines)
    assert lines[-1].startswith("Logs: ")
    assert Path(lines[-1].removeprefix("Logs: ")).is_dir()
    assert isinstance(error, ValueError)


def test_a_wrapped_secondary_error_does_not_hide_the_first_failure(launch: Launcher) -> None:
    with pytest.raises(LookupError, match=r"^the first to fail$") as caught:
        launch(catch_the_echo_and_raise)
    assert getattr(caught.value, "rank", None) == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: TwoArgumentsError(7, "bad"), "rank 1 raised .*TwoArgumentsError: 7: bad"),
        (lambda: FrozenError(5), "rank 1 raised .*FrozenError: 5"),
    ],
    ids=["does-not-unpickle", "takes-no-attributes"],
)
def test_an_unpicklable_exception_keeps_its_type_and_text(
    error: Callable[[], BaseException], message: str, launch: Launcher
) -> None:
    with pytest.raises(RankRaisedError, match=message) as caught:
        launch(raise_on_rank_1, (error,))
    assert caught.value.rank == 1
    assert "raise error()" in str(caught.value.__cause__)
    assert caught.value.log is not None
    assert caught.value.log.is_file()


# ------------------------------------------------------------------ ranks that die, or leave
@pytest.mark.parametrize(
    ("way", "status", "message"),
    [
        ("SIGKILL", -9, "rank 1 was killed by SIGKILL before die returned; the system probably ran out of memory"),
        ("SIGBUS", -signal.SIGBUS, "a mapped file was overwritten or truncated"),
        ("os._exit(0)", 0, r"rank 1 exited with status 0 before die returned \(os._exit, or C code that calls exit\)"),
        ("sys.exit(0)", 0, "rank 1 called sys.exit with status 0 before die returned: return from the function"),
        ("sys.exit('m')", 1, r"rank 1 called sys.exit with status 1 \(disk full\) before die returned"),
    ],
)
def test_a_rank_that_dies_or_leaves_is_named_with_how(way: str, status: int, message: str, launch: Launcher) -> None:
    with pytest.raises(RankDiedError, match=message) as caught:
        launch(die, (way,))
    assert caught.value.rank == 1
    assert caught.value.returncode == status
    assert caught.value.log is not None
    assert str(caught.value.log) in str(caught.value)
    assert caught.value.log.with_suffix(".out").read_text() == "last words\n"
    assert way != "SIGKILL" or "Its last lines:\n    last words\n" in str(caught.value)


def test_a_crash_in_c_shows_its_stderr_and_the_users_frames(launch: Launcher) -> None:
    with pytest.raises(
        RankDiedError, match="rank 1 was killed by SIGSEGV before die returned; a native library"
    ) as caught:
        launch(die, ("SIGSEGV",))
    shown = str(caught.value)
    assert "Fatal Python error: Segmentation fault\n    Current thread" in shown
    assert re.search(rf'File "{re.escape(__file__)}", line \d+ in _segfault\n', shown)
    assert "nblaunch/ranks" not in shown


def test_a_foreign_sigint_is_reported(launch: Launcher) -> None:
    with pytest.raises(RankDiedError, match=r"rank 1 was interrupted \(SIGINT\) from outside this notebook"):
        launch(die, ("SIGINT",))


# ------------------------------------------------------------------ what had been returned
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("os._exit(3)", r"rank 1 exited with status 3 after die_after_returning returned"),
        ("SIGABRT", r"rank 1 was killed by SIGABRT after die_after_returning returned; a native .* Its last lines:"),
    ],
    ids=["status", "signal"],
)
def test_a_crash_after_all_returned_warns_and_keeps_the_result(
    way: str, message: str, launch: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match=f"(?s)the result is complete, but {message}.*Log: .*rank1.err") as warned:
        result = launch(die_after_returning, (way,), max_restarts=1, view="text")
    assert list(result) == [0, 1]
    assert [warning.filename for warning in warned] == [__file__]
    shown = capsys.readouterr().out
    assert "nblaunch: every rank returned and the result is complete, but rank 1" in shown
    assert "restarting" not in shown


def test_a_crash_warning_turned_into_an_error_has_the_results(launch: Launcher) -> None:
    with pytest.raises(UserWarning, match="the result is complete") as raised:
        launch(die_after_returning, ("SIGABRT",))
    assert getattr(raised.value, "results", None) == {0: 0, 1: 1}


def test_a_crash_of_a_rank_that_returned_does_not_stop_the_others(launch: Launcher) -> None:
    with pytest.warns(UserWarning, match="rank 1 was killed by SIGABRT after"):
        result = launch(die_after_returning_before_the_other_returns)
    assert list(result) == [0, 1]


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        (lambda: _raise(WithDetailsError("late")), WithDetailsError),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), RankDiedError),
        (_kill_the_reaper_and_wait, RankLostError),
        (lambda: dist.all_reduce(torch.ones(1)), CollectiveError),
    ],
    ids=["exception", "killed", "reaper-killed", "collective"],
)
def test_the_error_carries_the_other_ranks_results(
    fail: Callable[[], Any], error: type[Exception], launch: Launcher
) -> None:
    with pytest.raises(error) as caught:
        launch(fail_once_the_other_returned, (fail,))
    assert getattr(caught.value, "results", None) == {1: "value of 1"}


# ------------------------------------------------------------------ no primary failure
def test_waiting_for_a_finished_rank_is_reported(launch: Launcher) -> None:
    message = "rank 0 finished while rank 1 waited in all_reduce: every rank must make the same collective calls"
    with pytest.raises(CollectiveError, match=message) as caught:
        launch(finish_early)
    assert caught.value.rank == 1
    assert "dist.all_reduce(torch.ones(1))" in str(caught.value.__cause__)


# ------------------------------------------------------------------ results that cannot come back
def _returns_ddp_models() -> dict[str, Any]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    return {"models": (model, torch.compile(model, backend="eager")), "optimizer": torch.optim.SGD(model.parameters())}


def test_of_a_ddp_model_in_a_result_the_module_arrives(launch: Launcher) -> None:
    result = launch(_returns_ddp_models)[0]
    model, compiled = result["models"]
    assert type(model) is torch.nn.Linear
    assert compiled._orig_mod is model
    assert result["optimizer"].param_groups[0]["params"][0] is model.weight


def test_an_unsendable_result_is_named_and_the_others_survive(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "PEER_FAILURE_WAIT_S", 0.0)
    message = r"rank 1's return value could not be sent: result\['model'\]\[1\], a thread lock"
    with pytest.raises(ResultError, match=message) as caught:
        launch(return_unsendable)
    assert caught.value.rank == 1
    assert caught.value.results == {0: "value of 0"}


def test_a_result_that_cannot_be_rebuilt_spares_the_others(launch: Launcher) -> None:
    message = "rank 0's return value cannot be rebuilt in the notebook: LookupError: only in its rank"
    with pytest.raises(ResultError, match=message) as caught:
        launch(return_vanishing)
    assert caught.value.rank == 0
    assert caught.value.results == {1: "survives"}
    assert isinstance(caught.value.__cause__, LookupError)


# ------------------------------------------------------------------ what hangs after the exception
@pytest.mark.parametrize("function", [raise_with_a_stuck_thread, raise_with_a_stuck_exit_function])
def test_an_exception_is_not_held_up_by_what_is_stuck_behind_it(
    function: Callable[..., None], launch: Launcher
) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"^before the"):
        launch(function)
    assert time.monotonic() - begin < SOON


def test_a_rank_stuck_behind_an_unsendable_result_is_stopped(launch: Launcher) -> None:
    with pytest.raises(ResultError, match="rank 1's return value could not be sent: result, a thread lock") as caught:
        launch(return_a_lock_with_a_stuck_exit_function)
    assert caught.value.results == {0: "whole"}


# ------------------------------------------------------------------ exits
def exit_late(seconds: float, rank: int) -> int:
    atexit.register(time.sleep, seconds)
    return rank


def test_a_launch_waits_for_exits_but_not_without_end(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(launch(exit_late, (0.5,), view="text")) == [0, 1]
    assert "did not exit" not in capsys.readouterr().out
    monkeypatch.setattr(timeouts, "EXIT_TIMEOUT_S", 0.5)
    assert list(launch(exit_late, (600.0,), view="text")) == [0, 1]
    assert "returned but did not exit within 0 s" in capsys.readouterr().out


def tell_exit_functions(folder: str, rank: int) -> None:
    """Do what wandb does: note in a hook that the function raised, and write that to a file at exit."""
    seen = []

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        seen.append(f"{kind.__name__}: {error}, line {trace.tb_lineno - begin}")

    sys.excepthook = hook
    atexit.register(lambda: Path(folder, str(rank)).write_text(f"{seen} {getattr(sys, 'last_value', None)}"))
    begin = sys._getframe().f_lineno
    raise ValueError("no data")


def test_exit_functions_see_that_the_function_raised(launch: Launcher, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data"):
        launch(tell_exit_functions, (str(tmp_path),), num_processes=1)
    assert (tmp_path / "0").read_text() == "['ValueError: no data, line 1'] no data"
    assert next((tmp_path / "state").rglob("rank0.err")).read_text() == ""  # the notebook shows the traceback


# ------------------------------------------------------------------ forks
@pytest.mark.parametrize("start_method", ["fork"], indirect=True)
def test_a_forked_ranks_exception_and_death_are_reported(launch: Launcher) -> None:
    with pytest.warns(UserWarning, match="start_method='fork'"):
        with pytest.raises(WithDetailsError, match=r"^forked$"):
            launch(raise_on_rank_1, (lambda: WithDetailsError("forked"),))
    with pytest.warns(UserWarning, match="start_method='fork'"):
        with pytest.raises(RankDiedError, match=re.escape("rank 1 exited with status 0 before die returned")):
            launch(die, ("os._exit(0)",))
