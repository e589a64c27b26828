"""A rank's side of its channel to the kernel: tasks come by it, which of them a SIGINT belongs to, and typed lines."""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from nblaunch.machine import processes, timeouts
from nblaunch.ranks import process_group
from nblaunch.ranks.report import Deferral
from nblaunch.wire.channel import Channel, LostDescriptorsError
from nblaunch.wire.messages import (
    Asked,
    Closed,
    Free,
    Interrupt,
    Interrupted,
    Look,
    Opened,
    StartProfile,
    Task,
    Typed,
)

_SIGNAL_AGAIN_AFTER_S = (0.05, 0.2, 0.8)


class KernelChannel:
    """The rank's channel to the kernel, and its SIGINT handler. A thread reads it, also while the rank waits in a call.

    The first SIGINT of a task, and only the first, raises KeyboardInterrupt: editors signal every descendant, then
    the kernel does, and a second KeyboardInterrupt would cut a ``finally`` in the middle of a checkpoint.

    A SIGINT carries no task, and may arrive late. So the kernel sends `Interrupt`, and the thread sends the process its
    SIGINT right after it. Another SIGINT, from an editor, counts for the task that runs.
    """

    def __init__(self, channel: Channel, rank: int) -> None:
        self.channel = channel
        self.rank = rank
        self.owner = os.getpid()
        self.task = 0
        self.armed = False
        """Whether SIGINT raises KeyboardInterrupt now."""
        self.keyboard = Keyboard(self)
        self.profile: Callable[[StartProfile], None] = lambda asked: None
        self._asked = 0
        """The last task that the kernel wants to interrupt."""
        self._seen = 0
        """The last task whose SIGINT has arrived."""
        self._answered = 0
        """The last task whose SIGINT was acknowledged."""
        self._overtaken = 0
        """The later task whose interrupt has ended the running one."""
        self._deferral: Deferral | None = None
        self._handled = 0
        """SIGINTs so far."""
        self._waits = False
        """The interrupt was acknowledged, and its KeyboardInterrupt waits."""
        self._speaking = False
        """The main thread sends a message."""
        self._turn = threading.Lock()
        self._arriving: queue.SimpleQueue[tuple[Task, list[int]] | None] = queue.SimpleQueue()
        self._main = threading.main_thread().ident or 0
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # Ray blocks SIGINT on its nodes
        signal.signal(signal.SIGINT, self._on_interrupt)
        is_ignored = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        # Slurm sends SIGTERM to all processes of a node that it takes back, and agents ignore it for their children.
        signal.signal(signal.SIGTERM, self._on_interrupt if is_ignored else signal.SIG_DFL)
        _thread.start_new_thread(self._read, ())  # `threading` must list the user's threads only

    @property
    def interrupted(self) -> bool:
        return 0 < self.task == self._seen

    @property
    def is_stopping(self) -> bool:
        """Return True if the current task is to be interrupted: its SIGINT may not have arrived yet."""
        return self.interrupted or self._asked >= self.task > 0

    def next_task(self) -> tuple[Task, list[int]] | None:
        received = self._arriving.get()
        if received is not None:
            signal.signal(signal.SIGINT, self._on_interrupt)  # a cell may have replaced it
            self._deferral, self._waits = None, False
            self.task = received[0].task
            if self._asked == self.task:  # interrupted while it was queued
                self._seen = self.task
        return received

    def defer(self, deferral: Deferral | None) -> None:
        """Set what decides when an interrupt of this task takes effect.

        None: at once. If it has come already, who deferred it raises KeyboardInterrupt, and a later SIGINT does not.
        """
        self._deferral, self._waits = deferral, False

    def send(self, message: object, *fds: int) -> None:
        """Send a message. An interrupt meanwhile takes effect right after it: a handler cannot send in its middle.

        Blocking the signal would not do: if another thread takes it, Python still runs the handler in this one.
        """
        if os.getpid() != self.owner:
            return  # a forked child, such as a DataLoader worker, must not speak for its rank
        if _thread.get_ident() != self._main:
            self._send(message, fds)
            return
        self._speaking = True
        try:
            self._send(message, fds)
        finally:
            self._speaking = False
            if self._answered < self._seen == self.task:
                self._answer()

    def _send(self, message: object, fds: tuple[int, ...]) -> None:
        with self._turn, contextlib.suppress(OSError):  # the kernel is gone; the reaper is about to end this process
            self.channel.send(message, fds)

    # -------------------------------------------------------------- the reading thread
    def _read(self) -> None:
        processes.leave_signals_to_main_thread()
        try:
            while (received := self._receive()) is not None:
                message, fds = received
                if isinstance(message, Task):
                    self._arriving.put((message, fds))
                elif isinstance(message, Interrupt):
                    self._asked = max(self._asked, message.task)
                    handled = self._handled
                    signal.pthread_kill(self._main, signal.SIGINT)
                    with contextlib.suppress(RuntimeError):  # no thread can be started
                        _thread.start_new_thread(self._signal_again, (handled,))
                    self.keyboard.wake()
                    deferral = self._deferral
                    if deferral is not None and message.task == self.task:  # the main thread may wait in C
                        deferral.ask()
                elif isinstance(message, Free) and message.task >= self.task:  # a later one waits for this one
                    with contextlib.suppress(Exception):  # it is asked again, and then killed
                        process_group.cut()  # before the next task is read
                elif isinstance(message, Typed) and message.task == self.task:
                    self.keyboard.lines.put(message)
                elif isinstance(message, Look) and message.task == self.task:
                    self.keyboard.look(message)
                elif isinstance(message, StartProfile) and message.task == self.task:
                    self.profile(message)
        finally:
            self._arriving.put(None)
            self.keyboard.wake()

    def _signal_again(self, handled: int) -> None:
        """Send SIGINT again if its handler has not run. Runs in a thread of its own.

        A signal that comes after the interpreter's last look for one, and before a call such as ``time.sleep`` blocks,
        does not end the call. The reading thread gets the lock of the interpreter just then.
        """
        processes.leave_signals_to_main_thread()
        for seconds in _SIGNAL_AGAIN_AFTER_S:
            time.sleep(seconds)
            if self._handled != handled or signal.getsignal(signal.SIGINT) != self._on_interrupt:
                return
            signal.pthread_kill(self._main, signal.SIGINT)

    def _receive(self) -> tuple[object, list[int]] | None:
        """Wait for a message; None at EOF. A task that has lost its descriptors fails, and the rank lives on."""
        try:
            return self.channel.receive()
        except LostDescriptorsError as lost:
            return lost.message, []
        except OSError:  # user code has closed the descriptor
            return None

    # -------------------------------------------------------------- the signal
    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._handled += 1
        if self._asked > self.task:  # the kernel has given up the running task, and wants a later one to stop
            if self.armed and self._overtaken < self._asked:
                self._overtaken = self._asked
                raise KeyboardInterrupt
            return
        if self._seen < self._asked < self.task:  # for a task that has ended
            self._seen = self._asked
            return
        self._seen = max(self._seen, self.task)
        if self._answered < self._seen == self.task and not self._speaking:
            self._answer()
        elif self._waits and not self._speaking:
            self._take_effect()

    def _answer(self) -> None:
        self._answered = self._seen
        self.send(Interrupted(self.rank, self._seen))
        self._take_effect()

    def _take_effect(self) -> None:
        """Raise KeyboardInterrupt, unless it may wait."""
        deferral = self._deferral
        if deferral is not None and os.getpid() != self.owner:
            return  # a forked child, such as a DataLoader worker, whose rank needs it until its own interrupt
        if deferral is not None:
            deferral.ask()
        self._waits = deferral is not None and deferral.may_wait()
        if self.armed and not self._waits:
            raise KeyboardInterrupt


