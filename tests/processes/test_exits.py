"""What the end of a launch waits for: not for exits that no caller can notice."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from tests.conftest import conformance, eventually
from tests.processes.conftest import Launcher

kept: list[Any] = []


def exit_late(held: str, file: str, rank: int) -> int:
    """Let this rank's exit take a while, and write a file."""
    really = os._exit
    dist.all_reduce(torch.ones(1))

    def exit_in_a_while(code: int) -> NoReturn:
        time.sleep(60.0 if held == "nothing" else 0.5)  # the reaper does not wait for the first
        Path(f"{file}{rank}").touch()
        really(code)

    os._exit = exit_in_a_while  # type: ignore[assignment]
    if held == "a child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    elif held == "a thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    elif held == "an orphan":
        subprocess.run("sleep 600 &", shell=True, check=True)
    elif held == "a port":
        kept.append(socket.create_server(("127.0.0.1", 10_000 + os.getpid() % 10_000)))
    elif held == "much memory":
        kept.append(torch.ones(600 << 20, dtype=torch.uint8))
    elif held == "much shared memory":
        kept.append(torch.ones(600 << 20, dtype=torch.uint8).share_memory_())
    return os.getpid()


HELD = ("nothing", "a child", "an orphan", "a thread", "a port", "much memory", "much shared memory")


@pytest.mark.parametrize("held", HELD)
def test_a_launch_waits_only_for_exits_that_matter(held: str, launch: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "exited"
    ranks = launch(exit_late, (held, str(file)))
    waited = [Path(f"{file}{rank}").exists() for rank in range(2)]
    assert waited == [held != "nothing"] * 2
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert [Path(f"{file}{rank}").exists() for rank in range(2)] == waited  # the reaper has killed them


@pytest.mark.parametrize("held", ["nothing", "an orphan"])
@conformance("fork")
def test_a_fork_of_the_notebook_waits_for_the_same(held: str, launch: Launcher, tmp_path: Path) -> None:
    test_a_launch_waits_only_for_exits_that_matter(held, launch, tmp_path)


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
