"""Kept ranks that wait for a rank that has left the task, on a fake clock."""

from __future__ import annotations

from nblaunch.launch.abandoned import AbandonedRanks
from tests.unit.fake_engine import FakeStackDumps

WAITS = (
    'Thread 0x1 (most recent call first):\n  File "/site-packages/torch/distributed/c10d.py", line 9 in all_reduce\n'
    '  File "/home/me/train.py", line {} in train\n'
)
COMPUTES = 'Thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 7 in train\n'


def found_after(dumps: FakeStackDumps, seconds: int) -> bool:
    """Look twice a second, as a supervisor does more often."""
    abandoned = AbandonedRanks(lambda rank: dumps)
    return any(abandoned.found([0], half / 2) for half in range(2 * seconds))


def test_a_rank_in_one_collective_for_seconds_is_abandoned() -> None:
    assert found_after(FakeStackDumps(WAITS.format(7)), 10)
    assert not found_after(FakeStackDumps(WAITS.format(7)), 4)


def test_a_rank_that_computes_is_not_abandoned() -> None:
    assert not found_after(FakeStackDumps(COMPUTES), 60)


def test_a_rank_that_does_not_answer_is_not_abandoned() -> None:
    assert not found_after(FakeStackDumps(None), 60)


def test_a_rank_whose_collectives_advance_is_not_abandoned() -> None:
    class Advancing(FakeStackDumps):
        line = 0

        def ask(self, signal_at: float) -> None:
            self.line += 1
            self.dump = WAITS.format(self.line)

    assert not found_after(Advancing(), 60)
