"""CPU and memory of a rank's process group, and its GPU's usage with incomplete drivers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nblaunch.launch.views import UsageMeter
from nblaunch.machine.usage import Sampler, Usage, visible_devices
from tests.conftest import LONG, eventually
from tests.unit.fake_engine import FakeWorkers

MEGABYTE = 1 << 20
HELD = 64 * MEGABYTE
NO_PID = 2**22 + 1
"""Above the largest pid of Linux."""

IDLE = "import sys; print('ready', flush=True); sys.stdin.read()"
BUSY_CHILD = """
import os, signal, sys
if os.fork() == 0:
    memory = bytearray(64 << 20)
    while True: pass
print('ready', flush=True)
sys.stdin.read()
"""


# ------------------------------------------------------------------ CPU and memory
@pytest.fixture
def groups() -> Iterator[Any]:
    """Starts processes that each lead a group, as ranks do, and ends the groups."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_child_of_a_rank_counts_as_the_rank(groups: Any) -> None:
    idle, busy = groups(IDLE), groups(BUSY_CHILD)
    sampler = Sampler([idle, busy].__getitem__, "cpu")
    samples = [sampler.sample([0, 1])]
    own = psutil.Process(busy).memory_info().rss

    def look() -> bool:
        psutil.cpu_percent(interval=1.0)  # the clock ticks a hundred times a second
        samples.append(sampler.sample([0, 1]))
        return samples[-1][1].cpu > 0.2 and samples[-1][1].memory > own + HELD

    eventually(look, LONG, lambda: samples[-1])
    assert [usage.cpu for usage in samples[0]] == [0.0, 0.0]
    assert [usage.rank for usage in samples[-1]] == [0, 1]
    assert samples[-1][0].cpu < 0.2
    assert 0 < samples[-1][0].memory < samples[-1][1].memory
    assert all(usage.cpu < 1.9 for sample in samples for usage in sample)
    assert samples[-1][0].gpu is samples[-1][0].gpu_memory is None


def test_values_that_are_not_known_are_not_shown() -> None:
    assert Usage(0, 0.501, 5, None, 7).values() == [("CPU", 0.5, "share"), ("", 5, "bytes"), ("GPU", 7, "bytes")]
    assert [label for label, _, _ in Usage(0, 1.0, 5, 0.5, 7).values()] == ["CPU", "", "GPU", ""]


def test_a_process_that_ended_takes_nothing(groups: Any) -> None:
    pid = groups(BUSY_CHILD)
    sampler = Sampler([pid, 0, NO_PID].__getitem__, "cpu")
    assert [usage.rank for usage in sampler.sample([0, 1, 2])] == [0]  # the others have no process
    os.killpg(pid, signal.SIGKILL)
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)  # not reaped yet
    assert sampler.sample([0]) == sampler.sample([]) == []


def test_a_meter_follows_the_group_that_a_restart_has_made() -> None:
    first, second = FakeWorkers(2), FakeWorkers(1)
    meter = UsageMeter("cpu", {})
    assert meter.sample(None, [0, 1]) == []
    assert [usage.rank for usage in meter.sample(first, [0, 1])] == [0, 1]
    first.ranks[0].exits()
    assert [usage.rank for usage in meter.sample(first, [0, 1])] == [1]
    assert len(first.samplers) == 1
    assert [usage.rank for usage in meter.sample(second, [0])] == [0]
    assert first.samplers[0].is_closed
    meter.close()
    meter.close()
    assert second.samplers[0].is_closed


