"""Which memory receivers map from its file: shared mappings, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
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
MAP_FIXED = 0x10
HEAD = 1000
"""Bytes before the array of some."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a file"
    np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8).tofile(path)
    return path


def libc_mmap(address: int, size: int, flags: int, fd: int, offset: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    assert libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset) == address


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
    assert memory_maps.FileMaps().identity_of(region_of(array))


def test_open_files_are_looked_at_once_for_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 300 descriptors, each look takes 0.6 ms."""
    looks = iter(range(9))
    monkeypatch.setattr(memory_maps, "_largest_file", lambda: next(looks))
    files = memory_maps.FileMaps()
    regions = [region_of(np.empty(2 << 20, np.uint8)) for _ in range(3)]
    assert not any(map(files.identity_of, regions))
    assert not files.placed(regions)
    assert next(looks) == 1


def test_advice_on_some_pages_leaves_a_map_shared(file: Path) -> None:
    """The kernel splits the mapping: a copy would lose what ranks write."""
    array: Any = np.memmap(file, np.uint8, "r+")
    before = len(list(memory_maps.mappings()))
    array.base.madvise(mmap.MADV_RANDOM, SIZE // 4 // mmap.PAGESIZE * mmap.PAGESIZE, SIZE // 4)
    assert len(list(memory_maps.mappings())) > before
    assert is_from(file.stat(), array, "shared")


def test_adjacent_parts_in_another_order_are_not_one_mapping(file: Path) -> None:
    array = np.memmap(file, np.uint8, "r+")
    half = SIZE // 2
    for at in (0, half):
        fd = os.open(file, os.O_RDWR)
        libc_mmap(array.ctypes.data + at, half, mmap.MAP_SHARED | MAP_FIXED, fd, half - at)
        os.close(fd)
    assert not is_from(file.stat(), array, "shared")
    assert is_from(file.stat(), array[half:], "shared")


@pytest.mark.parametrize("name", [b"caf\xe9", b"a\rb", b"a\nb", b" a ", b"a (deleted)"])
def test_a_files_name_may_hold_any_bytes(name: bytes, file: Path) -> None:
    path = file.rename(file.with_name(os.fsdecode(name)))
    array = np.memmap(path, np.uint8, "r+")
    assert is_from(path.stat(), array, "shared")
    tensor = torch.zeros(4)
    assert not memory_maps.FileMaps().identity_of(region_of(tensor.numpy()), is_mapped=True)


def test_memory_where_a_file_was_mapped_before_is_copied(file: Path) -> None:
    """Pickling runs code of the user's, and other threads run."""
    array = np.memmap(file, np.uint8, "r")
    files, region = memory_maps.FileMaps(), region_of(array)
    assert files.identity_of(region, is_mapped=True)
    libc_mmap(region.address, region.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, -1, 0)
    assert not files.placed([region])


def test_a_small_tensor_is_copied_whatever_else_is_sent(file: Path) -> None:
    """Whether a rank's writes reach the file must not depend on it."""
    array = np.memmap(file, np.uint8, "r+")
    small = region_of(array[: memory_maps._MIN_FILE_BYTES - 1])
    other = np.memmap(file, np.uint8, "r")
    files = memory_maps.FileMaps()
    assert files.identity_of(region_of(other))
    assert not files.identity_of(small)
    assert list(files.placed([small, region_of(other)])) == [region_of(other)]
    assert files.identity_of(small, is_mapped=True)
    assert small in files.placed([small])


def test_pages_that_a_file_has_lost_are_an_error(file: Path) -> None:
    """Reading them would end the notebook with SIGBUS."""
    array = np.memmap(file, np.uint8, "r")
    os.truncate(file, SIZE // 2)
    files = memory_maps.FileMaps()
    with pytest.raises(ValueError, match=f"{file} was truncated to {SIZE // 2} bytes, and its first {SIZE} are used"):
        files.identity_of(region_of(array), is_mapped=True)
    assert files.identity_of(region_of(array[: SIZE // 2]), is_mapped=True)
