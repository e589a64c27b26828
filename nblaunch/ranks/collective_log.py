"""The collectives that a rank has begun, by process group, with the user's line of the last one.

torch calls a hook before each collective of a process group, also for those of DDP's backward pass. Versions before
2.14 have no such hook: there nothing is logged. Collectives of a thread of the user, such as one that saves a
checkpoint, are not logged: the thread may be anywhere when the rank is looked at.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from nblaunch.machine.own_code import is_users
from nblaunch.wire.collective_table import Begun, CollectiveRows, in_ranges
from nblaunch.wire.session_messages import CollectivesBegun

_HOOK_ID = 0x6E626C
"""Names our hook in a group."""
_POINT_TO_POINT = {"SEND", "RECV", "SPLIT", "NEW_WINDOW"}
"""Operations that not every rank of a group calls."""
_is_users = functools.lru_cache(maxsize=4096)(is_users)


@dataclass(slots=True)
class _Group:
    """A process group, and what was begun in it."""

    name: str
    members: str
    count: int = 0
    last: Begun = field(default_factory=Begun)


class CollectiveLog:
    """See the module. Used from the thread of the tasks."""

    def __init__(self) -> None:
        self._thread = 0
        self._rows: CollectiveRows | None = None
        self._default: _Group | None = None
        self._transfers = 0

    def open(self, scratch: str, rank: int) -> None:
        """Log to this rank's rows of the table, for the kernel, from now on."""
        self._thread = threading.get_ident()
        self._rows = CollectiveRows(scratch, rank)

    def begin_task(self) -> None:
        """Count the point-to-point operations of another task."""
        self._transfers = 0

    def begun(self) -> CollectivesBegun:
        """Return what was begun in the default process group."""
        if self._default is None:
            return CollectivesBegun(transfers=self._transfers)
        return CollectivesBegun(self._default.last, self._transfers, is_counted=True)

    def watch(self, group: Any, ranks: Any) -> None:
        """Log the collectives of a new process group.

        Args:
            group: The group.
            ranks: Its global ranks; empty for the default group.
        """
        register = getattr(group, "register_pre_hook", None)
        if register is None or self._rows is None:
            self._default = self._default if ranks else None
            return
        made = _Group(str(group.group_name), in_ranges(ranks) if ranks else "")
        if not ranks:
            self._default = made
        register(_HOOK_ID, functools.partial(self._note, made))

    def _note(self, group: _Group, call: Any) -> None:
        name = call.name.name
        frame: FrameType | None = sys._getframe().f_back
        is_other_threads = frame is not None and threading.get_ident() != self._thread  # autograd's have no frame
        if is_other_threads:
            return
        is_transfer = name in _POINT_TO_POINT
        self._transfers += is_transfer
        group.count += not is_transfer
        with contextlib.suppress(Exception):  # logging must never fail a collective
            while frame is not None and not _is_users(frame.f_code.co_filename):
                frame = frame.f_back
            file, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
            detail = _size_of(call.input_tensors or call.output_tensors)
            begun = Begun(group.count, line, time.monotonic_ns(), group.name, group.members, name.lower(), detail, file)
            if not is_transfer:
                group.last = begun
            if self._rows is not None:
                self._rows.write(begun)


def _size_of(tensors: Any) -> str:
    """Return the size of the first tensor, such as ``8 float32``."""
    if not tensors:
        return ""
    first = tensors[0]
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{first.numel()} {str(first.dtype).removeprefix('torch.')}{more}"


collective_log = CollectiveLog()
"""This process's."""
