"""A rank's side of its channel to the kernel: tasks come by it, and it says which of them a SIGINT belongs to."""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import signal
import threading
from collections import deque
from types import FrameType

from nblaunch.machine import processes
from nblaunch.ranks import group_sockets
from nblaunch.wire.channel import Channel, LostDescriptorsError
from nblaunch.wire.messages import Free, Interrupt, Interrupted, Task


class KernelChannel:
    """The rank's channel to the kernel, and its SIGINT handler.

    The first SIGINT of a task, and only the first, raises KeyboardInterrupt: editors signal every descendant, then
    the kernel does, and a second KeyboardInterrupt would cut a ``finally`` in the middle of a checkpoint.

    A SIGINT carries no task, and may arrive late. So the kernel sends `Interrupt` first: a SIGINT that belongs to an
    earlier task is dropped.
    """

    def __init__(self, channel: Channel, rank: int) -> None:
        self.channel = channel
        self.rank = rank
        self.owner = os.getpid()
        self.task = 0
        """The task that runs, or ran last."""
        self.armed = False
        """Whether SIGINT raises KeyboardInterrupt now."""
        self._tasks: deque[tuple[Task, list[int]]] = deque()
        """Tasks that arrived while the handler read the channel."""
        self._asked = 0
        """The last task that the kernel has announced a SIGINT for."""
        self._seen = 0
        """The last task whose SIGINT has arrived."""
        self._arrived = 0
        """SIGINTs that are not attributed to a task yet."""
        self._answered = 0
        """The last task whose SIGINT was acknowledged."""
        self._speaking = False
        self._reading = False
        signal.signal(signal.SIGINT, self._on_interrupt)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @property
    def interrupted(self) -> bool:
        """Return True if the current task has got its SIGINT."""
        return 0 < self.task == self._seen

    def next_task(self) -> tuple[Task, list[int]] | None:
        """Wait for the next task and its descriptors; None at EOF."""
        self._reading = True  # the handler must not read in the middle of a message
        try:
            while not self._tasks:
                received = self.channel.receive()
                if received is None:
                    return None
                self._sort(*received)
            task, fds = self._tasks.popleft()
            if self._arrived:  # between two tasks: the SIGINT was for the one before
                self._seen = max(self._seen, min(self._asked, task.task - 1))
            self.task, self._arrived = task.task, 0
            return task, fds
        finally:
            self._reading = False

    def _sort(self, message: object, fds: list[int]) -> None:
        if isinstance(message, Task):
            self._tasks.append((message, fds))
        elif isinstance(message, Interrupt):
            self._asked = max(self._asked, message.task)

    def say(self, message: object, *fds: int) -> None:
        """Send a message. An interrupt meanwhile takes effect right after it: a handler cannot send in its middle.

        Blocking the signal would not do: if another thread takes it, Python still runs the handler in this one.

        Raises:
            KeyboardInterrupt: The rank was interrupted meanwhile.
        """
        if os.getpid() != self.owner:
            return  # a forked child, such as a DataLoader worker, must not speak for its rank
        self._speaking = True
        try:
            with contextlib.suppress(OSError):  # the kernel is gone; the reaper is about to end this process
                self.channel.send(message, fds)
        finally:
            self._speaking = False
            if self._answered < self._seen == self.task:
                self._answer()

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._arrived += 1
        if self._reading:
            return
        while self._arrived and self._seen < self.task:
            self._read_announcements()
            self._arrived -= 1
            is_stale = self._seen < self._asked < self.task
            self._seen = self._asked if is_stale else self.task
        self._arrived = 0
        if self._answered < self._seen == self.task and not self._speaking:
            self._answer()

    def _read_announcements(self) -> None:
        """Read what the kernel has sent so far. Each `Interrupt` arrives before its SIGINT."""
        if os.getpid() != self.owner or self.channel.closed:
            return
        self._reading = True
        try:
            with contextlib.suppress(OSError):  # user code has closed the descriptor
                self.channel.poll()
                for message, fds in self.channel.drain():
                    self._sort(message, fds)
        finally:
            self._reading = False

    def _answer(self) -> None:
        """Acknowledge the interrupt, and let it take effect."""
        self._answered = self._seen
        self.say(Interrupted(self.rank, self._seen))
        if self.armed:
            raise KeyboardInterrupt


class KeptChannel(KernelChannel):
    """The channel of a rank that stays for many tasks. A thread reads it, also while the rank waits in a collective.

    The thread sends the process its SIGINT itself, right after the kernel's `Interrupt`. Another SIGINT, from an
    editor, counts for the task that runs.
    """

    def __init__(self, channel: Channel, rank: int) -> None:
        super().__init__(channel, rank)
        self._overtaken = 0
        """The later task whose interrupt has ended the running one."""
        self._arriving: queue.SimpleQueue[tuple[Task, list[int]] | None] = queue.SimpleQueue()
        self._main = threading.main_thread().ident or 0
        _thread.start_new_thread(self._read, ())  # `threading` must list the user's threads only

    def next_task(self) -> tuple[Task, list[int]] | None:
        """Wait for the next task and its descriptors; None at EOF."""
        received = self._arriving.get()
        if received is not None:
            signal.signal(signal.SIGINT, self._on_interrupt)  # a cell may have replaced it
            self.task = received[0].task
            if self._asked == self.task:  # interrupted while it was queued
                self._seen = self.task
        return received

    def _read(self) -> None:
        processes.leave_signals_to_main_thread()
        try:
            while (received := self._receive()) is not None:
                message, fds = received
                if isinstance(message, Task):
                    self._arriving.put((message, fds))
                elif isinstance(message, Interrupt):
                    self._asked = max(self._asked, message.task)
                    signal.pthread_kill(self._main, signal.SIGINT)
                elif isinstance(message, Free) and message.task >= self.task:  # a later one waits for this one
                    with contextlib.suppress(Exception):  # it is asked again, and then killed
                        group_sockets.cut()  # before the next task is read
        finally:
            self._arriving.put(None)

    def _receive(self) -> tuple[object, list[int]] | None:
        """Wait for a message; None at EOF. A task that has lost its descriptors fails, and the rank lives on."""
        try:
            return self.channel.receive()
        except LostDescriptorsError as lost:
            return lost.message, []
        except OSError:  # user code has closed the descriptor
            return None

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
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
