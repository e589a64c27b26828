"""What the folder of a launch or a detached run says: its state, its metrics and its end, and whose it is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nblaunch.errors import ArgumentError
from nblaunch.launch import run_folders
from nblaunch.launch.events_file import EVENTS, to_line
from nblaunch.launch.output.log_directory import state_root
from nblaunch.launch.views import Ended, Event, LaunchInfo, Note, Outcome, Preparing, Reports, Started
from nblaunch.wire import launch_files

LAUNCH = "20260102T030405000000Z-7-1-abc"
"""The folder of a launch that is no detached run."""
ATTEMPT = "20260102T030406000000Z-8-1-def"
FAILED = Outcome("failed", 2.5, "rank 1 failed", at=1500.0)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBLAUNCH_STATE_DIR", str(tmp_path / "launches"))
    return state_root()


def started(ranks: int = 2) -> Started:
    return Started(LaunchInfo("8-1-def", "train", ranks, "cpu", Path("/nowhere")))


def write(
    root: Path,
    name: str,
    events: Sequence[Event] = (),
    *,
    function: str = "train",
    notebook: str = "a.ipynb",
    **facts: Any,
) -> Path:
    """Write the folder of a launch as the process that holds it does."""
    folder = root / name
    folder.mkdir()
    run_folders.write_facts(folder, name.partition("Z-")[2] or name, function, notebook)
    said = json.loads((folder / "run.json").read_text()) | {"began": 1000.0} | facts
    (folder / "run.json").write_text(json.dumps(said))
    add(folder, *events)
    return folder


def add(folder: Path, *events: Event) -> None:
    with (folder / EVENTS).open("ab") as file:
        file.write(b"".join(to_line(event, 1001.0) or b"" for event in events))


def spool(folder: Path, rank: int, *records: dict[str, Any], torn: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"rank{rank}.spool").write_text(torn + "".join(f"{json.dumps(record)}\n" for record in records))


def report(step: int, **metrics: float) -> dict[str, Any]:
    return {"time": 1000.0 + step, "step": step, "metrics": metrics}


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder, as a process that lives does."""
    lock = launch_files.acquire_lock(folder)
    assert lock is not None
    try:
        yield
    finally:
        launch_files.release_lock(lock)


def read(folder: Path) -> run_folders.RunFolder:
    run = run_folders.read(folder)
    assert run is not None
    return run


# ------------------------------------------------------------------ the state
def test_a_run_that_is_held_starts_and_then_runs(root: Path) -> None:
    folder = write(root, "run-r", [Preparing("waiting for Slurm job 7")])
    with held(folder):
        run = read(folder)
        assert (run.name, run.state, run.ranks, run.message) == ("r", "starting", 0, "waiting for Slurm job 7")
        assert not run.is_over
        assert run.seconds == 0.0  # the ranks have not begun
        add(folder, Preparing(""), started(3), Note("a note"))
        run = read(folder)
        assert (run.state, run.ranks, run.message, run.ended) == ("running", 3, "", 0.0)
        assert run.is_detached
        assert not run.is_over


@pytest.mark.parametrize("outcome", [FAILED, Outcome("finished", 3.0, "", at=1500.0), Outcome("stopped", 1.0, "why")])
def test_an_end_that_is_written_counts_whoever_holds_the_folder(root: Path, outcome: Outcome) -> None:
    folder = write(root, "run-r", [started(), Ended(outcome)])
    free = read(folder)
    with held(folder):
        assert read(folder) == free
    assert (free.state, free.message, free.seconds) == (outcome.state, outcome.message, outcome.seconds)
    assert free.ended == outcome.at
    assert free.is_over


def test_without_an_end_and_a_holder_it_is_lost(root: Path) -> None:
    run, launch = write(root, "run-r", [started()]), write(root, LAUNCH, [started()])
    os.utime(run / "run.json", (1060.0, 1060.0))
    os.utime(run / EVENTS, (1050.0, 1050.0))
    found = read(run)
    assert (found.state, found.seconds, found.ended) == ("lost", 0.0, 0.0)
    assert found.message == "the process that held the run died, and the ranks with it; runner.log may tell why"
    assert (found.lost.state, found.lost.seconds, found.lost.at) == ("failed", 60.0, 1060.0)
    assert found.lost.message == f"lost: {found.message}"
    assert read(launch).message == "its kernel ended, and the ranks with it"


