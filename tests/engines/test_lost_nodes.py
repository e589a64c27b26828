"""What happens if a machine, its cable or its agent goes away: each test has agents of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nblaunch.errors import NodeLostError
from tests.conftest import eventually
from tests.engines.machines import Cluster

Launcher = Callable[..., Any]


def hosts() -> str:
    dist.barrier()
    return socket.gethostname()


def wait_for_each_other() -> None:
    total = torch.ones(1)
    while True:
        dist.all_reduce(total)
        time.sleep(0.05)


def test_a_killed_agent_is_a_lost_node_and_the_next_launch_works(launch_alone: Launcher, weak_cluster: Cluster) -> None:
    running = launch_alone(wait_for_each_other, block=False)
    eventually(lambda: running.stacks().keys() == {0, 1})
    weak_cluster[1].kill(*weak_cluster[1].processes("nblaunch.engines.agent"))
    with pytest.raises(NodeLostError, match=r"^rank 1 is lost with node n2: its agent was killed"):
        running.result()
    eventually(lambda: not weak_cluster[1].python())
    assert list(launch_alone(hosts)) == ["n1", "n2"]


def test_a_cut_cable_is_a_lost_node_and_nothing_is_left_there(launch_alone: Launcher, weak_cluster: Cluster) -> None:
    running = launch_alone(wait_for_each_other, num_processes=2, block=False)
    eventually(lambda: len(running.stacks()) == 4)
    begin = time.monotonic()
    weak_cluster[1].cut()
    try:
        with pytest.raises(NodeLostError, match=r"^ranks 2 to 3 are lost with node n2"):
            running.result()
        assert time.monotonic() - begin < 10
        eventually(lambda: not weak_cluster[1].python())
    finally:
        weak_cluster[1].restore()
    assert list(launch_alone(hosts)) == ["n1", "n2"]
