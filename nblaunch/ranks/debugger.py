"""IPython's debugger in a rank: ``breakpoint()``, post-mortem, and a look at a rank that runs on.

The user types in the notebook; lines come through a `Keyboard`. Quitting asks the kernel to stop the task: the
interrupt, not ``BdbQuit``, ends the call, so that ``finally`` blocks and the other ranks see what Stop does.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import linecache
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

from IPython.core import debugger as ipythons
from IPython.core.debugger import Pdb

from nblaunch.errors import text_of
from nblaunch.machine import timeouts
from nblaunch.machine.own_code import is_rank_runtime
from nblaunch.ranks.kernel_channel import Keyboard
from nblaunch.wire.messages import Closed, Opened, OpenedBy, Printed

_MAX_ERROR = 1000
_MAX_TEXT = 1 << 20
_TAKES_EXCEPTIONS = hasattr(ipythons, "CHAIN_EXCEPTIONS")  # from IPython 8.15 on: its command `exceptions`
_MOVES = {"continue", "next", "return", "step", "until"}
_REFUSED = {"commands": "", "debug": "", "interact": "; type statements at this prompt", "run": "; run the cell again"}
_PAUSES = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class _Interrupted(BaseException):
    """KeyboardInterrupt in the debugger, which would swallow it."""


class RankDebugger(Pdb):
    """The debugger of one thread, which holds the keyboard's turn while it is open. It may run one `command` alone."""

    def __init__(self, keyboard: Keyboard, by: OpenedBy, command: str = "") -> None:
        self._screen = Screen(keyboard)
        self._continues = False
        """The line that is read continues a statement."""
        super().__init__(stdin=self, stdout=self._screen, nosigint=True, readrc=False)
        self.prompt = ""
        self.report_skipped = False
        self._keyboard, self._by = keyboard, by
        self._steps = self._has_quit = False
        self._command = command
        self.is_open = False

    # -------------------------------------------------------------- open and close
    def interaction(self, frame: FrameType | None, tb_or_exc: Any) -> None:
        keyboard, link = self._keyboard, self._keyboard.link
        self._steps = False
        with keyboard.turn:
            self.is_open, self._screen.thread = True, threading.get_ident()
            self._screen.others = sys.stdout if sys.stdout is not self._screen else self._screen.others
            error = tb_or_exc if isinstance(tb_or_exc, BaseException) else None
            link.send(self._opened(frame, error))
            if error is not None and not _TAKES_EXCEPTIONS:
                tb_or_exc = error.__traceback__
            try:
                super().interaction(frame, tb_or_exc)  # type: ignore[no-untyped-call]
            except _Interrupted:
                sys.settrace(None)
                self.set_continue()
                raise KeyboardInterrupt from None
            finally:
                self.is_open = False
                if frame is not None:
                    frame.f_globals.pop("__pdb_convenience_variables", None)  # $_frame, which keeps the frame alive
                self._screen.send()
                link.send(Closed(link.rank, link.task, steps=self._steps, quits=self._has_quit))
        if self._has_quit:
            self._await_the_stop()
        if link.interrupted and self._by == "breakpoint":  # while it printed, which IPython swallows
            raise KeyboardInterrupt

    def _opened(self, frame: FrameType | None, error: BaseException | None) -> Opened:
        link, line = self._keyboard.link, frame.f_lineno if frame is not None else 0
        traceback = error.__traceback__ if error is not None else None
        while traceback is not None:
            frame, line, traceback = traceback.tb_frame, traceback.tb_lineno, traceback.tb_next
        where = (frame.f_code.co_filename, line, frame.f_code.co_name) if frame is not None else ("", 0, "")
        text = f"{type(error).__name__}: {text_of(error)}".rstrip(": ")[:_MAX_ERROR] if error is not None else ""
        return Opened(link.rank, link.task, self._by, *where, text, self._command)

    def stop_here(self, frame: FrameType) -> bool:
        return not is_rank_runtime(frame.f_code.co_filename) and bool(super().stop_here(frame))  # type: ignore[no-untyped-call]

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Stop tracing when the user's code returns to nblaunch. A coroutine or generator may have paused only."""
        traced = super().dispatch_return(frame, arg)
        if (
            frame.f_back is None
            or not is_rank_runtime(frame.f_back.f_code.co_filename)
            or frame.f_code.co_flags & _PAUSES
        ):
            return traced
        sys.settrace(None)
        return None

    def _cmdloop(self) -> None:
        try:
            self.cmdloop()
        except KeyboardInterrupt:
            raise _Interrupted from None

    def _await_the_stop(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise KeyboardInterrupt
        while not self._keyboard.link.interrupted:
            time.sleep(timeouts.TYPED_CHECK_INTERVAL_S)
        raise KeyboardInterrupt  # it came between two lines of ours

    def readline(self) -> str:
        """Called by pdb, which takes this for its stdin."""
        self._screen.send()
        with contextlib.suppress(EOFError):
            return self._keyboard.ask("", is_command=not self._continues) + "\n"
        return ""

    def preloop(self) -> None:
        if self._command:
            self.cmdqueue += [self._command, "q"]
        super().preloop()

    def postcmd(self, stop: bool, line: str) -> bool:
        """Close after an interrupt, which pdb reports as an error of the command."""
        if self._keyboard.link.interrupted:
            raise _Interrupted
        return super().postcmd(stop, line)

    def print_stack_entry(self, *args: Any, **options: Any) -> None:
        if not self._command:
            super().print_stack_entry(*args, **options)

    @contextlib.contextmanager
    def _disable_command_completion(self) -> Iterator[None]:
        """Read the rest of a statement. IPython 9.18 calls this, and pdb has it from Python 3.13 on."""
        self._continues = True
        try:
            yield
        finally:
            self._continues = False

    # -------------------------------------------------------------- commands
    def onecmd(self, line: str) -> bool:
        """Refuse what has no place in a rank, and what needs a rank that has stopped at a breakpoint."""
        command, arg, _ = self.parseline(line)
        name = getattr(getattr(self, f"do_{command}", None), "__name__", "").removeprefix("do_")  # do_n is do_next
        moves = name in _MOVES
        self._steps = moves and self._by == "breakpoint" and (name != "continue" or bool(self.breaks))
        if name in _REFUSED:
            self.error(f"{name}: not supported in a rank{_REFUSED[name]}")
        elif self._by == "breakpoint" or not (moves or name == "jump" or (name in ("break", "tbreak") and arg)):
            return super().onecmd(line)
        elif not moves:
            self.error(f"{name}: only available at a breakpoint")
        elif self._by == "look":
            self.message("This rank is running and cannot be stepped; type q to close the debugger")
        return moves and self._by == "exception"  # nothing goes on after one

    def do_quit(self, arg: str) -> bool:
        """q(uit): close the debugger. At a breakpoint, also interrupt all ranks of the launch."""
        if self._by == "breakpoint":
            self._has_quit = True
            self.set_continue()
        return True

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool:  # noqa: N802  # cmd's name
        """Quit."""
        return self.do_quit(arg)

    def do_pinfo(self, arg: str, detail_level: int = 0) -> None:
        """pinfo: print the documentation of an object, as ``x?`` does."""
        try:
            found = self._getval(arg)
        except Exception:  # noqa: BLE001  # which pdb has printed
            return
        self.message(str(self.shell.inspector._get_info(found, arg, detail_level=detail_level)["text/plain"]).rstrip())

    def do_pinfo2(self, arg: str) -> None:
        """pinfo2: print the documentation and the source of an object, as ``x??`` does."""
        self.do_pinfo(arg, detail_level=1)

    def do_place(self, arg: str) -> None:
        """place: print the current line and its location."""
        frame, line = self.stack[self.curindex]
        source = linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()
        self.message(f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}: {source}")


class Screen(io.TextIOBase):
    """Where the debugger prints: text goes to the notebook before each request for a line.

    It stands in for ``sys.stdout`` while a command runs. What other threads print meanwhile goes where it would go.
    """

    def __init__(self, keyboard: Keyboard) -> None:
        super().__init__()
        self._keyboard = keyboard
        self._parts: deque[str] = deque()
        self.thread = 0
        """The debugger's."""
        self.others: Any = sys.stdout
        """Where other threads print."""

    def write(self, text: str, /) -> int:
        if threading.get_ident() != self.thread:
            return int(self.others.write(text))
        self._parts.append(text)
        return len(text)

    def send(self) -> None:
        text = "".join(self._parts.popleft() for _ in range(len(self._parts)))
        if len(text) > _MAX_TEXT:
            text = f"{text[:_MAX_TEXT]}\n… {len(text) - _MAX_TEXT:,} more characters\n"
        if text:
            link = self._keyboard.link
            link.send(Printed(link.rank, link.task, text))
