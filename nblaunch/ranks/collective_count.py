"""The collectives that a kept rank has begun in its default process group, and the user's line of the last one.

torch calls a hook before each collective, also those of DDP's backward pass. Versions before 2.14 have no such hook:
there nothing is counted. A thread of the user, such as one that saves a checkpoint, is not counted: it may be anywhere
when a cell ends.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from types import FrameType
from typing import Any

from nblaunch.machine.own_code import is_users
from nblaunch.wire.session_messages import Begun

_HOOK_ID = 0x6E626C
"""Names our hook in the group."""
_POINT_TO_POINT = {"SEND", "RECV", "SPLIT", "NEW_WINDOW"}
"""Operations that not every rank must call."""
_is_users = functools.lru_cache(maxsize=4096)(is_users)


class CollectiveCount:
    """See the module. Used from the thread of the tasks."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._group: Any = None
        self._count = self._transfers = 0
        self._is_counted = False
        self._last = ("", "", 0)
        """What was called, file and line."""

    def watch(self) -> None:
        """Count the collectives of the present default group, from none if it is another than before."""
        dist: Any = sys.modules.get("torch.distributed")
        group = dist.group.WORLD if dist is not None and dist.is_available() and dist.is_initialized() else None
        self._transfers = 0
        if group is self._group:
            return
        self._group, self._count, self._last = group, 0, ("", "", 0)
        register = getattr(group, "register_pre_hook", None)
        self._is_counted = register is not None
        if register is not None:
            register(_HOOK_ID, self._note)

    def begun(self) -> Begun:
        """Return what was counted."""
        return Begun(self._count, *self._last, self._transfers, self._is_counted)

    def _note(self, call: Any) -> None:
        name = call.name.name
        frame: FrameType | None = sys._getframe().f_back
        is_other_threads = frame is not None and threading.get_ident() != self._thread  # autograd's have no frame
        if name in _POINT_TO_POINT or is_other_threads:
            self._transfers += 1
            return
        self._count += 1
        with contextlib.suppress(Exception):  # counting must never fail a collective
            while frame is not None and not _is_users(frame.f_code.co_filename):
                frame = frame.f_back
            place = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
            self._last = (name.lower() + _size_of(call.input_tensors or call.output_tensors), *place)


def _size_of(tensors: Any) -> str:
    """Return the size of the first tensor, such as `` of 8 float32``."""
    if not tensors:
        return ""
    first = tensors[0]
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f" of {first.numel()} {str(first.dtype).removeprefix('torch.')}{more}"