def test_a_reboot_is_told_from_a_death(root: Path) -> None:
    rebooted = write(root, "run-r", [started()], boot="another start")
    assert (read(rebooted).state, read(rebooted).message) == ("lost", "the machine was started again")
    elsewhere = write(root, "run-elsewhere", [started()], boot="another start", host="another machine")
    assert "died" in read(elsewhere).message
    without = write(root, "run-without", [started()], boot="")
    assert "died" in read(without).message


def test_the_last_attempt_is_what_the_run_shows(root: Path) -> None:
    folder = write(root, "run-r", [started(2), Note("restarting"), started(4)])
    assert read(folder).log_dir == folder
    for name in (ATTEMPT, ATTEMPT.replace("0406", "0407")):
        (folder / name).mkdir()
    assert read(folder).log_dir.name == ATTEMPT.replace("0406", "0407")
    assert read(folder).ranks == 4


def test_a_folder_without_facts_is_no_launch(root: Path) -> None:
    (root / "run-r").mkdir()
    assert run_folders.read(root / "run-r") is None
    (root / "run-r" / "run.json").write_text('{"id": "r", "fun')
    assert run_folders.read(root / "run-r") is None
    assert run_folders.every() == []


# ------------------------------------------------------------------ metrics
def test_metrics_are_the_latest_of_each_rank_and_their_mean(root: Path) -> None:
    printed = Reports(0, [report(2, accuracy=0.5)], is_printed=True)
    folder = write(root, "run-r", [started(), printed])
    spool(folder / ATTEMPT, 0, report(1, loss=4.0), report(2, loss=1.0), {"progress": "epoch", "done": 1})
    spool(folder / ATTEMPT, 1, report(2, loss=2.0), torn='0, "metrics": {"loss": 9.0}}\n')
    assert read(folder).metrics == {"accuracy": 0.5, "loss": 1.5}


def test_of_a_long_spool_the_end_is_read(root: Path) -> None:
    folder = write(root, LAUNCH, [started(1)])
    spool(folder, 0, *(report(step, loss=float(step)) for step in range(2000)), torn="x" * 100_000 + "\n")
    assert read(folder).metrics == {"loss": 1999.0}


# ------------------------------------------------------------------ all of them
def test_runs_are_found_by_name_id_and_function_the_latest_first(root: Path) -> None:
    write(root, "run-old", [started(), Ended(FAILED)], began=1.0)
    write(root, "run-new", [started(), Ended(FAILED)], function="evaluate", began=3.0)
    write(root, LAUNCH, [started(), Ended(FAILED)], began=2.0)
    (root / "notes.txt").touch()
    (root / "unlike-a-launch").mkdir()
    assert [run.name for run in run_folders.every()] == ["new", "7-1-abc", "old"]
    assert run_folders.find(None).name == "new"
    assert run_folders.find("old").name == "old"
    assert run_folders.find("7-1-abc").path.name == LAUNCH
    assert run_folders.find("train").name == "7-1-abc"
    where = re.escape(str(root))
    with pytest.raises(ArgumentError, match=f"^name='gone': no such run or launch in {where}; the runs are: new, old$"):
        run_folders.find("gone")
    with pytest.raises(ArgumentError, match=r"^name='7-1-abc': a launch, no detached run: nblaunch.show\('7-1-abc'\)"):
        run_folders.find_run("7-1-abc")
    for name in ("train", "../run-old", ""):  # no function, no other folder
        with pytest.raises(ArgumentError, match=f"^name='.*': no such run in {where}; the runs are: new, old$"):
            run_folders.find_run(name)


@pytest.mark.parametrize(
    "facts", ["{}", "[]", '{"id": 1}', "no JSON", '{"function": "f", "notebook": "", "began": "x"}']
)
def test_a_damaged_folder_hides_no_other(root: Path, facts: str) -> None:
    write(root, "run-whole", [started(), Ended(FAILED)])
    (write(root, "run-damaged", [started()]) / "run.json").write_text(facts)
    assert [run.name for run in run_folders.every()] == ["whole"]


