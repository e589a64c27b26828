"""Where a rank stops for the user: ``breakpoint()``, an exception, a look from outside. And ``input()``.

The debugger itself is imported on first use: with it comes IPython.
"""

from __future__ import annotations

import _thread
import builtins
import getpass
import importlib
import os
import pdb
import sys
import threading
from types import FrameType
from typing import Any

from nblaunch.machine import timeouts
from nblaunch.machine.own_code import is_rank_runtime, is_users
from nblaunch.ranks import notebook_names
from nblaunch.ranks.keyboard import Keyboard
from nblaunch.wire.debug_messages import Closed, Debugging, Look, Opened, OpenedBy, Printed


class Breakpoints:
    """See the module.

    Args:
        keyboard: Where the user types.
    """

    def __init__(self, keyboard: Keyboard) -> None:
        self._keyboard = keyboard
        self._debugger: Any = None
        """That of breakpoints: it keeps those that the user sets."""
        self._has_noted: set[tuple[str, int]] = set()
        self._fails = False
        keyboard.look = self._look_in_thread

    # -------------------------------------------------------------- tasks
    def begin_task(self, debugging: Debugging) -> None:
        """Install the hooks for a task."""
        self._keyboard.can_type, self._fails = debugging.can_type, debugging.fails
        self._has_noted.clear()
        self._debugger = None
        builtins.input = self._keyboard.input
        getpass.getpass = self._ask_secret
        sys.breakpointhook = self._hook
        pdb.set_trace = self._set_trace  # pdb's own reads stdin

    def end_task(self) -> None:
        """Stop tracing: our own code follows."""
        if self._debugger is not None:
            sys.settrace(None)

    def _ask_secret(self, prompt: str = "Password: ", stream: object = None, **options: Any) -> str:
        return self._keyboard.input(prompt, is_secret=True)

    # -------------------------------------------------------------- breakpoints
    def _hook(self, *args: Any, **options: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT"):  # "0", or the user's own debugger
            return sys.__breakpointhook__(*args, **options)
        return self._stop(sys._getframe(1), "breakpoint()")

    def _set_trace(self, *args: Any, **options: Any) -> None:
        self._stop(sys._getframe(1), "pdb.set_trace()")

    def _stop(self, frame: FrameType, call: str) -> None:
        keyboard = self._keyboard
        if keyboard.voice.is_stopping:
            return  # ``finally`` has its grace period, and no more
        if not (keyboard.can_type and keyboard.is_here):
            self._pass_by(frame, call)
            return
        if self._debugger is None:
            self._debugger = self._new("breakpoint")
        self._debugger.set_trace(frame)

    def _pass_by(self, frame: FrameType, call: str) -> None:
        """Go on at a breakpoint where no one can type."""
        place = frame.f_code.co_filename, frame.f_lineno
        why = "no one can type here" if self._keyboard.is_here else "this is a child process of the rank"
        said = f"{call} at {place[0]}:{place[1]} in {frame.f_code.co_name} (rank {self._keyboard.voice.rank}): {why}"
        if self._fails:
            raise RuntimeError(said)
        if place not in self._has_noted:
            self._has_noted.add(place)
            sys.stderr.write(f"{said}, so the rank goes on\n")

    # -------------------------------------------------------------- exceptions, and looks
    def examine(self, error: BaseException) -> None:
        """Open the debugger on an exception, with its frames alive, until the user closes it.

        Raises:
            KeyboardInterrupt: The rank was interrupted.
        """
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_next is not None and _is_ours(traceback.tb_frame):
            traceback = traceback.tb_next
        if traceback is not None and self._keyboard.can_type:
            debugger = self._new("exception")
            debugger.reset()
            debugger.interaction(None, error.with_traceback(traceback))

    def _look_in_thread(self, message: Look) -> None:
        _thread.start_new_thread(self._look, (message,))  # `threading` must list the user's threads only

    def _look(self, message: Look) -> None:
        if not self._keyboard.turn.acquire(timeout=timeouts.LOOK_TIMEOUT_S / 2):  # the last look may be closing
            return  # a debugger is open
        try:
            frame = _users_frame(sys._current_frames().get(threading.main_thread().ident or 0))
            if frame is None:
                self._say_idle()
                return
            debugger = self._new("look", message.command)
            debugger.reset()
            debugger.interaction(frame, None)
        except KeyboardInterrupt:
            pass  # the task was interrupted: the look is over
        finally:
            self._keyboard.turn.release()

    def _say_idle(self) -> None:
        voice = self._keyboard.voice
        place = voice.rank, voice.task
        voice.say(Opened(*place, "look", command="place"))
        voice.say(Printed(*place, "runs no code of yours now\n"))
        voice.say(Closed(*place))

    def _new(self, by: OpenedBy, command: str = "") -> Any:
        notebook_names.get_ipython()  # which a spawned rank has not created yet
        return importlib.import_module("nblaunch.ranks.debugger").RankDebugger(self._keyboard, by, command)


def _is_ours(frame: FrameType) -> bool:
    return is_rank_runtime(frame.f_code.co_filename)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's code; None if there is none."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
