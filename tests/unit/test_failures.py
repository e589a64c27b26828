"""A failure in parts, as a view shows it: the user's own line from a rank's traceback."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from nblaunch.engines.protocol import Log
from nblaunch.errors import CollectiveError, NodeLostError, RankDiedError
from nblaunch.launch.failures import (
    MAX_HEADLINE,
    RankTraceback,
    attach,
    crash_warning,
    describe,
    headline_of,
    summary,
)
from nblaunch.launch.group import RankEnd
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.stopping import Account
from nblaunch.launch.views import Stream
from nblaunch.wire.messages import Done, RankExited
from tests.unit.fake_engine import FakeLog

IN_A_CELL = """on rank 1:
Traceback (most recent call last):
  Cell In[3], line 12, in train
    loss = step(model)
  Cell In[2], line 4, in step
    return F.nll_loss(x, y)
           ^^^^^^^^^^^^^^^^
  File "/env/lib/python3.11/site-packages/torch/nn/functional.py", line 3000, in nll_loss
    return torch._C._nn.nll_loss(input)
ValueError: no such class: 11"""
IN_A_MODULE = """on rank 0:
Traceback (most recent call last):
  File "/home/me/model.py", line 7, in forward
    return self.layer(x)
  File "/env/lib/python3.11/site-packages/torch/nn/linear.py", line 1, in forward
    return F.linear(x)
RuntimeError: shapes"""


def raised(traceback: str, rank: int = 1) -> Exception:
    error: Exception = ValueError("no such class: 11")
    error.rank = rank  # type: ignore[attr-defined]  # as launches set it
    error.__cause__ = RankTraceback(traceback)
    return error


def test_the_cells_last_line_is_shown_and_not_the_librarys() -> None:
    failure = describe(raised(IN_A_CELL), None)
    assert (failure.rank, failure.type_name, failure.message) == (1, "ValueError", "no such class: 11")
    assert (failure.where, failure.source) == ("Cell In[2], line 4", "return F.nll_loss(x, y)")
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert failure.traceback.endswith("ValueError: no such class: 11")


def test_a_message_of_two_sentences_is_said_whole_once() -> None:
    for traceback, details in ((IN_A_CELL, "Use 10."), (f"{IN_A_CELL}. Use 10.", "")):
        error = raised(traceback)
        error.args = ("no such class: 11. Use 10.",)
        assert describe(error, None).details == details


def test_the_path_of_the_logs_is_not_said_again() -> None:
    """Views show it. Text of the user that looks like it stays."""
    account = Account("train", [], LaunchFiles(Path("/logs"), None), {}, {})
    for error in (
        RankDiedError(
            "rank 1 was killed by SIGTERM: see the Logs: a. Log: /logs/rank1.err", 1, Path("/logs/rank1.err")
        ),
        NodeLostError("node n1 is lost: see the Logs: a. Log so far: /logs/rank1.err", 1, Path("/logs/rank1.err")),
        CollectiveError("train was stopped: see the Logs: a. Logs: /logs", 1, Path("/logs/rank1.err")),
    ):
        failure = describe(error, account)
        assert failure.message.endswith("see the Logs: a.")
        assert failure.details == ""
        assert summary(error, Path("/logs")).endswith("see the Logs: a.")


def test_without_a_cell_it_is_the_users_own_file() -> None:
    failure = describe(raised(IN_A_MODULE), None)
    assert (failure.where, failure.source) == ("/home/me/model.py, line 7", "return self.layer(x)")


@pytest.mark.parametrize("traceback", ["on rank 1:\nValueError: no such class: 11", "on rank 1:", ""])
def test_without_a_line_of_the_users_there_is_none(traceback: str) -> None:
    failure = describe(raised(traceback), None)
    assert (failure.where, failure.source) == ("", "")


def test_a_crash_shows_the_last_lines_of_stderr_or_else_of_stdout() -> None:
    """The logs may be on another machine."""
    printed: dict[Stream, bytearray] = {"out": bytearray(b"epoch 3\n"), "err": bytearray()}
    logs: dict[Stream, Log] = {stream: FakeLog(data) for stream, data in printed.items()}
    end = RankEnd(1, Done(1, 1, 5), None, RankExited(1, -signal.SIGSEGV, 6))
    account = Account("train", [end], LaunchFiles(Path("/logs"), None), {}, {1: logs})
    assert ". Its last lines:\n    epoch 3\nLog: /logs/rank1.err" in crash_warning([end], account)
    printed["err"] += b"no such driver\n"
    assert ". Its last lines:\n    no such driver\nLog: " in crash_warning([end], account)
    printed["out"].clear()
    printed["err"].clear()
    assert ". It printed nothing. Log: /logs/rank1.err" in crash_warning([end], account)


@pytest.mark.parametrize("hosts", [(), ("n1", "n2")])
def test_a_crash_for_want_of_threads_names_the_limit(hosts: tuple[str, ...]) -> None:
    said = FakeLog(bytearray(b"RuntimeError: can't start new thread\n"))
    end = RankEnd(1, Done(1, 1, 5), None, RankExited(1, -signal.SIGABRT, 6))
    account = Account(
        "train", [end], LaunchFiles(Path("/logs"), None), {}, {1: {"out": said, "err": said}}, hosts=hosts
    )
    limit = "its machine reached its process limit" if hosts else "no more processes or threads can be started"
    assert f"; probably {limit} (" in crash_warning([end], account)


# ------------------------------------------------------------------ headlines
WORKER = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/env/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/data.py", line 3, in __getitem__
    raise ValueError("bad image 17")
ValueError: bad image 17
"""
REMOTE = '\n"""\nTraceback (most recent call last):\n  File "a.py", line 1, in f\nfoo.BarError\n"""'
DDP = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
    "your module has parameters that were not used in producing loss. You can enable unused parameter detection by "
    "passing the keyword argument `find_unused_parameters=True`.\nParameter indices: 0 1"
)
CUDA = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
PYDANTIC = "1 validation error for Config\nlr\n  Input should be a valid number [type=float_parsing]"


