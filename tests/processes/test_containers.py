"""Launches and sessions where a container lacks what a plain machine has: memory files, /proc, room in /dev/shm.

Each case runs a script under a real seccomp filter or in a mount namespace of its own, which needs root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LONG
from tests.kernel.harness import running_kernel
from tests.processes import in_container
from tests.seccomp import refusing

KERNEL = (sys.executable, "-m", "ipykernel_launcher")

SMALL_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
"""What a container gets by default."""
ALL = {
    "results": [2.0, 3.0],
    "in a session": [2.0, 3.0],
    "again": [2.0, 3.0],
    "shared": [72_000_000, 72_000_000],
    "interrupted": True,
    "stopped": True,
    "memory": True,
}


HANGS = """
import time, torch, torch.distributed as dist
print("begun")
if rank == 0:
    time.sleep(600)
dist.all_reduce(torch.ones(1))
"""
LAUNCH_HANGS = """
import time
from nblaunch import notebook_launcher

def hang():
    print("begun")
    time.sleep(600)

notebook_launcher(hang, num_processes=2)
"""


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


def limited(processes: int, home: Path) -> list[str]:
    """Return the words to put before a command that runs with this ``ulimit -u``, as a user who has no other process.

    The limit does not hold for root. The user may read what root may: this checkout, and the Python.
    """
    user, may_read = 61_000 + os.getpid() % 4_000, "+dac_read_search,+dac_override"
    os.chown(home, user, user)
    places = [f"{name}={home}" for name in ("HOME", "IPYTHONDIR", "NBLAUNCH_STATE_DIR", "TMPDIR")]
    as_user = ["setpriv", f"--reuid={user}", "--inh-caps", may_read, "--ambient-caps", may_read]
    return ["env", *places, "prlimit", f"--nproc={processes}:{processes}", *as_user]


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder for the files of a user who may not enter pytest's."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


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


def test_there_may_be_no_proc_and_no_memory_files(tmp_path: Path) -> None:
    container = [*mounted("mount -t tmpfs tmpfs /proc"), *refusing("memfd_create=ENOSYS")]
    assert run_in(container, tmp_path) == {**ALL, "memory": False}


def test_a_sandbox_may_lack_system_calls_and_room_in_dev_shm(tmp_path: Path) -> None:
    """There memory files are on a disk. In /proc there are processes only."""
    lacks = ("memfd_create=EPERM", "pidfd_open=ENOSYS", "waitid=ENOSYS", "prctl=EINVAL", "sched_getaffinity=EPERM")
    container = [*mounted(SMALL_SHM, "mount -t proc -o subset=pid proc /proc"), *refusing(*lacks)]
    assert run_in(container, tmp_path) == ALL


def test_a_full_dev_shm_is_named_with_remedies() -> None:
    small = mounted(SMALL_SHM.replace("64m", "8m"))
    done = subprocess.run([*small, sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=LONG)
    note = next(
        line
        for line in done.stderr.splitlines()
        if line.startswith("/dev/shm holds the batches of DataLoader workers: 8 MiB,")
    )
    assert {"--shm-size=8g;", "emptyDir", "prefetch_factor),", "num_workers=0."} <= set(note.split())


def test_a_kernel_survives_interrupts_where_no_signal_may_be_sent_by_descriptor() -> None:
    lacks = ("pidfd_send_signal=EPERM", "setpgid=EPERM")
    with running_kernel(*refusing(*lacks), *KERNEL) as kernel:
        kernel.run("%load_ext nblaunch").check()
        assert kernel.run("%%distributed -n 2\nprint(rank)").check().stdout.count("[rank") == 2
        kernel.run("%distributed session -n 2").check()
        for cell in ("%%distributed --ranks 0,1\n" + HANGS, LAUNCH_HANGS):  # the first in the session
            request = kernel.start_cell(cell)
            kernel.finish_cell(request, until="begun")
            kernel.interrupt()
            assert kernel.finish_cell(request).error.startswith("KeyboardInterrupt")
        kernel.run("%distributed session stop").check()


def test_a_kernel_survives_a_small_ulimit_of_processes(home: Path) -> None:
    with running_kernel(
        *limited(24, home), *KERNEL, NBLAUNCH_VIEW="auto", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1"
    ) as kernel:
        kernel.run("from nblaunch import notebook_launcher").check()
        for _ in range(2):
            cell = kernel.run("notebook_launcher(lambda: None, num_processes=2)")
            assert "(RLIMIT_NPROC) is 24): end unneeded processes" in cell.error
        kernel.run("1").check()
