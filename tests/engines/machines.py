"""Machines for tests: network namespaces on a bridge, each with a host name, processes, clock and /tmp of its own.

This process is on the bridge too, as the notebook's machine. Names do not resolve, as in many clusters.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import eventually

_numbers = itertools.count()
_PROGRAMS = ("unshare", "nsenter", "ip", "tc")


@dataclass(eq=False)
class KnownMachine:
    """A machine that another process has made."""

    name: str
    address: str
    init: str
    """The pid of its PID 1."""

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs another one in this machine."""
        return ["nsenter", "-t", self.init, "-n", "-u", "-p", "-m", "-T", *command]


class Machine(KnownMachine):
    """One machine of a cluster, with this number at the end of its address. `close` ends every process in it."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        name, address = f"n{number}", f"{cluster.network}.{number}"
        self._port = f"{cluster.bridge}p{number}"
        clock_s = 1000 * number  # how much later it is there, by the monotonic clock
        script = f"hostname {name}; {_own_tmp()}; ip link set lo up; {_INIT}"
        self._process = subprocess.Popen(
            ["unshare", "-npumT", f"--monotonic={clock_s}", *_OPTIONS, "bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n", "namespaces are not permitted here: run as root"
        self._process.stdout.close()
        children = _children(self._process.pid)
        assert len(children) == 1
        super().__init__(name, address, str(children[0]))
        _run("ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self.init)
        _run("ip", "link", "set", self._port, "master", cluster.bridge, "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command here; the caller ends it."""
        return subprocess.Popen(self.inside(*command), **options)

    def run(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Run a command here and return what it prints."""
        return _run(*self.inside(*command), env=env)

    def cut(self) -> None:
        """Pull the cable: what is sent from now on is lost, in both directions, and no connection is closed."""
        _run("ip", "link", "set", self._port, "down")

    def restore(self) -> None:
        """Plug the cable in again."""
        _run("ip", "link", "set", self._port, "up")

    def slow(self, kilobits: int) -> None:
        """Limit what the machine receives, and what it sends, to so many kilobits a second; 0: no limit."""
        limit = ["tbf", "rate", f"{kilobits}kbit", "burst", "32k", "latency", "1s"]
        for run, device in ((_run, self._port), (self.run, "eth0")):
            with contextlib.suppress(subprocess.CalledProcessError):  # there was none
                run("tc", "qdisc", "del", "dev", device, "root")
            if kilobits:
                run("tc", "qdisc", "add", "dev", device, "root", *limit)

    def processes(self, containing: str) -> list[int]:
        """Return the pids here, of this machine's own numbering, of processes whose command contains a text."""
        return [pid for pid, _, command in self._listed() if containing in command]

    def python(self) -> list[int]:
        """Return the pids of every Python process here, and of our processes that have a name of their own."""
        return [pid for pid, name, _ in self._listed() if name.startswith(("python", "nblaunch"))]

    def _listed(self) -> Iterator[tuple[int, str, str]]:
        for line in self.run("ps", "-ww", "-eo", "pid,stat,comm,args").splitlines()[1:]:
            pid, state, name, command = line.split(maxsplit=3)
            if not state.startswith("Z"):
                yield int(pid), name, command

    def ranks(self) -> list[int]:
        """Return the pids of the ranks here, and of their reapers."""
        return [pid for pid, name, _ in self._listed() if name in ("nblaunch-rank", "nblaunch-reaper")]

    def kill(self, *pids: int) -> None:
        """SIGKILL."""
        self.run("kill", "-9", *map(str, pids))

    def close(self) -> None:
        """End every process here."""
        self._process.kill()
        self._process.wait()


class Cluster:
    """A bridge, and so many machines on it."""

    def __init__(self, count: int) -> None:
        for program in _PROGRAMS:
            assert any(os.access(f"{folder}/{program}", os.X_OK) for folder in _PATH), f"there is no {program}"
        number = (os.getpid() + 7919 * next(_numbers)) % 10_000  # other workers have clusters of their own
        self.network, self.bridge = f"10.{77 + number // 250}.{number % 250}", f"nbl{number}"
        self.machines: list[Machine] = []
        try:
            _run("ip", "link", "add", self.bridge, "type", "bridge")
            _run("ip", "addr", "add", f"{self.network}.254/24", "dev", self.bridge)
            _run("ip", "link", "set", self.bridge, "up")
            for number in range(1, count + 1):
                self.machines.append(Machine(self, number))
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int) -> Machine:
        return self.machines[number]

    def settle(self) -> None:
        """Wait until no machine has a Python process."""
        eventually(lambda: not any(machine.python() for machine in self.machines), otherwise=self.left)

    def left(self) -> str:
        """Return the processes of each machine that has a Python process."""
        return "; ".join(f"{machine.name}: {machine.run('ps', '-ef')}" for machine in self.machines if machine.python())

    def close(self) -> None:
        """End every machine, and unplug this process."""
        for machine in self.machines:
            machine.close()
        with contextlib.suppress(subprocess.CalledProcessError):  # it was never made
            _run("ip", "link", "del", self.bridge)


_OPTIONS = ("--fork", "--kill-child", "--mount-proc")
_PATH = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
_INIT = "sleep infinity & echo up; wait"
"""PID 1: a shell that waits collects the processes that it adopts."""


def _own_tmp() -> str:
    """Return the commands that give a machine a /tmp of its own, with this checkout and Python if they are in /tmp."""
    repository = str(Path(__file__).parents[2])
    shared = [path for path in {repository, sys.prefix, sys.base_prefix} if path.startswith("/tmp/")]
    keep = [f"mkdir /mnt/{n}; mount --bind {shlex.quote(path)} /mnt/{n}" for n, path in enumerate(shared)]
    give = [f"mkdir -p {shlex.quote(path)}; mount --bind /mnt/{n} {shlex.quote(path)}" for n, path in enumerate(shared)]
    hold = ["mount -t tmpfs tmpfs /mnt"] if shared else []
    return "; ".join([*hold, *keep, "mount -t tmpfs tmpfs /tmp", *give])


def _run(*command: str, env: Mapping[str, str] | None = None) -> str:
    path = ":".join(dict.fromkeys([*os.environ["PATH"].split(":"), *_PATH]))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {}), "PATH": path})
    assert done.returncode == 0 or "qdisc" in command, f"{command}: {done.stderr}"
    done.check_returncode()
    return done.stdout


def _children(pid: int) -> Sequence[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]
