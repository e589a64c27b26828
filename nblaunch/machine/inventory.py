"""What a launch finds on a machine: GPUs, CPUs, addresses, and the state of the kernel process that ranks inherit."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nblaunch.errors import ArgumentError
from nblaunch.machine.limits import affinity, usable_cpus
from nblaunch.machine.own_code import is_users

LOOPBACK = "127.0.0.1"
_UNLIMITED_DESCRIPTORS = 1 << 20
_CUDA_DRIVER = "libcuda.so.1"
_CUDA_ERROR_NOT_INITIALIZED = 3
_LIMITS = ("NOFILE", "CORE", "CPU", "FSIZE", "DATA", "STACK", "AS", "MEMLOCK", "NPROC")
_GPU_DEVICES = ("/dev/kfd", "/dev/dxg")
"""ROCm's, and Windows' for WSL 2."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan depends on: the hardware and the kernel process."""

    gpus: int
    cpus: int
    platform: str
    env: Mapping[str, str]
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
    try:
        driver = ctypes.CDLL(_CUDA_DRIVER, os.RTLD_NOLOAD)
    except OSError:
        return False  # not loaded, hence not used
    status: int = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))  # changes nothing
    return status != _CUDA_ERROR_NOT_INITIALIZED


def _import_torch() -> None:
    def try_to() -> None:
        with contextlib.suppress(Exception):  # the caller's own import raises it again
            importlib.import_module("torch")

    if "torch" not in sys.modules:
        thread = threading.Thread(target=try_to, daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: the caller's own import is in this one
            thread.start()
            thread.join()


def free_descriptors() -> int:
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


# ------------------------------------------------------------------ the process
@dataclass(frozen=True, slots=True)
class Process:
    """What ranks inherit from the kernel process, besides the environment."""

    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    umask: int
    limits: tuple[tuple[int, int, int], ...]
    """Resource, soft limit, hard limit; see `resource.setrlimit`."""
    cpus: tuple[int, ...]
    """The CPU affinity; empty if the platform has none."""


def this_process() -> Process:
    import resource  # which Windows lacks

    kinds = [getattr(resource, f"RLIMIT_{name}") for name in _LIMITS if hasattr(resource, f"RLIMIT_{name}")]
    limits = tuple((kind, *resource.getrlimit(kind)) for kind in kinds)
    try:
        cwd = os.getcwd()
    except FileNotFoundError:  # the directory was removed
        cwd = os.path.abspath(os.sep)
    return Process(cwd, (*map(str, sys.path), *_left_directories()), tuple(sys.argv), _umask(), limits, affinity())


def _left_directories() -> list[str]:
    """Return where the user's imported modules are that ``sys.path`` finds no more: the directory was changed since."""
    if "" not in sys.path:
        return []
    known, found = {os.path.abspath(entry) for entry in map(str, sys.path)}, []
    for name, module in sys.modules.copy().items():  # another thread may be importing
        file = None if "." in name else getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str):
            continue
        root, _, last = file.rpartition(os.sep)
        if last.startswith("__init__."):
            root = root.rpartition(os.sep)[0]
        if root not in known and os.path.isabs(root) and is_users(file):
            known.add(root)
            found.append(root)
    return found


def _umask() -> int:
    """Return the umask without setting it: `os.umask` would race with other threads."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("\nUmask:")[2].split()[0], 8)
    except (OSError, IndexError, ValueError):
        return 0o022


# ------------------------------------------------------------------ addresses
def address_towards(peer: str) -> str:
    """Return the address of this machine from which it reaches another, by address or name. OSError: it does not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # any port: the system only chooses a route
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            return str(name)
    return ""


def checked_address(name: str, value: str) -> str:
    """Return an IPv4 address of this machine, which the setting `name` has."""
    try:
        ipaddress.IPv4Address(value)
    except ValueError:
        raise ArgumentError(f"{name}={value!r}: must be an IPv4 address of this machine") from None
    if not interface_of(value):
        raise ArgumentError(f"{name}={value!r}: no network interface of this machine has this address")
    return value
