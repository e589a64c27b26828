"""A launch on two nodes, one rank on each, beside what else starts a function there; and data for four ranks on each.

The nodes are network namespaces of this machine with a real Slurm, sshd and Ray, so this runs as root, where the tests
of engines do. Each way runs in a real kernel of its own; the ways take turns. nblaunch's nodes are warm: its
first launch has started the agents, as that of a notebook does. Every other way starts Python and imports torch.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import nblaunch
from tests.benchmarks.patience import shown
from tests.engines.machines import Cluster
from tests.engines.ray_cluster import RayCluster
from tests.engines.slurm_cluster import SlurmCluster
from tests.engines.ssh_hosts import SshHosts
from tests.kernel.harness import Kernel, running_kernel

_LIMIT_S = 30.0
_FUNCTION = """
def train(address=None, port=None):
    import os
    import torch
    import torch.distributed as dist
    makes_its_own = not dist.is_initialized()
    if makes_its_own:
        if address is not None:
            os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        dist.init_process_group("gloo")
    t = torch.ones(1)
    dist.all_reduce(t)
    if makes_its_own:
        dist.destroy_process_group()
    return t.item()
"""
_TIMED = """
import time

def timed():
    begin = time.perf_counter()
    assert launch() == 2.0
    return time.perf_counter() - begin
"""
_NBLAUNCH = """
%load_ext nblaunch
from nblaunch import notebook_launcher
chosen = dict(engine="{engine}", num_nodes=2, device="cpu", view="none")

def launch():
    return notebook_launcher(train, num_processes=1, **chosen)[0]
"""
_TORCHRUN = """
import pathlib, random, subprocess, sys

# torchrun starts a program, so its user has to write a file, which prints what it returns
program = pathlib.Path("{folder}", "program.py")
program.write_text('''FUNCTION
import os
value = train()
if os.environ["RANK"] == "0":
    print(value)
''')

def launch():
    torchrun = (
        f"{{sys.executable}} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --node-rank=$SLURM_NODEID "
        f"--master-addr={address} --master-port={{random.randrange(20000, 30000)}} {{program}}"
    )
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", torchrun]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
"""
_SUBMITIT = """
import random
import submitit
executor = submitit.SlurmExecutor(folder="{folder}/submitit", max_num_timeout=0)
executor.update_parameters(nodes=2, ntasks_per_node=1, time=5)

def in_task(port):
    # its TorchDistributedEnvironment gives a name as the address, and names do not resolve here
    import os
    environment = submitit.JobEnvironment()
    os.environ.update(RANK=str(environment.global_rank), WORLD_SIZE=str(environment.num_tasks))
    return train("{address}", port)

def launch():
    return executor.submit(in_task, random.randrange(20000, 30000)).results()[0]
"""
_TORCHRUNX = """
import os
import torchrunx
os.chdir("{folder}")  # where it leaves logs
os.environ["GLOO_SOCKET_IFNAME"] = "{bridge}"  # its launcher joins a group of its agents
launcher = torchrunx.Launcher(
    hostnames={addresses}, workers_per_host=1, ssh_config_file="{folder}/addresses", backend="gloo",
    extra_env_vars={{"GLOO_SOCKET_IFNAME": "eth0"}},
)

def launch():
    return launcher.run(train).rank(0)
"""
_RAY_TRAIN = """
import pathlib
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
on_nodes = {{"env_vars": {{"GLOO_SOCKET_IFNAME": "eth0"}}}}
ray.init("{ray}", log_to_driver=False, logging_level="ERROR", runtime_env=on_nodes)
spread = ScalingConfig(num_workers=2, resources_per_worker={{"CPU": 1}}, placement_strategy="STRICT_SPREAD")

def loop():
    value = train()  # its driver gets no value of a loop without a checkpoint, so its user has to write a file
    if ray.train.get_context().get_world_rank() == 0:
        pathlib.Path("{folder}", "value").write_text(str(value))

def launch():
    TorchTrainer(
        loop, torch_config=TorchConfig("gloo"), scaling_config=spread, run_config=RunConfig(storage_path="{folder}/ray")
    ).fit()
    return float(pathlib.Path("{folder}", "value").read_text())
"""
WAYS = {
    "nblaunch, slurm": _NBLAUNCH.replace("{engine}", "slurm"),
    "nblaunch, ssh": _NBLAUNCH.replace("{engine}", "ssh -F {ssh} n1 n2"),
    "srun torchrun": _TORCHRUN,
    "submitit": _SUBMITIT,
    "torchrunx": _TORCHRUNX,
    "Ray Train": _RAY_TRAIN,
}
"""The cell that defines ``launch()``, by name; in braces: what the machines have."""
BASELINE = "srun torchrun"
_DATA = """
import torch

def used():
    import os, re
    import torch.distributed as dist
    total = float(data.sum()) if data is not None else 0.0
    dist.barrier()
    own = int(re.search(r"^Pss: +([0-9]+) kB", open("/proc/self/smaps_rollup").read(), re.M)[1]) * 1024
    dist.barrier()  # a rank that exits leaves its part to the others
    return own

def measured():
    begin = time.perf_counter()
    found = list(notebook_launcher(used, num_processes=4, **chosen))
    return time.perf_counter() - begin, [sum(found[:4]), sum(found[4:])]
data = None
measured()
nothing = measured()[1]
"""


@dataclass
class Sent:
    """One launch with data."""

    what: str
    seconds: float
    sent: Sequence[int]
    """Bytes that came to each node."""
    memory: Sequence[int]
    """Bytes of its ranks' memory, beyond those of ranks without data; pages that ranks share count once."""


