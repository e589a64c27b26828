"""What a launch finds on a machine: GPUs, CPUs, the environment, and room for descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from nblaunch.machine.limits import usable_cpus

LOOPBACK = "127.0.0.1"
_UNLIMITED_DESCRIPTORS = 1 << 20
_CUDA_DRIVER = "libcuda.so.1"
_CUDA_ERROR_NOT_INITIALIZED = 3
_GPU_DEVICES = ("/dev/kfd", "/dev/dxg")
"""ROCm's, and Windows' for WSL 2."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan depends on: the hardware and the kernel process."""

    gpus: int
    cpus: int
    platform: str
    env: Mapping[str, str]
    gpu_backend: str = "nccl"
    free_descriptors: int = _UNLIMITED_DESCRIPTORS
    """How many more file descriptors this process may open."""
    name: str = ""
    """Of a node, for messages; empty for the notebook's own machine."""
    address: str = LOOPBACK
    """Where ranks on other nodes reach it."""
    interface: str = ""
    """The network interface with this address; empty: the loopback interface."""

    @property
    def socket_interface(self) -> str:
        """The interface that gloo and NCCL use."""
        return self.interface or ("lo0" if self.platform == "darwin" else "lo")


def this_machine() -> Machine:
    """Return the machine as the kernel sees it now.

    Counting GPUs does not initialize CUDA, unless NVML is absent or ``CUDA_VISIBLE_DEVICES`` names MIG slices: then
    torch asks the CUDA driver.
    """
    gpus = 0
    if "torch" in sys.modules or _may_have_gpus():
        _import_torch()
        gpus = _visible_gpus()
    return Machine(gpus, usable_cpus(), sys.platform, dict(os.environ), free_descriptors=free_descriptors())


def _may_have_gpus() -> bool:
    """Return False if torch cannot find a GPU here, so that a launch need not import torch to count them."""
    if sys.platform != "linux" or any(map(os.path.exists, _GPU_DEVICES)):
        return True
    try:
        ctypes.CDLL(_CUDA_DRIVER)  # loading it does not initialize CUDA
    except OSError:
        return False
    return True


def _visible_gpus() -> int:
    """Return the number of GPUs that ranks will see, by ``CUDA_VISIBLE_DEVICES`` as it is now.

    Once CUDA is initialized in this process, torch counts those that were visible then.
    """
    import torch

    count = torch.cuda.device_count()
    if not torch.cuda.is_initialized() or torch.version.hip is not None:
        return count
    now: int = getattr(torch.cuda, "_device_count_nvml", lambda: -1)()  # as torch counts without CUDA
    return count if now < 0 else now  # NVML does not count MIG slices


def has_used_cuda() -> bool:
    """Return True if this process has used the CUDA driver, which does not work after a fork.

    ``torch.cuda.is_available()`` is enough: it initializes the driver, but not torch.
    """
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)  # a thread may be importing it
    if is_initialized is not None and is_initialized():
        return True
    if sys.platform == "win32":
        return False  # make_plan refuses Windows
    try:
        driver = ctypes.CDLL(_CUDA_DRIVER, os.RTLD_NOLOAD)
    except OSError:
        return False  # not loaded, hence not used
    status: int = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))  # changes nothing
    return status != _CUDA_ERROR_NOT_INITIALIZED


def _import_torch() -> None:
    """Import torch in another thread: a KeyboardInterrupt during the import would leave torch broken."""

    def try_to() -> None:
        with contextlib.suppress(Exception):  # the caller's own import raises it again
            importlib.import_module("torch")

    if "torch" not in sys.modules:
        thread = threading.Thread(target=try_to, daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: the caller's own import is in this one
            thread.start()
            thread.join()


def free_descriptors() -> int:
    """Return how many more file descriptors this process may open."""
    if sys.platform == "win32":
        return _UNLIMITED_DESCRIPTORS  # make_plan refuses Windows
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _UNLIMITED_DESCRIPTORS
    try:
        used = len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")) - 1  # listdir's own
        return max(0, soft - used)
    except OSError as error:
        return 0 if error.errno == errno.EMFILE else soft  # no descriptor is left for listdir
