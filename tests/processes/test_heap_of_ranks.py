"""A rank keeps the memory that a training step frees for the next step, unless the user has set malloc."""

from __future__ import annotations

import ctypes
import resource
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import nblaunch
from tests.conftest import conformance
from tests.processes.conftest import Launcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
STEPS = 20
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
    faults(5)
    return faults(STEPS)


def faults_of_tensors() -> int:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    inputs = torch.ones(40_000, 64)
    counts = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            model(inputs).sum().backward()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return counts[-1]


class Faults(Dataset[int]):
    """What the worker of a DataLoader counts."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return faults_of_steps()


def faults_of_worker() -> int:
    return int(next(iter(DataLoader(Faults(), num_workers=1, multiprocessing_context="fork"))))


# ------------------------------------------------------------------ tests
@conformance("forkserver", "fork")
def test_steps_reuse_the_memory_that_steps_free(launch: Launcher, few: int) -> None:
    assert max(launch(faults_of_steps, num_processes=few)) < FEW


def test_training_has_few_faults(launch: Launcher) -> None:
    assert max(launch(faults_of_tensors)) < FEW


@pytest.mark.parametrize(
    "env", [{"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}], ids=str
)
def test_the_users_settings_leave_malloc_as_it_is(launch: Launcher, env: dict[str, str]) -> None:
    assert min(launch(faults_of_steps, num_processes=1, env=env)) > STEPS * PAGES


@conformance("fork")
def test_a_fork_of_the_notebook_reads_the_users_settings(launch: Launcher) -> None:
    """Each rank reads them where it sets malloc, however it was started."""
    assert min(launch(faults_of_steps, num_processes=1, env={"MALLOC_TRIM_THRESHOLD_": "131072"})) > STEPS * PAGES


def test_the_ranks_of_a_session_reuse_memory() -> None:
    with nblaunch.session(1) as made:
        first, second = (made.run(faults_of_steps)[0] for _ in range(2))
    assert max(first, second) < FEW


def test_forked_workers_of_a_loader_reuse_memory(launch: Launcher) -> None:
    assert max(launch(faults_of_worker)) < FEW
