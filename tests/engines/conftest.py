"""Machines for the tests of engines, each cluster once for all of them. Where they cannot be made, the tests fail."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nblaunch import notebook_launcher
from nblaunch.engines import current
from nblaunch.engines.fork_servers import servers
from nblaunch.engines.local import serve_store
from nblaunch.engines.node_engine import NodeEngine
from tests.conftest import eventually
from tests.engines.agents import MachineStarter
from tests.engines.machines import Cluster
from tests.engines.ray_cluster import RayCluster
from tests.engines.slurm_cluster import SlurmCluster
from tests.engines.ssh_hosts import SshHosts

NODES = ("machines", 2)
"""The name of an engine that only tests have."""


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Two machines."""
    serve_store(1)  # libuv keeps a pipe in this process
    made = Cluster(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def held(cluster: Cluster) -> Iterator[NodeEngine]:
    """Both machines as an engine, whose agents stay for the tests of a file: others want the machines empty."""
    engine = NodeEngine(MachineStarter(cluster.machines))
    engine.machines(print)
    yield engine
    engine.stop()
    cluster.settle()


@pytest.fixture
def nodes(held: NodeEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that choose the two machines. Their agents are started again if a test before has lost one."""
    monkeypatch.setattr(current, "KINDS", (*current.KINDS, NODES[0]))
    monkeypatch.setitem(current._held, NODES, held)
    held.machines(print)
    return {"engine": NODES[0], "num_nodes": NODES[1]}


@pytest.fixture
def launch(nodes: dict[str, Any]) -> Callable[..., Any]:
    """`notebook_launcher` of one rank on each machine, which shows nothing."""
    return functools.partial(notebook_launcher, **nodes, view="none")


@pytest.fixture(scope="package")
def weak_cluster() -> Iterator[Cluster]:
    """Two more machines, which tests cut off and kill."""
    made = Cluster(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def weak_engine(weak_cluster: Cluster) -> Iterator[NodeEngine]:
    """The machines of `weak_cluster` as an engine, whose agents stay as `held`'s do."""
    engine = NodeEngine(MachineStarter(weak_cluster.machines))
    engine.machines(print)
    yield engine
    engine.stop()
    weak_cluster.settle()


@pytest.fixture
def alone(weak_engine: NodeEngine, weak_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The arguments that choose them. No rank is left there, and lost agents are started again for the next test."""
    monkeypatch.setattr(current, "KINDS", (*current.KINDS, NODES[0]))
    monkeypatch.setitem(current._held, NODES, weak_engine)
    yield {"engine": NODES[0], "num_nodes": NODES[1]}
    eventually(lambda: not any(machine.ranks() for machine in weak_cluster.machines), otherwise=weak_cluster.left)
    weak_engine.machines(print)  # also if there are none: what the next test holds besides is its leak


@pytest.fixture
def launch_alone(alone: dict[str, Any]) -> Callable[..., Any]:
    """`launch` on them."""
    return functools.partial(notebook_launcher, **alone, view="none")


@pytest.fixture
def _warm() -> None:
    servers.stop()


@pytest.fixture(scope="package")
def slurm_cluster(cluster: Cluster) -> Iterator[SlurmCluster]:
    """A real Slurm over the two machines."""
    made = SlurmCluster(cluster)
    yield made
    made.close()


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The same, which this process uses; every node is free again after the test."""
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    yield slurm_cluster
    current.release()
    slurm_cluster.run("scancel", "--user=root")
    eventually(slurm_cluster.is_idle, otherwise=slurm_cluster.log)


@pytest.fixture(scope="package")
def _sshd(cluster: Cluster) -> Iterator[SshHosts]:
    made = SshHosts(cluster)
    yield made
    made.close()


@pytest.fixture
def ssh_hosts(_sshd: SshHosts) -> Iterator[SshHosts]:
    """The machines, by a real sshd each."""
    yield _sshd
    current.release()
    _sshd.cluster.settle()


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[RayCluster]:
    """A real Ray with two nodes and a head."""
    serve_store(1)  # as for `cluster`
    made = RayCluster()
    yield made
    made.close()


@pytest.fixture
def ray_nodes(ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """The same, which this process uses; nothing of nblaunch is left in it after the test."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    ray_cluster.restore()
    yield ray_cluster
    current.release()
    eventually(ray_cluster.is_free, otherwise=ray_cluster.log)
