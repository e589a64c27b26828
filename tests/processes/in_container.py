"""A script that uses what launches and sessions have, to run where a container lacks something.

It writes one JSON object to stdout.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Any

import torch

import nblaunch
from nblaunch import Launch, LaunchResult, notebook_launcher
from nblaunch.errors import LaunchStoppedError
from nblaunch.machine.processes import alive
from nblaunch.machine.usage import Sampler
from tests.conftest import eventually, state_of

DATA_ELEMENTS = 9_000_000
"""72 MB of float64, which free memory is checked for, and /dev/shm has no room for."""


def fill(data: torch.Tensor, rank: int) -> torch.Tensor:
    """Write to what all ranks received, and return as much."""
    assert data.sum() == DATA_ELEMENTS
    return data.fill_(rank + 2)


def count(lock: Lock, data: bytes) -> int:
    with lock:
        return len(data)


def leave_a_child() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def has_ended(pid: int) -> bool:
    """Return True for a zombie, too: PID 1 of a container need not collect it."""
    with contextlib.suppress(OSError):  # no such process, or no /proc
        return state_of(pid) == "Z"
    return not alive(pid)


def hang(folder: str, rank: int) -> None:
    (Path(folder) / f"{rank}").touch()
    time.sleep(600)


def begun(folder: Path) -> bool:
    """Return True once, when both ranks hang."""
    marks = [folder / "0", folder / "1"]
    is_so = all(mark.exists() for mark in marks)
    for mark in marks if is_so else ():
        mark.unlink()
    return is_so


def launched(function: Callable[..., Any], *args: Any) -> list[Any]:
    result = notebook_launcher(function, args, 2, view="none")
    assert isinstance(result, LaunchResult)
    return list(result)


def interrupt(folder: Path) -> None:
    eventually(lambda: begun(folder))
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(folder: Path) -> bool:
    thread = threading.Thread(target=interrupt, args=(folder,))
    thread.start()
    try:
        notebook_launcher(hang, (str(folder),), 2, view="none")
    except KeyboardInterrupt:
        return True
    finally:
        thread.join()
    return False


def stopped(folder: Path) -> bool:
    launch = notebook_launcher(hang, (str(folder),), 2, view="none", block=False)
    assert isinstance(launch, Launch)
    eventually(lambda: begun(folder))
    launch.stop()
    try:
        launch.result()
    except LaunchStoppedError:
        return True
    return False


def main(folder: Path) -> None:
    said: dict[str, Any] = {}
    data = torch.ones(DATA_ELEMENTS, dtype=torch.float64)
    said["results"] = [float(part.mean()) for part in launched(fill, data)]
    with nblaunch.session(2, name="contained") as session:
        said["in a session"] = [float(part.mean()) for part in session.run(fill, data, view="none")]
        said["again"] = [float(part.mean()) for part in session.run(fill, data, view="none")]
    said["shared"] = launched(count, multiprocessing.get_context("spawn").Lock(), bytes(72_000_000))
    children = launched(leave_a_child)
    eventually(lambda: all(map(has_ended, children)))
    said["interrupted"] = interrupted(folder)
    said["stopped"] = stopped(folder)
    os.setpgrp()  # a rank leads its group, too
    said["memory"] = Sampler(lambda rank: os.getpid(), "cpu").sample([0])[0].memory > 0
    assert data.mean() == 1.0
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
