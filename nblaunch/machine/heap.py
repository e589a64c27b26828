"""The heap of a process: how much freed memory glibc keeps in a rank, and huge pages in the fork server.

A training step allocates and frees its activations and gradients. By default glibc gives them back to the system at
each step, and the next step faults every page in again, which zeroes it: 5 to 25% of the CPU time of small models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping

from nblaunch.errors import ArgumentError
from nblaunch.machine.limits import memory_left, physical_memory
from nblaunch.machine.memory_maps import anonymous_memory
from nblaunch.machine.processes import LINUX

_SWITCH = "NBLAUNCH_MALLOC"
_OWN_SETTINGS = "MALLOC_"
_OWN_TUNABLES = "glibc.malloc."
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 32 << 20
"""Allocations of this size or more are mappings of their own, which end when they are freed: glibc's maximum. Its
default grows towards this, too, as mapped memory is freed."""
_MAX_KEPT_BYTES = 512 << 20
_MIN_KEPT_BYTES = 64 << 20
"""glibc's default grows to as much."""
_KEPT_SHARE = 16
"""At most 1/16 of the machine's memory is kept by all its ranks together, if that is more than the minimum."""
_ARENA_BYTES = 64 << 20
"""Threads other than the main one allocate from heaps of this size. glibc ends one that is all free if the heap before
it has room for the pad, so a pad of this size keeps them all."""
_MADV_COLLAPSE = 25
"""Linux 6.1; older kernels reject it."""
_HUGE = 2 << 20
_libc = ctypes.CDLL(None)
_mallopt = getattr(_libc, "mallopt", None)
_trim = getattr(_libc, "malloc_trim", None)
"""None with musl and on macOS. Looked up before any fork, as the loader's lock may be held at a fork."""


def keeps_freed_memory(env: Mapping[str, str]) -> bool:
    """Return True unless ``NBLAUNCH_MALLOC=0`` or the user's own settings of glibc's malloc say otherwise.

    Any variable ``MALLOC_*``, and any tunable ``glibc.malloc.*``, is such a setting, even if it is about something
    else: who sets one has tuned the memory of these processes, and our values would change its effect unseen.

    Args:
        env: The environment of a rank.

    Raises:
        ArgumentError: ``NBLAUNCH_MALLOC`` is neither 0 nor 1.
    """
    chosen = env.get(_SWITCH) or "1"
    if chosen not in ("0", "1"):
        raise ArgumentError(f"{_SWITCH}={chosen!r}: must be 1, or 0 for the system's own settings of malloc")
    tunables = env.get("GLIBC_TUNABLES", "").split(":")
    has_own = any(name.startswith(_OWN_SETTINGS) for name in env) or any(
        tunable.startswith(_OWN_TUNABLES) for tunable in tunables
    )
    return chosen == "1" and not has_own


def keep_freed_memory(processes: int, *, in_thread: bool = False) -> None:
    """Have glibc keep freed memory of this process from now on; children by fork inherit that.

    Does nothing with other C libraries. If another malloc is in place (``LD_PRELOAD``), it sets one that is not used.

    Args:
        processes: How many processes of this machine do so.
        in_thread: A thread has forked this process, so its main thread allocates as that thread did. Then all that it
            has ever used at a time stays, except large allocations.
    """
    if _mallopt is None:
        return
    _mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    if in_thread:
        _mallopt(_M_TOP_PAD, _ARENA_BYTES)
    memory = min(physical_memory(), memory_left())
    _mallopt(_M_TRIM_THRESHOLD, kept_bytes(processes, memory))


def trim() -> None:
    """Give all freed memory of this process back to the system, also between what is in use. Takes 0.1 s for 1 GB."""
    if _trim is not None:
        _trim(0)


def kept_bytes(processes: int, memory: int) -> int:
    """Return the bytes of freed memory that each of these processes keeps at the end of its heap.

    Args:
        processes: How many there are.
        memory: Bytes of memory that they share.
    """
    return max(_MIN_KEPT_BYTES, min(_MAX_KEPT_BYTES, memory // _KEPT_SHARE // processes))


def collapse() -> Iterator[None]:
    """Collapse this process's heap into huge pages, one at each step, where the system can.

    A fork copies the page table, and importing torch fills 270 MB of small pages. With huge pages a fork takes 2.4 ms
    instead of 8.2, and the child's exit 6 ms instead of 10. A write in a child splits the page, and still copies 4 KB.
    """
    if not LINUX:
        return
    madvise = _libc.madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in anonymous_memory():
        for address in range(-(-begin // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            madvise(address, _HUGE, _MADV_COLLAPSE)
            yield
