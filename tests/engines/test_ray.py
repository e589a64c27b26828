"""Launches by a real Ray with a node on each of two machines, beside the head."""

from __future__ import annotations

import ast
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nblaunch import notebook_launcher
from nblaunch.engines import current
from nblaunch.engines.ray import AgentActor, RayStarter, most_gpus
from nblaunch.errors import ArgumentError, NodeLostError, StartError
from nblaunch.wire.link_messages import Boot
from tests.conftest import eventually
from tests.engines.ray_cluster import RayCluster

TWO: dict[str, Any] = {"engine": "ray", "num_nodes": 2}
NO_KERNEL = Boot("tcp://127.0.0.1:9", "", "", "")
launch: Callable[..., Any] = functools.partial(notebook_launcher, **TWO, view="none")


def where() -> tuple[str, dict[str, str]]:
    dist.barrier()
    names = ("CUDA_VISIBLE_DEVICES", "RAY_JOB_ID", "RAY_RAYLET_PID", "PYTHONBREAKPOINT", "SPT_NOENV")
    return socket.gethostname(), {name: os.environ[name] for name in names if name in os.environ}


def wait_for_each_other() -> None:
    total = torch.ones(1)
    while True:
        dist.all_reduce(total)
        time.sleep(0.05)


def test_nodes_that_ray_lacks_are_waited_for_until_an_interrupt(ray_nodes: RayCluster) -> None:
    starter = RayStarter([], 3)
    starter.addresses(lambda: None)
    try:
        starter.start(NO_KERNEL)
        eventually(starter.state)
        assert starter.state() == "ray: waiting for nodes: 3 with CPU: 1; the cluster has 2; free in total: CPU: 2"
        assert ray_nodes.look()["groups"] == ["PENDING"]
        assert starter.problem() == ""
    finally:
        starter.stop()
    eventually(ray_nodes.is_free, otherwise=ray_nodes.log)


NOTEBOOK = """
import sys, ray
from nblaunch import notebook_launcher
from nblaunch.engines import current
from tests.engines.test_ray import where
ray.init(sys.argv[1], log_to_driver=False)
kept = ray.put("kept")
print(list(notebook_launcher(where, engine="ray", num_nodes=2, device="cpu", view="none")))
print(current.status()[-1], ray.is_initialized(), ray.get(kept), flush=True)
sys.stdin.read()
"""


def test_ranks_run_on_the_cluster_that_the_notebook_uses(
    ray_nodes: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    with subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, ray_nodes.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as notebook:
        assert notebook.stdout is not None
        ours = {"CUDA_VISIBLE_DEVICES": "0,1"}  # every GPU of a node, and nothing that Ray's workers have
        assert ast.literal_eval(notebook.stdout.readline().decode()) == [("n1", ours), ("n2", ours)]
        assert notebook.stdout.readline() == b"ray: n1, n2 True kept\n"
        seen = ray_nodes.look()
        assert (len(seen["actors"]), seen["groups"]) == (2, ["CREATED"])
        notebook.kill()
    eventually(ray_nodes.is_free, otherwise=ray_nodes.log)  # also without a release


def test_a_killed_raylet_is_a_lost_node_and_leaves_nothing(ray_nodes: RayCluster) -> None:
    running = launch(wait_for_each_other, block=False)
    eventually(lambda: running.stacks().keys() == {0, 1})
    n2 = ray_nodes.machines[1]
    begin = time.monotonic()
    n2.kill(*n2.processes("raylet/raylet"))
    with pytest.raises(NodeLostError, match=r"^rank 1 is lost with node n2"):
        running.result()
    eventually(lambda: not n2.processes("nblaunch"))
    assert time.monotonic() - begin < 30
    eventually(lambda: not n2.python(), otherwise=ray_nodes.log)


# ------------------------------------------------------------------ without a cluster
def test_an_address_without_a_cluster_is_an_error() -> None:
    begin = time.monotonic()
    why = r"127\.0\.0\.1:9 \(ConnectionRefusedError: .*\)\. The notebook must run on a machine of the cluster\. `ray"
    with pytest.raises(StartError, match=f"^engine='ray' cannot connect to {why}"):
        notebook_launcher(where, engine="ray --address 127.0.0.1:9", view="none")
    assert time.monotonic() - begin < 20  # Ray itself takes minutes
    current.release()


def test_an_agent_that_cannot_start_says_why() -> None:
    host, status, said = AgentActor().run("/nowhere/python", "{}\n")
    assert (host, status) == (socket.gethostname(), 127)
    assert "No such file" in said


def test_no_ray_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StartError, match=r"Ray is not installed here: pip install ray$"):
        RayStarter([]).addresses(lambda: None)


@pytest.mark.parametrize(
    ("counts", "agents", "each"),
    [([0, 8, 8], 2, 8), ([0, 8, 4], 2, 4), ([8, 8], 3, 0), ([], 1, 0)],
)
def test_each_agent_gets_as_many_gpus_as_all_can(counts: list[int], agents: int, each: int) -> None:
    assert most_gpus(counts, agents) == each


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--gpus", "2"], "unrecognized arguments: --gpus 2"),
        (["--num-gpus"], "argument --num-gpus: expected one argument"),
        (["--num-cpus", "-1"], "argument --num-cpus: must not be negative"),
        (["--resources={'TPU': 4}"], "argument --resources: must be a JSON object of numbers"),
    ],
)
def test_a_wrong_option_is_an_error(words: list[str], why: str) -> None:
    with pytest.raises(ArgumentError, match=f"^engine=.*: {why}"):
        RayStarter(words)
