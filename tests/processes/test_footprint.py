"""Leaks of launches in the notebook's process, and listeners that others can reach."""

from __future__ import annotations

import gc
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nblaunch import Launch, notebook_launcher
from nblaunch.launch.output.log_directory import prune
from nblaunch.machine.processes import descendants
from tests.conftest import LONG, eventually, present_server, settled_server
from tests.processes.conftest import Launcher

pytestmark = pytest.mark.alone  # it compares memory and open files
LAUNCHES = 120
MEGABYTE = 1 << 20
LOOPBACK = ("127.", "::1", "::ffff:127.")
LISTENS = "0A"


# ------------------------------------------------------------------ what ranks run
def add_up(rank: int, numbers: list[float]) -> float:
    total = torch.tensor(numbers) * (rank + 1)
    dist.all_reduce(total)
    return float(total.sum())


def wait_for(folder: Path, rank: int, world_size: int, address: str = "", port: int = 0) -> float:
    """Hold a group, ours or one made by hand, until the file "leave" is there."""
    if address:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    (folder / f"ready{rank}").touch()
    eventually(lambda: (folder / "leave").exists())
    return float(total)


# ------------------------------------------------------------------ flat
@dataclass(frozen=True)
class Footprint:
    """What this process and its fork server hold."""

    descriptors: int
    threads: int
    children: int
    server_descriptors: int
    memory: int
    server_memory: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        its = present_server().process.pid
        return cls(
            descriptors_of(os.getpid()),
            threading.active_count(),
            len(descendants(os.getpid())),
            descriptors_of(its),
            memory_of(os.getpid()),
            memory_of(its),
        )

    def exceeds(self, before: Footprint) -> bool:
        """Whether there is more of anything that can be counted."""
        counted = ("descriptors", "threads", "children", "server_descriptors")
        return any(getattr(self, name) > getattr(before, name) for name in counted)


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_of(pid: int) -> int:
    """Bytes of a process's own: what is shared with files and other processes is not counted."""
    words = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")


def logs() -> int:
    return len(list(Path(os.environ["NBLAUNCH_STATE_DIR"]).iterdir()))


def wait_for_supervisor() -> None:
    """The last launch's: when the result is there it still prunes the logs."""
    eventually(lambda: not any(thread.name.startswith("nblaunch-") for thread in threading.enumerate()))


def kept_logs() -> int:
    """How many launches have their logs, once those that only wait for the collector have gone."""
    gc.collect()
    prune()
    return logs()


def test_sixty_more_launches_leave_nothing_behind() -> None:
    def launch() -> None:
        result = notebook_launcher(add_up, num_processes=2, kwargs={"numbers": [1.0] * 1000}, view="none")
        assert list(result) == [3000.0, 3000.0]  # type: ignore[arg-type]  # a blocking launch returns its result

    settled_server()
    for _ in range(60):  # the pages that are used once, and the 50 launches whose logs are kept
        launch()
    wait_for_supervisor()
    before = Footprint.now()
    kept = kept_logs()

    for _ in range(LAUNCHES - 60):
        launch()

    wait_for_supervisor()
    eventually(lambda: not Footprint.now().exceeds(before), LONG, lambda: (before, Footprint.now()))
    after = Footprint.now()
    assert after.memory - before.memory < 5 * MEGABYTE
    assert after.server_memory - before.server_memory < 2 * MEGABYTE
    assert kept_logs() == kept == 50


# ------------------------------------------------------------------ who can reach it
def listeners() -> set[str]:
    """The addresses on which this process and its descendants accept connections."""
    inodes = {inode for pid in (os.getpid(), *descendants(os.getpid())) for inode in sockets_of(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and words[9] in inodes:
                found.add(address_in(words[1].partition(":")[0]))
    return found


def sockets_of(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found


def address_in(text: str) -> str:
    """An address of /proc/net/tcp: words of four bytes, each in the machine's own order."""
    words = bytes.fromhex(text)
    data = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def test_a_listener_on_every_interface_would_be_seen() -> None:
    with socket.socket() as everywhere:
        everywhere.bind(("0.0.0.0", 0))
        everywhere.listen()
        assert "0.0.0.0" in listeners()


@pytest.mark.parametrize("address", ["", "localhost"])
def test_nothing_listens_beyond_loopback(address: str, launch: Launcher, free_port: int, tmp_path: Path) -> None:
    ours = {"folder": tmp_path}
    users = {"address": address, "port": free_port} if address else {}
    running = launch(wait_for, kwargs=ours | users, block=False)
    assert isinstance(running, Launch)
    eventually(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)) or running.done)

    seen = listeners()
    (tmp_path / "leave").touch()

    assert list(running.result()) == [2.0, 2.0]
    assert seen
    assert all(address.startswith(LOOPBACK) for address in seen), seen
