"""Where a rank stops for the user: ``breakpoint()``, an exception, a look from outside, and ``input()``.

The debugger itself is imported on first use: with it comes IPython.
"""

from __future__ import annotations

import _thread
import bdb
import builtins
import getpass
import importlib
import os
import pdb
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

from nblaunch.machine import timeouts
from nblaunch.machine.own_code import is_rank_runtime, is_users
from nblaunch.ranks.kernel_channel import Keyboard
from nblaunch.wire.messages import Closed, Debugging, Look, Opened, OpenedBy, Printed


class Breakpoints:
    """See the module."""

    def __init__(self, keyboard: Keyboard) -> None:
        self._keyboard = keyboard
        self.labels: Mapping[str, str] = {}
        """The notebook's names of cells, by file."""
        self._debuggers: dict[int, Any] = {}
        self._is_looking = False
        self._has_noted: set[tuple[str, int]] = set()
        self._fails = False
        keyboard.look = self._look_in_thread

    # -------------------------------------------------------------- tasks
    def begin_task(self, debugging: Debugging) -> None:
        self._keyboard.can_type, self._fails = debugging.can_type, debugging.fails
        self._has_noted.clear()
        bdb.Breakpoint.clearBreakpoints()  # those that the user has set in earlier tasks
        builtins.input = self._keyboard.input
        getpass.getpass = self._ask_secret
        sys.breakpointhook = self._hook
        pdb.set_trace = self._set_trace  # pdb's own reads stdin
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is not None:
            distributed.breakpoint = self._torchs_breakpoint

    def end_task(self) -> None:
        """Stop tracing, as our own code follows, and close what is open. Keep no frame alive."""
        if self._debuggers:
            sys.settrace(None)
        self._debuggers = {}
        if hasattr(pdb.Pdb, "_last_pdb_instance"):
            pdb.Pdb._last_pdb_instance = None
        if self._is_looking:
            self._keyboard.let_go()
            if self._keyboard.turn.acquire(timeout=timeouts.LOOK_TIMEOUT_S):  # else a command runs on
                self._keyboard.turn.release()

    def _ask_secret(self, prompt: str = "Password: ", stream: object = None, **options: Any) -> str:
        return self._keyboard.input(prompt, is_secret=True)

    # -------------------------------------------------------------- breakpoints
    def _hook(self, *args: Any, **options: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT"):  # "0", or the user's own debugger
            return sys.__breakpointhook__(*args, **options)
        return self._stop(sys._getframe(1), "breakpoint()")

    def _set_trace(self, *args: Any, **options: Any) -> None:
        self._stop(sys._getframe(1), "pdb.set_trace()")

    def _torchs_breakpoint(self, rank: int = 0, *args: Any, **options: Any) -> None:
        """Stop one rank, as `torch.distributed.breakpoint` does. The others wait in their next collective."""
        distributed: Any = sys.modules["torch.distributed"]
        if not distributed.is_initialized() or distributed.get_rank() == rank:
            self._stop(sys._getframe(1), "torch.distributed.breakpoint()")

    def _stop(self, frame: FrameType, call: str) -> None:
        keyboard = self._keyboard
        if keyboard.link.is_stopping:
            return  # ``finally`` has its grace period, and no more
        if not (keyboard.can_type and keyboard.is_here):
            why = "input is not possible here" if keyboard.is_here else "called in a child process of the rank"
            self._pass_by(frame, call, why)
            return
        debugger = self._debuggers.get(_thread.get_ident())
        if debugger is None:
            debugger = self._debuggers[_thread.get_ident()] = self._new("breakpoint")
        if debugger.is_open:
            debugger.message(self._said(frame, call, "already in the debugger"))
        else:
            debugger.set_trace(frame)

    def _said(self, frame: FrameType, call: str, why: str) -> str:
        file = frame.f_code.co_filename
        where = f"{self.labels.get(file) or file}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        return f"{call} at {where} (rank {self._keyboard.link.rank}): {why}"

    def _pass_by(self, frame: FrameType, call: str, why: str) -> None:
        """Go on at a breakpoint where no one can type."""
        place, said = (frame.f_code.co_filename, frame.f_lineno), self._said(frame, call, why)
        if self._fails:
            raise RuntimeError(said)
        if place not in self._has_noted:
            self._has_noted.add(place)
            sys.stderr.write(f"{said}, so the breakpoint is skipped\n")

    # -------------------------------------------------------------- exceptions, and looks
    def examine(self, error: BaseException) -> None:
        """Open the debugger on an exception, with its frames alive, until the user closes it."""
        traceback = error.__traceback__
        while (
            traceback is not None
            and traceback.tb_next is not None
            and is_rank_runtime(traceback.tb_frame.f_code.co_filename)
        ):
            traceback = traceback.tb_next
        if traceback is not None and self._keyboard.can_type:
            debugger = self._new("exception")
            debugger.reset()
            debugger.interaction(None, error.with_traceback(traceback))

    def _look_in_thread(self, message: Look) -> None:
        try:
            _thread.start_new_thread(self._look, (message,))  # `threading` must list the user's threads only
        except RuntimeError as error:  # ulimit -u
            self._say_of_look(f"cannot be inspected: {error}")

    def _look(self, message: Look) -> None:
        if not self._keyboard.turn.acquire(timeout=timeouts.LOOK_TIMEOUT_S / 2):  # the last look may be closing
            return  # a debugger is open
        self._is_looking = True
        try:
            frame = _users_frame(sys._current_frames().get(threading.main_thread().ident or 0))
            if frame is None:
                self._say_of_look("is not running your code now")
                return
            debugger = self._new("look", message.command)
            debugger.reset()
            debugger.interaction(frame, None)
        except KeyboardInterrupt:
            pass  # the task was interrupted: the look is over
        finally:
            self._is_looking = False
            self._keyboard.turn.release()

    def _say_of_look(self, text: str) -> None:
        link = self._keyboard.link
        place = link.rank, link.task
        link.send(Opened(*place, "look", command="place"))
        link.send(Printed(*place, f"{text}\n"))
        link.send(Closed(*place))

    def _new(self, by: OpenedBy, command: str = "") -> Any:
        return importlib.import_module("nblaunch.ranks.debugger").RankDebugger(self._keyboard, by, command)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
