"""Whose code a stack frame runs: nblaunch's, a library's or the user's. Judged by the directory of the frame's file."""

from __future__ import annotations

import os
import sysconfig
from types import TracebackType

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The directory of nblaunch, with a separator at the end."""
RANK_WORKER = os.path.join(PACKAGE, "ranks", "worker.py")
"""Its first frame is where a rank begins; older frames belong to the process that was forked."""
COLLECTIVE_LOG = os.path.join(PACKAGE, "ranks", "collective_log.py")
"""With torch < 2.14 its frames stand between torch.distributed's Python code and its C code."""
RANK_THREADS = tuple(os.path.join(PACKAGE, "ranks", f"{name}.py") for name in ("stack_dumps", "kernel_channel"))
"""Their functions run in threads of their own, which dump stacks and read the kernel's messages."""


def _as_dumped(path: str) -> str:
    """Escape a path as faulthandler does."""
    return path.encode("ascii", "backslashreplace").decode()


_RANK_RUNTIME = (os.path.join(PACKAGE, "ranks", ""), os.path.join(PACKAGE, "training", "distribute.py"))
_IN_RANK_RUNTIME = (*_RANK_RUNTIME, *map(_as_dumped, _RANK_RUNTIME))
_IN_PACKAGE_OR_STDLIB = (PACKAGE, _as_dumped(PACKAGE), os.path.join(sysconfig.get_path("stdlib"), ""))
_INTERACTIVE = ("<stdin>", "<python-input-", "<ipython-input-", "<distributed cell")
"""Code that the user typed."""
_INSTALLED = tuple(
    f"{separator}{name}{separator}" for separator in "/\\" for name in ("site-packages", "dist-packages")
)


def is_file(filename: str, ours: str) -> bool:
    """Return True if `filename`, as a frame names it, is this file of the package."""
    return os.path.normpath(filename) == ours


def is_rank_runtime(filename: str) -> bool:
    """Return True for the files whose frames stand between a rank's start and the user's function."""
    return os.path.normpath(filename).startswith(_IN_RANK_RUNTIME)


def is_users(filename: str) -> bool:
    """Return True unless the file is nblaunch's, an installed library's, or generated code such as ``<string>``."""
    if filename.startswith("<"):
        return filename.startswith(_INTERACTIVE)
    filename = os.path.normpath(filename)  # an entry of sys.path may be "..": frames then name /a/b/../nblaunch/...
    return not (filename.startswith(_IN_PACKAGE_OR_STDLIB) or any(directory in filename for directory in _INSTALLED))


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the user's first frame to the user's last, without nblaunch's; None if there is none."""
    frames: list[TracebackType] = []
    while trace is not None:
        if frames or is_users(trace.tb_frame.f_code.co_filename):
            frames.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for each in reversed(frames):
        file = each.tb_frame.f_code.co_filename
        is_own = os.path.normpath(file).startswith(PACKAGE)
        if is_users(file) or (found is not None and not is_own):
            found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found
