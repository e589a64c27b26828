"""Where an interrupted training run ends: between two steps, the same ones on all ranks."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist

from nblaunch.machine import processes
from nblaunch.ranks.report import current
from nblaunch.training.topology import has_group, world

STOP_AGREEMENT_S = 2.0
"""For the ranks of an interrupted training run to agree on their last step; usually milliseconds."""
STOP_STEP_S = 3.0
"""For that step to end, or twice as long as the longest one before. Then KeyboardInterrupt is raised within it."""
MAX_STOP_STEP_S = 15.0
"""The limit of that: ``finally`` and the checkpoint need the rest of the grace period."""
STOP_POLL_S = 0.01
"""Between two looks for the steps of the other ranks."""
STOP_SIGNAL_INTERVAL_S = 0.5
"""Before a rank whose step has not ended is interrupted again; a second interrupt that comes sooner is the first."""


class AgreedStop(BaseException):
    """Ends a training run at a boundary, on every rank at the same one."""


class StepBoundaries:
    """The boundaries between a run's steps, which all ranks reach in the same order. A context manager.

    Within the context an interrupt takes effect at a boundary. It may arrive in different steps of the ranks, and while
    a rank waits in a collective for another one. So a thread of each rank posts the step that its rank is in to the
    store that the ranks share, and all ranks end after the latest of these: none has begun a later one, because a rank
    that reaches a boundary first waits for all posts. That takes milliseconds, as no thread waits for its rank.

    KeyboardInterrupt is raised at once, wherever the rank is, if the step takes too long, and at the second interrupt:
    in a launch the kernel kills the ranks then.

    In a rank of torchrun or srun, and in another thread than the main one, interrupts are not deferred.
    """

    def __init__(self, key: str) -> None:
        self.is_asked = False
        self.is_saving = False  # a checkpoint, which may take longer than a step
        self._key = key
        self._position = 0
        """Boundaries reached, and so the number of the step that was begun last."""
        self._last: int | None = None
        """The last step, once it is settled; None if the ranks could not agree."""
        self._is_over = False
        """Whether KeyboardInterrupt is to be raised at once."""
        self._settled, self._ended = threading.Event(), threading.Event()
        self._first_asking = threading.Lock()
        self._asked_at = 0.0
        self._begun, self._longest = time.monotonic(), 0.0
        self._owner, self._main = os.getpid(), threading.get_ident()
        self._undo: Callable[[], object] | None = None

    def __enter__(self) -> StepBoundaries:
        context = current()
        self._begun = time.monotonic()
        if threading.current_thread() is not threading.main_thread():
            return self
        if context is not None and context.defer is not None:
            defer = context.defer
            defer(self)
            self._undo = lambda: defer(None)
        elif context is None and not world().is_shared:
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                signal.signal(signal.SIGINT, lambda number, frame: self._on_interrupt(before, number, frame))
                self._undo = lambda: signal.signal(signal.SIGINT, before)
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()  # first: no late signal
        if self._undo is not None:
            self._undo()

    # ------------------------------------------------------------------ in the loop
    def reach(self) -> None:
        self._position += 1  # before the flag is read
        now = time.monotonic()
        self._longest, self._begun = max(self._longest, now - self._begun), now
        if not self.is_asked:
            return
        if not self._settled.wait(2 * STOP_AGREEMENT_S) or self._last is None:
            self._ended.set()
            raise KeyboardInterrupt
        if self._position > self._last:
            self._ended.set()
            raise AgreedStop

    # ------------------------------------------------------------------ the interrupt
    def ask(self) -> None:
        """See `Deferral`."""
        if self._first_asking.acquire(blocking=False):
            self._asked_at = time.monotonic()
            self.is_asked = True
            own = self._position  # after the flag is set: `reach` reads them in the other order
            try:
                _thread.start_new_thread(self._follow, (own,))  # `threading` must list the user's threads only
            except RuntimeError:  # ulimit -u
                self._is_over = True
                self._settled.set()

    def may_wait(self) -> bool:
        """See `Deferral`."""
        if self._is_over:
            self._ended.set()
        return not self._is_over

    def _on_interrupt(self, before: Callable[..., object], number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return  # a DataLoader's worker, which the last step may need
        is_second = self.is_asked and time.monotonic() - self._asked_at > STOP_SIGNAL_INTERVAL_S
        self.ask()
        if not self.may_wait() or is_second:
            self._ended.set()
            before(number, frame)

    # ------------------------------------------------------------------ the thread of an interrupted run
    def _follow(self, own: int) -> None:
        """Settle the last step, and interrupt the rank if that step takes too long."""
        processes.leave_signals_to_main_thread()
        with contextlib.suppress(Exception):  # the store's, once the process that serves it has ended
            self._last = self._agree(own)
        self._settled.set()
        limit = min(max(STOP_STEP_S, 2 * self._longest), MAX_STOP_STEP_S)
        while self._last is not None and not self._ended.wait(10 * STOP_POLL_S):
            if time.monotonic() > self._asked_at + limit and not self.is_saving:
                break
        self._is_over = True
        while not self._ended.is_set():
            signal.pthread_kill(self._main, signal.SIGINT)
            self._ended.wait(STOP_SIGNAL_INTERVAL_S)

    def _agree(self, own: int) -> int | None:
        """Return the latest step that a rank is in; None if a rank does not post its own."""
        if not world().is_shared:
            return own
        if not has_group():
            return None
        shared: Any = dist.distributed_c10d._get_default_store()
        store = shared.clone()  # the main thread may wait in the other one
        keys = [f"{self._key}/{rank}" for rank in range(world().size)]
        store.set(keys[world().rank], str(own))
        while not store.check(keys):
            if self._ended.wait(STOP_POLL_S) or time.monotonic() > self._asked_at + STOP_AGREEMENT_S:
                return None
        return max(int(store.get(key)) for key in keys)
