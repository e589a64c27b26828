"""Sharded loaders over real ranks: every sample once, and no rank hangs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from nblaunch.training import Accelerator, ShardedLoader, TrainConfig, shard
from nblaunch.training.collectives import exchange
from nblaunch.training.seeding import seed_everything
from nblaunch.training.topology import world
from nblaunch.training.train_config import loader_of
from tests.processes.conftest import Launcher

pytestmark = pytest.mark.usefixtures("imported_ahead")

DATA: Any = list(range(67))


class Numbers(IterableDataset):
    """A stream; only the process that reads it knows how often."""

    def __init__(self, size: int) -> None:
        self.size, self.reads = size, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        self.reads += 1
        step, first = (info.num_workers, info.id) if info else (1, 0)
        return (torch.tensor([value, value]) for value in range(first, self.size, step))


def gathered(loader: DataLoader[Any]) -> list[int]:
    """What all ranks get in a pass, in the ranks' order, without padding; every rank has as many batches."""
    own = [([] if getattr(loader, "is_padding", False) else flat(batch)) for batch in loader]
    everybodys = exchange(own)
    assert len({len(batches) for batches in everybodys}) == 1, [len(batches) for batches in everybodys]
    return [value for step in zip(*everybodys, strict=True) for batch in step for value in batch]


def flat(batch: torch.Tensor) -> list[int]:
    return batch.reshape(len(batch), -1)[:, 0].tolist()


def loaders() -> dict[str, ShardedLoader[Any]]:
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    return {
        "shuffled": shard(DataLoader(DATA, 8, shuffle=True)),
        "workers": shard(DataLoader(DATA, 8, shuffle=True, **workers)),
        "fewer than ranks": shard(DataLoader(DATA[:2], 8, shuffle=True)),
        "dispatched": shard(DataLoader(Numbers(67), 8)),
        "dispatched from a worker": shard(DataLoader(Numbers(67), 8, **workers)),
        "a short stream": shard(DataLoader(Numbers(1), 8)),
        "an empty stream": shard(DataLoader(Numbers(0), 8)),
        "read by all": shard(DataLoader(Numbers(67), 8), dispatch=False),
    }


def check_exactness() -> dict[str, tuple[list[int], list[int]]]:
    """The orders of two epochs, of every kind of loader."""
    torch.manual_seed(dist.get_rank())  # whatever the ranks' generators are
    return {name: (gathered(loader), gathered(loader)) for name, loader in loaders().items()}


def seeded_loaders(seed: int) -> dict[str, DataLoader[Any]]:
    """Loaders whose order the seed chooses, each by a generator of its own, except the first."""

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    samplers = {
        "random": RandomSampler(DATA, generator=generator()),
        "subset": SubsetRandomSampler(DATA[:50], generator=generator()),
        "weighted": WeightedRandomSampler([1.0] * len(DATA), 60, generator=generator()),
    }
    return {
        "global": DataLoader(DATA, 8, shuffle=True),
        "generator": DataLoader(DATA, 8, shuffle=True, generator=generator()),
        **{name: DataLoader(DATA, 8, sampler=sampler) for name, sampler in samplers.items()},
        "batches": DataLoader(DATA, batch_sampler=BatchSampler(samplers["random"], 8, drop_last=False)),
    }


def seeded_orders(seeds: tuple[int, ...]) -> dict[str, list[list[int]]]:
    """The orders of prepared loaders and of a Trainer's, by seed; only rank 0 is seeded alike."""
    accelerator = Accelerator(compute_setup="cpu", gradient_accumulation_steps=2)
    orders: dict[str, list[list[int]]] = {}
    for seed in seeds:
        for name, loader in seeded_loaders(seed).items():
            torch.manual_seed(1000 + world().rank if name != "global" else seed + world().rank)
            before = torch.get_rng_state()
            prepared = accelerator.prepare(loader)
            assert torch.equal(torch.get_rng_state(), before)
            orders.setdefault(name, []).append(gathered(prepared))
            resumed = accelerator.prepare(seeded_loaders(77)[name])
            resumed.load_state_dict({**prepared.state_dict(), "epoch": 0})
            assert gathered(resumed) == orders[name][-1]
        trained = loader_of(seeded_loaders(seed)["generator"], TrainConfig(batch_size=8), shuffle=True)
        orders.setdefault("trained", []).append(gathered(trained))
    return orders


