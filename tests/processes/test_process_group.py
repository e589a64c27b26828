"""The default process group, and functions that create their own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nblaunch import notebook_launcher
from tests.conftest import LONG, conformance, eventually
from tests.processes.conftest import Launcher

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as /proc/net writes them."""
LISTEN = "0A"


# ------------------------------------------------------------------ what ranks run
def summed() -> float:
    """The sum of all ranks' numbers, each counted from 1."""
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return float(total)


def group_as_found() -> tuple[bool, str, int, int, float]:
    return dist.is_initialized(), dist.get_backend(), dist.get_rank(), dist.get_world_size(), summed()


def the_documents_own(rank: int, world_size: int, port: int) -> float:
    """As tutorials have it: address and port set by hand, then a group by rank and world size."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = summed()
    dist.destroy_process_group()
    return total


def by_environment(port: int) -> float:
    dist.init_process_group("gloo", init_method="env://")
    return summed()


def by_tcp(rank: int, world_size: int, port: int) -> float:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    return summed()


def by_ipv6(rank: int, world_size: int, port: int) -> float:
    dist.init_process_group("gloo", init_method=f"tcp://[::1]:{port}", rank=rank, world_size=world_size)
    return summed()


def by_name_imported_early(rank: int, world_size: int, port: int) -> float:
    from torch.distributed import init_process_group
    from torch.distributed.distributed_c10d import init_process_group as the_same

    assert init_process_group is the_same
    os.environ["MASTER_PORT"] = str(port)
    init_process_group("gloo", rank=rank, world_size=world_size)
    return summed()


def by_store_of_its_own(rank: int, world_size: int, port: int) -> float:
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return summed()


def by_file(rank: int, world_size: int, folder: str) -> float:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    return summed()


def alone_in_a_collective(rank: int, world_size: int, folder: str) -> str:
    """Rank 0 waits for rank 1, which comes only when the wait is over."""
    over = Path(folder) / "over"
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    if rank == 1:
        eventually(over.exists)
        return ""
    try:
        summed()
    except RuntimeError as error:
        return str(error)
    finally:
        over.touch()
    return "no error"


def first_rank_late(rank: int, make: Callable[..., float], port: int, folder: str) -> float:
    """Rank 0 begins a second after the other has begun."""
    begun = Path(folder) / "begun"
    if rank == 0:
        eventually(begun.exists)
        time.sleep(1)  # the second that the other rank has to wait
    else:
        begun.touch()
    return make(rank=rank, world_size=2, port=port)


def thirty_groups(rank: int, world_size: int, port: int) -> list[float]:
    os.environ["MASTER_PORT"] = str(port)
    totals = []
    for _ in range(30):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo")
        totals.append(summed())
    return totals


def second_init() -> str:
    dist.init_process_group("gloo")  # ours steps aside
    summed()
    try:
        dist.init_process_group("gloo")
    except ValueError as error:
        return str(error)
    return "no error"


def wait_for(folder: str, port: int, rank: int, world_size: int) -> float:
    """Hold a group, on the user's own port, until a file says stop."""
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = summed()
    (Path(folder) / f"ready{rank}").touch()
    go = Path(folder) / "go"
    eventually(go.exists)
    return total


# ------------------------------------------------------------------ the group that is ready
@conformance("forkserver", "fork")
def test_the_default_group_is_ready(launch: Launcher) -> None:
    assert list(launch(group_as_found)) == [(True, "gloo", rank, 2, 3.0) for rank in range(2)]


# ------------------------------------------------------------------ groups of the user's own
@pytest.mark.parametrize(
    "make",
    [
        by_environment,
        by_tcp,
        by_ipv6,
        by_name_imported_early,
        by_store_of_its_own,
    ],
)
def test_a_group_of_the_users_own_is_what_it_asks_for(
    make: Callable[..., float], launch: Launcher, free_port: int
) -> None:
    assert list(launch(make, kwargs={"port": free_port})) == [3.0, 3.0]


def test_a_file_rendezvous_is_left_to_torch(launch: Launcher, tmp_path: Path) -> None:
    assert list(launch(by_file, kwargs={"folder": str(tmp_path)})) == [3.0, 3.0]


def test_the_users_own_timeout_counts(launch: Launcher, tmp_path: Path) -> None:
    assert "Timed out waiting 5000ms" in launch(alone_in_a_collective, kwargs={"folder": str(tmp_path)})[0]


def test_a_rank_that_comes_a_second_late_is_waited_for(launch: Launcher, free_port: int, tmp_path: Path) -> None:
    arguments = {"make": the_documents_own, "port": free_port, "folder": str(tmp_path)}
    assert list(launch(first_rank_late, kwargs=arguments)) == [3.0, 3.0]


def test_a_group_can_be_destroyed_and_made_again_thirty_times(launch: Launcher, free_port: int) -> None:
    assert list(launch(thirty_groups, kwargs={"port": free_port})) == [[3.0] * 30] * 2


def test_a_second_init_process_group_raises_torchs_own_error(launch: Launcher) -> None:
    for said in launch(second_init):
        assert "trying to initialize the default process group twice" in said


def test_a_port_of_the_users_own_may_be_in_use(launch: Launcher) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert list(launch(the_documents_own, kwargs={"port": taken.getsockname()[1]})) == [3.0, 3.0]


# ------------------------------------------------------------------ who can connect
def listeners_beyond_loopback() -> set[str]:
    """Sockets of this test run's processes that listen on more than loopback: ``address:port`` in hexadecimal."""
    inodes = _sockets_of_this_run()
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if state == LISTEN and inode in inodes and local.partition(":")[0] not in LOOPBACK:
                found.add(local)
    return found


def listeners() -> set[int]:
    """Every port that a process of this test run listens on."""
    inodes = _sockets_of_this_run()
    tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN and row[9] in inodes}


def _sockets_of_this_run() -> set[str]:
    from tests.conftest import marked_processes

    return set(_sockets([os.getpid(), *marked_processes()]))


def _sockets(pids: list[int]) -> Iterator[str]:
    for pid in pids:
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue  # it has ended
        yield from (link[len("socket:[") : -1] for link in links if link.startswith("socket:["))


def test_nothing_listens_beyond_loopback_while_a_launch_runs(launch: Launcher, free_port: int, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"folder": str(tmp_path), "port": free_port}
    running = launch(wait_for, kwargs=arguments, block=False)
    eventually(lambda: running.done or all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    listening, beyond = listeners(), listeners_beyond_loopback()
    (tmp_path / "go").touch()
    assert list(running.result()) == [3.0, 3.0]
    assert listening, "the store of the launch must be among the listeners, or this test looks in the wrong place"
    assert free_port not in listening
    assert beyond == set()


# ------------------------------------------------------------------ a group of the notebook's own
@pytest.mark.filterwarnings("ignore:start_method='fork':UserWarning")
def test_a_fork_of_a_notebook_with_a_group_raises_and_does_not_hang(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="trying to initialize the default process group twice"):
            notebook_launcher(os.getpid, num_processes=2, start_method="fork", view="none", timeout=LONG)
    finally:
        dist.destroy_process_group()
