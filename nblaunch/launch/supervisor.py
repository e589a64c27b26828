"""Supervises a task until its ranks are done: passes events on, and polls the logs, which have no events.

Runs in a thread of the kernel, for an attempt of a launch and for a session's turn alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nblaunch.launch.output.follower import OutputFollower
from nblaunch.launch.task import Task
from nblaunch.launch.views import Tick, View
from nblaunch.machine import timeouts


def supervise(task: Task, output: OutputFollower, view: View, until: Callable[[], bool]) -> None:
    """Supervise a task.

    Args:
        task: What the ranks run; it has been sent.
        output: What the ranks write.
        view: Shows the launch.
        until: Returns True once the task or its group is over.
    """
    poll_at = 0.0
    while not until():
        for event in task.group.wait(max(0.0, poll_at - time.monotonic())):
            task.take(event)
        task.step()
        if time.monotonic() >= poll_at:  # and not after each of the messages that many ranks send
            poll_at = time.monotonic() + timeouts.LOG_POLL_S
            output.poll()
            view.on(Tick())
