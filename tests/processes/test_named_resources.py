"""multiprocessing's shared memory in ranks: the notebook's is kept, and what ranks create is removed."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import nblaunch
from nblaunch import notebook_launcher
from tests.conftest import conformance

quiet: Callable[..., Any] = functools.partial(notebook_launcher, view="none")


def leave_shared_memory() -> str:
    return SharedMemory(create=True, size=100_000).name


def test_shared_memory_that_a_rank_forgot_is_removed(start_method: str) -> None:
    name = quiet(leave_shared_memory, num_processes=1, start_method=start_method)[0]
    assert not Path("/dev/shm", name).exists()


def sum_of_block(name: str) -> int:
    block: Any = SharedMemory(name=name)  # a habit: nothing closes it
    return sum(block.buf[:3])


class OfBlock(Dataset[int]):
    """Reads the block in the worker."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, index: int) -> int:
        return sum_of_block(self.name)

    def __len__(self) -> int:
        return 2


def load_block(name: str) -> list[int]:
    loader = DataLoader(OfBlock(name), num_workers=1, multiprocessing_context="spawn")
    return [sum_of_block(name), *(int(value) for value in loader)]


@pytest.fixture
def block() -> Iterator[SharedMemory]:
    """Shared memory of the notebook that begins with 1, 2, 3."""
    made: Any = SharedMemory(create=True, size=100)
    made.buf[:3] = bytes([1, 2, 3])
    yield made
    made.close()
    made.unlink()


@conformance("forkserver", "fork")
def test_shared_memory_of_the_notebook_outlives_ranks(start_method: str, block: SharedMemory) -> None:
    for _ in range(2):
        result = quiet(sum_of_block, (block.name,), start_method=start_method, num_processes=2)
        assert list(result) == [6, 6]
        assert [log.err.read_text() for log in result.logs] == ["", ""]


def test_it_outlives_spawned_workers_of_a_rank(block: SharedMemory) -> None:
    assert list(quiet(load_block, (block.name,), num_processes=1)) == [[6, 6, 6]]
    assert sum_of_block(block.name) == 6


def test_it_outlives_a_session(block: SharedMemory) -> None:
    with nblaunch.session(1) as session:
        assert session.run(sum_of_block, block.name)[0] == 6
    assert sum_of_block(block.name) == 6


def create_and_hand_over(rank: int, name: str) -> int:
    if rank == 0:
        made: Any = SharedMemory(name, create=True, size=10)
        made.buf[0] = 7
    dist.barrier()
    block: Any = SharedMemory(name)
    value = int(block.buf[0])
    dist.barrier()
    block.close()
    if rank == 1:
        block.unlink()
    return value


def test_a_rank_may_unlink_shared_memory_of_another() -> None:
    name = f"nblaunch-{uuid.uuid4().hex[:8]}"
    assert list(quiet(create_and_hand_over, kwargs={"name": name}, num_processes=2)) == [7, 7]
    block = SharedMemory(name, create=True, size=10)  # the name is the notebook's now
    block.close()
    block.unlink()


def unlink_and_make_again() -> str:
    block = SharedMemory(create=True, size=10)
    block.unlink()
    Path("/dev/shm", block.name).touch()  # as a program that is none of the launch's
    return block.name


def test_a_block_that_another_program_has_made_again_stays() -> None:
    Path("/dev/shm", quiet(unlink_and_make_again, num_processes=1)[0]).unlink()
