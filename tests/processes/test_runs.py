"""Detached runs: they outlive the process that has started them, and whatever dies, their folders tell the truth."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
import torch
import torch.distributed as dist

import nblaunch
from nblaunch import Launch, notebook_launcher
from nblaunch.errors import (
    ArgumentError,
    LaunchStoppedError,
    LaunchTimeoutError,
    RankDiedError,
    RankLostError,
    ResultError,
    StartError,
)
from nblaunch.launch import run_folders
from nblaunch.launch.output.log_directory import state_root
from nblaunch.notebook.run_table import record_of
from tests.conftest import LONG, command_of, eventually, marked_processes, parent_of
from tests.processes.conftest import Launcher
from tests.processes.test_deaths import Family, alive, assert_gone, end_all, with_offspring

NUMBERS = 4_000_000
"""Of a tensor of 16 MB."""


# ------------------------------------------------------------------ what ranks run
def train(rank: int, folder: Path, numbers: int = NUMBERS) -> dict[str, Any]:
    """Add up in all ranks until the file "enough" is there."""
    step, total = 0, torch.empty(0)
    is_enough = torch.zeros(1)
    while not is_enough:
        time.sleep(0.01)  # leaves the others some of the processors
        total = torch.full((numbers,), rank + 1.0)
        dist.all_reduce(total)
        nblaunch.report(step=step, loss=1 / (step + 1), steps=step + 1)
        print(f"step {step} of rank {rank}")
        step += 1
        is_enough += (folder / "enough").exists()
        dist.all_reduce(is_enough)
    return {"rank": rank, "steps": step, "total": total}


def talk(rank: int, folder: Path) -> None:
    print(f"printed by {rank}")
    nblaunch.report(step=7, loss=0.25 + rank)
    with_offspring(rank, folder)


class UnluckyError(Exception):
    def __init__(self, luck: int, wish: str) -> None:
        super().__init__(luck, wish)
        self.luck, self.wish = luck, wish


def fail_after_the_other(error: Exception, folder: Path, rank: int) -> int:
    if rank == 1:
        eventually((folder / "pid0").exists)
        other = int((folder / "pid0").read_text())
        eventually(lambda: not alive(other))
        raise error
    (folder / ".pid0").write_text(str(os.getpid()))
    (folder / ".pid0").rename(folder / "pid0")
    return 5


def fail_once(rank: int) -> str:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    nblaunch.report({f"loss_of_attempt_{attempt}": 0.5}, step=1)
    print(f"attempt {attempt}")
    if attempt == "0":
        raise ValueError("the first time")
    return f"attempt {attempt}"


def wait_forever() -> None:
    time.sleep(600)


def stop_at_a_breakpoint(rank: int) -> int:
    x = 40 + rank
    breakpoint()
    return x + 1


def return_ones(folder: Path, rank: int, attempt: int = 0) -> torch.Tensor:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != str(attempt):
        raise ValueError("too early")
    (folder / f"begun{rank}").touch()
    eventually((folder / "enough").exists)
    return torch.ones(NUMBERS)


def print_accuracy(rank: int) -> int:
    for percent in (80, 90):
        print(f"Accuracy: {percent + rank}")
    return rank


def fail() -> None:
    raise ValueError("no luck")


# ------------------------------------------------------------------ runs and commands
@pytest.fixture(autouse=True)
def _no_run_goes_on() -> Iterator[None]:
    """End the runs of a test that fails."""
    yield
    for pid in runners():
        os.kill(pid, signal.SIGKILL)


def runners() -> list[int]:
    """Return the processes that hold runs."""
    return [pid for pid in marked_processes() if "nblaunch.launch.runner" in command_of(pid, 2000)]


def runner_of(name: str) -> int:
    (found,) = [pid for pid in runners() if f"{run_folders.folder_of(name)}" in command_of(pid, 2000)]
    return found


def start(function: Any, name: str | bool, *args: Any, ranks: int = 2, **options: Any) -> Launch:
    run = notebook_launcher(function, args, ranks, detach=name, view="none", **options)
    assert isinstance(run, Launch)
    return run


def attach(name: str) -> Launch:
    return nblaunch.attach(name, view="none")


def steps_of(name: str) -> float:
    return run_folders.find_run(name).metrics.get("steps", 0)


def command(*words: str, **options: Any) -> subprocess.Popen[str]:
    whole = [sys.executable, "-m", "nblaunch", *words]
    return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def said_by(*words: str) -> tuple[int, str]:
    """Return the status of a command, and what it prints."""
    process = command(*words)
    said, _ = process.communicate(timeout=LONG)
    return process.returncode, said


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# ------------------------------------------------------------------ the process that has started a run
def be_a_kernel(folder: str) -> None:
    start(train, "nightly", Path(folder))
    time.sleep(600)


def test_a_run_outlives_its_kernel_and_others_have_all_of_it(tmp_path: Path) -> None:
    code = "import sys; from tests.processes.test_runs import be_a_kernel; be_a_kernel(sys.argv[1])"
    kernel = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    folder = run_folders.folder_of("nightly")
    try:
        eventually(lambda: (run_folders.read(folder) and steps_of("nightly") > 5) or kernel.poll() is not None)
    finally:
        kernel.kill()
        kernel.wait()
    run, other = attach("nightly"), command("attach", "nightly")
    killed_at = steps_of("nightly")
    eventually(lambda: steps_of("nightly") > killed_at + 5)
    (tmp_path / "enough").touch()

    results = [run.result(), attach("nightly").result()]

    for result in results:
        assert [result[rank]["rank"] for rank in range(2)] == [0, 1]
        assert all(torch.equal(result[rank]["total"], torch.full((NUMBERS,), 3.0)) for rank in range(2))
        steps = result[0]["steps"]
        assert steps == result[1]["steps"] > killed_at + 5
        for rank in range(2):
            assert [each.step for each in result.metrics if each.rank == rank] == [*range(steps)]
            printed = result.logs[rank].text().splitlines()
            assert printed == [f"step {step} of rank {rank}" for step in range(steps)]
    said, _ = other.communicate(timeout=LONG)
    assert other.returncode == 0
    assert "[rank 1] step 0 of rank 1\n" in said
    assert "finished" in said.splitlines()[-1]
    (told,) = nblaunch.runs()
    assert (told.name, told.state, told.ranks, told.metrics["steps"]) == ("nightly", "finished", 2, steps)


def test_whoever_stops_a_run_all_see_the_same_end(tmp_path: Path) -> None:
    run = start(train, "busy", tmp_path, 10)
    second, other = attach("busy"), command("attach", "busy")
    eventually(lambda: steps_of("busy") > 2)
    assert not run.done
    folder = run_folders.folder_of("busy")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.glob("*Z-*"))}
    assert len(modes) == 2
    assert {*modes.values()} == {0o700}

    second.stop()

    errors = []
    for each in (run, second, attach("busy")):
        with pytest.raises(
            LaunchStoppedError, match=r"^train was stopped after \d+\.\d s\. Logs: .*run-busy"
        ) as caught:
            each.result()
        errors.append(str(caught.value))
    assert len({*errors}) == 1
    said, _ = other.communicate(timeout=LONG)
    assert other.returncode == 1
    assert "stopped" in said.splitlines()[-1]
    assert run_folders.find_run("busy").state == "stopped"


# ------------------------------------------------------------------ one victim each
@pytest.mark.parametrize(
    ("victim", "state", "error", "said"),
    [
        ("runner", "lost", RankLostError, "the run doomed is lost: the process that held the run died"),
        ("reaper", "failed", RankLostError, "the parent process of the ranks of talk was killed"),
        ("rank", "failed", RankDiedError, "rank 1 was killed by SIGKILL before talk returned"),
    ],
    ids=["runner", "reaper", "rank"],
)
def test_nothing_survives_and_the_folder_tells_the_truth(
    victim: str, state: str, error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Family(tmp_path / "family")
    run = start(talk, "doomed", family.folder)
    try:
        eventually(lambda: family.complete() or run.done)
        assert len(family.living()) == len(family.pids())
        server = parent_of(family.pid("reaper"))
        if victim == "reaper":
            os.kill(server, signal.SIGSTOP)
        os.kill(runner_of("doomed") if victim == "runner" else family.pid(victim, 1), signal.SIGKILL)
        if victim == "reaper":  # the run ends before its fork server has killed what the reaper has left
            eventually(lambda: not runners())
            os.kill(server, signal.SIGCONT)
        assert_gone(family)
    finally:
        end_all(family)
    assert run.wait(LONG)

    for each in (run, attach("doomed")):
        with pytest.raises(error, match=said) as caught:
            each.result()
        assert getattr(caught.value, "rank", None) == (1 if victim == "rank" else -1)
    (told,) = nblaunch.runs()
    assert (told.state, told.metrics) == (state, {"loss": 0.75})
    assert [(told.log_dir / f"rank{rank}.out").read_text() for rank in range(2)] == ["printed by 0\n", "printed by 1\n"]
    record = record_of(told)
    how = "died" if victim == "runner" else "killed"
    assert all(word in record for word in ("printed by 0", "printed by 1", "loss", how))
    assert how in told.message
    monkeypatch.chdir(told.path)
    with socket.socket(socket.AF_UNIX) as peer, pytest.raises(OSError, match=r"refused|No such file"):
        peer.connect("control")
    run_folders.remove("doomed")


# ------------------------------------------------------------------ ends of many kinds
def test_a_run_raises_the_ranks_own_exception_everywhere(tmp_path: Path) -> None:
    errors = {"builtin": FileNotFoundError(2, "no data", "x.csv"), "own": UnluckyError(13, "a cat")}
    runs = {}
    for name, error in errors.items():
        (tmp_path / name).mkdir()
        runs[name] = start(fail_after_the_other, name, error, tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"no data: 'x\.csv'") as builtin:
        runs["builtin"].result()
    for each in (runs["own"], attach("own")):
        with pytest.raises(UnluckyError) as own:
            each.result()
        assert (own.value.luck, own.value.wish) == (13, "a cat")
        assert "raise error" in str(own.value.__cause__)
    for raised in (builtin.value, own.value):
        assert (getattr(raised, "rank", None), getattr(raised, "results", None)) == (1, {0: 5})
    code = (
        "import nblaunch\ntry: nblaunch.attach('own').result()\n"
        "except Exception as error: print(f'{type(error)} {error.luck} {error.rank} {error.results}')"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert elsewhere.stdout.splitlines()[-1] == f"{UnluckyError} 13 1 {{0: 5}}"
    status, said = said_by("attach", "own")
    assert status == 1
    assert re.search(r'File ".*test_runs\.py", line \d+, in fail_after_the_other\n    raise error', said)


def test_a_restarted_run_has_the_charts_of_both_attempts() -> None:
    run = start(fail_once, "restarts", max_restarts=1)
    result = run.result()
    assert [*result] == ["attempt 1"] * 2
    assert result.logs[0].text() == "attempt 1\n"
    told = run_folders.find_run("restarts")
    assert (told.state, told.message) == ("finished", "")
    record = record_of(told)
    assert "restarting all ranks (1 of 1)" in record
    assert all(f"loss_of_attempt_{attempt}" in record for attempt in range(2))
    assert len([*told.path.glob("*Z-*/rank0.out")]) == 2

    again = attach("restarts")
    told.path.rename(run_folders.folder_of("moved"))
    with pytest.raises(StartError, match=r"^the run restarts has left no result in .*: was it moved or removed\?$"):
        again.result()
    result = attach("moved").result()
    assert [*result] == ["attempt 1"] * 2
    assert result.logs[0].text() == "attempt 1\n"
    record = record_of(run_folders.find_run("moved"))
    assert all(f"loss_of_attempt_{attempt}" in record for attempt in range(2))
    next(run_folders.folder_of("moved").rglob("rank1.result.*")).unlink()
    with pytest.raises(ResultError, match=r"^the run moved lacks results: files were removed from .*run-moved/"):
        attach("moved").result()


def test_a_run_without_a_name_has_a_name_and_a_timeout_ends_it() -> None:
    run = start(wait_forever, True, timeout=0.5)
    assert re.fullmatch(r"wait-forever-\d{8}-\d{6}", run.id)
    with pytest.raises(LaunchTimeoutError, match=r"wait_forever took longer than timeout=0\.5 s"):
        run.result()
    assert run_folders.find_run(run.id).state == "stopped"
    (ending,) = run_folders.folder_of(run.id).rglob("ending.pickle")
    ending.write_bytes(b"cnblaunch.launch.ending\nOfAnotherVersion\n.")
    again = attach(run.id)
    for _ in range(2):
        with pytest.raises(ResultError, match=r"cannot be loaded with python .*, torch .*; it was written with python"):
            again.result()


def test_a_run_is_stopped_before_its_ranks_have_started() -> None:
    states: set[str] = set()
    is_started = threading.Event()

    def look() -> None:
        while not is_started.is_set():
            states.update(each.state for each in nblaunch.runs())

    onlooker = threading.Thread(target=look)
    onlooker.start()
    run = start(wait_forever, "hasty")
    is_started.set()
    onlooker.join()
    run.stop()
    assert states == {"starting"}
    for each in (run, attach("hasty")):
        with pytest.raises(LaunchStoppedError, match=r"^wait_forever was stopped "):
            each.result()
    assert run_folders.find_run("hasty").state == "stopped"


def test_results_are_kept_while_they_cannot_be_written(tmp_path: Path) -> None:
    run = start(return_ones, "full", tmp_path)
    eventually(lambda: (tmp_path / "begun1").exists())
    runner = runner_of("full")
    _, hard = resource.prlimit(runner, resource.RLIMIT_FSIZE)
    resource.prlimit(runner, resource.RLIMIT_FSIZE, (1 << 20, hard))  # as on a disk that is full
    (tmp_path / "enough").touch()
    events = run_folders.folder_of("full") / "events.jsonl"
    eventually(lambda: "The run keeps them, and tries again: free some space there" in events.read_text())
    assert not run.done
    resource.prlimit(runner, resource.RLIMIT_FSIZE, (hard, hard))
    result = run.result()
    assert all(torch.equal(result[rank], torch.ones(NUMBERS)) for rank in range(2))
    assert run_folders.find_run("full").state == "finished"

    (tmp_path / "enough").unlink()
    (tmp_path / "begun1").unlink()
    again = start(return_ones, "full2", tmp_path, kwargs={"attempt": 1}, max_restarts=1)
    eventually(lambda: (tmp_path / "begun1").exists())
    resource.prlimit(runner_of("full2"), resource.RLIMIT_FSIZE, (1 << 20, hard))
    (tmp_path / "enough").touch()
    events = run_folders.folder_of("full2") / "events.jsonl"
    eventually(lambda: "or stop the run" in events.read_text())
    again.stop()
    for each in (again, attach("full2")):
        with pytest.raises(StartError, match=r"^the results cannot be written to .*File too large"):
            each.result()
    assert not [*events.parent.rglob("*.result.*")]


def test_a_run_whose_folder_is_removed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(wait_forever, "removed")
    eventually(lambda: run.stacks().keys() == {0, 1})
    with monkeypatch.context() as patch:
        patch.setattr(run_folders, "read", lambda path: None)  # as without a free descriptor
        assert not run._has_ended()  # type: ignore[attr-defined]
    shutil.rmtree(run_folders.folder_of("removed"))
    eventually(lambda: not runners())
    with pytest.raises(RankLostError, match="its folder was removed"):
        run.result()


def test_an_ended_run_is_done_as_soon_as_it_is_attached(tmp_path: Path) -> None:
    (tmp_path / "enough").touch()
    start(return_ones, "over", tmp_path).result()
    again = attach("over")
    assert again.done
    assert "2 ranks, finished" in repr(again)


def test_a_breakpoint_waits_until_someone_attaches() -> None:
    run = start(stop_at_a_breakpoint, "paused", ranks=1, on_breakpoint="wait")
    eventually(lambda: "breakpoint" in repr(run) or run.done)
    onlooker = command("attach", "paused", stdin=subprocess.DEVNULL)  # as over `ssh -n`: it cannot type
    assert onlooker.stdout is not None
    while "to type there" not in onlooker.stdout.readline():
        pass
    assert not run.done
    code = "import nblaunch; run = nblaunch.attach('paused'); run.wait(); print('returned', run.result()[0])"
    terminal = pexpect.spawn(sys.executable, ["-c", code], encoding="utf-8", timeout=LONG)
    try:
        for typed in ("p x + 1000", "c"):
            terminal.expect_exact("(rank 0 of 1) ")
            terminal.sendline(typed)
        terminal.expect_exact("returned 41")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)
    assert list(run.result()) == [41]
    onlooker.communicate(timeout=LONG)
    assert onlooker.returncode == 0


# ------------------------------------------------------------------ names, and what is refused
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"detach": "a/b"}, "^detach='a/b': must be 1 to 80 letters"),
        ({"detach": ""}, "^detach='': must be"),
        ({"detach": ".hidden"}, "^detach='.hidden': must be"),
        ({"detach": "r", "start_method": "fork"}, "^start_method='fork': a detached run does not share"),
        ({"on_breakpoint": "wait"}, "^on_breakpoint='wait': only the ranks of a detached run can wait"),
    ],
)
def test_what_a_run_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    before = runners()
    with pytest.raises(ArgumentError, match=said):
        notebook_launcher(wait_forever, num_processes=2, view="none", **options)
    assert runners() == before
    assert run_folders.every() == []


def test_the_commands_in_a_terminal(tmp_path: Path) -> None:
    run = start(train, "busy", tmp_path, 10)
    follower = command("logs", "busy", "--rank", "1", "--follow")
    eventually(lambda: steps_of("busy") > 2)
    before = runners()
    with pytest.raises(ArgumentError, match=r"^detach='busy': the name is in use by a run of train from .*\(running\)"):
        start(train, "busy", tmp_path, 10)
    assert runners() == before
    status, said = said_by("runs")
    assert status == 0
    assert re.search(r"^busy +train +running +2 ", said, re.M)
    status, said = said_by("rm", "busy")
    assert (status, said.partition(":")[0]) == (1, "nblaunch")
    assert "the run is running: stop it first" in said
    status, said = said_by("logs", "busy", "--rank", "1")
    assert status == 0
    assert said.startswith("==> rank1.out <==\nstep 0 of rank 1\nstep 1 of rank 1\n")
    assert "rank 0" not in said
    leaving = command("attach", "busy")
    assert leaving.stdout is not None
    while "[rank 0] step" not in leaving.stdout.readline():
        pass
    leaving.send_signal(signal.SIGINT)
    assert "the run busy goes on" in leaving.communicate(timeout=LONG)[0]
    assert leaving.returncode == 0
    assert not run.done

    assert said_by("stop", "busy") == (0, "busy: stopped\n")

    assert run.wait(LONG)
    assert said_by("stop", "busy") == (0, "busy: stopped\n")
    followed, _ = follower.communicate(timeout=LONG)
    assert follower.returncode == 0
    (log,) = run_folders.folder_of("busy").glob("*Z-*/rank1.out")
    assert log.read_text() in followed
    status, said = said_by("logs", "busy")
    assert status == 0
    assert "==> rank0.out <==\nstep 0 of rank 0\n" in said
    assert log.read_text() in said
    assert said_by("attach", "busy")[0] == 1
    with pytest.raises(ArgumentError, match=r"the name is in use by a run of train from .*\(stopped\)"):
        start(train, "busy", tmp_path, 10)
    assert said_by("rm", "busy") == (0, "busy: removed\n")
    assert said_by("runs") == (0, f"no runs or launches in {state_root()} yet\n")
    for words in (["rm", "busy"], ["attach", "busy"], ["stop", "busy"]):
        assert said_by(*words) == (
            1,
            f"nblaunch: name='busy': no such run in {state_root()}; there is none\n",
        )


# ------------------------------------------------------------------ launches that are not detached
def test_every_launch_is_in_the_table_and_has_a_record(launch: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    launch(print_accuracy, metric_patterns=r"Accuracy: (?P<accuracy>\d+)")
    with pytest.raises(ValueError, match="no luck"):
        launch(fail)
    with nblaunch.session(2, device="cpu") as session:
        session.run(print_accuracy, view="none")
    cell, failed, finished = nblaunch.runs()
    assert (finished.function, finished.state, finished.metrics) == ("print_accuracy", "finished", {"accuracy": 90.5})
    assert (failed.function, failed.state) == ("fail", "failed")
    assert "no luck" in failed.message
    assert (cell.function, cell.state, cell.ranks) == ("print_accuracy", "finished", 2)
    with pytest.raises(ArgumentError, match=r"^name='.*': a launch, no detached run: nblaunch.show"):
        attach(finished.name)
    wrong: Any = finished
    with pytest.raises(ArgumentError, match=r"^name=RunFolder.*: must be the name of a run, as a string"):
        attach(wrong)
    record = record_of(finished)
    assert "accuracy" in record
    assert "<img" in record
    capsys.readouterr()
    nblaunch.show("fail")
    assert "ValueError: no luck" in capsys.readouterr().out
    nblaunch.show(finished.name)
    assert "Accuracy: 91" in capsys.readouterr().out
