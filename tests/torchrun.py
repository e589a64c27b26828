"""torchrun, for scripts that tests run without a notebook."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TORCHRUN = Path(sys.executable).with_name("torchrun")
_TIMEOUT_S = 300
_ABORTED = "terminate called without an active exception"
"""What any script under torchrun rarely says when it exits on a loaded machine: threads of torch 2.14 still run."""


def torchrun(script: Path, *arguments: str, options: tuple[str, ...] = ("--standalone",), **env: str) -> str:
    """Run a script on two CPU ranks in its own folder, and return what it prints; again if torch aborts at its exit.

    Args:
        script: The script. Beside it torchrun's temporary files go to `tmp`.
        arguments: The script's.
        options: torchrun's, besides the number of ranks.
        env: More variables.
    """
    temporary = script.with_name("tmp")
    temporary.mkdir(exist_ok=True)
    environment: Mapping[str, str] = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(temporary),
        **env,
    }
    command = [str(TORCHRUN), *options, "--nproc-per-node", "2", str(script), *arguments]
    for _ in range(3):
        done = subprocess.run(
            command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if _ABORTED not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
