"""Reported metrics and progress, and printed lines: all reach the result and the logs."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import nblaunch
from tests.conftest import conformance
from tests.processes.conftest import Launcher


# ------------------------------------------------------------------ what ranks run
def report_some(rank: int) -> None:
    for step in range(3):
        nblaunch.report(step=step, loss=1.0 / (step + 1), accuracy=torch.tensor(0.5 * rank))
    nblaunch.report(lr=1)


class Reporting(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        nblaunch.report(step=index, seen=index)
        os.write(1, f"worker read {index}\n".encode())
        return index


def report_in_workers(rank: int) -> list[int]:
    loader = DataLoader(Reporting(), sampler=[0, 1], num_workers=1, multiprocessing_context="fork")
    return [int(batch) for batch in loader]


def with_progress(rank: int) -> list[int]:
    return list(nblaunch.progress(range(5), desc="epoch"))


def report_much(rank: int) -> None:
    for step in range(2000):
        nblaunch.report(step=step, loss=float(step))


def write_everywhere(rank: int) -> None:
    print("from print")
    print("to stderr", file=sys.stderr)
    sys.__stdout__.write("from __stdout__\n")  # type: ignore[union-attr]
    os.write(1, b"from os.write\n")
    libc = ctypes.CDLL(None)
    libc.puts(b"from C")
    libc.fflush(None)
    subprocess.run("echo from a subprocess; echo its stderr >&2", shell=True, check=True)
    child = multiprocessing.get_context("fork").Process(target=print, args=("from a child",), kwargs={"flush": True})
    child.start()
    child.join()


def write_odd_bytes(rank: int) -> None:
    os.write(1, b"caf\xc3")
    os.write(1, b"\xa9 \xff\xfe \x00 nul\n")
    os.write(2, bytes(range(256)) + b"\n")
    print("\udcff lone surrogate")
    sys.stdout.buffer.write(b"\xe2\x82")  # and an end in the middle of a character
    sys.stdout.flush()


def print_many_lines(rank: int) -> None:
    for number in range(100_000):
        print(f"line {number}")


def close_and_replace_streams(rank: int) -> str:
    sys.stdout.close()
    sys.stderr = None
    os.write(1, b"still a file\n")
    return "returned"


def print_without_newline(rank: int) -> None:
    print("no newline", end="")


def print_then_vanish(rank: int) -> None:
    print("a whole line")
    nblaunch.report(step=1, loss=rank)
    if rank == 1:
        os._exit(1)


def print_on_a_full_disk(rank: int) -> str:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    for _ in range(100):
        print("x" * 99)
    child = multiprocessing.get_context("fork").Process(target=print, args=("y" * 99,), kwargs={"flush": True})
    child.start()
    child.join()
    print("z" * 100, end="")  # what is left for the end
    return f"trained, and its child left with {child.exitcode}"


def fill_the_disk(rank: int) -> int:
    """Files end at 8 KB: as on a full disk, and by the same path in the system."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for step in range(1000):
        print("x" * 99)
        nblaunch.report(step=step, loss=0.0)
    libc = ctypes.CDLL(None)
    libc.puts(b"from C")
    libc.fflush(None)
    child = subprocess.run("head -c 10000 /dev/zero", shell=True, check=False)
    print("to stderr", file=sys.stderr)
    faulthandler.dump_traceback(all_threads=True)
    return child.returncode


def log_two_gigabytes(fail: bool = False) -> None:
    os.ftruncate(1, 2 << 30)  # a hole: it takes no room
    dist.barrier()  # the failure of one rank ends the other
    if fail:
        raise ValueError("after all that")


def print_much(rank: int) -> None:
    for _ in range(100):
        print("x" * 99)


