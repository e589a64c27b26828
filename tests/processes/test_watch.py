"""Warnings that save days, in real ranks: each once, at the user's line, and not where nothing is wrong."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from nblaunch import notebook_launcher, progress
from nblaunch.training.data import shard
from tests.processes.conftest import Launcher

SAMPLES = 1437
on_two: Launcher = functools.partial(notebook_launcher, num_processes=2, start_method="forkserver", view="none")
NOTHING_WRONG = "------ nothing was wrong so far"


class Drawn(Sampler[int]):
    """As many draws as its owner wants, which may differ between ranks."""

    def __init__(self, draws: int) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return self.draws

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.draws))


class Broken(Dataset[int]):
    """A dataset whose attributes cannot be read."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # the trouble that is wanted
        raise RuntimeError("no attributes today")

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


def images() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES * 4.0).reshape(SAMPLES, 4))


def go_through(loader: Any, passes: int = 1) -> int:
    """A training loop without the training; how many batches came."""
    return sum(1 for _ in range(passes) for _ in loader)


def mark(text: str) -> None:
    dist.barrier()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


# ------------------------------------------------------------------ what ranks run: nothing is wrong
def whole_but_right(rank: int) -> None:
    data = images()
    shuffled = DataLoader(data, batch_size=100, shuffle=True)
    with torch.no_grad():
        go_through(shuffled)  # an evaluation by each rank
    next(iter(shuffled))  # a peek
    go_through(DataLoader(Subset(data, range(rank, SAMPLES - 1, 2)), batch_size=100))  # cut by rank, each as many
    go_through(DataLoader(TensorDataset(data.tensors[0][rank : SAMPLES - 1 : 2]), batch_size=100))
    go_through(DataLoader(data, sampler=DistributedSampler(data), batch_size=100))
    go_through(DataLoader(data, sampler=Drawn(700), batch_size=100))
    go_through(shard(shuffled), passes=2)
    go_through(shard(DataLoader(data, sampler=DistributedSampler(data), batch_size=100)), passes=2)
    if rank == 0:
        go_through(shuffled)  # not every rank
    assert go_through(DataLoader(Broken(), batch_size=2)) == 3


def orders_that_advance() -> None:
    data = images()
    for workers in (0, 1):
        sampler: Any = DistributedSampler(data, shuffle=True)
        loader = DataLoader(data, sampler=sampler, batch_size=100, num_workers=workers)
        go_through(loader)
        for peek in loader:  # after a whole pass of the same epoch
            assert len(peek[0]) == 100
            break
        sampler.set_epoch(1)
        go_through(loader)
    unshuffled: Any = DistributedSampler(data, shuffle=False)
    go_through(DataLoader(data, sampler=unshuffled, batch_size=100), passes=2)
    assert list(DistributedSampler(data, seed=1)) == list(DistributedSampler(data, seed=1))


def counts_that_may_differ(rank: int) -> None:
    data = images()
    uneven = DataLoader(data, sampler=Drawn(9 - rank), batch_size=2)
    go_through(uneven)  # no DistributedDataParallel is alive
    model = DistributedDataParallel(nn.Linear(4, 1))
    with torch.no_grad():
        go_through(uneven)
    with Join([model]):
        for (batch,) in uneven:
            model(batch).sum().backward()
    if rank == 0:
        go_through(uneven)  # other ranks do not do the same
    group = [dist.new_group([each]) for each in range(2)][rank]
    alone = DistributedDataParallel(nn.Linear(4, 1), process_group=group)
    del model
    go_through(uneven)  # models of one rank each
    del alone


