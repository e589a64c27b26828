"""IPython's shell in ranks: functions find it, and it costs them no thread, file or session."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from tests.conftest import LONG, conformance, eventually, settled_server
from tests.processes.conftest import Launcher


# ------------------------------------------------------------------ what ranks run
def shell() -> Any:
    from IPython import get_ipython

    return get_ipython()


def magics(rank: int) -> tuple[str, list[str], int, str]:
    ours = shell()
    ours.run_line_magic("cd", "-q /")
    ours.run_line_magic("timeit", "-n 1 -r 1 pass")
    lines = ours.getoutput("echo {2 * 4}; echo two")
    ours.system("exit 3")
    return type(ours).__name__, list(lines), ours.user_ns["_exit_code"], os.getcwd()


def session() -> dict[str, bool]:
    ours = shell()
    return {
        "prompt": hasattr(sys, "ps1"),
        "displayhook": sys.displayhook is not sys.__displayhook__,
        "excepthook": sys.excepthook.__module__.startswith("IPython"),  # torch sets its own
        "history": ours.history_manager.enabled,
        "kernel": hasattr(ours, "kernel"),
        "threads": len(threading.enumerate()) > 1,
    }


class Held:
    """Something to finalize."""


held = Held()


def leaves_exit_functions(folder: Path, rank: int) -> None:
    atexit.register((folder / f"atexit{rank}").touch)
    weakref.finalize(held, (folder / f"finalize{rank}").touch)


def runs_a_command(folder: Path, rank: int) -> None:
    try:
        shell().system(f"touch {folder}/begun{rank}; sleep 600")
    except KeyboardInterrupt:
        (folder / f"interrupted{rank}").touch()
        raise


# ------------------------------------------------------------------ what holds
@conformance("forkserver", "fork")
def test_a_function_finds_the_shell(launch: Launcher) -> None:
    assert list(launch(magics)) == [("RankShell", ["8", "two"], 3, "/")] * 2


def test_the_shell_is_no_interactive_session(launch: Launcher) -> None:
    assert not any(launch(session)[0].values())


def test_exit_functions_of_ranks_still_run(launch: Launcher, tmp_path: Path) -> None:
    launch(leaves_exit_functions, (tmp_path,))
    assert {path.name for path in tmp_path.glob("*[01]")} == {"atexit0", "atexit1", "finalize0", "finalize1"}


def test_the_fork_server_keeps_one_thread_and_no_matplotlib() -> None:
    server = settled_server()
    assert len(os.listdir(f"/proc/{server.process.pid}/task")) == 1
    assert "matplotlib" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_an_interrupt_reaches_a_command_and_the_function(launch: Launcher, tmp_path: Path) -> None:
    """IPython's own functions swallow it."""
    job = launch(runs_a_command, (tmp_path,), block=False)
    eventually(lambda: len([*tmp_path.glob("begun*")]) == 2)
    job.stop()
    assert job.wait(LONG)
    assert {path.name for path in tmp_path.glob("interrupted*")} == {"interrupted0", "interrupted1"}
