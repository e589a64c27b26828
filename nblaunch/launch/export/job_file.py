"""How a script is started: the command for torchrun, and the job file for Slurm."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nblaunch.engines import current
from nblaunch.engines.current import JobRequest
from nblaunch.launch.options import Options
from nblaunch.launch.plan import make_plan
from nblaunch.machine.inventory import this_machine

_JOB = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{more}#
# Submit it with `sbatch {file}`, or on {others} nodes with `sbatch --nodes={others} {file}`. Each node runs one
# torchrun, which starts {ranks}. Add what your cluster needs: {missing}.

set -euo pipefail
{environment}
# All nodes meet at the first one. Set MASTER_ADDR if its name does not resolve on the other nodes.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [ "${{#nodes[@]}}" = 1 ]; then first=127.0.0.1; else first=${{nodes[0]}}; fi
export MASTER_ADDR=${{MASTER_ADDR:-$first}}
export MASTER_PORT=${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 12768))}}
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-{cpus}}}

# Node 0 serves the rendezvous, whatever its host is called.
srun --kill-on-bad-exit=1 bash -c 'first=$((SLURM_NODEID == 0)); exec torchrun \\
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={nproc} {restarts}\\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \\
    --rdzv-conf=is_host="$first" $([ "$first" = 0 ] || echo --local-addr="$MASTER_ADDR") \\
    "$0"' {script}
"""

_RESOURCES = ("--gres", "--tres-per-node", "--tres-per-task")
"""Options of Slurm that may ask for GPUs, among others."""


@dataclass(frozen=True, slots=True)
class Start:
    """How to start a script.

    Attributes:
        nproc: Ranks per node.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        env: Environment variables.
        threads: CPU threads of each rank; None: torchrun's choice.
        max_restarts: How many times to start all ranks again after a failure.
        timeout: Seconds; None: no limit.
        nodes: The number of nodes.
        options: Slurm's options for the job file, each as one or two words.
    """

    nproc: int
    device: str
    env: Mapping[str, str]
    threads: int | None
    max_restarts: int
    timeout: float | None
    nodes: int = 1
    options: tuple[tuple[str, ...], ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables, with the one for the threads."""
        return {**({} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}), **self.env}


def start_of(asked: JobRequest, options: Options) -> Start:
    """Return how ranks with these options start. The GPUs need not be here: the script may run elsewhere."""
    machine = replace(this_machine(), free_descriptors=sys.maxsize)
    gpus = _gpus_per_node(asked)
    if gpus and options.device != "cpu":
        machine = replace(machine, gpus=gpus)
    if options.device == "cuda" or options.backend == "nccl" or machine.gpus:
        machine = replace(machine, gpus=max(machine.gpus, options.num_processes or 1))
    plan = make_plan([machine] * asked.nodes, current.engine, options)
    own = {name: plan.env[name] for name in plan.named}
    nproc = plan.places[0].local_world_size
    return Start(
        nproc,
        options.device,
        own,
        options.threads_per_rank,
        options.max_restarts,
        options.timeout,
        asked.nodes,
        asked.options,
    )


def notes(asked: JobRequest, sbatch: bool) -> list[str]:
    """Return what the script and its job file do not do of what ``engine=`` asks for."""
    if asked.kind in ("ray", "ssh"):
        instead = ", or submit the job file to Slurm" if sbatch else ""
        return [f"the script does not use engine='{asked.kind}': start torchrun on each node yourself{instead}"]
    if asked.kind == "slurm" and not sbatch:
        return ["the command runs on this machine: engine='slurm' and its options need a job file (sbatch)"]
    return [
        f"`{shlex.join(words)}` is left out of the job file: it is an option of srun alone" for words in asked.left_out
    ]


def _name_and_value(words: tuple[str, ...]) -> tuple[str, str]:
    """Split an option: ``--partition=gpu``, ``-p gpu`` or ``-pgpu``."""
    first = words[0]
    name, value = first.partition("=")[::2] if first.startswith("--") else (first[:2], first[2:])
    return name, words[1] if len(words) == 2 else value


def _gpus_per_node(asked: JobRequest) -> int:
    """Return the GPUs of each node that the options of Slurm ask for; 0 if they name no number."""
    for name, value in map(_name_and_value, asked.options):
        if name in _RESOURCES:  # gpu, gpu:2, gpu:a100:2 or gres/gpu:2
            found = re.search(r"(?:^|[,/])gpu(?:[:=][^,:=]+)??(?:[:=](\d+))?(?=,|$)", value)
            if found is not None:
                return int(found[1] or 1)
        elif name in ("--gpus-per-node", "--gpus-per-task", "--gpus", "-G"):  # 2 or a100:2
            found = re.search(r"(?:^|:)(\d+)$", value)
            if found is not None:
                of_job = name in ("--gpus", "-G")
                return max(1, int(found[1]) // asked.nodes) if of_job else int(found[1])
    return 0


def command(start: Start, script: str) -> str:
    """Return the command that starts a script on this machine."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in start.variables.items()]
    restarts = ["--max-restarts", str(start.max_restarts)] if start.max_restarts else []
    return " ".join([*variables, "torchrun", "--nproc-per-node", str(start.nproc), *restarts, shlex.quote(script)])


def job_file(start: Start, script: str, file: str) -> str:
    """Return a job file for Slurm.

    Args:
        start: How to start the script.
        script: The script's name, in the folder that the job runs in.
        file: The job file's name.
    """
    named = {_name_and_value(words)[0] for words in start.options}
    cpus = start.nproc * (start.threads or 1)
    lines = [] if named & {"--cpus-per-task", "-c"} else [f"--cpus-per-task={cpus}"]
    if start.device == "cuda" and not _gpus_per_node(JobRequest("slurm", start.nodes, start.options)):
        lines.append(f"--gpus-per-node={start.nproc}")
    has_time = bool(named & {"--time", "-t"})
    if start.timeout is not None and not has_time:
        lines.append(f"--time={math.ceil(start.timeout / 60)}")
    if not named & {"--output", "-o"}:
        lines.append("--output=%x-%j.out")
    lines += [shlex.join(words) for words in start.options]
    missing = [] if named & {"--partition", "-p"} else ["a partition"]
    missing += [] if has_time or start.timeout is not None else ["a time"]
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in start.variables.items())
    return _JOB.format(
        name=shlex.quote(script.removesuffix(".py")),
        cpus=cpus,
        nodes=start.nodes,
        others=2 if start.nodes == 1 else 2 * start.nodes,
        missing=", ".join([*missing, "an environment"]),
        more="".join(f"#SBATCH {line}\n" for line in lines),
        file=shlex.quote(file),
        ranks="one rank" if start.nproc == 1 else f"{start.nproc} ranks",
        environment=f"\n{exports}" if exports else "",
        nproc=start.nproc,
        restarts=f"--max-restarts={start.max_restarts} " if start.max_restarts else "",
        script=shlex.quote(script),
    )
