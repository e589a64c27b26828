"""munge, by which Slurm's machines know a user: a credential proves that a process of this user has made it.

https://github.com/dun/munge: a credential is encrypted with a key that all machines of a cluster share, and each can be
read once.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from nblaunch.machine import timeouts


def is_available() -> bool:
    """Return True if this machine makes credentials."""
    return shutil.which("munge") is not None and _run(["munge", "--no-input", "--no-output"], "") is not None


def credential(text: str) -> str:
    """Return a credential with a text; empty if this machine makes none."""
    return (_run(["munge"], text) or "").strip()


def is_own(made: str, text: str) -> bool:
    """Return True if a process of this user, on a machine of the cluster, has made a credential with this text.

    A second look at the same credential returns False.
    """
    said = _run(["unmunge", "--numeric"], made)
    if said is None:
        return False
    head, _, body = said.partition("\n\n")
    fields = dict(line.partition(":")[::2] for line in head.splitlines())
    return fields.get("UID", "").strip() == str(os.getuid()) and body == text


def _run(command: list[str], text: str) -> str | None:
    """Return what a command prints; None if it fails."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=timeouts.PROGRAM_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
