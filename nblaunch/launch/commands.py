"""Requests of other threads to a supervisor."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from nblaunch.engines.protocol import Wakeup
from nblaunch.profiles.profile import Profile


class Commands(Wakeup):
    """Requests to a supervisor, which they wake. Thread-safe, and safe after the launch has ended.

    Attributes:
        interrupts_to_kill: How many more interrupts of the caller kill the ranks; 0: none does, as no caller waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stop = False
        self.kill = False
        self.interrupts_to_kill = 0
        self._lock = threading.RLock()
        self._waiting: list[tuple[float, Future[dict[int, str]]]] = []
        self._profiles: list[tuple[float, Future[Profile | None]]] = []

    def ask(self, *, kill: bool = False) -> None:
        """Stop the ranks, with or without their grace period."""
        with self._lock:
            self.stop = True
            self.kill = self.kill or kill
            self.set()

    def want_stacks(self, timeout: float) -> Future[dict[int, str]]:
        """Return a future of the stacks by rank, which have `timeout` to answer; empty if the launch ends first."""
        future: Future[dict[int, str]] = Future()
        with self._lock:
            if self._write.fileno() < 0:
                future.set_result({})
            else:
                self._waiting.append((timeout, future))
                self.set()
        return future

    def take_stacks(self) -> list[tuple[float, Future[dict[int, str]]]]:
        with self._lock:
            taken, self._waiting = self._waiting, []
            return taken

    def want_profile(self, seconds: float) -> Future[Profile | None]:
        """Return a future of a profile; None if the launch ends first. It can be cancelled until a task takes it."""
        future: Future[Profile | None] = Future()
        with self._lock:
            if self._write.fileno() < 0:
                future.set_result(None)
            else:
                self._profiles.append((seconds, future))
                self.set()
        return future

    def take_profiles(self) -> list[tuple[float, Future[Profile | None]]]:
        with self._lock:
            taken, self._profiles = self._profiles, []
        return [(seconds, future) for seconds, future in taken if future.set_running_or_notify_cancel()]

    def set(self) -> None:
        with self._lock:  # `close` must not free the descriptor meanwhile
            super().set()

    def close(self) -> None:
        """Answer open requests for stacks and profiles with none. Later requests have no effect."""
        with self._lock:
            super().close()
            waiting, self._waiting = self._waiting, []
            profiles, self._profiles = self._profiles, []
        for _, future in waiting:
            future.set_result({})
        for _, wanted in profiles:
            if wanted.set_running_or_notify_cancel():
                wanted.set_result(None)
