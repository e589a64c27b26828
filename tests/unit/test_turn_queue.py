"""The queue of tasks that want the same ranks."""

from __future__ import annotations

import pytest

from nblaunch.launch.session_ranks import BusyError, Ticket, TurnQueue


def enqueued(queue: TurnQueue) -> Ticket:
    ticket = Ticket()
    queue.enqueue(ticket)
    return ticket


def test_the_first_ticket_has_the_turn_and_others_wait() -> None:
    queue = TurnQueue()
    first, second = enqueued(queue), enqueued(queue)

    queue.wait_for(first, lambda: True, lambda: None)
    with pytest.raises(BusyError):
        queue.wait_for(second, lambda: True, lambda: None)
    queue.discard(first)
    queue.wait_for(second, lambda: True, lambda: None)


def test_a_queue_closes_only_while_it_is_empty() -> None:
    queue = TurnQueue()
    ticket = enqueued(queue)

    assert not queue.close_if_empty()
    queue.discard(ticket)
    assert queue.close_if_empty()
    assert queue.close_if_empty()
    queue.wait_for(enqueued(queue), lambda: False, lambda: None)  # no turn, but no waiting either
    assert queue.is_closed
