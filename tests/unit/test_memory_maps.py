"""Which memory receivers map from its file: shared mappings, and nothing else."""

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


def is_from(about: os.stat_result, array: Any, access: str, is_here: bool = True) -> bool:
    """Whether an array is found in the file, with what it holds."""
    region = region_of(array)
    files = memory_maps.FileMaps(is_here)
    is_known = bool(files.identity_of(region, is_mapped=True))
    found = files.placed([region])
    assert is_known == (bool(found) and is_here)
    if not found:
        return False
    ((its, placed),) = found.items()
    assert its == region
    assert os.path.samestat(os.fstat(placed.segment.fd), about)
    assert not placed.is_new
    assert placed.segment.access == access
    return placed.segment.equals(placed.offset, region)


@pytest.mark.parametrize(
    "opened",
    [
        lambda file, mode: np.memmap(file, np.uint8, mode),
        lambda file, mode: np.memmap(file, np.uint8, mode, offset=HEAD),
        lambda file, mode: np.memmap(file, np.uint8, mode, offset=5 * HEAD)[HEAD:],
        lambda file, mode: np.asarray(np.memmap(file, np.uint8, mode))[HEAD : HEAD + memory_maps._MIN_FILE_BYTES],
        lambda file, mode: without(file, np.memmap(file, np.uint8, mode)),
        lambda file, mode: replaced(file, np.memmap(file, np.uint8, mode)),
    ],
)
@pytest.mark.parametrize(("mode", "access"), [("r", "read-only"), ("r+", "shared")])
def test_shared_mappings_are_mapped_from_their_file(
    opened: Callable[[Path, str], Any], mode: str, access: str, file: Path
) -> None:
    about = file.stat()
    array = opened(file, mode)
    assert is_from(about, array, access)
    int(array.sum())  # every page has been read
    assert is_from(about, array, access)


def test_mappings_of_torch_are_mapped_from_their_file(file: Path) -> None:
    tensor = torch.from_file(str(file), shared=True, size=SIZE, dtype=torch.uint8)
    assert is_from(file.stat(), tensor.numpy(), "shared")


def test_a_file_that_cannot_be_opened_again_is_found_open(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its permissions have changed; root could open it all the same."""
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if path == str(file):
            raise PermissionError(13, "Permission denied", path)
        return opened(path, flags, *rest)

    array = np.memmap(file, np.uint8, "r+")
    monkeypatch.setattr(os, "open", refuse)
    assert is_from(file.stat(), array, "shared")
    tensor = torch.from_file(str(file), shared=True, size=SIZE, dtype=torch.uint8)  # holds no descriptor
    del array
    assert not memory_maps.FileMaps().placed([region_of(tensor.numpy())])


def test_a_file_that_was_truncated_is_not_mapped(file: Path) -> None:
    array = np.memmap(file, np.uint8, "r")
    os.truncate(file, SIZE - 1)
    assert not is_from(file.stat(), array, "read-only")


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
        lambda file: np.memmap(file, np.uint8, "c"),
        lambda file: torch.from_file(str(file), size=SIZE, dtype=torch.uint8).numpy(),  # private
        lambda file: loaded(file),
        lambda file: torch.ones(SIZE, dtype=torch.uint8).share_memory_().numpy(),
        lambda file: np.memmap(file, np.uint8, "r")[: memory_maps._MIN_FILE_BYTES - 1],
        lambda file: np.fromfile(file, np.uint8),
    ],
)
def test_mappings_that_may_differ_from_their_file_are_copied(opened: Callable[[Path], Any], file: Path) -> None:
    array = opened(file)  # stays mapped
    assert not memory_maps.FileMaps().placed([region_of(array)])


def test_other_machines_get_no_file_that_this_process_also_writes_to(file: Path) -> None:
    array = np.memmap(file, np.uint8, "r")
    writer = np.memmap(file, np.uint8, "r+")
    assert not is_from(file.stat(), array, "read-only", is_here=False)
    assert not is_from(file.stat(), writer, "shared", is_here=False)
    assert is_from(file.stat(), array, "read-only")
    del writer
    assert is_from(file.stat(), array, "read-only", is_here=False)


def test_nothing_is_mapped_without_proc(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise FileNotFoundError("/proc/self/maps")

    array = np.memmap(file, np.uint8, "r")
    monkeypatch.setattr(memory_maps, "mappings", refuse)
    assert not is_from(file.stat(), array, "read-only")


def test_parts_of_a_file_share_a_descriptor(file: Path) -> None:
    array = np.memmap(file, np.uint8, "r")
    parts = [region_of(array[: memory_maps._MIN_FILE_BYTES]), region_of(array[memory_maps._MIN_FILE_BYTES :])]
    found = memory_maps.FileMaps().placed(parts)
    assert len(found) == 2
    assert len({placed.segment.fd for placed in found.values()}) == 1


def test_few_files_are_mapped_and_the_others_left(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_maps, "_MAX_FILES", 1)
    other = file.with_name("other")
    other.write_bytes(bytes(SIZE + 1))
    arrays = [np.memmap(file, np.uint8, "r"), np.memmap(other, np.uint8, "r")]
    regions = [region_of(array) for array in arrays]
    assert list(memory_maps.FileMaps().placed(regions)) == regions[1:]
    written = np.memmap(file, np.uint8, "r+")  # must not be copied
    assert list(memory_maps.FileMaps().placed([*regions, region_of(written)])) == [regions[1], region_of(written)]


def test_mappings_are_read_only_while_a_large_file_is_open(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes 3 ms, and most tensors are of no file."""
    monkeypatch.setattr(memory_maps, "_largest_file", lambda: SIZE - 1)
    array = np.memmap(file, np.uint8, "r")
    files = memory_maps.FileMaps()
    assert not files.identity_of(region_of(array))
    assert not files.placed([region_of(array)])
    monkeypatch.undo()
    assert memory_maps._largest_file() >= SIZE
    assert files.identity_of(region_of(array))
