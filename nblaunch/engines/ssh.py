"""Nodes by ssh: OpenSSH's own client, with the user's own configuration, starts an agent on each host.

Nothing is asked: hosts must accept a key. The notebook's Python is started there, by its path.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from nblaunch.engines.command_starter import AGENT, Command, CommandStarter, python_on_nodes
from nblaunch.errors import ArgumentError, StartError
from nblaunch.machine import timeouts
from nblaunch.wire.link_messages import Boot

_VALUED = frozenset(f"-{letter}" for letter in "BbcDEeFIiJLlmOoPpQRSWw")
"""Options of ssh that take a value."""
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=10", "-T")
"""Ask for no password, notice a host that does not answer or is dead, and want no terminal."""
_SSH_FAILED = 255
"""The exit status of ssh's own failures; others are the agent's."""


class SshStarter(CommandStarter):
    """A `node_engine.Starter` for hosts.

    Args:
        words: The hosts, as ssh knows them; options of ssh may come first, such as ``-F config``. ``--hostfile PATH``
            names a file with a host on each line.
        num_nodes: The number of hosts to use. Default: all.
    """

    def __init__(self, words: Sequence[str], num_nodes: int | None = None) -> None:
        super().__init__()
        self._options: list[str] = []
        hosts: list[str] = []
        rest, typed = list(words), f"engine={shlex.join(['ssh', *words])!r}"
        while rest:
            word = rest.pop(0)
            if not rest and (word == "--hostfile" or word in _VALUED):
                raise ArgumentError(f"{typed}: {word} needs a value")
            if word == "--hostfile":
                hosts += _hosts_in(rest.pop(0))
            elif word.startswith("-"):
                self._options += [word, rest.pop(0)] if word in _VALUED else [word]
            elif "," in word:
                raise ArgumentError(f"{typed}: separate hosts by spaces, as in engine='ssh gpu1 gpu2'")
            else:
                hosts.append(word)
        if not hosts:
            raise ArgumentError(f"{typed}: name the hosts, as in engine='ssh gpu1 gpu2'")
        if num_nodes is not None and num_nodes > len(hosts):
            raise ArgumentError(f"num_nodes={num_nodes}, but engine='ssh …' names {len(hosts)} hosts")
        self._hosts = hosts[: num_nodes or len(hosts)]
        self.name = f"ssh {' '.join(self._hosts)}"
        self.count = len(self._hosts)

    def addresses(self, check: Callable[[], None]) -> Sequence[str]:
        if shutil.which("ssh") is None:
            raise StartError("engine='ssh': `ssh` is not on the PATH: install the OpenSSH client")
        found = []
        for host in self._hosts:
            check()
            found.append(self._address_of(host))
        return found

    def _address_of(self, host: str) -> str:
        asked = subprocess.run(
            ["ssh", *self._options, "-G", host], capture_output=True, text=True, timeout=timeouts.PROGRAM_TIMEOUT_S
        )
        if asked.returncode:
            raise StartError(f"ssh {host}: {asked.stderr.strip().partition(chr(10))[0]}; `man ssh` lists its options")
        lines = dict(line.partition(" ")[::2] for line in asked.stdout.splitlines())
        return lines.get("hostname", host)

    def start(self, boot: Boot) -> None:
        ssh, agent = ["ssh", *self._options, *_OPTIONS], [python_on_nodes(), "-m", AGENT]
        self.run([Command(number, host, [*ssh, host, *agent]) for number, host in enumerate(self._hosts)], boot)

    def reason(self, name: str, status: int, said: str) -> str:
        if status != _SSH_FAILED:
            return super().reason(name, status, said)
        by_hand = shlex.join(["ssh", *self._options, name, "true"])
        return (
            f"{name}: ssh failed: {said.rstrip('.') or 'no error message'}. `{by_hand}` must work in a terminal of "
            "this machine, without a password or other prompt"
        )

    def state(self) -> str:
        return ""


def _hosts_in(path: str) -> list[str]:
    """Return the hosts of a hostfile: the first word of each line, without slots and comments."""
    try:
        lines = Path(path).expanduser().read_text().splitlines()
    except OSError as error:
        raise ArgumentError(f"engine='ssh --hostfile {path}': {error.strerror}") from error
    return [line.split()[0] for line in (line.partition("#")[0].strip() for line in lines) if line]