@pytest.mark.parametrize(
    ("type_name", "message", "headline", "has_details"),
    [
        ("ValueError", WORKER, "ValueError: bad image 17 (in DataLoader worker 0)", False),
        (
            "KeyError",
            WORKER.replace("ValueError", "KeyError"),
            "KeyError: bad image 17 (in DataLoader worker 0)",
            False,
        ),
        ("RemoteTraceback", REMOTE, "BarError", False),
        (
            "RuntimeError",
            DDP,
            "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
            True,
        ),
        ("AcceleratorError", CUDA, "AcceleratorError: CUDA error: device-side assert triggered", True),
        ("ValidationError", PYDANTIC, "ValidationError: 1 validation error for Config", True),
        (
            "BackendCompilerFailed",
            "backend='inductor' raised:\nValueError: bad\n\nSet TORCHDYNAMO_VERBOSE=1",
            "BackendCompilerFailed: backend='inductor' raised: ValueError: bad",
            True,
        ),
        ("StopIteration", "", "StopIteration", False),
        ("KeyError", "'x'", "KeyError: 'x'", False),
        ("ValueError", "lr must be > 0, e.g. 0.1", "ValueError: lr must be > 0, e.g. 0.1", False),
        ("AssertionError", "tensor([[1., 2.],\n        [3., 4.]])", "AssertionError: tensor([[1., 2.],", True),
    ],
)
def test_a_headline_is_the_sentence_that_matters(
    type_name: str, message: str, headline: str, has_details: bool
) -> None:
    found = headline_of(type_name, message)
    assert (str(found), bool(found.details)) == (headline, has_details)


@pytest.mark.parametrize("message", ["0.123, " * 10_000, "x" * 10_000, "Traceback (most recent call last):\n  cut"])
def test_a_headline_has_at_most_two_lines(message: str) -> None:
    found = headline_of("ValueError", message)
    assert len(found.text) <= MAX_HEADLINE
    assert "\n" not in found.text
    assert len(found.details) < 5000


class OwnResultsError(Exception):
    results = (0.5,)


class StrictError(Exception):
    """Refuses attributes that it does not define."""

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(name)


@pytest.mark.parametrize(("error", "results"), [(OwnResultsError(), (0.5,)), (StrictError(), None)])
def test_a_users_error_keeps_its_own_results_or_has_none(error: Exception, results: object) -> None:
    attach({1: "value"}, error)
    assert getattr(error, "results", None) == results
