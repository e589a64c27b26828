"""A real Ray: its head here, without CPUs, and a node with 2 GPUs, as Ray believes, on each of two machines of its own.

Only one process of the tests connects to it, as an observer; nblaunch connects by itself. All nodes have their files at
the path of the head's, and each has a disk of its own there: two nodes that start would race for names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import MARK, eventually
from tests.engines.machines import Cluster, Machine

_SMALL = ["--object-store-memory=80000000", "--include-log-monitor=false", "--disable-usage-stats"]
_HEAD = ["--head", "--block", "--num-cpus=0", "--num-gpus=0", "--include-dashboard=false", "--no-monitor"]
_ENV = {"TMPDIR": "/tmp", "RAY_enable_worker_prestart": "0"}  # idle workers would only cost time
_RAY = [sys.executable, "-m", "ray.scripts.scripts", "start"]
_OBSERVER = r"""
import json, os, sys, ray
out = os.dup(1)
os.dup2(2, 1)  # Ray prints errors of the cluster
from ray._private.state import actors
from ray.util.placement_group import placement_group_table
ray.init(log_to_driver=False, logging_level="ERROR")
for _ in sys.stdin:
    os.write(out, json.dumps({
        "nodes": sorted(node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]),
        "actors": [each["Pid"] for each in actors().values() if each["State"] != "DEAD"],
        "groups": [each["state"] for each in placement_group_table().values() if each["state"] != "REMOVED"],
    }).encode() + b"\n")
"""


class RayCluster:
    """See the module."""

    def __init__(self) -> None:
        self.machines = Cluster(2)
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/var/tmp"))
        self.address = f"{self.machines.network}.254:{20_000 + (os.getpid() + 1) % 10_000}"
        self.env = {name: value for name, value in os.environ.items() if name != MARK} | _ENV
        host, _, port = self.address.partition(":")
        self._started: list[subprocess.Popen[bytes]] = []
        try:
            own = [f"--node-ip-address={host}", f"--port={port}", f"--temp-dir={self.folder}"]
            for machine in self.machines.machines:
                machine.run("mount", "-t", "tmpfs", "tmpfs", str(self.folder))
            self._start_head(*own)
            for machine in self.machines.machines:
                self._start(machine)
            with (self.folder / "observer.log").open("wb") as log:
                self._observer = subprocess.Popen(
                    [sys.executable, "-c", _OBSERVER],
                    env={**self.env, "RAY_ADDRESS": self.address},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            self._started.append(self._observer)
            assert self.look()["nodes"] == ["n1", "n2", os.uname().nodename], self.log()
        except BaseException:
            self.close()
            raise

    def _popen(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            started = subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(started)
        return started

    def _start_head(self, *own: str) -> None:
        """Start the head; once more if Ray gives up, as in `_start`."""
        for _ in range(3):
            head = self._popen("head", *_RAY, *_HEAD, *own, *_SMALL)
            while "Ray runtime started" not in (self.folder / "head.log").read_text():
                if head.poll():
                    break
                time.sleep(0.1)
            else:
                return
        raise AssertionError(self.log())

    def _start(self, machine: Machine) -> None:
        """Start a node; once more if Ray gives up, which it does on a busy machine."""
        own = [f"--address={self.address}", f"--node-ip-address={machine.address}", "--num-cpus=1", "--num-gpus=2"]
        for _ in range(3):
            if self._popen(machine.name, *machine.inside(*_RAY, *own, *_SMALL)).wait(120) == 0:
                return
        raise AssertionError(self.log())

    def restore(self) -> None:
        """Start the nodes again that a test has killed."""
        up = self.look()["nodes"]
        for machine in self.machines.machines:
            if machine.name not in up:
                self._start(machine)
        eventually(lambda: len(self.look()["nodes"]) == 3, otherwise=self.log)

    def look(self) -> dict[str, Any]:
        """Return the names of the living nodes, the pids of actors, and the states of placement groups."""
        assert self._observer.stdin is not None
        assert self._observer.stdout is not None
        self._observer.stdin.write(b"look\n")
        self._observer.stdin.flush()
        answer = self._observer.stdout.readline()
        assert answer, self.log()
        seen: dict[str, Any] = json.loads(answer)
        return seen

    def is_free(self) -> bool:
        """Return True if there is no actor and no placement group, and no process of nblaunch on a node."""
        seen = self.look()
        left = [pid for machine in self.machines.machines for pid in machine.processes("nblaunch")]
        return not (seen["actors"] or seen["groups"] or left)

    def log(self) -> str:
        """Return what `ray start` has printed, what there is, and what runs."""
        logs = [f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.log")]
        return "\n".join(
            [
                *logs,
                *(machine.run("ps", "-eo", "pid,ppid,stat,args:150") for machine in self.machines.machines),
            ]
        )

    def close(self) -> None:
        """End every process of it and remove its files."""
        self.machines.close()
        for started in reversed(self._started):
            if started.poll() is None:
                running = psutil.Process(started.pid)
                for process in [*running.children(recursive=True), running]:
                    process.kill()
            started.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)
