"""What happens if a machine, its cable or its agent goes away. The last tests end the agents."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nblaunch
from nblaunch.engines import current
from nblaunch.engines.node_engine import NodeEngine
from nblaunch.engines.nodes import NodeWorkers
from nblaunch.engines.protocol import NodeLeaving
from nblaunch.errors import LaunchStoppedError, NodeLostError, RankLostError, StartError
from nblaunch.machine import timeouts
from tests.conftest import eventually
from tests.engines.agents import have_begun
from tests.engines.machines import Cluster, Machine

Launcher = Callable[..., Any]


def hosts() -> str:
    dist.barrier()
    return socket.gethostname()


def agents_of(machine: Machine) -> list[int]:
    return machine.processes("nblaunch.engines.agent")


def wait_for_each_other() -> None:
    total = torch.ones(1)
    while True:
        dist.all_reduce(total)
        time.sleep(0.05)


def test_a_restart_of_a_launch_gets_another_agent(launch_alone: Launcher, weak_cluster: Cluster) -> None:
    def work() -> str:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(600)
        return hosts()

    running = launch_alone(work, block=False, max_restarts=1)
    eventually(lambda: running.stacks().keys() == {0, 1})
    weak_cluster[1].kill(*agents_of(weak_cluster[1]))
    assert list(running.result()) == ["n1", "n2"]


def test_a_node_may_be_lost_just_before_its_ranks_start(
    launch_alone: Launcher, weak_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = NodeWorkers.start

    def start_late(workers: NodeWorkers, environment: Any) -> Any:
        weak_cluster[1].kill(*agents_of(weak_cluster[1]))
        eventually(lambda: workers._used[1].lost)
        return start(workers, environment)

    monkeypatch.setattr(NodeWorkers, "start", start_late)
    with pytest.raises(NodeLostError, match="rank 1 is lost with node n2: its agent was killed"):
        launch_alone(hosts)


def test_a_restart_of_a_session_gets_another_agent(alone: dict[str, Any], weak_cluster: Cluster) -> None:
    with nblaunch.session(1, **alone) as kept:
        weak_cluster[1].kill(*agents_of(weak_cluster[1]))
        eventually(lambda: "dead" in kept.status())
        eventually(lambda: not weak_cluster[1].python())
        assert "nblaunch-agent" not in weak_cluster[1].run("ls", "/tmp")
        with pytest.raises(StartError, match=r"^rank 1 cannot be restarted: node n2 is lost \(its agent was killed"):
            kept.restart([1])
        kept.restart()
        assert list(kept.run(hosts, view="none")) == ["n1", "n2"]


def test_a_node_that_leaves_between_two_cells_is_announced(
    alone: dict[str, Any], launch_alone: Launcher, weak_cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with nblaunch.session(1, **alone) as kept:
        signal_each({weak_cluster[1]: agents_of(weak_cluster[1])}, "TERM")
        workers: Any = kept._ranks.group.workers
        eventually(lambda: any(isinstance(event, NodeLeaving) for event in workers._events))
        kept.run(hosts, view="text")
    assert "n2: the node is being reclaimed (SIGTERM): its ranks will end soon" in capsys.readouterr().out
    eventually(lambda: not weak_cluster[1].python())  # without ranks it waits for nothing
    assert "nblaunch-agent" not in weak_cluster[1].run("ls", "/tmp")
    assert list(launch_alone(hosts)) == ["n1", "n2"]


def test_a_cut_cable_is_a_lost_node_and_nothing_is_left_there(launch_alone: Launcher, weak_cluster: Cluster) -> None:
    running = launch_alone(wait_for_each_other, num_processes=2, block=False)
    eventually(lambda: len(running.stacks()) == 4)
    begin = time.monotonic()
    weak_cluster[1].cut()
    try:
        with pytest.raises(NodeLostError, match=r"^ranks 2 to 3 are lost with node n2"):
            running.result()
        assert time.monotonic() - begin < 30  # TCP itself takes minutes
        eventually(lambda: not weak_cluster[1].python())
    finally:
        later = threading.Timer(5, weak_cluster[1].restore)  # a new agent fails to connect until then
        later.start()
    assert list(launch_alone(hosts)) == ["n1", "n2"]
    later.join()


def test_a_kernel_that_is_busy_loses_no_node(launch_alone: Launcher) -> None:
    def work() -> str:
        time.sleep(8)
        return socket.gethostname()

    running = launch_alone(work, block=False)
    eventually(lambda: running.stacks().keys() == {0, 1})
    ctypes.PyDLL(None).usleep(7_000_000)  # with the GIL, longer than `LINK_SILENCE_S`: no thread runs Python
    assert list(running.result()) == ["n1", "n2"]


def test_a_slow_link_delays_and_loses_nothing(launch_alone: Launcher, weak_cluster: Cluster) -> None:
    def work() -> torch.Tensor:
        print("x" * 100_000)
        return torch.zeros(50_000)

    launch_alone(work)
    for machine in weak_cluster.machines:
        machine.slow(2000)
    try:
        result = launch_alone(work)
    finally:
        for machine in weak_cluster.machines:
            machine.slow(0)
    assert [len(log.text()) for log in result.logs] == [100_001] * 2
    assert [len(value) for value in result] == [50_000] * 2


def test_a_stop_reaches_ranks_that_flood_a_slow_link(launch_alone: Launcher, weak_cluster: Cluster) -> None:
    def flood() -> None:
        try:
            for _ in range(8_000):  # more than the window that a quick link has
                print("x" * 1000)
            print("begun", flush=True)
            time.sleep(600)
        finally:
            Path("/tmp/saved").touch()  # of its machine

    launch_alone(hosts)
    for machine in weak_cluster.machines:
        machine.slow(16_000)
    try:
        running = launch_alone(flood, block=False)
        eventually(lambda: running.stacks().keys() == {0, 1} and all("sleep" in s for s in running.stacks().values()))
        running.stop()
        with pytest.raises(LaunchStoppedError):
            running.result()
        assert all(machine.run("ls", "/tmp/saved") for machine in weak_cluster.machines)
    finally:
        for machine in weak_cluster.machines:
            machine.slow(0)


def test_an_interrupt_does_not_wait_for_agents_that_do_not_answer(
    launch_alone: Launcher, weak_cluster: Cluster
) -> None:
    launch_alone(hosts)
    agents = {machine: agents_of(machine) for machine in weak_cluster.machines}
    signal_each(agents, "STOP")
    try:
        running = launch_alone(hosts, block=False)
        running.stop()
        with pytest.raises(LaunchStoppedError, match=r"was stopped before its ranks started$"):
            running.result()
    finally:
        signal_each(agents, "CONT")
        subprocess.run(["pkill", "-CONT", "-x", "nsenter"], check=True)  # it stops with its child
    assert list(launch_alone(hosts)) == ["n1", "n2"]


def signal_each(agents: dict[Machine, list[int]], name: str) -> None:
    for machine, pids in agents.items():
        machine.run("kill", f"-{name}", *map(str, pids))


def test_a_reaper_that_hangs_does_not_keep_a_launch(
    launch_alone: Launcher, weak_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "GROUP_SWEEP_TIMEOUT_S", 2.0)
    running = launch_alone(wait_for_each_other, block=False)
    eventually(lambda: running.stacks().keys() == {0, 1})
    (session,) = current._held["machines", 2]._nodes.groups.values()  # type: ignore[attr-defined]
    sampler = session.sampler("cpu", {})  # as a panel has: its agents send something each second
    weak_cluster[1].run("pkill", "-STOP", "-x", "nblaunch-reaper")
    running.stop()
    with pytest.raises((LaunchStoppedError, RankLostError)):
        running.result()
    sampler.close()


NOTEBOOK = """
import sys, time
import nblaunch
from nblaunch.engines import current
from nblaunch.engines.node_engine import NodeEngine
from tests.engines.agents import MachineStarter
from tests.engines.machines import KnownMachine

