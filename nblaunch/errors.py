"""The exceptions that nblaunch raises itself, and its warnings.

An exception of the user's function is not wrapped: it is raised in the notebook as itself.

    NblaunchError
    ├── ArgumentError (ValueError)        an argument is wrong; nothing was started
    │   └── UnknownArgumentError (TypeError)  a function has no argument of this name
    ├── PayloadError (TypeError)          an object cannot be sent, rebuilt there, or exported; nothing has run
    ├── NestedLaunchError (RuntimeError)  a rank, or one of several Slurm tasks, tried to launch
    ├── StartError (RuntimeError)         the processes could not be started
    ├── LaunchStoppedError                the launch was stopped before every rank had returned
    ├── LaunchTimeoutError (TimeoutError) the launch exceeded ``timeout``
    └── RankError (RuntimeError)          a rank failed without a user exception to raise
        ├── RankDiedError                 killed by a signal, or exited early (even with status 0)
        │   └── NodeLostError             its node is lost: power, network, or the agent
        ├── RankLostError                 the reaper died, and its ranks with it
        ├── RankRaisedError               its exception could not be sent, or is SystemExit; the message has its text
        ├── ResultError                   its return value could not be sent
        └── CollectiveError               it waited in a collective for a rank that had finished

Every exception of a launch has ``results``: the return values of the ranks that had returned, by rank. So do the user's
exceptions (unless they define ``results``) and the KeyboardInterrupt of an interrupted launch. Once every rank has
returned there is no error: a later crash is a warning, and the result is complete.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nblaunch.machine.own_code import PACKAGE, users_part


class NblaunchError(Exception):
    """Base class of nblaunch's exceptions.

    Attributes:
        results: The return values of the ranks that had returned, by rank; empty if nothing was started.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.results: dict[int, object] = {}

    def _render_traceback_(self) -> list[str]:
        """Return IPython's traceback without nblaunch's frames. Called by IPython."""
        shell = sys.modules["IPython"].get_ipython()
        trace = users_part(self.__traceback__)
        lines: list[str] = shell.InteractiveTB.structured_traceback(type(self), self, trace, tb_offset=0)
        return lines


class ArgumentError(NblaunchError, ValueError):
    """An argument is wrong; nothing was started. The message names the argument and its value."""


class UnknownArgumentError(ArgumentError, TypeError):
    """A function has no argument of this name. The message suggests the closest name."""


class PayloadError(NblaunchError, TypeError):
    """An object that the function uses cannot be sent to the ranks, rebuilt there, or exported; nothing has run."""


class NestedLaunchError(NblaunchError, RuntimeError):
    """A rank, or one of several tasks of a Slurm step, tried to launch."""


class StartError(NblaunchError, RuntimeError):
    """The processes of a launch could not be started."""


class LaunchStoppedError(NblaunchError):
    """The launch was stopped before every rank had returned."""

    def __init__(self, message: str, results: Mapping[int, object] | None = None) -> None:
        super().__init__(message)
        self.results = dict(results or {})


class LaunchTimeoutError(NblaunchError, TimeoutError):
    """The launch exceeded its ``timeout`` and was stopped."""


class RankError(NblaunchError, RuntimeError):
    """A rank failed.

    Attributes:
        rank: The rank that failed first; -1 if no single rank did.
        log: The rank's stderr log, or None.
    """

    def __init__(self, message: str, rank: int = -1, log: Path | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.log = log


class RankDiedError(RankError):
    """A rank was killed by a signal, or exited before the function returned.

    Attributes:
        returncode: The exit status; ``-n`` if killed by signal ``n``.
    """

    returncode: int = 0


class NodeLostError(RankDiedError):
    """The node of a rank is lost, and every rank there with it."""


class RankLostError(RankError):
    """The reaper, the parent process of the ranks, died, and every rank was killed with it."""


class RankRaisedError(RankError):
    """A rank raised an exception that cannot be raised here; the message has its type and text."""


class ResultError(RankError):
    """A rank's return value could not be sent; the message names the part."""


class CollectiveError(RankError):
    """A rank waited in a collective for a rank that had finished."""


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or a placeholder if ``__str__`` raises."""
    try:
        return str(error)
    except Exception as trouble:  # noqa: BLE001  # a user's __str__
        return f"<its __str__ raised {type(trouble).__name__}>"


def add_note(error: Any, note: str) -> None:
    """Add a note to an exception, as Python 3.11's ``add_note`` does."""
    if isinstance(getattr(error, "__notes__", None), list):
        error.__notes__.append(note)
    else:
        error.__notes__ = [note]


_said: set[str] = set()
_SKIPPED = (PACKAGE, contextlib.__file__)  # a context manager of ours is entered by contextlib's code


def warn(message: str, *, each_time: bool = False, once: str = "") -> None:
    """Issue a UserWarning at the line of the first caller outside this package.

    Args:
        message: What to say.
        each_time: Say it again if it was said at this line before. Default: False.
        once: A name of what is said, which this process says once only, wherever it is. Default: once at each line.
    """
    if once in _said:
        return
    _said.update([once] if once else [])
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        level, frame = level + 1, frame.f_back
    if each_time:
        warnings.warn_explicit(
            message, UserWarning, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
        )
    elif sys.version_info >= (3, 12):
        warnings.warn(message, stacklevel=2, skip_file_prefixes=_SKIPPED)
    else:
        warnings.warn(message, stacklevel=level)
