"""What GPU checks depend on: the GPUs of this machine, their driver, and what else is there."""

from __future__ import annotations

import datetime
import functools
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = {
    "torch": "torch",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "ipykernel": "ipykernel",
    "jupyter_client": "jupyter-client",
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "ipywidgets": "ipywidgets",
    "anywidget": "anywidget",
    "threadpoolctl": "threadpoolctl",
    "platformdirs": "platformdirs",
    "pynvml": "nvidia-ml-py",
}
"""What tests/gpu and nblaunch import at least: modules, and the package that each is in."""
FOR_NOTEBOOKS = ("torchvision", "sklearn", "matplotlib", "nbclient")
ALONE = "No GPU here: tests/gpu was not run (bash tests/run.sh --gpu)"
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Lets CUDA and NVML number GPUs of several kinds alike."""
_PROBE_TIMEOUT_S = 120.0
SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Lets ranks of NCCL share a GPU, from NCCL 2.30 on or a little earlier."""

_USES_THEM = """
import json, torch
names, sizes = [], []
for index in range(torch.cuda.device_count()):
    assert torch.ones(3, device=f"cuda:{index}").sum().item() == 3
    names.append(torch.cuda.get_device_name(index))
    sizes.append(torch.cuda.mem_get_info(index)[1])
print(json.dumps({"names": names, "sizes": sizes, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}))
"""
_TWO_ON_ONE = """
import datetime, sys, torch, torch.distributed as dist
torch.cuda.set_device(0)
limit = datetime.timedelta(seconds=60)
dist.init_process_group("nccl", f"file://{sys.argv[1]}/store", rank=int(sys.argv[2]), world_size=2, timeout=limit)
total = torch.ones(1, device="cuda")
dist.all_reduce(total)
assert total.item() == 2
"""


@dataclass(frozen=True)
class Gpus:
    """The visible GPUs, in the order of torch."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes of each."""
    driver: str
    torch: str
    nccl: str
    uuids: tuple[str, ...]
    """``GPU-…`` of each; none if NVML does not answer."""
    slices: tuple[str, ...]
    """``MIG-…`` of all MIG slices."""
    has: frozenset[str]
    """What tests need and name with the marker `needs`."""

    @property
    def count(self) -> int:
        return len(self.names)

    def line(self) -> str:
        """The GPUs, the software and the date in one line."""
        kinds = ", ".join(f"{self.names.count(name)} × {name}" for name in dict.fromkeys(self.names))
        versions = f"driver {self.driver}, torch {self.torch}, NCCL {self.nccl}, Python {sys.version.split()[0]}"
        return f"{kinds}; {versions}; {datetime.date.today()}"


def device_files() -> list[str]:
    """The GPUs that the driver has made files for."""
    return sorted(map(str, Path("/dev").glob("nvidia[0-9]*"))) + ["/dev/dxg"] * Path("/dev/dxg").exists()


class NoGpuError(Exception):
    """There is no GPU, or none that torch can use; the message is one line."""


def number() -> int:
    """The number of visible GPUs, without a look at whether they work."""
    import torch

    return torch.cuda.device_count()


def absent_modules(names: Iterable[str] = PACKAGES) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


@functools.cache
def found() -> Gpus:
    """Look at the GPUs, in a process of its own: this one never starts CUDA.

    Raises:
        NoGpuError: There is none that torch can use.
    """
    import torch

    if torch.version.cuda is None:
        raise NoGpuError(f"a GPU is needed, and torch {torch.__version__} is built without CUDA")
    if number() == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        said = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
        raise NoGpuError(f"a GPU is needed, and torch {torch.__version__} sees none here{said}")
    try:
        done = _run(_USES_THEM, **ORDER)
    except subprocess.TimeoutExpired:
        raise NoGpuError(f"a GPU is needed, and the one here gave no answer in {_PROBE_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NoGpuError(f"a GPU is needed, and torch {torch.__version__} cannot use the one here: {last}")
    seen = json.loads(done.stdout.splitlines()[-1])
    driver, uuids, slices = _from_nvml()
    return Gpus(
        tuple(seen["names"]),
        tuple(seen["sizes"]),
        driver,
        torch.__version__,
        seen["nccl"],
        uuids,
        slices,
        _present(len(seen["names"]), uuids, slices),
    )


def _present(count: int, uuids: Sequence[str], slices: Sequence[str]) -> frozenset[str]:
    there = {
        "two GPUs": count > 1,
        "two NCCL ranks": count > 1 or _shares_a_gpu(),
        "GPUs with UUIDs": bool(uuids),
        "MIG slices": bool(slices),
        "a C compiler and Python.h": _compiles(),
        "the notebooks' packages": not absent_modules(FOR_NOTEBOOKS),
    }
    return frozenset(name for name, is_there in there.items() if is_there)


def _run(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    environ = {**os.environ, **env}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=_PROBE_TIMEOUT_S)


def _shares_a_gpu() -> bool:
    """Whether two ranks of this NCCL can share the first GPU."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _TWO_ON_ONE, folder, str(rank)],
                env={**os.environ, SHARED: "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        try:
            return all(rank.wait(timeout=_PROBE_TIMEOUT_S) == 0 for rank in ranks)
        except subprocess.TimeoutExpired:
            return False
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _compiles() -> bool:
    """Whether Triton can build what torch.compile makes for a GPU."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    return compiler is not None and Path(sysconfig.get_paths()["include"], "Python.h").exists()


def _from_nvml() -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The driver's version, the UUIDs of the visible devices, and those of all MIG slices."""
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return "unknown", (), ()
    try:
        return _text(nvml.nvmlSystemGetDriverVersion()), *_uuids(nvml)
    except nvml.NVMLError:  # a device that this user may not see
        return _text(nvml.nvmlSystemGetDriverVersion()), (), ()
    finally:
        nvml.nvmlShutdown()


def _uuids(nvml: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    names = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in every]
    slices = [name for handle in every for name in _slices(nvml, handle)]
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(names)).split(",")
    visible = [dict(enumerate(names)).get(int(entry), "") if entry.isdecimal() else entry for entry in entries]
    is_whole = not slices and all(name in names for name in visible)
    return tuple(visible) if is_whole else (), tuple(slices)


def _slices(nvml: Any, handle: Any) -> list[str]:
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:  # most GPUs have no MIG
        return []
    slices = []
    for index in range(most):
        try:
            slices.append(_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))))
        except nvml.NVMLError:  # no slice has this index
            continue
    return slices


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
