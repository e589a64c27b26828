"""Kept ranks that wait for a rank that has left the task, on a fake clock."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nblaunch.launch.abandoned import AbandonedRanks
from nblaunch.machine.usage import Usage
from nblaunch.wire.collective_table import Begun
from tests.unit.fake_engine import FakeSampler, FakeStackDumps, FakeWorker

WAITS = (
    'Thread 0x1 (most recent call first):\n  File "/site-packages/torch/distributed/c10d.py", line 9 in all_reduce\n'
    '  File "/home/me/train.py", line {} in train\n'
)
COMPUTES = 'Thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 7 in train\n'
BACKWARD = (
    'Thread 0x1 (most recent call first):\n  File "/site-packages/torch/autograd/graph.py", line 9 in run_backward\n'
    '  File "/home/me/train.py", line 7 in train\n'
)


class Uses(FakeSampler):
    """Every rank uses so many cores."""

    cpu = 0.0

    def sample(self, ranks: Collection[int]) -> list[Usage]:
        return [Usage(rank, self.cpu, 0, None, None) for rank in ranks]


def found_after(dumps: FakeStackDumps, seconds: int, begun: Sequence[int] = (1, 0), cpu: float = 0.0) -> bool:
    """Look twice a second, as a supervisor does more often. Rank 1 has returned."""
    workers = [FakeWorker(0, stacks=dumps), FakeWorker(1)]
    for worker, count in zip(workers, begun, strict=True):
        worker.begun = [Begun(count, 7, 0, "0", "", "allreduce", "", "/home/me/train.py")]
    sampler = Uses(workers)
    sampler.cpu = cpu
    abandoned = AbandonedRanks(workers, lambda: sampler)
    return any(abandoned.found([0], [1], half / 2) for half in range(2 * seconds))


def test_a_rank_in_one_collective_for_seconds_is_abandoned() -> None:
    assert found_after(FakeStackDumps(WAITS.format(7)), 10)
    assert not found_after(FakeStackDumps(WAITS.format(7)), 4)


def test_a_rank_in_a_backward_of_its_own_is_abandoned() -> None:
    assert found_after(FakeStackDumps(BACKWARD), 10)
    assert not found_after(FakeStackDumps(BACKWARD), 4)


def test_a_backward_that_computes_is_not_abandoned() -> None:
    assert not found_after(FakeStackDumps(BACKWARD), 60, cpu=0.9)


def test_a_backward_after_collectives_of_all_is_not_abandoned() -> None:
    assert not found_after(FakeStackDumps(BACKWARD), 60, begun=(3, 3))


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
