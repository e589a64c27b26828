"""Stacks of ranks that compute, wait or are stuck; taking them disturbs no rank."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from nblaunch import Launch, notebook_launcher
from nblaunch.errors import LaunchStoppedError
from tests.conftest import LONG, eventually

NAP = 3.0


# ------------------------------------------------------------------ what ranks run
def ready(folder: Path, rank: int) -> None:
    (folder / f"pid{rank}.new").write_text(str(os.getpid()))
    (folder / f"pid{rank}.new").rename(folder / f"pid{rank}")


def pid_of(folder: Path, rank: int) -> int:
    return int((folder / f"pid{rank}").read_text())


def be_in_many_places(rank: int, folder: Path) -> None:
    """In C with the GIL; in a collective; in a loader's wait; in Python, with a thread beside: one rank each."""
    if rank == 3:
        threading.Thread(target=wait_beside, daemon=True).start()
    ready(folder, rank)
    if rank == 0:
        lock_twice_with_the_gil()
    elif rank == 1:
        dist.barrier()
    elif rank == 2:
        next(iter(DataLoader(Never(), num_workers=1)))  # type: ignore[arg-type]  # it has what a loader needs
    else:
        count_up()


def lock_twice_with_the_gil() -> None:
    """Block forever in C with the GIL held; unlike a sleep, no signal ends it."""
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def count_up() -> None:
    number = 0
    while True:
        number += 1


def wait_beside() -> None:
    threading.Event().wait()


class Never:
    """A dataset that brings nothing."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        time.sleep(LONG)


def nap(rank: int, folder: Path) -> tuple[float, bool]:
    """Sleep in a thread too; how long the sleep took, and whether the thread's did."""
    ends: list[float] = []

    def beside() -> None:
        begun = time.monotonic()
        time.sleep(NAP)
        ends.append(time.monotonic() - begun)

    thread = threading.Thread(target=beside)
    thread.start()
    ready(folder, rank)
    begun = time.monotonic()
    time.sleep(NAP)
    slept = time.monotonic() - begun
    thread.join()
    return slept, ends[0] >= NAP


def wait(rank: int, folder: Path) -> None:
    ready(folder, rank)
    time.sleep(LONG)


def go_through_signals(rank: int, folder: Path) -> int:
    """Handle SIGUSR1 and SIGUSR2, and enable faulthandler again, as debugging tools do."""
    import faulthandler

    seen: list[int] = []
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda number, frame: seen.append(number))
    faulthandler.enable()
    ready(folder, rank)
    eventually(lambda: (folder / "leave").exists())
    return len(seen)


def become_another_program(rank: int, folder: Path) -> None:
    ready(folder, rank)
    os.execvp("sleep", ["sleep", str(LONG)])


# ------------------------------------------------------------------ how they are asked
def begin(function: Callable[..., Any], folder: Path, ranks: int = 2, **options: Any) -> Launch:
    """Launch a function of `folder` in the background."""
    options = {"view": "none", **options}
    launch = notebook_launcher(function, kwargs={"folder": folder}, num_processes=ranks, block=False, **options)
    assert isinstance(launch, Launch)
    return launch


def begun(function: Callable[..., Any], folder: Path, ranks: int = 2, **options: Any) -> Launch:
    """The same, with every rank where it is to be asked."""
    launch = begin(function, folder, ranks, **options)
    eventually(lambda: all((folder / f"pid{rank}").exists() for rank in range(ranks)) or launch.done)
    assert not launch.done
    return launch


def end(launch: Launch) -> None:
    launch.kill()
    with pytest.raises(LaunchStoppedError):
        launch.result()
    assert launch.stacks() == {}


def calls(text: str) -> list[str]:
    """The functions of a rank's main thread, in the order of the text."""
    return re.findall(r", in (\S+)", text.partition("\n\n")[0])


# ------------------------------------------------------------------ wherever they are
def test_stacks_show_every_rank_whatever_it_does(tmp_path: Path) -> None:
    """In C with the GIL held, in a collective, waiting for a loader's worker, computing: one rank each."""
    launch = begun(be_in_many_places, tmp_path, ranks=4)
    expected = {0: "lock_twice_with_the_gil", 1: "barrier", 2: "_try_get_data", 3: "count_up"}
    texts: dict[int, str] = {}

    def look() -> bool:
        texts.update(launch.stacks())
        return all(place in calls(texts[rank]) for rank, place in expected.items())

    eventually(look, LONG, lambda: texts)
    for rank in range(4):
        lines = texts[rank].splitlines()
        assert lines[0] == "Main thread (most recent call last):"
        assert re.fullmatch(rf'  File "{re.escape(__file__)}", line \d+, in be_in_many_places', lines[1])
        assert "nblaunch/ranks" not in texts[rank]
    assert texts[0].splitlines()[2] == "    lock_twice_with_the_gil()"
    assert re.search(
        r'Thread \S+( \(wait_beside\))? \(most recent call last\):\n  File ".*", line \d+, in wait_beside\n', texts[3]
    )
    assert re.search(r"Thread QueueFeederThread of a library \(most recent call last\):\n", texts[2])
    end(launch)


def test_stacks_do_not_disturb_a_sleep(tmp_path: Path) -> None:
    launch = begun(nap, tmp_path)

    asked = [launch.stacks(LONG) for _ in range(5)]

    assert all("nap" in calls(texts[rank]) for texts in asked for rank in (0, 1))
    for slept, beside_too in launch.result():
        assert slept >= NAP
        assert beside_too


def test_a_launch_that_begins_can_be_asked_at_once(tmp_path: Path) -> None:
    """No rank may be sent a signal that it has no handler for: that would end it."""
    launch = begin(wait, tmp_path)

    while not all((tmp_path / f"pid{rank}").exists() for rank in range(2)):
        texts = launch.stacks(timeout=0.3)
        assert set(texts) == {0, 1}
        assert not launch.done
    eventually(lambda: all("wait" in calls(text) for text in launch.stacks().values()))
    end(launch)


def test_the_signals_of_other_tools_are_left_to_them(tmp_path: Path) -> None:
    launch = begun(go_through_signals, tmp_path)

    assert all("go_through_signals" in calls(text) for text in launch.stacks(LONG).values())
    (tmp_path / "leave").touch()

    assert list(launch.result()) == [0, 0]


def test_a_rank_that_became_another_program_is_let_be(tmp_path: Path) -> None:
    """The program has no handler, and would die of the signal."""
    launch = begun(become_another_program, tmp_path)
    pids = [pid_of(tmp_path, rank) for rank in range(2)]
    eventually(lambda: all(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in pids))

    eventually(lambda: launch.stacks(timeout=0.2) == {})

    assert not launch.done
    end(launch)
