"""Nodes by Slurm: one srun starts an agent on each, in a job of its own or in the notebook's own allocation.

The keys go over srun's stdin, which Slurm passes to every task in clear. So an agent also proves with munge, by which
Slurm itself knows users, that it is of the same user. Agents keep neither srun's stdin nor its stdout: what holds them
would keep a node from being freed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

from nblaunch.engines.command_starter import AGENT, Command, CommandStarter, python_on_nodes
from nblaunch.engines.link import has_munge
from nblaunch.errors import ArgumentError, StartError
from nblaunch.machine import timeouts
from nblaunch.wire.link_messages import Boot

_OURS = ("-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node", "-K", "--kill-on-bad-exit", "-J", "--job-name")
"""Options of srun that are not the user's."""
_PROGRAMS = ("srun", "squeue", "scontrol")
_TASKS_PER_GPU = ("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES")
"""srun refuses them beside ``--ntasks-per-node``."""
_MAX_ASKED = 16
"""Nodes of a large cluster whose addresses are looked at."""
NEW_JOB_POLL_S = 0.1
"""The same, while the job's number is not known: agents may start within a second."""


class SlurmStarter(CommandStarter):
    """A `node_engine.Starter`.

    Args:
        words: Options of srun, such as ``--partition=gpu``, ``--time=1:00:00``, ``--gres=gpu:4``, ``--account=me``.
        num_nodes: The number of nodes. Default: all of the allocation that the notebook is in, else 1.
    """

    def __init__(self, words: Sequence[str], num_nodes: int | None = None) -> None:
        super().__init__()
        for word in words:
            option = word.partition("=")[0]
            if option in _OURS or (word[:2] in _OURS and not word.startswith("--")):
                instead = "use num_nodes= (--nodes)" if option in ("-N", "--nodes") else "nblaunch sets it"
                raise ArgumentError(f"engine='slurm {' '.join(words)}': {option}: {instead}")
        self._words = list(words)
        names_job = any(word.startswith("--jobid") for word in words)
        self._allocation = "" if names_job else os.environ.get("SLURM_JOB_ID", "")
        held = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if self._allocation else 0
        self.count = num_nodes or held or 1
        if self._allocation and self.count > held:
            raise ArgumentError(f"num_nodes={self.count}, but the notebook's job {self._allocation} has {held}")
        self._job_name = f"nblaunch-{secrets.token_hex(4)}"
        self._job = self._allocation
        self._state, self._asked_at, self._is_queued = "", 0.0, False

    @property
    def name(self) -> str:
        return f"slurm job {self._job}" if self._job else "slurm"

    def addresses(self, check: Callable[[], None]) -> Sequence[str]:
        """Return the addresses of the nodes, or of some that the job may get."""
        missing = [program for program in _PROGRAMS if shutil.which(program) is None]
        if missing:
            raise StartError(
                f"engine='slurm': `{missing[0]}` is not on the PATH: start the notebook where Slurm is installed"
            )
        self.proof = "munge" if has_munge() else ""
        asked = os.environ.get("SLURM_JOB_NODELIST", "") if self._allocation else ""
        lines = _answer("scontrol", "show", "node", "--oneliner", *([asked] if asked else [])).splitlines()
        fields = [dict(word.partition("=")[::2] for word in line.split()) for line in lines]
        up = [each for each in fields if not each.get("State", "").startswith("DOWN")] or fields
        return [each["NodeAddr"] for each in up[:_MAX_ASKED] if "NodeAddr" in each]

    def start(self, boot: Boot) -> None:
        within = ["--overlap", f"--jobid={self._allocation}"] if self._allocation else [f"--job-name={self._job_name}"]
        nodes = [f"--nodes={self.count}", f"--ntasks={self.count}", "--ntasks-per-node=1"]
        self._state, self._is_queued = "", not self._allocation
        srun = ["srun", *within, *nodes, "--kill-on-bad-exit=0", *self._words, python_on_nodes(), "-m", AGENT]
        memory = [name for name in os.environ if name.startswith("SLURM_MEM_PER_")]
        refused = {*_TASKS_PER_GPU, *(memory if len(memory) > 1 else ())}  # by srun, together: one was inherited
        env = {name: value for name, value in os.environ.items() if name not in refused}
        self.run([Command(-1, "srun", srun)], boot, env)

    def state(self) -> str:
        """Return the job's place in the queue, and why it waits; empty once it has its nodes."""
        pause = timeouts.QUEUE_POLL_S if self._job else NEW_JOB_POLL_S
        if self._is_queued and time.monotonic() - self._asked_at > pause:
            self._asked_at = time.monotonic()
            self._ask()
        return self._state

    def _ask(self) -> None:
        try:
            asked = _answer("squeue", "--noheader", "--me", f"--name={self._job_name}", "--format=%i %T %r")
        except StartError:  # a busy controller: the job has not lost its place for that
            return
        said = asked.split(maxsplit=2)
        if len(said) < 3:  # not yet known, or it has ended: `problem` says so
            return
        self._job, state, reason = said[0], said[1], said[2].strip()
        self._is_queued = state in ("PENDING", "CONFIGURING")
        self._state = f"slurm job {self._job} is queued ({reason})" if self._is_queued else ""

    def stop(self) -> None:
        """End srun: at once if the job is still queued."""
        self._state, self._job = "", self._allocation
        self.end(at_once=self._is_queued)


def options_of(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the options in these words, each as one or two words."""
    options: list[tuple[str, ...]] = []
    for word in words:
        if not word.startswith("-") and options and len(options[-1]) == 1:  # the value, as in -p gpu
            options[-1] = (*options[-1], word)
        else:
            options.append((word,))
    return options


def _answer(*command: str) -> str:
    """Return what a program of Slurm prints. StartError: it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeouts.PROGRAM_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"engine='slurm': {error}") from error
    if done.returncode:
        raise StartError(f"engine='slurm': {command[0]} failed: {done.stderr.strip()}")
    return done.stdout
