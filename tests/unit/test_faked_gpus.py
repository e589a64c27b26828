"""What the package says and plans by a GPU driver's answers, which are faked here: tests/gpu asks a real one."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nblaunch.engines.local import check_fork
from nblaunch.errors import StartError
from nblaunch.launch.failures import exception_for
from nblaunch.launch.group import RankEnd
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.stopping import Account
from nblaunch.launch.verdict import Cause
from nblaunch.machine import inventory
from nblaunch.machine.inventory import has_used_cuda, this_machine
from nblaunch.ranks import error_report, process_group
from nblaunch.ranks.forkserver import fork_problem

GIGABYTE = 10**9


# ------------------------------------------------------------------ which GPUs there are, and whether CUDA runs
@pytest.mark.parametrize(
    ("is_initialized", "now", "gpus"),
    [(False, 2, 4), (True, 2, 2), (True, 0, 0), (True, -1, 4)],  # -1: NVML does not know
)
def test_gpus_are_those_visible_now(is_initialized: bool, now: int, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)  # cached, once CUDA is initialized
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: now)
    assert this_machine().gpus == gpus


class FakeDriver:
    """libcuda, loaded in this process."""

    def __init__(self, status: int) -> None:
        self._status = status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802  # CUDA's own name
        return self._status


@pytest.mark.parametrize(("status", "is_used"), [(0, True), (3, False), (999, True)])  # 3: cuInit was not called
def test_the_driver_knows_whether_cuda_was_used(status: int, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name, mode: FakeDriver(status))
    assert has_used_cuda() == is_used


def test_a_fork_after_the_driver_was_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda.is_available()`` is enough."""
    monkeypatch.setattr("ctypes.CDLL", lambda name, mode: FakeDriver(0))
    with pytest.raises(
        StartError, match=r"^start_method='fork': the notebook has used CUDA.*: use start_method='auto'$"
    ):
        check_fork()
    monkeypatch.setattr("nblaunch.machine.processes.thread_count", lambda: 1)
    assert fork_problem() == "preloading initialized CUDA, which cannot be used after a fork"


def test_the_question_does_not_load_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is there, and that this process has not loaded."""
    monkeypatch.setattr(inventory, "_CUDA_DRIVER", "libanl.so.1")
    assert not any("libanl" in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert not has_used_cuda()
    assert not any("libanl" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_torch_knows_that_cuda_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_CUDA_DRIVER", "libnone.so.1")  # other tests may have loaded it
    assert not has_used_cuda()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert has_used_cuda()


def test_a_thread_may_be_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_CUDA_DRIVER", "libnone.so.1")
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace())
    assert not has_used_cuda()


# ------------------------------------------------------------------ out of memory
@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Two GPUs, and the bytes that torch holds on each."""
    reserved = {0: 2 * GIGABYTE, 1: 70 * GIGABYTE}
    for name, answer in {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "memory_reserved": reserved.__getitem__,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return reserved


def notes_of(error: BaseException) -> list[str]:
    """The notes of an exception of rank 3, as the notebook raises it."""
    failed = error_report.describe(3, 1, error)
    end = RankEnd(3, None, failed, None)
    account = Account("train", [end], LaunchFiles(Path("/logs"), None), {}, {})
    raised = exception_for(Cause("exception", 3, failed.time_ns, end), account)
    assert (type(raised), raised.rank) == (type(error), 3)
    notes = list(getattr(raised, "__notes__", []))
    assert set(notes) <= set(raised._render_traceback_())
    return notes


def test_out_of_memory_says_what_the_notebook_holds(gpus: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.cuda.OutOfMemoryError("CUDA out of memory.")
    assert notes_of(full) == [
        "The notebook itself holds 2.0 GB on cuda:0 and 70.0 GB on cuda:1: delete tensors there, then call "
        "torch.cuda.empty_cache()"
    ]
    assert notes_of(RuntimeError("CUDA error: invalid argument")) == []
    gpus.update({0: 0, 1: 0})
    assert notes_of(full) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 // 0)  # a broken CUDA does not replace the error
    assert notes_of(full) == []


# ------------------------------------------------------------------ communicators
class FakeGroup:
    """A process group whose communicator on a GPU takes a function's time to end."""

    def __init__(self, abort: Any) -> None:
        self._abort = abort

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        if self._abort is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return SimpleNamespace(abort=self._abort)


def abort_all(monkeypatch: pytest.MonkeyPatch, *aborts: Any) -> None:
    groups = {FakeGroup(abort): None for abort in aborts}
    fake = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        distributed_c10d=SimpleNamespace(_world=SimpleNamespace(pg_map=groups)),
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)
    process_group._abort_on_gpus()


def test_communicators_are_aborted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    ended = []

    def abort() -> None:
        both.wait()  # an abort that waits for the other group's
        ended.append(1)

    def fails() -> None:
        raise RuntimeError("aborted before")

    monkeypatch.setattr(process_group, "_ABORT_TIMEOUT_S", 60.0)
    abort_all(monkeypatch, abort, None, fails, abort)
    assert ended == [1, 1]


def test_a_communicator_whose_calls_are_checked_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps each backend, and the wrapper of older versions of torch aborts nothing."""
    ended = []

    class CheckedGroup(FakeGroup):
        def _get_backend(self, device: torch.device) -> Any:
            return SimpleNamespace(abort=lambda: None, wrapped_pg=super()._get_backend(device))

    monkeypatch.setattr(process_group, "_ABORT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(sys.modules[__name__], "FakeGroup", CheckedGroup)
    abort_all(monkeypatch, lambda: ended.append(1))
    assert ended == [1]


@pytest.mark.parametrize(("hangs", "calls"), [(False, ["work of 1", "destroy"]), (True, ["abort", "destroy"])])
def test_a_collective_that_hangs_is_aborted_before_its_group(
    hangs: bool, calls: list[str], gpus: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's would keep the group from being destroyed."""
    said, may_end, has_ended = [], threading.Event(), threading.Event()

    def synchronize(device: int) -> None:
        if hangs:
            may_end.wait()
        else:
            said.append(f"work of {device}")  # of the main thread's current device
        has_ended.set()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(process_group, "_GPU_WORK_TIMEOUT_S", 0.01 if hangs else 60.0)
    monkeypatch.setattr(process_group, "_abort_on_gpus", lambda: said.append("abort"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: said.append("destroy"))
    process_group.leave()
    assert said == calls
    process_group.leave(is_last=True)  # the process ends: nothing is kept waiting
    assert said == [*calls, "destroy"]
    may_end.set()
    assert has_ended.wait(60)


def test_a_group_on_the_cpu_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("asked"))
    process_group.finish_on_gpus()


def test_torch_has_what_an_abort_needs() -> None:
    """Its own names, which the fakes here only repeat."""
    distributed = torch._C._distributed_c10d
    assert "abort all operations" in str(distributed.Backend.abort.__doc__)
    assert isinstance(distributed._ProcessGroupWrapper.wrapped_pg, property)
    assert "pg_map" in torch.distributed.distributed_c10d._World.__dict__


def test_an_abort_that_hangs_does_not_keep_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def hangs() -> None:
        begun.set()
        may_end.wait()
        has_ended.set()

    monkeypatch.setattr(process_group, "_ABORT_TIMEOUT_S", 0.01)
    abort_all(monkeypatch, hangs)
    begun.wait()
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(60)