def check_a_look_by_one_rank() -> None:
    for loader in (shard(DataLoader(DATA, 8, shuffle=True)), shard(DataLoader(DATA, 8, sampler=None, num_workers=1))):
        for _ in range(2):
            if dist.get_rank() == 0:
                next(iter(loader))
            assert sorted(gathered(loader)) == DATA


def check_resumption() -> None:
    loader, fresh = (shard(DataLoader(Numbers(67), 8)) for _ in range(2))
    gathered(loader)
    passing = iter(loader)
    next(passing)
    fresh.load_state_dict(loader.state_dict())
    assert list(map(flat, fresh)) == list(map(flat, passing))
    assert gathered(fresh) == gathered(loader)


def check_streams_out_of_step() -> None:
    for looks in ((True, False, False), (False, True, True)):
        loader = shard(DataLoader(Numbers(67), 8))
        first = iter(loader)
        next(first)
        # Two sends in all: what one rank takes for its second pass's first batch, another takes for the first's second.
        second = iter(loader) if looks[dist.get_rank()] else first
        if dist.get_rank() == 0:
            next(second)
            continue
        with pytest.raises(RuntimeError, match=r"expects batch \d of pass \d .* Take the same number on every rank"):
            next(second)


def check_who_reads() -> None:
    stream = Numbers(20)
    gathered(shard(DataLoader(stream, 4)))
    assert exchange(stream.reads) == [1] + [0] * (dist.get_world_size() - 1)


def train() -> list[float]:
    """Two epochs of DDP over a size that no number of ranks divides: it hangs where batch counts differ."""
    seed_everything(2)
    data = TensorDataset(torch.randn(67, 3), torch.randn(67, 1))
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = shard(DataLoader(data, 8, shuffle=True))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def test_the_users_seeds_choose_a_prepared_order(launch: Launcher) -> None:
    seeds = (1, 2, 2**40, 1)
    by_ranks = launch(seeded_orders, (seeds,), num_processes=2, device="cpu")[0]
    assert by_ranks == seeded_orders(seeds)
    for name, orders in by_ranks.items():
        assert orders[0] == orders[3], name
        assert orders[0] != orders[1] != orders[2] != orders[0], name


def in_ranks(*made_in_the_notebook: ShardedLoader[int]) -> dict[str, Any]:
    for loader in made_in_the_notebook:
        assert sorted(gathered(loader)) == DATA
    check_a_look_by_one_rank()
    check_resumption()
    check_streams_out_of_step()
    check_who_reads()
    orders = check_exactness()
    weights = train()
    assert exchange(weights) == [weights] * dist.get_world_size()
    return orders


def test_every_sample_comes_once_and_nothing_hangs(launch: Launcher) -> None:
    used, one_by_one = (shard(DataLoader(DATA, size, shuffle=True)) for size in (8, 1))
    list(used)  # in the notebook, which is one process
    orders = launch(in_ranks, (used, one_by_one), num_processes=3, device="cpu")[0]
    for name, (first, second) in orders.items():
        size = {"fewer than ranks": 2, "a short stream": 1, "an empty stream": 0}.get(name, 67)
        assert sorted(first) == sorted(second) == list(range(size)), name
        assert (first != second) == (name in ("shuffled", "workers")), name
        if name in ("dispatched", "read by all"):
            assert first == DATA
    again = shard(DataLoader(DATA, 8, shuffle=True))
    assert torch.cat(list(again)).tolist() == orders["shuffled"][0]  # as one process reads it
