"""Launches in the background, in parallel, from threads, and in large numbers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nblaunch import Launch, notebook_launcher
from nblaunch.errors import LaunchStoppedError, NestedLaunchError
from nblaunch.launch.handle import live_launches
from tests.conftest import LONG, eventually
from tests.processes.conftest import Launcher


# ------------------------------------------------------------------ what ranks run
def wait_for(folder: str, rank: int) -> str:
    """Write a file for this rank, and wait for the file "go"."""
    (Path(folder) / f"begun{rank}").touch()
    eventually((Path(folder) / "go").exists)
    return Path(folder).name


def return_or_wait(folder: str, rank: int) -> str:
    if rank > 0:
        return wait_for(folder, rank)
    (Path(folder) / "pid0").write_text(str(os.getpid()))
    (Path(folder) / "begun0").touch()
    return "early"


def clean_up_after(folder: str, rank: int) -> None:
    try:
        wait_for(folder, rank)
    finally:
        (Path(folder) / f"cleaned{rank}").touch()


def summed(value: float, rank: int) -> float:
    total = torch.tensor([value + rank])
    dist.all_reduce(total)
    return float(total)


def fail() -> None:
    raise ValueError("in the background")


def launch_again() -> None:
    notebook_launcher(summed, (1.0,))


@pytest.fixture
def begin(launch: Launcher, tmp_path: Path) -> Callable[..., Launch]:
    """Start a function in the background, with a folder of its own name, and wait until its ranks have begun."""

    def start(function: Callable[..., Any] = wait_for, name: str = "only", ranks: tuple[int, ...] = (0, 1)) -> Launch:
        folder = tmp_path / name
        folder.mkdir()
        launched: Launch = launch(function, (str(folder),), block=False, stop_grace=10.0)
        eventually(lambda: launched.done or all((folder / f"begun{rank}").exists() for rank in ranks))
        return launched

    return start


# ------------------------------------------------------------------ in the background
def test_a_background_launch_returns_its_result(begin: Callable[..., Launch], tmp_path: Path) -> None:
    running = begin()
    assert not running.wait(0.01)
    assert [(launched, launched.done) for launched in live_launches()] == [(running, False)]
    assert (running.name, running.world_size) == ("wait_for", 2)
    assert f"<Launch {running.id} of wait_for: 2 ranks, running for" in repr(running)
    (tmp_path / "only" / "go").touch()
    assert running.wait(LONG)
    assert running.done
    assert list(running.result()) == ["only", "only"]
    assert running.result() is running.result()
    assert live_launches() == []
    assert repr(running).endswith("2 ranks, finished>")
    running.stop()  # too late, and harmless
    running.kill()
    assert list(running.result()) == ["only", "only"]


def test_a_failure_in_the_background_is_raised_by_result(launch: Launcher) -> None:
    running = launch(fail, block=False)
    assert running.wait(LONG)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^in the background$"):
            running.result()
    assert repr(running).endswith("2 ranks, failed>")


def test_a_stopped_launch_cleans_up_and_keeps_returned_values(begin: Callable[..., Launch], tmp_path: Path) -> None:
    cleaning = begin(clean_up_after, "cleaning")
    cleaning.stop()
    with pytest.raises(LaunchStoppedError, match=r"clean_up_after was stopped after \d+\.\d s. Logs: "):
        cleaning.result()
    assert all((tmp_path / "cleaning" / f"cleaned{rank}").exists() for rank in range(2))
    halfway = begin(return_or_wait, "halfway")
    eventually(lambda: _has_ended(tmp_path / "halfway" / "pid0"))
    halfway.stop()
    with pytest.raises(LaunchStoppedError, match="return_or_wait was stopped") as caught:
        halfway.result()
    assert caught.value.results == {0: "early"}


def _has_ended(pid_file: Path) -> bool:
    """Return True if the rank that wrote its pid there has exited."""
    return not Path(f"/proc/{pid_file.read_text()}").exists()


# ------------------------------------------------------------------ side by side
def test_launches_run_and_stop_side_by_side_each_with_its_own_ranks(
    begin: Callable[..., Launch], tmp_path: Path
) -> None:
    names = ["first", "second", "third"]
    running = [begin(name=name) for name in names]
    assert not any(launched.done for launched in running)
    assert live_launches() == running
    running[1].stop()
    with pytest.raises(LaunchStoppedError, match="wait_for was stopped"):
        running[1].result()
    for name in ("third", "first"):
        (tmp_path / name / "go").touch()
    assert [list(running[number].result()) for number in (0, 2)] == [["first"] * 2, ["third"] * 2]


def test_launches_can_be_made_from_threads(launch: Launcher) -> None:
    results: dict[int, list[float]] = {}

    def run(number: int) -> None:
        results[number] = list(launch(summed, (float(number),)))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [2.0 * number + 1] * 2 for number in range(4)}


# ------------------------------------------------------------------ not inside a rank
def test_a_launch_inside_a_rank_is_refused(launch: Launcher) -> None:
    with pytest.raises(NestedLaunchError, match=r"this is rank \d of a launch, and a rank cannot launch") as caught:
        launch(launch_again)
    assert "launch_again" in str(caught.value.__cause__)


def test_one_of_several_slurm_tasks_is_refused_with_the_way_out(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1"}
    for name, value in {**slurm, "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NestedLaunchError, match=r"this is task 1 of 2 of a Slurm step.*srun -n1"):
        launch(summed, (1.0,))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_NTASKS", "8")  # of the allocation
    assert list(launch(summed, (1.0,))) == [3.0, 3.0]
