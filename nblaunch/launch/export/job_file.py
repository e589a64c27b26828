"""How a script is started: the command for torchrun, and the job file for Slurm."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

_JOB = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
{more}#SBATCH --output=%x-%j.out
#
# Submit it with `sbatch {file}`, or on other nodes with `sbatch --nodes=2 {file}`. Each node runs one torchrun,
# which starts {ranks}. Add what your cluster needs: a partition, a time, an environment.

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
    """

    nproc: int
    device: str
    env: Mapping[str, str]
    threads: int | None
    max_restarts: int
    timeout: float | None
    nodes: int = 1

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables, with the one for the threads."""
        return {**({} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}), **self.env}


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
    more = ""
    if start.device == "cuda":
        more += f"#SBATCH --gpus-per-node={start.nproc}\n"
    if start.timeout is not None:
        more += f"#SBATCH --time={math.ceil(start.timeout / 60)}\n"
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in start.variables.items())
    return _JOB.format(
        name=shlex.quote(script.removesuffix(".py")),
        cpus=start.nproc * (start.threads or 1),
        nodes=start.nodes,
        more=more,
        file=shlex.quote(file),
        ranks="one rank" if start.nproc == 1 else f"{start.nproc} ranks",
        environment=f"\n{exports}" if exports else "",
        nproc=start.nproc,
        restarts=f"--max-restarts={start.max_restarts} " if start.max_restarts else "",
        script=shlex.quote(script),
    )