# ------------------------------------------------------------------ what ranks run: something is wrong
def every_mistake(rank: int) -> str:
    """In each a second time, which is not told again."""
    data = images()
    go_through(progress(DataLoader(data, batch_size=100, shuffle=True)), passes=2)
    dist.barrier()
    for _ in DataLoader(data, batch_size=50):
        pass
    sampler: Any = DistributedSampler(data, shuffle=True)
    for workers in (0, 2):
        loader = DataLoader(data, sampler=sampler, batch_size=100, num_workers=workers, persistent_workers=workers > 0)
        for _ in range(3):
            for _ in loader:
                pass
    uneven = DataLoader(data, batch_sampler=BatchSampler(Drawn(9 - rank), 2, drop_last=False))
    model = DistributedDataParallel(nn.Linear(4, 1))
    for _ in range(2):
        for _ in uneven:
            pass
    return type(model).__name__


def both(rank: int) -> str:
    warnings.simplefilter("always")
    whole_but_right(rank)
    orders_that_advance()
    counts_that_may_differ(rank)
    mark(NOTHING_WRONG)
    return every_mistake(rank)


def test_each_mistake_is_told_once_with_its_numbers_and_nothing_else_is(launch: Launcher) -> None:
    result = launch(both)

    logs = [result.logs[rank].err.read_text() for rank in range(2)]
    told = "".join(log.partition(NOTHING_WRONG)[2] for log in logs)
    assert [log.partition(NOTHING_WRONG)[0] for log in logs] == ["", ""]
    assert told.count("Warning: ") == 3, told
    assert (
        told.count(
            "each of the 2 ranks goes through all 1,437 samples of this DataLoader: with "
            "nblaunch.training.data.shard(loader), or sampler=DistributedSampler(dataset), each takes its part"
        )
        == 1
    )
    assert "return sum(1 for _ in range(passes) for _ in loader)" in told  # the user's line, past progress
    assert "goes through epoch 0 again, so in the order of the epoch before: call sampler.set_epoch(epoch)" in logs[0]
    assert told.count("rank 0 has 5 batches of this DataLoader, rank 1 has 4: ") == 1
    assert "so after batch 4 they hang" in told
    assert f"{__file__}:" in told
    assert told.count("for _ in uneven:") + told.count("for _ in loader:") == 2


def ordinary_loaders() -> tuple[bool, bool]:
    warnings.simplefilter("always")
    loader = DataLoader(images(), batch_size=100)
    go_through(loader, passes=2)
    return hasattr(DataLoader.__iter__, "__nblaunch__"), dist.is_initialized()


def test_a_single_rank_is_left_alone(launch: Launcher) -> None:
    result = launch(ordinary_loaders, num_processes=1)
    assert list(result) == [(False, True)]
    assert result.logs[0].err.read_text() == ""
    assert not hasattr(DataLoader.__iter__, "__nblaunch__")


# ------------------------------------------------------------------ other people's loaders and groups
def prepared_by_accelerate(dispatch: bool) -> int:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    warnings.simplefilter("always")
    warnings.filterwarnings("ignore", module="accelerate")
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(images(), batch_size=100, shuffle=True))
    return go_through(loader, passes=2)


@pytest.mark.parametrize("dispatch", [False, True], ids=["sharded", "dispatched"])
def test_what_accelerate_shares_out_is_not_taken_for_whole(dispatch: bool) -> None:
    result = on_two(prepared_by_accelerate, args=(dispatch,))
    assert list(result) == [16, 16]
    assert "DataLoader" not in result.logs[0].err.read_text() + result.logs[1].err.read_text()


def with_a_group_of_ones_own(folder: str, rank: int) -> int:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    warnings.simplefilter("error")
    batches = 0
    with contextlib.suppress(UserWarning):
        batches = go_through(DataLoader(images(), batch_size=100))
    dist.barrier()
    dist.destroy_process_group()
    return batches + go_through(DataLoader(images(), batch_size=100))  # without a group nobody can be asked


def test_a_group_of_the_users_own_is_used_and_a_filter_for_errors_obeyed(tmp_path: Any) -> None:
    result = on_two(with_a_group_of_ones_own, args=(str(tmp_path),))
    assert sorted(result) == [15, 30]  # the last rank to begin has the warning raised
