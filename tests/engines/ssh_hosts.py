"""A real sshd on each machine of a `Cluster`, and a configuration for the client that reaches them by name."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.conftest import eventually
from tests.engines.machines import Cluster

_SSHD = """
Port 22
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
"""
_CLIENT = """
Host {name}
    HostName {address}
    IdentityFile {folder}/user
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking no
    LogLevel ERROR
"""


class SshHosts:
    """See the module."""

    def __init__(self, cluster: Cluster) -> None:
        sshd = shutil.which("sshd", path="/usr/sbin")
        assert sshd is not None, "there is no OpenSSH: bash tests/run.sh installs it"
        self.cluster = cluster
        self.folder = Path(tempfile.mkdtemp(prefix="nblaunch-ssh-", dir="/var/tmp"))  # machines have their own /tmp
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True)
        (self.folder / "sshd").write_text(_SSHD.format(folder=self.folder))
        hosts = [_CLIENT.format(name=m.name, address=m.address, folder=self.folder) for m in cluster.machines]
        self.config = self.folder / "client"
        self.config.write_text("".join(hosts))
        null = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._daemons = [
            machine.popen(sshd, "-D", "-f", str(self.folder / "sshd"), start_new_session=True, **null)
            for machine in cluster.machines
        ]
        eventually(lambda: all(map(self._answers, cluster.machines)))

    def _answers(self, machine: object) -> bool:
        name = getattr(machine, "name", "")
        return subprocess.run(["ssh", "-F", self.config, name, "true"], capture_output=True).returncode == 0

    def close(self) -> None:
        """End the daemons and remove their files."""
        for daemon in self._daemons:
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
