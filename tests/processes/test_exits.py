"""What the end of a launch waits for: not for exits that no caller can notice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from nblaunch.machine import processes
from nblaunch.ranks import worker
from tests.conftest import conformance, eventually, is_spare, marked_processes
from tests.processes.conftest import Launcher


def exit_late(held: str, file: str, rank: int) -> int:
    """Let this rank's exit take a while, and write a file."""
    really = os._exit

    def exit_in_a_while(code: int) -> NoReturn:
        time.sleep(0.5)
        Path(f"{file}{rank}").touch()
        really(code)

    os._exit = exit_in_a_while  # type: ignore[assignment]
    if held == "a child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    elif held == "a thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    elif held == "much memory":
        worker._MUCH_MEMORY = 1
    return os.getpid()


@pytest.mark.parametrize("held", ["nothing", "a child", "a thread", "much memory"])
@conformance("forkserver", "spawn", "fork")
def test_a_launch_waits_only_for_exits_that_matter(held: str, launch: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "exited"
    ranks = launch(exit_late, (held, str(file)))
    waited = [Path(f"{file}{rank}").exists() for rank in range(2)]
    assert waited == [held != "nothing"] * 2
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert [Path(f"{file}{rank}").exists() for rank in range(2)] == waited  # the reaper has killed them


def group() -> tuple[str, str, int]:
    world = dist.distributed_c10d._world
    return world.pg_names[dist.distributed_c10d._get_default_group()], dist.get_backend(), world.group_count


def _spare_ranks() -> list[int]:
    spares = {pid for pid in marked_processes(with_spares=True) if is_spare(pid)}
    return [pid for pid in spares if not set(processes.children(pid)) & spares]  # and not the spare reaper


def _page_faults(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def test_spares_rehearse_a_group_and_ranks_see_none_of_it(launch: Launcher) -> None:
    """A spare that only waits has touched some 440 pages, and after a rehearsal 1,180."""
    before = launch(group)
    eventually(lambda: len(_spare_ranks()) == 2 and all(_page_faults(pid) > 800 for pid in _spare_ranks()))
    spares = _spare_ranks()
    eventually(lambda: all(len(os.listdir(f"/proc/{pid}/task")) == 1 for pid in spares))
    assert list(launch(group)) == list(before)
    assert all(not processes.alive(pid) or not is_spare(pid) for pid in spares)  # they were the ranks
