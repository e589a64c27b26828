"""What other threads ask of a launch's supervisor."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future


class Commands:
    """What other threads ask of a supervisor: stop, kill, stacks. Safe to call from anywhere, at any time."""

    def __init__(self) -> None:
        self.stop = False
        self.kill = False
        self.stacks = False
        """Whether the view is to be shown what each rank is doing."""
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, Future[dict[int, str]]]] = []
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def ask(self, *, kill: bool = False) -> None:
        with self._lock:
            self.stop = True
            self.kill = self.kill or kill
            self._wake()

    def ask_stacks(self) -> None:
        with self._lock:
            self.stacks = True
            self._wake()

    def want_stacks(self, within: float) -> Future[dict[int, str]]:
        """To be given what each rank is doing that answers `within` so many seconds; of a launch that ends, nothing."""
        future: Future[dict[int, str]] = Future()
        with self._lock:
            if self._write.fileno() < 0:
                future.set_result({})
            else:
                self._waiting.append((within, future))
                self._wake()
        return future

    def take_stacks(self) -> tuple[bool, list[tuple[float, Future[dict[int, str]]]]]:
        """Whether the view is to be shown the stacks, and who else waits for them; both are cleared."""
        with self._lock:
            taken = self.stacks, self._waiting
            self.stacks, self._waiting = False, []
            return taken

    def _wake(self) -> None:
        if self._write.fileno() >= 0:
            try:
                self._write.send(b"!")
            except BlockingIOError:
                return  # it has been told often enough

    def clear(self) -> None:
        try:
            self._read.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            self._read.close()
            self._write.close()
            waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            future.set_result({})
