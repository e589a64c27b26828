"""A rank keeps the memory that a training step frees for the next step, unless the user has set malloc."""

from __future__ import annotations

import ctypes
import resource
import sys

import pytest

from tests.conftest import conformance
from tests.processes.conftest import Launcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
STEPS = 5
SIZE = 20 << 20
PAGES = SIZE // resource.getpagesize()
FEW = 2 * PAGES
"""Without the settings, each step has more."""


# ------------------------------------------------------------------ what ranks run
def faults(steps: int) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def step() -> None:
    """Allocate, fill and free six temporaries of 20 MB.

    Without torch: its small objects may come to lie above the temporaries, and then glibc, too, keeps these.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    temporaries = [libc.malloc(SIZE) for _ in range(6)]
    for address in temporaries:
        ctypes.memset(address, 1, SIZE)
    for address in temporaries:
        libc.free(address)


def faults_of_steps() -> int:
    faults(2)
    return faults(STEPS)


# ------------------------------------------------------------------ tests
@conformance("forkserver", "fork")
def test_steps_reuse_the_memory_that_steps_free(launch: Launcher, few: int) -> None:
    assert max(launch(faults_of_steps, num_processes=few)) < FEW


@conformance("forkserver", "fork")
@pytest.mark.parametrize(
    "env", [{"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}], ids=str
)
def test_the_users_settings_leave_malloc_as_it_is(launch: Launcher, env: dict[str, str]) -> None:
    assert min(launch(faults_of_steps, num_processes=1, env=env)) > STEPS * PAGES
