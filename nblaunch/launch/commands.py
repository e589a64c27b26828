"""Requests of other threads to a supervisor."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future


class Commands:
    """Requests to a supervisor, which `fileno` wakes. Thread-safe, and safe after the launch has ended.

    Attributes:
        interrupts_to_kill: How many more interrupts of the caller kill the ranks; 0: none does, as no caller waits.
    """

    def __init__(self) -> None:
        self.stop = False
        self.kill = False
        self.stacks = False
        self.interrupts_to_kill = 0
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, Future[dict[int, str]]]] = []
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def ask(self, *, kill: bool = False) -> None:
        """Stop the ranks, with or without their grace period."""
        with self._lock:
            self.stop = True
            self.kill = self.kill or kill
            self._wake()

    def ask_stacks(self) -> None:
        with self._lock:
            self.stacks = True
            self._wake()

    def want_stacks(self, timeout: float) -> Future[dict[int, str]]:
        """Return a future of the stacks by rank, which have `timeout` to answer; empty if the launch ends first."""
        future: Future[dict[int, str]] = Future()
        with self._lock:
            if self._write.fileno() < 0:
                future.set_result({})
            else:
                self._waiting.append((timeout, future))
                self._wake()
        return future

    def take_stacks(self) -> tuple[bool, list[tuple[float, Future[dict[int, str]]]]]:
        """Return and clear `stacks`, and the (timeout, future) pairs of `want_stacks`."""
        with self._lock:
            taken = self.stacks, self._waiting
            self.stacks, self._waiting = False, []
            return taken

    def wake(self) -> None:
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        if self._write.fileno() >= 0:
            try:
                self._write.send(b"!")
            except BlockingIOError:
                return  # the buffer is full of wakeups

    def clear(self) -> None:
        try:
            self._read.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Answer open requests for stacks with none. Later requests have no effect."""
        with self._lock:
            self._read.close()
            self._write.close()
            waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            future.set_result({})
