"""CPUs and memory that this process may use, with the limits of its cgroups, and what to do at a limit."""

from __future__ import annotations

import _thread
import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from nblaunch.machine.processes import thread_count

SHARED_MEMORY = Path("/dev/shm")
_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_HIGH_LIMIT = 20_000
"""A user's limit of processes from here on is not tried."""
_THREADS_END_S = 0.1
"""For threads that have been told to end."""
_NO_THREAD = re.compile(
    r"can't start new thread|pthread_create failed|Thread creation failed"
    r"|RuntimeError: Resource temporarily unavailable"
    r"|(?:std::system_error|\bfork\(|_fork_exec\()[\s\S]*Resource temporarily unavailable"
)
"""What Python, libraries, C++ and forks say; alone, the last words also speak of a lock or a socket."""
_LOST_THREAD = "terminate called without an active exception"


def usable_cpus() -> int:
    """Return the CPUs that this process may use, by affinity and cgroup quota; at least 1."""
    return max(1, min(len(affinity()) or os.cpu_count() or 1, cpu_quota()))


def affinity() -> tuple[int, ...]:
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except (AttributeError, OSError):  # macOS; a sandbox
        return ()


def free_memory() -> int:
    """Return the bytes that this process may still allocate, on the machine and within its cgroups' limits."""
    import psutil  # not at the top: a rank that sends little never needs it

    try:
        available = int(psutil.virtual_memory().available)
    except OSError:  # no /proc/meminfo, as where /proc has subset=pid
        available = physical_memory()
    return max(0, min(available, memory_left()))


def physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def remedy(error: OSError) -> str:
    """Return what to do about a system that starts no process or opens no file, as the end of a message."""
    if error.errno == errno.E2BIG:
        longest = max(os.environ, key=lambda name: len(os.environ[name]))
        size = len(os.environ[longest])
        return f": the environment variable {longest} has {size:,} characters: del os.environ[{longest!r}]"
    if error.errno == errno.EAGAIN:
        return f": {process_advice()}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ": close unneeded files (ulimit -n)"
    if error.errno == errno.ENOMEM:
        return ": free memory, or end unneeded processes"
    return ""


def process_advice() -> str:
    """Return the limits of processes and threads that this process is under, and what to do if one is reached."""
    found = [f"{name} is {limit}" for name, limit in _process_limits().items()] or ["ulimit -u, or a cgroup's pids.max"]
    return (
        f"no more processes or threads can be started ({'; '.join(found)}): "
        "end unneeded processes, use fewer ranks, DataLoader workers or threads, or raise the limit"
    )


def advice_on_threads(text: str) -> str:
    """Return `process_advice` if a traceback or a log says that a process or thread was refused, else an empty text.

    C++ also says "without an active exception" if a library forgets a thread: it counts only under a limit.
    """
    is_refused = _NO_THREAD.search(text) or (_LOST_THREAD in text and _process_limits())
    return process_advice() if is_refused else ""


def refused_threads(count: int) -> str:
    """Return `process_advice` if this machine refuses `count` more processes and threads, else an empty string.

    Some libraries end the process if it is refused a thread. A cgroup says how many there are. Those of a user are
    counted in all containers, so under a low ``ulimit -u`` this starts as many threads, and ends them.
    """
    left = [limit[0] - used[0] for limit, used in _pids() if used]
    if min(left, default=count) < count:
        return process_advice()
    if _user_limit() >= _HIGH_LIMIT:
        return ""
    before, over = thread_count(), threading.Event()
    try:
        for _ in range(count):
            _thread.start_new_thread(over.wait, ())  # `threading` must list the user's threads only
    except RuntimeError:
        return process_advice()
    finally:
        over.set()
        deadline = time.monotonic() + _THREADS_END_S
        while thread_count() > before and time.monotonic() < deadline:
            time.sleep(0.0005)
    return ""


def _process_limits() -> dict[str, int]:
    found = {}
    if _user_limit() < _HIGH_LIMIT:
        found["this user's `ulimit -u` (RLIMIT_NPROC)"] = _user_limit()
    if pids := [limit[0] for limit, _ in _pids()]:
        found["the container's pids.max (docker run --pids-limit)"] = min(pids)
    return found


def _user_limit() -> int:
    import resource  # which Windows lacks

    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return _HIGH_LIMIT if soft == resource.RLIM_INFINITY else soft


def _pids() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the limit of processes of each cgroup that has one, and how many it has."""
    found = [(group / "pids.max", group / "pids.current") for group in _groups("pids")]
    return [(limit, _numbers(used, 1)) for file, used in found if (limit := _numbers(file, 1))]


def shared_memory_advice() -> str:
    """Return how large /dev/shm is, and what to do if it is full; empty if there is none."""
    try:
        room = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return ""
    return (
        f"/dev/shm holds the batches of DataLoader workers: {room.total >> 20} MiB, {room.free >> 20} MiB free. "
        "Enlarge it (docker run --shm-size=8g; in Kubernetes, mount an emptyDir with medium: Memory), reduce its use "
        "(smaller batches, fewer workers, a lower prefetch_factor), or use num_workers=0. "
        "torch.multiprocessing.set_sharing_strategy does not help: every strategy uses /dev/shm"
    )


def cpu_quota() -> int:
    """Return the smallest CPU quota of this process's cgroup and its ancestors, in whole CPUs; a million for none."""
    least = 1_000_000
    for group in _groups("cpu"):
        quota = _numbers(group / "cpu.max", 2)
        quota = quota or _numbers(group / "cpu.cfs_quota_us", 1) + _numbers(group / "cpu.cfs_period_us", 1)
        if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:
            least = min(least, max(1, quota[0] // quota[1]))
    return least


def memory_left() -> int:
    """Return the bytes that cgroups' memory limits leave, not counting file cache as used; 2**62 for no limit."""
    least = 1 << 62
    for group in _groups("memory"):
        limit = _numbers(group / "memory.max", 1) or _numbers(group / "memory.limit_in_bytes", 1)
        used = _numbers(group / "memory.current", 1) or _numbers(group / "memory.usage_in_bytes", 1)
        if limit and used and limit[0] < 1 << 60:  # v1 writes "no limit" as a number near 2**63
            least = min(least, limit[0] - used[0] + _file_cache(group))
    return least


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors, of cgroup v2 and v1."""
    try:
        lines = [line.split(":", 2) for line in _MEMBERSHIP.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        top = _ROOT / controller if controllers else _ROOT
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            yield place
            if place == top:
                break


def _numbers(file: Path, count: int) -> tuple[int, ...]:
    """Return the first numbers in a file; none if the file does not exist or holds ``max``."""
    try:
        words = file.read_text().split()
        return tuple(map(int, words[:count])) if len(words) >= count else ()
    except (OSError, ValueError):
        return ()


def _file_cache(group: Path) -> int:
    try:
        entries = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(entries.get("total_inactive_file") or entries.get("inactive_file") or 0)
    except (OSError, ValueError):
        return 0
