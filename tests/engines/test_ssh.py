"""Launches over ssh, with a real sshd on each machine."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import nblaunch
from nblaunch.engines import current
from nblaunch.errors import StartError
from tests.conftest import eventually
from tests.engines.machines import Cluster
from tests.engines.ssh_hosts import SshHosts


def hosts() -> tuple[str, str]:
    dist.barrier()
    return socket.gethostname(), os.getcwd()


def launch(engine: str, **options: Any) -> Any:
    return nblaunch.notebook_launcher(hosts, engine=engine, view="none", **options)


def test_ranks_run_on_the_hosts_that_are_named(ssh_hosts: SshHosts, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two hosts\nn2 slots=2\n\nn1\n")
    engine = f"ssh -F {ssh_hosts.config} --hostfile {tmp_path}/hosts"
    assert list(launch(engine)) == [("n2", os.getcwd()), ("n1", os.getcwd())]
    assert current.status()[-1] == "ssh n2 n1: n2, n1"
    check_that_no_process_shows_the_keys(engine)

    def work() -> str:
        time.sleep(3)
        return socket.gethostname()

    running: Any = nblaunch.notebook_launcher(work, engine=engine, view="none", block=False)
    eventually(lambda: running.stacks().keys() == {0, 1})
    sessions = cluster[1].processes("sshd: root@notty")
    assert sessions
    cluster[1].kill(*sessions)  # which ends no launch
    assert list(running.result()) == ["n2", "n1"]
    assert current.release() == ["ssh n2 n1: n2, n1"]
    ssh_hosts.cluster.settle()


def check_that_no_process_shows_the_keys(engine: str) -> None:
    held: Any = current.chosen(engine)
    secret = held._nodes.link.boot.secret_key.encode()
    for process in Path("/proc").glob("[0-9]*"):
        for file in ("cmdline", "environ"):
            try:
                assert secret not in (process / file).read_bytes()
            except OSError:
                continue  # it has exited


def test_what_ssh_says_is_the_error(ssh_hosts: SshHosts) -> None:
    advice = (
        r"\. `ssh -p 9 127.0.0.1 true` must work in a terminal of this machine, without a password or other prompt$"
    )
    with pytest.raises(StartError, match=rf"(?s)^127.0.0.1: ssh failed: .*(refused|failed){advice}"):
        launch("ssh -p 9 127.0.0.1")
    with pytest.raises(StartError, match=r"^no route to nowhere: .*Check the name"):
        launch("ssh nowhere")
    with pytest.raises(StartError, match=r"^ssh nowhere: .*unknown option -- Z; `man ssh` lists its options"):
        launch("ssh -Z nowhere")


def test_a_python_that_cannot_be_the_agents_is_named(ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_PYTHON", "/nowhere/python")
    says = "cannot start /nowhere/python; set NBLAUNCH_PYTHON to .*: No such file"
    with pytest.raises(StartError, match=rf"^n[12]: .*{says}"):
        launch(f"ssh -F {ssh_hosts.config} n1 n2")
