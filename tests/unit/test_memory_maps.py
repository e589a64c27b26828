"""Which memory is mapped from its file: unchanged private mappings, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nblaunch.machine import memory_maps
from nblaunch.machine.segments import Region

SIZE = 32 << 20
"""Bytes of the file."""
HEAD = 1000
"""Bytes before the array of some."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a file"
    np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8).tofile(path)
    return path


def region_of(array: Any) -> Region:
    return Region(array.ctypes.data, array.nbytes)


def is_from(file: Path, array: Any) -> bool:
    """Whether an array is found in the file, with what it holds."""
    region = region_of(array)
    found = memory_maps.from_files([region])
    if not found:
        return False
    ((its, placed),) = found.items()
    assert its == region
    assert os.path.samestat(os.fstat(placed.segment.fd), file.stat())
    assert not placed.is_new
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(placed.segment.fd, b"x")
    return placed.segment.equals(placed.offset, region)


@pytest.mark.parametrize(
    "opened",
    [
        lambda file: np.memmap(file, np.uint8, "r"),
        lambda file: np.memmap(file, np.uint8, "r", offset=HEAD),
        lambda file: np.memmap(file, np.uint8, "r", offset=5 * HEAD)[HEAD:],
        lambda file: np.asarray(np.memmap(file, np.uint8, "r"))[HEAD : HEAD + memory_maps._MIN_FILE_BYTES],
    ],
)
def test_read_only_mappings_are_mapped_from_their_file(opened: Callable[[Path], Any], file: Path) -> None:
    array = opened(file)
    assert is_from(file, array)
    int(array.sum())  # every page has been read
    assert is_from(file, array)


def loaded(file: Path) -> Any:
    torch.save(torch.from_numpy(np.fromfile(file, np.uint8)), file)
    return torch.load(file, mmap=True).numpy()


def without(file: Path, array: Any) -> Any:
    file.unlink()
    return array


def replaced(file: Path, array: Any) -> Any:
    other = file.with_name("other")
    other.write_bytes(bytes(SIZE))
    other.replace(file)
    return array


@pytest.mark.parametrize(
    "opened",
    [
        lambda file: np.memmap(file, np.uint8, "r+"),
        lambda file: np.memmap(file, np.uint8, "w+", shape=SIZE),
        lambda file: np.memmap(file, np.uint8, "c"),
        lambda file: torch.from_file(str(file), size=SIZE, dtype=torch.uint8).numpy(),
        lambda file: loaded(file),
        lambda file: without(file, np.memmap(file, np.uint8, "r")),
        lambda file: replaced(file, np.memmap(file, np.uint8, "r")),
        lambda file: np.memmap(file, np.uint8, "r")[: memory_maps._MIN_FILE_BYTES - 1],
        lambda file: np.fromfile(file, np.uint8),
    ],
)
def test_mappings_that_may_differ_from_their_file_are_copied(opened: Callable[[Path], Any], file: Path) -> None:
    array = opened(file)  # stays mapped
    assert not memory_maps.from_files([region_of(array)])


def test_a_file_that_this_process_also_writes_to_is_not_mapped(file: Path) -> None:
    array = np.memmap(file, np.uint8, "r")
    writer = np.memmap(file, np.uint8, "r+")
    assert not is_from(file, array)
    del writer
    assert is_from(file, array)


def test_nothing_is_mapped_without_proc(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise FileNotFoundError("/proc/self/maps")

    array = np.memmap(file, np.uint8, "r")
    monkeypatch.setattr(memory_maps, "mappings", refuse)
    assert not is_from(file, array)


def test_parts_of_a_file_share_a_descriptor(file: Path) -> None:
    array = np.memmap(file, np.uint8, "r")
    parts = [region_of(array[: memory_maps._MIN_FILE_BYTES]), region_of(array[memory_maps._MIN_FILE_BYTES :])]
    found = memory_maps.from_files(parts)
    assert len(found) == 2
    assert len({placed.segment.fd for placed in found.values()}) == 1


def test_few_files_are_mapped_and_the_others_left(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_maps, "_MAX_FILES", 1)
    other = file.with_name("other")
    other.write_bytes(bytes(SIZE + 1))
    arrays = [np.memmap(file, np.uint8, "r"), np.memmap(other, np.uint8, "r")]
    assert list(memory_maps.from_files([region_of(array) for array in arrays])) == [region_of(arrays[1])]