machines = [KnownMachine(*words.split()) for words in sys.argv[1:]]
current.KINDS = (*current.KINDS, "machines")
current._held["machines", 2] = NodeEngine(MachineStarter(machines))

def work():
    print("begun", flush=True)
    time.sleep(600)

nblaunch.notebook_launcher(work, engine="machines", num_nodes=2, view="none")
"""


def test_a_release_and_a_killed_kernel_leave_nothing_on_any_node(
    weak_engine: NodeEngine, weak_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current, "KINDS", (*current.KINDS, "machines"))
    monkeypatch.setitem(current._held, ("machines", 2), weak_engine)
    running: Any = nblaunch.notebook_launcher(
        wait_for_each_other, engine="machines", num_nodes=2, view="none", block=False
    )
    eventually(lambda: running.stacks().keys() == {0, 1})
    weak_engine.stop()
    with pytest.raises(NodeLostError, match=r"^rank \d is lost with node n\d: its nodes were released"):
        running.result()
    weak_cluster.settle()
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    known = [f"{machine.name} {machine.address} {machine.init}" for machine in weak_cluster.machines]
    command = [sys.executable, str(tmp_path / "notebook.py"), *known]
    kernel = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    try:
        eventually(have_begun)
        assert all(machine.python() for machine in weak_cluster.machines)
    finally:
        kernel.kill()
        kernel.wait()
    begin = time.monotonic()
    weak_cluster.settle()
    assert time.monotonic() - begin < 20
