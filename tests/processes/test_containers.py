"""Launches and sessions where a container lacks what a plain machine has: memory files, /proc, room in /dev/shm.

Each case runs a script under a real seccomp filter or in a mount namespace of its own, which needs root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LONG
from tests.processes import in_container
from tests.seccomp import refusing

SMALL_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
"""What a container gets by default."""
ALL = {
    "results": [2.0, 3.0],
    "in a session": [2.0, 3.0],
    "again": [2.0, 3.0],
    "shared": [100_000_000, 100_000_000],
    "interrupted": True,
    "stopped": True,
    "memory": True,
}


def mounted(*mounts: str) -> list[str]:
    """Return the words to put before a command that runs with these mounts."""
    return ["unshare", "--mount", "bash", "-ec", f'{"; ".join(mounts)}; exec "$@"', "bash"]


LOADS = """
import torch
from nblaunch import notebook_launcher
from torch.utils.data import DataLoader, TensorDataset

def load():
    return len(list(DataLoader(TensorDataset(torch.ones(64, 200_000)), batch_size=16, num_workers=1)))

notebook_launcher(load, (), 2, view='none')
"""


def run_in(container: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return what in_container.py says there."""
    done = subprocess.run(
        [*container, sys.executable, in_container.__file__, str(folder)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize(
    "container",
    [
        refusing("memfd_create=ENOSYS"),
        [*mounted(SMALL_SHM), *refusing("memfd_create=EPERM")],
    ],
    ids=["in-shm", "on-disk"],
)
def test_a_container_may_refuse_memory_files(container: Sequence[str], tmp_path: Path) -> None:
    assert run_in(container, tmp_path) == ALL


def test_proc_may_have_processes_only(tmp_path: Path) -> None:
    assert run_in(mounted("mount -t proc -o subset=pid proc /proc"), tmp_path) == ALL


def test_there_may_be_no_proc(tmp_path: Path) -> None:
    assert run_in(mounted("mount -t tmpfs tmpfs /proc"), tmp_path) == {**ALL, "memory": False}


def test_a_full_dev_shm_is_named_with_remedies() -> None:
    small = mounted(SMALL_SHM.replace("64m", "8m"))
    done = subprocess.run([*small, sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=LONG)
    note = next(line for line in done.stderr.splitlines() if line.startswith("/dev/shm has 8 MiB ("))
    assert {"--shm-size=8g;", "emptyDir", "prefetch_factor),", "num_workers=0."} <= set(note.split())