# ------------------------------------------------------------------ reports
def test_every_report_is_in_the_metrics_with_its_rank_step_and_time(
    launch: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.time()
    result = launch(report_some, view="text")
    shown, metrics = capsys.readouterr().out, result.metrics
    assert "[rank 0] step 2: loss 0.3333, accuracy 0" in shown
    assert "[rank 1] step 2: loss 0.3333, accuracy 0.5" in shown
    assert len(metrics) == 8
    times = [report.time for report in metrics]
    assert times == sorted(times)
    assert begin <= times[0] <= times[-1] <= time.time()
    for rank in range(2):
        own = [(report.step, dict(report.values)) for report in metrics if report.rank == rank]
        assert own[:3] == [(s, {"loss": 1.0 / (s + 1), "accuracy": 0.5 * rank}) for s in range(3)]
        assert own[3] == (None, {"lr": 1.0})
    assert repr(result).endswith(" s, loss 0.3333, accuracy 0.25 (mean of 2 ranks), lr 1; every rank returned None>")


def test_a_dataloader_worker_can_report_and_print(launch: Launcher) -> None:
    result = launch(report_in_workers)
    assert sorted((report.rank, report.step) for report in result.metrics) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [log.out.read_text() for log in result.logs] == ["worker read 0\nworker read 1\n"] * 2


def test_reports_are_quick_and_none_is_lost_in_a_flood(launch: Launcher) -> None:
    metrics = launch(report_much).metrics
    for rank in range(2):
        assert [report.step for report in metrics if report.rank == rank] == list(range(2000))


def test_progress_iterates_and_is_no_metric(launch: Launcher) -> None:
    result = launch(with_progress)
    assert list(result) == [[0, 1, 2, 3, 4]] * 2
    assert len(result.metrics) == 0
    assert repr(result.metrics) == "Metrics(0 reports)"


# ------------------------------------------------------------------ logs
@conformance("forkserver", "spawn", "fork")
def test_all_that_a_rank_and_its_children_write_is_in_its_files(launch: Launcher, few: int) -> None:
    for log in launch(write_everywhere, num_processes=few).logs:
        assert log.out.read_text().splitlines() == [
            "from print",
            "from __stdout__",
            "from os.write",
            "from C",
            "from a subprocess",
            "from a child",
        ]
        assert log.err.read_text().splitlines() == ["to stderr", "its stderr"]


def test_bytes_that_are_no_text_are_kept_as_they_are_and_harm_nothing(
    launch: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    result = launch(write_odd_bytes, view="text")
    for log in result.logs:
        assert log.out.read_bytes() == b"caf\xc3\xa9 \xff\xfe \x00 nul\n\\udcff lone surrogate\n\xe2\x82"
        assert log.err.read_bytes() == bytes(range(256)) + b"\n"
    shown = capsys.readouterr().out
    assert "[rank 0] café \ufffd\ufffd  nul\n" in shown
    assert "\x00" not in shown


def test_a_hundred_thousand_lines_are_kept_and_their_ends_shown(
    launch: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    result = launch(print_many_lines, view="text")
    for log in result.logs:
        assert log.out.read_text() == "".join(f"line {number}\n" for number in range(100_000))
    shown = capsys.readouterr().out
    for rank, log in enumerate(result.logs):
        assert f"[rank {rank}] line 0\n" in shown
        assert f"[rank {rank}] line 99999\n" in shown
        assert f"omitted; see {log.out}" in shown
    assert len(shown) < 2_500_000


@pytest.mark.parametrize(
    ("function", "kept"),
    [(close_and_replace_streams, "still a file\n"), (print_without_newline, "no newline")],
)
def test_whatever_a_function_does_to_its_streams_the_file_has_it(
    function: Callable[..., Any], kept: str, launch: Launcher
) -> None:
    assert [log.out.read_text() for log in launch(function).logs] == [kept, kept]


def test_what_a_rank_said_before_its_death_is_shown(launch: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(nblaunch.errors.RankDiedError, match="rank 1 exited with status 1"):
        launch(print_then_vanish, view="text")
    shown = capsys.readouterr().out
    assert "[rank 1] a whole line\n" in shown
    assert "[rank 1] step 1: loss 1" in shown
    assert "nblaunch: print_then_vanish failed after" in shown


# ------------------------------------------------------------------ logs that are kept
def wait_for_pruning() -> None:
    """A launch removes old logs when its result is there already."""
    for thread in threading.enumerate():
        if thread.name.startswith(f"nblaunch-{os.getpid()}-"):
            thread.join()


def test_logs_of_any_size_are_kept_while_something_refers_to_them(launch: Launcher) -> None:
    small = launch(print_without_newline)
    large = launch(log_two_gigabytes)
    wait_for_pruning()
    with pytest.raises(ValueError, match=r"^after all that$") as caught:
        launch(log_two_gigabytes, (True,))
    wait_for_pruning()
    launch(print_without_newline)
    wait_for_pruning()
    assert small.logs[1].text() == "no newline"
    assert large.logs[1].out.stat().st_size == 2 << 30
    logs = Path(caught.value._render_traceback_()[-1].removeprefix("Logs: "))  # type: ignore[attr-defined]  # IPython's
    assert (logs / "rank1.out").stat().st_size == 2 << 30


# ------------------------------------------------------------------ logs that cannot be written
def test_output_beyond_a_full_disk_is_dropped_and_noted(launch: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    result = launch(print_on_a_full_disk, view="text")
    assert list(result) == ["trained, and its child left with 0"] * 2
    assert [log.dropped for log in result.logs] == [True] * 2
    shown = capsys.readouterr().out
    assert re.search(r"nblaunch: rank [01] cannot write its logs \(No space left on device\)", shown)
    assert "nblaunch: rank 1 lost output (No space left on device)" in shown
    assert repr(result).endswith(" s; output dropped>")


def test_training_goes_on_where_no_file_can_grow(launch: Launcher) -> None:
    result = launch(fill_the_disk)
    assert all(result)  # the child could not write; its rank went on
    for rank, log in enumerate(result.logs):
        assert log.out.stat().st_size == 8192
        assert log.dropped
        assert "to stderr\n" in log.err.read_text()
        steps = [report.step for report in result.metrics if report.rank == rank]
        assert steps == list(range(len(steps)))
    assert result.metrics.dropped
    assert 0 < len(result.metrics) < 2000


def test_a_log_ends_at_its_limit(launch: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    result = launch(print_much, env={"NBLAUNCH_MAX_LOG_BYTES": "1050"}, view="text")
    for log in result.logs:
        *lines, end = log.text().splitlines()
        assert lines == ["x" * 99] * 10 + [""]
        assert end == "nblaunch: this log ends at NBLAUNCH_MAX_LOG_BYTES: further output is dropped"
        assert log.dropped
    shown = capsys.readouterr().out
    assert re.search(r"nblaunch: rank [01]'s log is full \(NBLAUNCH_MAX_LOG_BYTES, by default 1 GB\)", shown)
    assert "nblaunch: rank 1 lost output (NBLAUNCH_MAX_LOG_BYTES)" in shown
