"""A real Slurm with a node on each machine of a `Cluster`, and the controller here.

Its configuration, state and spool are in a folder of its own; only munge uses the system's key and socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.conftest import eventually
from tests.engines.machines import Cluster

_CONFIG = """
ClusterName=nblaunch
SlurmctldHost={host}({network}.254)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=10
KillWait=30
MpiDefault=none
SlurmdParameters=config_overrides
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=60 State=UP
"""
_SILENT: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.DEVNULL,
    "stderr": subprocess.DEVNULL,
    "start_new_session": True,
}
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "squeue")


class Munge:
    """The system's munge, which the Slurms of several test workers share: the last to leave ends it."""

    def __init__(self) -> None:
        self._started = Path("/run/nblaunch-tests.munged")
        """Holds the pid, if a test has started it; locked by who starts or ends it."""
        self._turn = self._started.open("a+")
        self._users = Path("/run/nblaunch-tests.munge-users").open("a+")
        """Locked by all that use it."""

    def open(self) -> None:
        """Start it, unless it runs."""
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        fcntl.flock(self._users, fcntl.LOCK_SH)
        if not self._answers():
            Path("/run/munge").mkdir(exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            daemon = ["su", "-s", "/bin/bash", "munge", "-c", "exec /usr/sbin/munged --force"]
            subprocess.run(daemon, check=True, **_SILENT)
            eventually(self._answers)
            self._started.write_text(Path("/run/munge/munged.pid").read_text())
        fcntl.flock(self._turn, fcntl.LOCK_UN)

    @staticmethod
    def _answers() -> bool:
        return subprocess.run(["munge", "-n"], capture_output=True).returncode == 0

    def close(self) -> None:
        """End it, if a test has started it and no other uses it."""
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            pid = self._started.read_text()
            self._started.write_text("")
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGTERM)
        self._users.close()
        self._turn.close()


class SlurmCluster:
    """See the module."""

    def __init__(self, cluster: Cluster) -> None:
        for program in _PROGRAMS:
            assert shutil.which(program, path=_PATH), f"there is no {program}: bash tests/run.sh installs it"
        self.cluster = cluster
        self.folder = Path(tempfile.mkdtemp(prefix="nblaunch-slurm-", dir="/var/tmp"))  # machines have their own /tmp
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._munge = Munge()
        host = socket.gethostname()
        nodes = "\n".join(f"NodeName={m.name} NodeAddr={m.address} CPUs=4 RealMemory=4000" for m in cluster.machines)
        config = _CONFIG.format(
            host=host, network=cluster.network, port=20_000 + os.getpid() % 10_000, folder=self.folder, nodes=nodes
        )
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "state").mkdir()
        try:
            self._munge.open()
            self._daemon("slurmctld", "-D")
            for machine in cluster.machines:
                self._daemon(*machine.inside("slurmd", "-D", "-N", machine.name))
            eventually(self.is_idle, otherwise=self.log)
        except BaseException:
            self.close()
            raise

    @property
    def env(self) -> Mapping[str, str]:
        """What programs of Slurm need to find this one."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """Run a program of Slurm and return what it prints."""
        env = {**os.environ, **self.env, "PATH": _PATH}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=30)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def is_idle(self) -> bool:
        """Return True if every node is idle: no job, and nothing left of one."""
        with contextlib.suppress(AssertionError):  # the controller does not answer yet
            return set(self.run("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"}
        return False

    def log(self) -> str:
        """Return what the daemons have logged."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def _daemon(self, *command: str) -> None:
        env = {**os.environ, **self.env, "PATH": _PATH}
        self._daemons.append(
            subprocess.Popen(
                command,
                env=env,
                **_SILENT,
            )
        )

    def close(self) -> None:
        """End the daemons and remove their files."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            daemon.kill()
            daemon.wait()
        self._munge.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_PATH = f"/usr/sbin:/usr/bin:/sbin:/bin:{os.environ['PATH']}"
