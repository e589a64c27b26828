"""Who sets malloc in a rank, and how much freed memory a rank keeps."""

from __future__ import annotations

import ctypes
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nblaunch.errors import ArgumentError
from nblaunch.machine import heap
from nblaunch.machine.processes import own_memory
from nblaunch.ranks import environment

MB = 1 << 20


@pytest.mark.parametrize(
    ("env", "keeps"),
    [
        ({}, True),
        ({"NBLAUNCH_MALLOC": ""}, True),
        ({"NBLAUNCH_MALLOC": "1"}, True),
        ({"NBLAUNCH_MALLOC": "0"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"MALLOC_ARENA_MAX": "2", "NBLAUNCH_MALLOC": "1"}, False),
        ({"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2:glibc.malloc.trim_threshold=0"}, False),
        ({"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2"}, True),
    ],
)
def test_the_users_own_settings_of_malloc_come_first(env: dict[str, str], keeps: bool) -> None:
    assert heap.keeps_freed_memory(env) is keeps


@pytest.mark.parametrize("chosen", ["off", "2", "1e9"])
def test_a_switch_that_is_neither_0_nor_1_is_named(chosen: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"NBLAUNCH_MALLOC={chosen!r}: must be 1, or 0")):
        heap.keeps_freed_memory({"NBLAUNCH_MALLOC": chosen})


@pytest.mark.parametrize(
    ("processes", "gigabytes", "kept"),
    [(1, 24, 512 * MB), (8, 24, 192 * MB), (8, 8, 64 * MB), (64, 8, 64 * MB), (8, 256, 512 * MB)],
)
def test_many_ranks_on_little_memory_keep_less(processes: int, gigabytes: int, kept: int) -> None:
    assert heap.kept_bytes(processes, gigabytes << 30) == kept


def test_a_libc_without_mallopt_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_mallopt", None)
    monkeypatch.setattr(heap, "_trim", None)
    heap.keep_freed_memory(2)
    heap.trim()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
def test_trimming_gives_back_what_lies_below_memory_in_use() -> None:
    libc, size = ctypes.CDLL(None), 100 << 10
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    *freed, last = [libc.malloc(size) for _ in range(1000)]
    for address in freed:
        ctypes.memset(address, 1, size)
    for address in freed:
        libc.free(address)
    before = own_memory()
    heap.trim()
    assert before - own_memory() > 50 * MB
    libc.free(last)


@pytest.mark.parametrize(("env", "trims"), [({}, 1), ({"NBLAUNCH_MALLOC": "0"}, 0), ({"MALLOC_ARENA_MAX": "2"}, 0)])
def test_only_a_heap_that_nblaunch_has_set_is_trimmed(
    env: dict[str, str], trims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(heap, "_trim", trimmed.append)
    spec: Any = SimpleNamespace(env=env)
    environment.trim_heap(spec)
    assert len(trimmed) == trims
