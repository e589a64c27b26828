"""The queue of tasks that want the same ranks: one has them at a time, in the order of the calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from nblaunch.machine import timeouts


class BusyError(Exception):
    """The ranks run something else."""


class Ticket:
    """A place in the queue, once it was enqueued.

    Args:
        label: Names the task, such as ``Cell In[3]``; empty for a question. Default: empty.
    """

    __slots__ = ("label",)

    def __init__(self, label: str = "") -> None:
        self.label = label


class TurnQueue:
    """See the module. Thread-safe.

    Attributes:
        is_closed: No further task gets a turn.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._tickets: deque[Ticket] = deque()
        """The first has the ranks."""
        self._stops: dict[int, Callable[[], None]] = {}
        """What stops the task of a ticket, by the ticket's id."""
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def labels(self) -> list[str]:
        """The labels of the task that has its turn and of those that wait, in their order."""
        with self._changed:
            return [ticket.label for ticket in self._tickets]

    def enqueue(self, ticket: Ticket) -> None:
        """Append a ticket, whose turn comes after those before it. Whatever happens, the caller discards it."""
        with self._changed:
            self._tickets.append(ticket)

    def is_first(self, ticket: Ticket) -> bool:
        """Return True if a ticket has its turn, or would have it now."""
        with self._changed:
            return bool(self._tickets) and self._tickets[0] is ticket

    def ahead_of(self, ticket: Ticket) -> list[str]:
        """Return the labels of the tasks that a ticket waits for, in their order."""
        with self._changed:
            tickets = list(self._tickets)
        return [each.label for each in tickets[: tickets.index(ticket)]] if ticket in tickets else []

    def discard(self, ticket: Ticket) -> None:
        """End the turn of a ticket, or give it up. Idempotent."""
        with self._changed:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            self._stops.pop(id(ticket), None)
            self._changed.notify_all()

    def wait_for(self, ticket: Ticket, give_up: Callable[[], bool], stop: Callable[[], None]) -> None:
        """Wait for the turn of a ticket, or until the queue is closed.

        Args:
            ticket: Was enqueued. The caller discards it.
            give_up: Return True to wait no longer.
            stop: Called to stop the task when the queue is closed.

        Raises:
            BusyError: `give_up` returned True first, or the ticket was discarded.
        """
        with self._changed:
            self._stops[id(ticket)] = stop
            while not self.is_closed and (ticket not in self._tickets or self._tickets[0] is not ticket):
                if give_up() or ticket not in self._tickets:
                    raise BusyError
                self._changed.wait(timeouts.LOG_POLL_S)

    def close_if_empty(self) -> bool:
        """Let nothing have a turn, unless a task runs or waits. Return True if no task gets a turn from now on."""
        with self._changed:
            self.is_closed = self.is_closed or not self._tickets
            return self.is_closed

    def close(self) -> None:
        """Stop what has its turn, let nothing else have one, and wait until the queue is empty."""
        self.is_closed = True
        with self._changed:
            self._changed.notify_all()
            while self._tickets:
                for stop in list(self._stops.values()):
                    stop()
                self._changed.wait(timeouts.LOG_POLL_S)
