"""CPUs, memory and descriptors that this process may use, on fake machines."""

from __future__ import annotations

import _thread
import errno
import os
import resource
from pathlib import Path
from typing import Any

import psutil
import pytest

from nblaunch.machine import limits
from nblaunch.machine.limits import free_memory, usable_cpus
from nblaunch.machine.processes import thread_count

NO_QUOTA = 1_000_000
NO_LIMIT = 1 << 62


class Cgroups:
    """A made-up /sys/fs/cgroup."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "cgroup"
        self.root.mkdir()
        self.membership = folder / "membership"
        self.membership.write_text("0::/\n")
        monkeypatch.setattr(limits, "_ROOT", self.root)
        monkeypatch.setattr(limits, "_MEMBERSHIP", self.membership)

    def holds(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cgroups:
    return Cgroups(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("400000 100000\n", 4),
        ("150000 100000\n", 1),
        ("20000 100000\n", 1),
        ("max 100000\n", NO_QUOTA),
        ("", NO_QUOTA),
        ("nonsense\n", NO_QUOTA),
    ],
)
def test_a_quota_counts_in_whole_cpus(cgroups: Cgroups, text: str, cpus: int) -> None:
    cgroups.holds("cpu.max", text)
    assert limits.cpu_quota() == cpus


def test_the_least_quota_on_the_way_to_the_root_counts(cgroups: Cgroups) -> None:
    cgroups.membership.write_text("12:cpuset:/elsewhere\n0::/pod/notebook\n")
    cgroups.holds("pod/notebook/cpu.max", "800000 100000")
    cgroups.holds("pod/cpu.max", "300000 100000")
    cgroups.holds("cpu.max", "max 100000")
    cgroups.holds("elsewhere/cpu.max", "100000 100000")
    assert limits.cpu_quota() == 3
    cgroups.membership.unlink()
    assert limits.cpu_quota() == NO_QUOTA


@pytest.mark.parametrize(("quota", "cpus"), [("250000\n", 2), ("-1\n", NO_QUOTA)])
def test_the_first_version_of_cgroups_is_read_too(cgroups: Cgroups, quota: str, cpus: int) -> None:
    cgroups.membership.write_text("4:cpu,cpuacct:/\n")
    cgroups.holds("cpu/cpu.cfs_quota_us", quota)
    cgroups.holds("cpu/cpu.cfs_period_us", "100000\n")
    assert limits.cpu_quota() == cpus


@pytest.mark.parametrize(("quota", "cpus"), [(1, 1), (NO_QUOTA, len(os.sched_getaffinity(0)))])
def test_usable_cpus_are_the_affinitys_or_the_quotas(monkeypatch: pytest.MonkeyPatch, quota: int, cpus: int) -> None:
    monkeypatch.setattr(limits, "cpu_quota", lambda: quota)
    assert usable_cpus() == cpus


# ------------------------------------------------------------------ memory
def test_a_memory_limit_leaves_what_is_not_used_and_the_file_cache(cgroups: Cgroups) -> None:
    cgroups.holds("memory.max", "1000000\n")
    cgroups.holds("memory.current", "400000\n")
    assert limits.memory_left() == 600_000
    cgroups.holds("memory.stat", "anon 300000\ninactive_file 50000\n")
    assert limits.memory_left() == 650_000


@pytest.mark.parametrize("limit", ["max", "", "9223372036854771712"])
def test_without_a_limit_the_cgroups_leave_everything(cgroups: Cgroups, limit: str) -> None:
    cgroups.membership.write_text("4:memory:/\n0::/\n")
    for group in ("", "memory/"):
        cgroups.holds(f"{group}memory.max", limit)
        cgroups.holds(f"{group}memory.limit_in_bytes", limit)
        cgroups.holds(f"{group}memory.current", "1000")
        cgroups.holds(f"{group}memory.usage_in_bytes", "1000")
    assert limits.memory_left() == NO_LIMIT


def test_the_first_version_limits_memory_too(cgroups: Cgroups) -> None:
    cgroups.membership.write_text("4:memory:/pod\n")
    cgroups.holds("memory/pod/memory.limit_in_bytes", "1000")
    cgroups.holds("memory/pod/memory.usage_in_bytes", "600")
    cgroups.holds("memory/pod/memory.stat", "inactive_file 1\ntotal_inactive_file 50\n")
    assert limits.memory_left() == 450


def test_free_memory_is_the_machines_or_the_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "memory_left", lambda: 12_345)
    assert free_memory() == 12_345
    monkeypatch.setattr(limits, "memory_left", lambda: NO_LIMIT)
    assert free_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_the_remedy_suits_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_LONG_ONE", "x" * 100_000)
    said = limits.remedy(OSError(errno.E2BIG, "too long"))
    assert said == ": the environment variable A_LONG_ONE has 100,000 characters: del os.environ['A_LONG_ONE']"
    assert limits.remedy(OSError(errno.EMFILE, "too many")).endswith("(ulimit -n)")
    assert limits.remedy(OSError(errno.ENOSPC, "full")) == ""


def test_limits_of_processes_are_named(cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (300, 300))
    cgroups.holds("pids.max", "512\n")
    said = limits.remedy(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
    assert (
        "this user's `ulimit -u` (RLIMIT_NPROC) is 300; the container's pids.max (docker run --pids-limit) is 5" in said
    )
    cgroups.holds("pids.max", "max\n")
    monkeypatch.setattr("resource.getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert "(ulimit -u, or a cgroup's pids.max): end unneeded" in limits.process_advice()


def test_refused_threads_are_found_before_a_library_needs_them(
    cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (300, 300))
    before, start = thread_count(), _thread.start_new_thread
    left = [0, 0, 0]

    def limited(*args: Any) -> int:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        return start(*args)

    monkeypatch.setattr(_thread, "start_new_thread", limited)
    assert limits.refused_threads(3) == ""
    left += [0, 0, 0]
    said = limits.refused_threads(4)
    assert said.startswith("no more processes or threads can be started (this user's `ulimit -u`")
    assert thread_count() <= before  # a thread of an earlier test may have ended meanwhile


def test_a_cgroup_that_is_full_of_processes_is_found(cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroups.holds("pids.max", "512\n")
    cgroups.holds("pids.current", "500\n")
    assert "pids.max (docker run --pids-limit) is 512" in limits.refused_threads(13)
    cgroups.holds("pids.current", "100\n")
    assert limits.refused_threads(13) == ""