class Keyboard:
    """Takes what the user types in the notebook, for the debugger and ``input``. One thread at a time has its `turn`.

    The reading thread calls `look` when the kernel asks for a look.
    """

    def __init__(self, link: KernelChannel) -> None:
        self.link = link
        self.turn = threading.RLock()
        self.can_type = False
        self.look: Callable[[Look], None] = lambda message: None
        self.lines: queue.SimpleQueue[Typed | None] = queue.SimpleQueue()
        """Answers to the last request. None: something has happened."""
        self._number = 0
        """Of the last request."""
        self._is_let_go = False
        """The thread that waits for a line is to end its input."""

    @property
    def is_here(self) -> bool:
        """Return True if this process is the rank, and no child that it has forked."""
        return os.getpid() == self.link.owner

    # -------------------------------------------------------------- lines
    def ask(self, prompt: str, *, is_secret: bool = False, is_command: bool = False) -> str:
        """Wait until the user has typed a line, and return it. Hold `turn`."""
        link = self.link
        self._number, self.lines, self._is_let_go = self._number + 1, queue.SimpleQueue(), False
        link.send(Asked(link.rank, link.task, self._number, prompt, is_secret, is_command))
        typed: Typed | None = None
        while typed is None or typed.number != self._number:
            self._check_interrupt()
            with contextlib.suppress(queue.Empty):
                typed = self.lines.get(timeout=timeouts.TYPED_CHECK_INTERVAL_S)
        if typed.line is None:
            raise EOFError("the input has ended")
        return typed.line

    def _check_interrupt(self) -> None:
        if self.link.channel.closed or self._is_let_go:
            raise EOFError("the input has ended")
        if threading.current_thread() is threading.main_thread():
            if self.link.interrupted:  # and has not raised: it came between two lines of ours
                raise KeyboardInterrupt
        elif self.link.is_stopping:
            raise EOFError("the task was interrupted")

    def let_go(self) -> None:
        self._is_let_go = True
        self.wake()

    def wake(self) -> None:
        """Let the thread that waits for a line see an interrupt: no SIGINT reaches any but the main one."""
        self.lines.put(None)

    # -------------------------------------------------------------- input()
    def input(self, prompt: object = "", *, is_secret: bool = False) -> str:
        """Ask the user in the notebook, as ``input`` does."""
        text = str(prompt)
        call = f"{'getpass' if is_secret else 'input'}({text!r})"
        if not self.is_here:
            raise EOFError(f"{call}: not available in a child process of a rank; call it in the rank itself")
        if not self.can_type:
            raise EOFError(
                f"{call}: input is not possible here (no input box, captured output, or a launch in the background); "
                "pass the value as an argument, or detach with on_breakpoint='wait'"
            )
        link = self.link
        if link.is_stopping:
            raise EOFError(f"{call}: the task is being stopped")
        with self.turn:
            link.send(Opened(link.rank, link.task, "input"))
            try:
                return self.ask(text, is_secret=is_secret)
            finally:
                link.send(Closed(link.rank, link.task))
