"""CPU, memory and GPU usage of ranks.

A rank leads its own process group, so its DataLoader workers are the processes of that group. A process that exits
during a sample, or that is not accessible, counts as zero.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from nblaunch.machine import processes

_log = logging.getLogger(__name__)
Unit = Literal["share", "bytes"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of one rank: of all processes of its group."""

    rank: int
    cpu: float
    """Busy cores since the last sample; 0.0 in the first sample of a rank."""
    memory: int
    """Resident bytes; a shared page counts once per process."""
    gpu: float | None
    """Utilization of the rank's GPU by all processes, 0 to 1; None if unknown."""
    gpu_memory: int | None
    """Bytes of the rank on its GPU; of all processes there if the driver does not list them; None if unknown."""

    def values(self) -> list[tuple[str, float, Unit]]:
        """Return what the panel shows of each known value: (label, value, unit). Bytes of memory have no label."""
        shown: list[tuple[str, float | None, Unit]] = [
            ("CPU", round(self.cpu, 2), "share"),
            ("", self.memory, "bytes"),
            ("GPU", self.gpu, "share"),
            ("" if self.gpu is not None else "GPU", self.gpu_memory, "bytes"),
        ]
        return [(label, value, unit) for label, value, unit in shown if value is not None]


class Sampler:
    """Samples the ranks of one launch on this machine, about once a second and from one thread.

    `pid_of` returns the pid of a rank in any thread, 0 before it has started. The `first` rank has the first GPU.
    """

    def __init__(
        self, pid_of: Callable[[int], int], device: str, environment: Mapping[str, str] = os.environ, first: int = 0
    ) -> None:
        self._pid_of, self._first = pid_of, first
        self._gpus = _Gpus(environment) if device.startswith("cuda") else None
        self._processes: dict[int, psutil.Process] = {}
        self._seconds: dict[int, float] = {}
        """CPU seconds of each process at its last sample."""
        self._leaders: set[int] = set()
        """Pids of the ranks at the last sample."""
        self._time = 0.0

    def sample(self, ranks: Collection[int]) -> list[Usage]:
        """Return the current usage of those of these ranks that have a process."""
        pids = {rank: pid for rank in ranks if (pid := self._pid_of(rank)) and processes.alive(pid)}
        groups = _groups(pids.values())
        now = time.monotonic()  # after the search, as the times of the processes
        elapsed, self._time = now - self._time, now
        for pid in self._processes.keys() - {pid for members in groups.values() for pid in members}:
            del self._processes[pid]
            self._seconds.pop(pid, None)
        usages = [self._usage(rank, pid, groups[pid], elapsed) for rank, pid in sorted(pids.items())]
        self._leaders = set(pids.values())
        return usages

    def close(self) -> None:
        if self._gpus is not None:
            self._gpus.close()

    def _usage(self, rank: int, leader: int, members: list[int], elapsed: float) -> Usage:
        seconds, memory = 0.0, 0
        for pid in members:
            spent, resident = self._sample_process(pid)
            seconds += spent
            memory += resident
        cpu = seconds / elapsed if leader in self._leaders and elapsed > 0 else 0.0
        gpu, gpu_memory = (None, None) if self._gpus is None else self._gpus.usage(rank - self._first, members)
        return Usage(rank, cpu, memory, gpu, gpu_memory)

    def _sample_process(self, pid: int) -> tuple[float, int]:
        try:
            process = self._processes.get(pid) or psutil.Process(pid)
            self._processes[pid] = process
            with process.oneshot():
                times, resident = process.cpu_times(), process.memory_info().rss
        except (psutil.Error, OSError):
            return 0.0, 0
        seconds = times.user + times.system
        before, self._seconds[pid] = self._seconds.get(pid, 0.0), seconds
        return (seconds - before if seconds >= before else seconds), resident


def _groups(leaders: Collection[int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {leader: [] for leader in leaders}
    if not processes.LISTS_PROCESSES:
        return {leader: [leader] for leader in leaders}
    for pid in psutil.pids():
        with suppress(OSError):
            members = groups.get(os.getpgid(pid))
            if members is not None:
                members.append(pid)
    return groups


# ------------------------------------------------------------------ GPUs
class _Gpus:
    """NVML, initialized by the first sample. Values are None if it fails."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._visible = environment.get("CUDA_VISIBLE_DEVICES")
        self._has_nvmls_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        self._nvml: Any = None
        self._handles: list[Any] | None = None
        """Visible devices in torch's order; None before the first sample."""

    def usage(self, rank: int, members: Collection[int]) -> tuple[float | None, int | None]:
        """Return the utilization of a rank's GPU, 0 to 1, and the bytes that `members` hold on it."""
        if self._handles is None:
            self._handles = self._attempt(self._find) or []
        if not self._handles:
            return None, None
        handle = self._handles[rank % len(self._handles)]  # as `make_plan` places ranks
        busy = self._attempt(lambda: self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        return busy, self._attempt(lambda: self._memory(handle, members))

    def close(self) -> None:
        if self._nvml is not None:
            self._attempt(lambda: self._nvml.nvmlShutdown())
            self._nvml, self._handles = None, []

    def _attempt(self, look: Callable[[], Any]) -> Any:
        """Call `look`; return None if NVML fails: no driver, a MIG slice, a lost device."""
        try:
            return look()
        except Exception as error:  # noqa: BLE001  # NVML's errors, and those of an incomplete driver
            _log.debug("GPU usage is not available: %s: %s", type(error).__name__, error)
            return None

    def _find(self) -> list[Any]:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        self._nvml = nvml
        every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        kinds = {nvml.nvmlDeviceGetName(handle) for handle in every}
        if len(kinds) > 1 and not self._has_nvmls_order:  # CUDA counts from the fastest, NVML along the bus
            raise LookupError("the order of GPUs of several kinds is only known with CUDA_DEVICE_ORDER=PCI_BUS_ID")
        return [every[index] for index in visible_devices(self._visible, len(every))]

    def _memory(self, handle: Any, members: Collection[int]) -> int:
        known = {
            process.pid: process.usedGpuMemory
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            if process.usedGpuMemory is not None
        }
        is_member = any(pid in known for pid in members)
        if is_member or (known and all(map(psutil.pid_exists, known))):
            return sum(known.get(pid, 0) for pid in members)
        # Some or all pids are of another namespace, as in a container, where one may exist by chance.
        return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)


def visible_devices(variable: str | None, count: int) -> list[int]:
    """Return the indices of the devices that ``CUDA_VISIBLE_DEVICES`` names, of `count`; none if it has UUIDs.

    As CUDA and torch read it, the list ends before the first unknown device, and is empty if one is named twice.
    """
    if variable is None:
        return list(range(count))
    found: list[int] = []
    for word in variable.split(","):
        index = int(word) if word.strip().isdecimal() else count
        if index >= count:
            break
        found.append(index)
    return found if len(set(found)) == len(found) else []
