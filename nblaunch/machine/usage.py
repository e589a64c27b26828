"""What each rank takes of the machine: CPU, memory, GPU.

A rank leads a process group of its own, so its DataLoader workers are found by asking each process for its group.
A process that ends while it is looked at, or that belongs to somebody else, counts as nothing.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one rank takes, it and every process of its group."""

    rank: int
    cpu: float
    """Busy cores since the last sample: 1.0 is one of them; 0.0 in a rank's first sample."""
    memory: int
    """Bytes resident; a page that several of its processes share counts in each."""
    gpu: float | None
    """How busy the rank's GPU is, 0 to 1, whoever keeps it so; None where that is not known."""
    gpu_memory: int | None
    """Bytes that the rank holds on its GPU; what all hold there where the driver does not tell whose is what."""


class Sampler:
    """Samples the ranks of one launch, about once a second and from one thread.

    Args:
        device: The launch's, ``"cpu"`` or ``"cuda"``: only for the latter is NVML asked.
        environment: The ranks'. Default: this process's.
    """

    def __init__(self, device: str, environment: Mapping[str, str] = os.environ) -> None:
        self._gpus = _Gpus(environment.get("CUDA_VISIBLE_DEVICES")) if device.startswith("cuda") else None
        self._processes: dict[int, psutil.Process] = {}
        self._seconds: dict[int, float] = {}
        """CPU seconds of each process when it was sampled last."""
        self._leaders: set[int] = set()
        """The ranks' pids at the last sample."""
        self._time = 0.0

    def sample(self, pids: Mapping[int, int]) -> list[Usage]:
        """What each rank takes now.

        Args:
            pids: The ranks that live, and their pids.
        """
        now = time.monotonic()
        elapsed, self._time = now - self._time, now
        groups = _groups(pids.values())
        self._forget_all_but({pid for members in groups.values() for pid in members})
        usages = [self._usage(rank, pid, groups[pid], elapsed) for rank, pid in sorted(pids.items())]
        self._leaders = set(pids.values())
        return usages

    def close(self) -> None:
        """Let go of NVML."""
        if self._gpus is not None:
            self._gpus.close()

    def _usage(self, rank: int, leader: int, members: list[int], elapsed: float) -> Usage:
        seconds, memory = 0.0, 0
        for pid in members:
            spent, resident = self._look_at(pid)
            seconds += spent
            memory += resident
        cpu = seconds / elapsed if leader in self._leaders and elapsed > 0 else 0.0
        gpu, gpu_memory = (None, None) if self._gpus is None else self._gpus.usage(rank, members)
        return Usage(rank, cpu, memory, gpu, gpu_memory)

    def _look_at(self, pid: int) -> tuple[float, int]:
        """The CPU seconds that a process has spent since its last sample, or its start, and its resident memory."""
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

    def _forget_all_but(self, living: Collection[int]) -> None:
        for pid in self._processes.keys() - living:
            del self._processes[pid]
            self._seconds.pop(pid, None)


def _groups(leaders: Collection[int]) -> dict[int, list[int]]:
    """The processes of each leader's group."""
    groups: dict[int, list[int]] = {leader: [] for leader in leaders}
    for pid in psutil.pids():
        with suppress(OSError):
            members = groups.get(os.getpgid(pid))
            if members is not None:
                members.append(pid)
    return groups


# ------------------------------------------------------------------ GPUs
class _Gpus:
    """NVML, which is asked for nothing before the first sample; where it fails there are no numbers."""

    def __init__(self, visible: str | None) -> None:
        self._visible = visible
        self._nvml: Any = None
        self._handles: list[Any] | None = None
        """The visible devices, in torch's order; None until they are looked up."""

    def usage(self, rank: int, members: Collection[int]) -> tuple[float | None, int | None]:
        """How busy a rank's GPU is, and the bytes that these processes hold on it."""
        if self._handles is None:
            self._handles = self._attempt(self._find) or []
        if not self._handles:
            return None, None
        handle = self._handles[rank % len(self._handles)]  # as `Plan.device_of` has it
        busy = self._attempt(lambda: self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        return busy, self._attempt(lambda: self._memory(handle, members))

    def close(self) -> None:
        if self._nvml is not None:
            self._attempt(lambda: self._nvml.nvmlShutdown())
            self._nvml, self._handles = None, []

    def _attempt(self, look: Callable[[], Any]) -> Any:
        """What `look` brings; None where there is no NVML, or it refuses: no driver, a MIG slice, a lost device."""
        try:
            return look()
        except Exception as error:  # noqa: BLE001  # NVML's own, and whatever an incomplete driver brings
            _log.debug("no numbers of a GPU: %s: %s", type(error).__name__, error)
            return None

    def _find(self) -> list[Any]:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        self._nvml = nvml
        every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [self._handle(entry, every) for entry in visible_devices(self._visible, len(every))]

    def _handle(self, entry: int | str, every: list[Any]) -> Any:
        if isinstance(entry, int):
            return every[entry]
        if entry.startswith("MIG-"):
            return self._nvml.nvmlDeviceGetHandleByUUID(entry)
        (found,) = (handle for handle in every if self._uuid(handle).startswith(entry))  # CUDA takes a unique beginning
        return found

    def _uuid(self, handle: Any) -> str:
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        return uuid.decode() if isinstance(uuid, bytes) else str(uuid)

    def _memory(self, handle: Any, members: Collection[int]) -> int:
        known = {
            process.pid: process.usedGpuMemory
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            if process.usedGpuMemory is not None
        }
        if any(map(psutil.pid_exists, known)):  # else those of another pid namespace, as in a container
            return sum(known.get(pid, 0) for pid in members)
        return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)


def visible_devices(variable: str | None, count: int) -> list[int | str]:
    """The devices that ``CUDA_VISIBLE_DEVICES`` names, as CUDA and torch read it.

    Args:
        variable: Its value; None where it is not set.
        count: How many devices there are.

    Returns:
        Indices, or the names of devices (``GPU-…``) or of slices (``MIG-…``). The list ends before the first that
        there is not, and is empty where one is named twice.
    """
    if variable is None:
        return list(range(count))
    found: list[int | str] = []
    kind = next((kind for kind in ("GPU-", "MIG-") if variable.startswith(kind)), "")
    for word in variable.split(","):
        entry = word.strip() if kind else _index(word.strip())
        there = entry.startswith(kind) if isinstance(entry, str) else 0 <= entry < count
        if not there:
            break
        if entry in found:
            return []
        found.append(entry)
    return found


def _index(word: str) -> int:
    """The number that a word begins with, as strtoul reads it; -1 where it begins with none."""
    digits = word[: len(word) - len(word.lstrip("0123456789"))]
    return int(digits) if digits else -1