# ------------------------------------------------------------------ GPUs
class FakeNvml:
    """A fake pynvml; the handle of a GPU is its index."""

    def __init__(self) -> None:
        self.refuses = ""
        self.names = ["H100"] * 2
        self.processes: dict[int, list[Any]] = {}

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name == self.refuses:
            raise RuntimeError("Not Supported")
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:  # noqa: N802  # NVML's own names, as for all below
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return self.names[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=(10, 85)[handle])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return self.processes.get(handle, [])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=(1000, 2000)[handle])


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def numbers(visible: str | None, *ranks: int) -> list[tuple[float | None, int | None]]:
    """What the GPUs of these ranks do, all of them this process."""
    sampler = Sampler(lambda rank: os.getpid(), "cuda", {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    usages = sampler.sample(ranks)
    sampler.close()
    return [(usage.gpu, usage.gpu_memory) for usage in usages]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [(0.1, 1000), (0.85, 2000)]),
        ("1,0", [(0.85, 2000), (0.1, 1000)]),
        ("1", [(0.85, 2000), (0.85, 2000)]),
        ("GPU-ab22,GPU-aa11", [(None, None), (None, None)]),
        ("", [(None, None), (None, None)]),
    ],
)
def test_a_rank_has_the_device_that_torch_gives_it(nvml: FakeNvml, visible: str | None, expected: list[Any]) -> None:
    assert numbers(visible, 0, 1) == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [("PCI_BUS_ID", (0.85, 2000)), ("FASTEST_FIRST", (None, None)), ("", (None, None))],
)
def test_gpus_of_two_kinds_have_figures_in_a_known_order(nvml: FakeNvml, order: str, expected: tuple[Any, Any]) -> None:
    """NVML counts along the bus, and CUDA from the fastest: another GPU's figures would be worse than none."""
    nvml.names = ["T4", "H100"]
    env = {"CUDA_DEVICE_ORDER": order, "CUDA_VISIBLE_DEVICES": "1"}
    (usage,) = Sampler(lambda rank: os.getpid(), "cuda", env).sample([0])
    assert (usage.gpu, usage.gpu_memory) == expected


def test_a_rank_holds_what_its_own_processes_hold(nvml: FakeNvml, groups: Any) -> None:
    pid = groups(BUSY_CHILD)
    (child,) = psutil.Process(pid).children()
    held = {pid: 300, child.pid: 40, os.getpid(): 5000}
    nvml.processes[0] = [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held.items()]

    (usage,) = Sampler(lambda rank: pid, "cuda", {}).sample([0])

    assert usage.gpu_memory == 340


@pytest.mark.parametrize(("others", "held"), [((), 0), ((NO_PID,), 1000)], ids=["here", "another namespace's"])
def test_memory_of_other_processes_is_not_the_ranks(
    nvml: FakeNvml, groups: Any, others: tuple[int, ...], held: int
) -> None:
    """Pids of another namespace may exist here by chance: then it is the whole device's."""
    nvml.processes[0] = [SimpleNamespace(pid=pid, usedGpuMemory=5000) for pid in (os.getpid(), *others)]

    (usage,) = Sampler([groups(IDLE)].__getitem__, "cuda", {}).sample([0])

    assert usage.gpu_memory == held


@pytest.mark.parametrize(("pid", "held"), [(NO_PID, 5000), (1, None)])
def test_hidden_pids_or_sizes_give_the_whole_devices_memory(nvml: FakeNvml, pid: int, held: int | None) -> None:
    nvml.processes[0] = [SimpleNamespace(pid=pid, usedGpuMemory=held)]

    assert numbers(None, 0) == [(0.1, 1000)]


@pytest.mark.parametrize(
    ("refuses", "expected"),
    [
        ("nvmlInit", (None, None)),
        ("nvmlDeviceGetUtilizationRates", (None, 1000)),
        ("nvmlDeviceGetMemoryInfo", (0.1, None)),
        ("nvmlDeviceGetComputeRunningProcesses", (0.1, None)),
        ("nvmlShutdown", (0.1, 1000)),
    ],
)
def test_values_that_the_driver_refuses_are_left_out(nvml: FakeNvml, refuses: str, expected: tuple[Any, Any]) -> None:
    nvml.refuses = refuses

    assert numbers(None, 0) == [expected]


def test_without_nvml_there_are_no_numbers_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import raises

    assert numbers(None, 0) == [(None, None)]


@pytest.mark.parametrize(
    ("variable", "devices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2", [2]),
        ("3, 1", [3, 1]),
        ("0,-1,2", [0]),
        ("0,0", []),
        ("0,GPU-aa", [0]),
    ],
)
def test_visible_devices_are_read_as_torch_reads_them(
    variable: str | None, devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    assert visible_devices(variable, 4) == devices
    if variable is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    torchs: list[Any] = torch.cuda._parse_visible_devices()
    assert [entry for entry in torchs if isinstance(entry, str) or entry < 4][: len(devices)] == devices
