"""Kept ranks that wait for a rank that has left the task."""

from __future__ import annotations

import pytest

from nblaunch.launch.inspector import Place
from nblaunch.launch.stacks import parse
from nblaunch.launch.stuck import AbandonedRanks
from nblaunch.wire.tables import Begun

WAITS = (
    'Thread 0x1 (most recent call first):\n  File "/site-packages/torch/distributed/c10d.py", line 9 in all_reduce\n'
    '  File "/home/me/train.py", line {} in train\n'
)
COMPUTES = 'Thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 7 in train\n'
BACKWARD = (
    'Thread 0x1 (most recent call first):\n  File "/site-packages/torch/autograd/graph.py", line 9 in run_backward\n'
    '  File "/home/me/train.py", line 7 in train\n'
)


def found_after(dump: str, seconds: int, begun: tuple[int, int] = (1, 0), is_busy: bool = False) -> bool:
    """Judge once a second. Rank 1 has returned; a dump with a ``{}`` is another each time."""
    waiting, returned = ([Begun(count, 7, 0, "0", "", "allreduce", "", "/home/me/train.py")] for count in begun)
    abandoned = AbandonedRanks(2)
    return any(
        abandoned.found({0: Place(parse(dump.format(second)), "0x1", waiting, is_busy)}, {1: returned}, second)
        for second in range(seconds)
    )


@pytest.mark.parametrize("dump", [WAITS.format(7), BACKWARD], ids=["collective", "backward"])
def test_a_rank_that_waits_for_seconds_is_abandoned(dump: str) -> None:
    assert found_after(dump, 10)
    assert not found_after(dump, 4)


@pytest.mark.parametrize(
    ("dump", "begun", "is_busy"),
    [
        (COMPUTES, (1, 0), False),
        (WAITS, (1, 0), False),
        (BACKWARD, (1, 0), True),
        (BACKWARD, (3, 3), False),
        ("", (1, 0), False),
    ],
    ids=["computes", "collectives advance", "backward computes", "all have begun it", "no answer"],
)
def test_a_rank_that_may_go_on_is_not_abandoned(dump: str, begun: tuple[int, int], is_busy: bool) -> None:
    assert not found_after(dump, 60, begun, is_busy)