def test_a_run_of_another_machine_is_removed_only_there(root: Path) -> None:
    folder = write(root, "run-far", [started()], host="another machine")
    with pytest.raises(ArgumentError, match=r"the run was started on another machine: remove it there, or delete "):
        run_folders.remove("far")
    assert folder.exists()


def test_without_any_run_the_error_says_so(root: Path) -> None:
    with pytest.raises(ArgumentError, match=f"^there is no run or launch in {re.escape(str(root))} yet$"):
        run_folders.find(None)


@pytest.fixture
def given_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    def give_away(path: Path) -> None:
        """Make this another user's: by chown, if root runs the tests."""
        if os.getuid() == 0:
            os.chown(path, 65534, 65534)
        else:
            stat_of = Path.lstat
            as_another = lambda found: os.stat_result([*found[:4], found.st_uid + 1, *found[5:10]])  # noqa: E731
            monkeypatch.setattr(Path, "lstat", lambda self: as_another(stat_of(self)))

    return give_away


def test_a_run_of_another_user_is_no_run_and_keeps_its_name(root: Path, given_away: Callable[[Path], None]) -> None:
    folder = write(root, "run-r", [started(), Ended(FAILED)])
    assert run_folders.find_run("r").path == folder
    given_away(folder)
    assert run_folders.unseen("a.ipynb") == []
    with pytest.raises(ArgumentError, match=f"detach='r': the name is in use: {re.escape(str(folder))} exists"):
        run_folders.create("r")


# ------------------------------------------------------------------ names
def test_a_new_run_has_a_folder_that_only_its_user_reads(root: Path) -> None:
    folder = run_folders.create("nightly")
    assert folder == root / "run-nightly"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_name_in_use_is_refused_with_what_it_is(root: Path) -> None:
    folder = write(root, "run-r", [started()])
    who = r"a run of train from \d\d\d\d-\d\d-\d\d \d\d:\d\d"
    said = f"^detach='r': the name is in use by {who} \\({{}}\\): .*`python -m nblaunch {{}} r` {{}} it$"
    with held(folder), pytest.raises(ArgumentError, match=said.format("running", "stop", "stops")):
        run_folders.create("r")
    with pytest.raises(ArgumentError, match=said.format("lost", "rm", "removes")):
        run_folders.create("r")
    add(folder, Ended(FAILED))
    with pytest.raises(ArgumentError, match=said.format("failed", "rm", "removes")):
        run_folders.create("r")


def test_a_run_is_removed_once_it_is_over(root: Path) -> None:
    folder = write(root, "run-r", [started()])
    with (
        held(folder),
        pytest.raises(ArgumentError, match=r"name='r': the run is running: stop it first.*nblaunch stop r"),
    ):
        run_folders.remove("r")
    run_folders.remove("r")
    assert not folder.exists()
    with pytest.raises(ArgumentError, match="no such run"):
        run_folders.remove("r")


# ------------------------------------------------------------------ ends that no one has seen
def test_an_end_is_unseen_until_it_was_shown(root: Path) -> None:
    running = write(root, "run-running", [started()])
    ended = write(root, "run-ended", [started(), Ended(FAILED)])
    write(root, "run-elsewhere", [started(), Ended(FAILED)], notebook="b.ipynb")
    with held(running):
        assert [run.name for run in run_folders.unseen("a.ipynb")] == ["ended"]
        run_folders.mark_seen(ended)
        assert run_folders.unseen("a.ipynb") == []
    assert [run.name for run in run_folders.unseen("a.ipynb")] == ["running"]  # it is lost


def test_a_lost_run_ends_with_its_last_write_and_not_when_it_is_seen(tmp_path: Path) -> None:
    run_folders.write_facts(tmp_path, "id", "train", "")
    facts = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "rank0.out").write_text("step 1\n")
    for path in tmp_path.iterdir():
        os.utime(path, (facts["began"] + 60,) * 2)
    run_folders.mark_seen(tmp_path)
    os.utime(tmp_path / "seen", (facts["began"] + 3600,) * 2)

    run = run_folders.read(tmp_path)

    assert run is not None
    assert run.state == "lost"
    assert round(run.lost.seconds) == 60