@dataclass
class Figures:
    """All of the module's."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """From the call to the result, by way."""
    why_not: dict[str, str] = field(default_factory=dict)
    """The error of a way that does not work, or that it is not installed."""
    cells: list[float] = field(default_factory=list)
    """The whole cell with nblaunch and Slurm, from its request to an idle kernel."""
    size: int = 0
    data: list[Sent] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)


def measure(rounds: int, size: int, names: Sequence[str] = tuple(WAYS)) -> Figures:
    """Measure each way this often after one that warms up, and three launches with data of this size."""
    figures = Figures(size=size)
    with contextlib.ExitStack() as stack:
        cluster = Cluster(2)
        stack.callback(cluster.close)
        slurm, ssh = SlurmCluster(cluster), SshHosts(cluster)
        stack.callback(slurm.close)
        stack.callback(ssh.close)
        ray = RayCluster() if "Ray Train" in names else None
        if ray is not None:
            stack.callback(ray.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))  # machines have a /tmp of their own
        config = ssh.config.read_text()
        for machine in cluster.machines:  # torchrunx asks for the address of a host, and names do not resolve here
            config = config.replace(f"Host {machine.name}\n", f"Host {machine.address}\n")
        Path(folder, "addresses").write_text(config)
        hosts = Path(folder, "hosts")  # torchrunx connects to the notebook's machine by its name
        hosts.write_text(f"127.0.0.1 localhost\n{cluster.network}.254 {socket.getfqdn()} {socket.gethostname()}\n")
        for machine in cluster.machines:
            machine.run("mount", "--bind", str(hosts), "/etc/hosts")
        places = {
            "{folder}": folder,
            "{address}": cluster[0].address,
            "{addresses}": str([m.address for m in cluster.machines]),
            "{ssh}": str(ssh.config),
            "{bridge}": cluster.bridge,
            "{ray}": "" if ray is None else ray.address,
        }
        kernels: dict[str, Kernel] = {}
        for name in names:
            kernel = stack.enter_context(running_kernel(**_environment(name, slurm)))
            started = kernel.run(_FUNCTION + _filled(WAYS[name], places) + _TIMED)
            try:
                warm = started if started.error else kernel.run("timed()", limit=_LIMIT_S)
            except queue.Empty:
                figures.why_not[name] = f"no result within {_LIMIT_S:.0f} s"
                continue
            if warm.error:
                figures.why_not[name] = warm.error
            else:
                kernels[name] = kernel
                figures.seconds[name] = []
        for _ in range(rounds):
            for name, kernel in kernels.items():
                kernel.run("found = timed()", limit=_LIMIT_S).check()
                figures.seconds[name].append(kernel.ask("found"))
        ours = kernels["nblaunch, slurm"]
        figures.cells = [ours.run("launch()").check().seconds for _ in range(rounds)]
        figures.data = _data(ours, cluster, size)
        for name, kernel in kernels.items():
            if "nblaunch" in name:
                kernel.run("%distributed release").check()
    return figures


def _environment(name: str, slurm: SlurmCluster) -> Mapping[str, str]:
    root = str(Path(nblaunch.__file__).parents[1])
    own = {**slurm.env, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if name.endswith("ssh"):
        own["NBLAUNCH_PYTHON"] = f"env PYTHONPATH={root} {sys.executable}"
    return own


def _filled(cell: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        cell = cell.replace(name, value)
    return cell.replace("{{", "{").replace("}}", "}").replace("FUNCTION", _FUNCTION)


def _data(kernel: Kernel, cluster: Cluster, size: int) -> list[Sent]:
    kernel.run(_DATA, limit=_LIMIT_S).check()
    kernel.run(f"data = torch.rand({size} // 4)", limit=_LIMIT_S).check()
    nothing, found = kernel.ask("nothing"), []
    for what in ("first", "again", "after a change"):
        if what == "after a change":
            kernel.run("data += 1").check()
        before = [_received(cluster, number) for number in range(2)]
        kernel.run("found = measured()", limit=_LIMIT_S).check()
        seconds, memory = kernel.ask("found")
        sent = [_received(cluster, number) - before[number] for number in range(2)]
        found.append(Sent(what, seconds, sent, [each - none for each, none in zip(memory, nothing, strict=True)]))
    return found


def _received(cluster: Cluster, number: int) -> int:
    """Return the bytes that the bridge has sent to a machine."""
    port = f"{cluster.bridge}p{number + 1}"
    return int(Path(f"/sys/class/net/{port}/statistics/tx_bytes").read_text())


def table(figures: Figures) -> str:
    """The medians as Markdown tables."""
    base = statistics.median(figures.seconds.get(BASELINE, [math.inf]))
    rounds = max(map(len, figures.seconds.values()))
    lines = [f"| 2 nodes of 1 rank, one all_reduce | median of {rounds}, seconds | most |", "|---|---|---|"]
    for name, seconds in figures.seconds.items():
        lines.append(f"| {name} | {shown(statistics.median(seconds), 3, base)} | {shown(max(seconds), 3)} |")
    lines += ["", f"In brackets: the ratio to {BASELINE}."]
    lines[-1] += f" The whole cell with nblaunch and Slurm: {statistics.median(figures.cells):.3f} s."
    lines += [f"Not measured: {name} ({why})." for name, why in figures.why_not.items()]
    gigabytes = figures.size / 1e9
    lines += ["", f"| {gigabytes:.1f} GB for 2 nodes of 4 ranks | seconds | sent to each node, to the data |"]
    lines[-1] += " memory of each node's ranks, to the data |"
    lines.append("|---|---|---|---|")
    for each in figures.data:
        sent, memory = (", ".join(f"{n / figures.size:.3f}" for n in of) for of in (each.sent, each.memory))
        lines.append(f"| {each.what} | {each.seconds:.2f} | {sent} | {memory} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(measure(int(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:]) or tuple(WAYS))))
