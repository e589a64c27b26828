"""The paths of a launch's files.

A launch has two directories. The log directory is kept for the user; the scratch directory is removed after the last
rank's exit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias

Directory: TypeAlias = "str | os.PathLike[str]"
RankFile = Literal["out", "err", "spool", "stacks", "error.json"]
"""What a rank writes to fd 1 and fd 2, its reports, its stack dumps, and what torch's ``@record`` writes."""
LOCK = "live"
"""In the log directory: locked while the directory must not be pruned."""


def rank_file(log_dir: Directory, rank: int, kind: RankFile) -> Path:
    """Return the path of one file of a rank in the log directory."""
    return Path(log_dir, f"rank{rank}.{kind}")


def output_file(log_dir: Directory, rank: int, key: str, suffix: str) -> Path:
    """Return the path of what a rank has displayed, such as a figure."""
    return Path(log_dir, f"rank{rank}-output{key}.{suffix}")


def stacks_pipe(scratch: Directory, rank: int) -> Path:
    """Return the path of the FIFO that asks a rank for its stacks."""
    return Path(scratch, f"rank{rank}.ask")


def drop_counters(scratch: Directory) -> Path:
    """Return the path of the table that counts what ranks could not write."""
    return Path(scratch, "drops")


def collective_rows(scratch: Directory) -> Path:
    """Return the path of the table of the ranks' collectives."""
    return Path(scratch, "collectives")
