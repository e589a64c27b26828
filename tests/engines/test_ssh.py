"""Launches over ssh, with a real sshd on each machine."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import nblaunch
from nblaunch.engines import current
from nblaunch.errors import ArgumentError, StartError
from tests.conftest import eventually
from tests.engines.machines import Cluster
from tests.engines.ssh_hosts import SshHosts


def hosts() -> tuple[str, str]:
    dist.barrier()
    return socket.gethostname(), os.getcwd()


def launch(engine: str, **options: Any) -> Any:
    return nblaunch.notebook_launcher(hosts, engine=engine, view="none", **options)


def test_ranks_run_on_the_hosts_that_are_named(ssh_hosts: SshHosts) -> None:
    assert list(launch(f"ssh -F {ssh_hosts.config} n1 n2")) == [("n1", os.getcwd()), ("n2", os.getcwd())]
    assert [host for host, _ in launch(f"ssh -F {ssh_hosts.config} n1 n2", num_nodes=1)] == ["n1", "n1"]
    assert [host for host, _ in launch(f"ssh -F {ssh_hosts.config} n2 n1", num_nodes=1)] == ["n2", "n2"]
    assert current.status()[-2:] == ["ssh n1 n2: n1, n2", "ssh n2: n2"]  # one node of the first was enough
    assert [host for host, _ in launch(f"ssh -F {ssh_hosts.config} n2 n1")] == ["n2", "n1"]
    assert current.release() == ["ssh n1 n2: n1, n2", "ssh n2 n1: n2, n1"]  # the smaller was given back
    ssh_hosts.cluster.settle()


def test_a_hostfile_names_them_too(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two hosts\nn2 slots=2\n\nn1\n")
    assert [host for host, _ in launch(f"ssh -F {ssh_hosts.config} --hostfile {tmp_path}/hosts")] == ["n2", "n1"]


def test_keys_are_in_no_command_line_and_no_environment(ssh_hosts: SshHosts) -> None:
    launch(f"ssh -F {ssh_hosts.config} n1 n2")
    engine: Any = current.chosen(f"ssh -F {ssh_hosts.config} n1 n2")
    secret = engine._nodes.link.boot.secret_key.encode()
    for process in Path("/proc").glob("[0-9]*"):
        for file in ("cmdline", "environ"):
            try:
                assert secret not in (process / file).read_bytes()
            except OSError:
                continue  # it has exited


def test_what_ssh_says_is_the_error(ssh_hosts: SshHosts) -> None:
    advice = r"\. `ssh -p 9 127.0.0.1 true` must work in a terminal of this machine, without a password or question$"
    with pytest.raises(StartError, match=rf"(?s)^127.0.0.1: ssh has failed: .*(refused|failed){advice}"):
        launch("ssh -p 9 127.0.0.1")
    with pytest.raises(StartError, match=r"^no route to nowhere: .*Is the name right\?"):
        launch("ssh nowhere")
    with pytest.raises(ArgumentError, match=r"^engine='ssh': name the hosts"):
        launch("ssh")
    with pytest.raises(ArgumentError, match=r"^num_nodes=3, but engine='ssh …' names 2 hosts"):
        launch("ssh n1 n2", num_nodes=3)


@pytest.mark.parametrize(
    ("python", "says"),
    [
        (f"{sys.executable} -IS", r" there has no nblaunch: install it there, or let NBLAUNCH_PYTHON name a Python"),
        ("/nowhere/python", r"cannot start /nowhere/python there; let NBLAUNCH_PYTHON name .*: No such file"),
    ],
)
def test_a_python_that_cannot_be_the_agents_is_named(
    ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, python: str, says: str
) -> None:
    monkeypatch.setenv("NBLAUNCH_PYTHON", python)
    with pytest.raises(StartError, match=rf"^n[12]: .*{says}"):
        launch(f"ssh -F {ssh_hosts.config} n1 n2")
    assert "Traceback" not in caplog.text


def test_a_warning_names_no_healthy_host(
    ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NBLAUNCH_PYTHON", "sleep 4 #")  # n1's ssh still runs when it is ended
    with pytest.raises(StartError, match=r"^127.0.0.1: ssh has failed: "):
        launch(f"ssh -F {ssh_hosts.config} n1 127.0.0.1")
    assert all(record.message.startswith("127.0.0.1: ") for record in caplog.records)


def test_a_killed_sshd_does_not_end_a_launch(ssh_hosts: SshHosts, cluster: Cluster) -> None:
    def work() -> str:
        time.sleep(3)
        return socket.gethostname()

    engine = f"ssh -F {ssh_hosts.config} n1 n2"
    launch(engine)
    running: Any = nblaunch.notebook_launcher(work, engine=engine, view="none", block=False)
    eventually(lambda: running.stacks().keys() == {0, 1})
    sessions = cluster[1].processes("sshd: root@notty")
    assert sessions
    cluster[1].kill(*sessions)
    assert list(running.result()) == ["n1", "n2"]


KERNEL = """
import sys, time
from nblaunch import notebook_launcher
def work():
    print("begun", flush=True)
    time.sleep(600)
notebook_launcher(work, engine=sys.argv[1], view="text")
"""


def test_a_killed_kernel_leaves_nothing_on_the_hosts(ssh_hosts: SshHosts, cluster: Cluster) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KERNEL, f"ssh -F {ssh_hosts.config} n1 n2"], stdout=subprocess.PIPE
    ) as kernel:
        try:
            assert kernel.stdout is not None
            begun = {b"[rank 0] begun\n", b"[rank 1] begun\n"}
            assert set(itertools.islice(filter(begun.__contains__, kernel.stdout), 2)) == begun
        finally:
            kernel.kill()
    eventually(lambda: not any(machine.python() for machine in cluster.machines), 14)
