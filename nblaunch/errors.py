"""Every error that nblaunch raises on its own account.

The user's exceptions are not here: what a rank raises comes up in the notebook as itself.

    NblaunchError
    ├── ArgumentError (ValueError)        an argument is wrong; nothing was started
    ├── PayloadError (TypeError)          something cannot be sent to the ranks; nothing was started
    ├── NestedLaunchError (RuntimeError)  a rank, or one of several Slurm tasks, tried to launch
    ├── StartError (RuntimeError)         the processes could not be started
    ├── LaunchStoppedError                the launch was stopped before every rank had returned
    ├── LaunchTimeoutError (TimeoutError) the launch took longer than ``timeout``
    └── RankError (RuntimeError)          a rank failed, and there is no exception of the user's to raise
        ├── RankDiedError                 killed by a signal, or left early (with status 0 too)
        ├── RankLostError                 what watched over the ranks died, and took them along
        ├── RankRaisedError               its exception could not travel; this one carries its text
        ├── ResultError                   its result could not come back
        └── CollectiveError               it waited in a collective for a rank that had already finished

Whatever a launch raises has ``results``: what each rank that had returned by then gave back, by rank. So have the
user's own exceptions (unless they have a ``results`` of their own) and the KeyboardInterrupt of a launch that was
interrupted. Where every rank had returned there is no error: a crash after that is warned of, and the result is whole.

Warnings are here too: `warn`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from nblaunch.machine.own_code import PACKAGE


class NblaunchError(Exception):
    """The root of the tree above.

    Attributes:
        results: What each rank that had returned gave back, by rank; empty where nothing was started.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.results: dict[int, object] = {}


class ArgumentError(NblaunchError, ValueError):
    """An argument is wrong. The message names it and its value; nothing was started."""


class PayloadError(NblaunchError, TypeError):
    """Something that the function uses cannot be sent to the ranks; nothing was started."""


class NestedLaunchError(NblaunchError, RuntimeError):
    """A rank, or one of several tasks of a Slurm step, tried to launch ranks of its own."""


class StartError(NblaunchError, RuntimeError):
    """The processes of a launch could not be started."""


class LaunchStoppedError(NblaunchError):
    """The launch was stopped before every rank had returned."""

    def __init__(self, message: str, results: Mapping[int, object] | None = None) -> None:
        super().__init__(message)
        self.results = dict(results or {})


class LaunchTimeoutError(NblaunchError, TimeoutError):
    """The launch took longer than its ``timeout`` and was stopped."""


class RankError(NblaunchError, RuntimeError):
    """A rank failed.

    Attributes:
        rank: The rank that failed first, or -1 where no single rank did.
        log: The file that holds what it printed to stderr, or None.
    """

    def __init__(self, message: str, rank: int = -1, log: Path | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.log = log


class RankDiedError(RankError):
    """A rank was killed by a signal, or left before the function returned.

    Attributes:
        returncode: Its exit status; ``-n`` for death by signal ``n``.
    """

    returncode: int = 0


class RankLostError(RankError):
    """The process that watched over the ranks died; every rank was ended with it."""


class RankRaisedError(RankError):
    """A rank raised an exception that cannot be rebuilt here; the message carries its type and text."""


class ResultError(RankError):
    """A rank's return value could not come back; the message names the part."""


class CollectiveError(RankError):
    """A rank waited in a collective for a rank that had already finished."""


def text_of(error: BaseException) -> str:
    """``str(error)``, or what stands for it where that raises."""
    try:
        return str(error)
    except Exception as trouble:  # noqa: BLE001  # a user's __str__
        return f"<its __str__ raised {type(trouble).__name__}>"


def warn(message: str) -> None:
    """Issue a UserWarning at the line of the first caller outside this package."""
    if sys.version_info >= (3, 12):
        warnings.warn(message, stacklevel=2, skip_file_prefixes=(PACKAGE,))
    else:
        level, frame = 2, sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
            level, frame = level + 1, frame.f_back
        warnings.warn(message, stacklevel=level)
