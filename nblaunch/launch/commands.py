"""Requests of other threads to a supervisor."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TypeVar

from nblaunch.engines.protocol import Wakeup
from nblaunch.profiles.profile import Profile

_Answer = TypeVar("_Answer")
_Requests = list[tuple[float, Future[_Answer]]]
"""Each with its seconds."""


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
        self._stacks: _Requests[dict[int, str]] = []
        self._profiles: _Requests[Profile | None] = []

    def ask(self, *, kill: bool = False) -> None:
        """Stop the ranks, with or without their grace period."""
        with self._lock:
            self.stop = True
            self.kill = self.kill or kill
            self.set()

    def want_stacks(self, timeout: float) -> Future[dict[int, str]]:
        """Return a future of the stacks by rank, which have `timeout` to answer; empty if the launch ends first."""
        return self._want(self._stacks, timeout, {})

    def want_profile(self, seconds: float) -> Future[Profile | None]:
        """Return a future of a profile; None if the launch ends first. It can be cancelled until a task takes it."""
        return self._want(self._profiles, seconds, None)

    def _want(self, requests: _Requests[_Answer], seconds: float, nothing: _Answer) -> Future[_Answer]:
        future: Future[_Answer] = Future()
        with self._lock:
            if self._write.fileno() < 0:
                future.set_result(nothing)
            else:
                requests.append((seconds, future))
                self.set()
        return future

    def take_stacks(self) -> _Requests[dict[int, str]]:
        return self._take(self._stacks)

    def take_profiles(self) -> _Requests[Profile | None]:
        return self._take(self._profiles)

    def _take(self, requests: _Requests[_Answer]) -> _Requests[_Answer]:
        with self._lock:
            taken = list(requests)
            requests.clear()
        return [(seconds, future) for seconds, future in taken if future.set_running_or_notify_cancel()]

    def set(self) -> None:
        with self._lock:  # `close` must not free the descriptor meanwhile
            super().set()

    def close(self) -> None:
        """Answer open requests for stacks and profiles with none. Later requests have no effect."""
        with self._lock:
            super().close()
        for _, stacks in self.take_stacks():
            stacks.set_result({})
        for _, profile in self.take_profiles():
            profile.set_result(None)
