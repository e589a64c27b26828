"""Which lines of the user's program led here, past those of libraries: torch's, a progress bar's, our own."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

LIBRARIES = (
    str(Path(__file__).parents[1]) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
    "<frozen ",
)
"""What the names of files begin with that are not the user's."""


def users_lines(most: int) -> list[tuple[str, int]]:
    """(file, line number) of the user's calls that led here, the innermost first."""
    return [(frame.f_code.co_filename, frame.f_lineno) for frame in _frames() if _is_users(frame)][:most]


def users_text() -> str:
    """The line of the user's program that led here; empty where its source is not to be had."""
    innermost = users_lines(1)
    return linecache.getline(*innermost[0]) if innermost else ""


def package_outside(module: str) -> str:
    """The top name of the module that called `module`, such as ``accelerate``; empty if it has none."""
    names = [str(frame.f_globals.get("__name__")) for frame in _frames()]
    outside = [name for name in names if name not in (__name__, module)]
    return outside[0].partition(".")[0] if outside else ""


def _frames() -> list[FrameType]:
    """This function's own, its caller's, and all that led there."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(LIBRARIES)
