"""`Parallelism`: its checks, the sizes of its mesh, the modules it names, and accelerate's objects. Also `copies`."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader, DistributedSampler

from nblaunch.errors import ArgumentError
from nblaunch.training import Parallelism, shard
from tests.unit.test_sharding import Standing, standing

__all__ = ["standing"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)
        self.experts = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x))


def model() -> Any:
    parts: dict[str, nn.Module] = {"stem": nn.Linear(2, 2), "layers": nn.ModuleList([Layer(), nn.ReLU(), Layer()])}
    return nn.ModuleDict(parts)


PLAN = {"layers.*.up": "colwise"}


@pytest.mark.parametrize(
    ("options", "ranks", "sizes"),
    [
        ({}, 4, (1, 4, 1)),
        ({"replicate": 2}, 4, (2, 2, 1)),
        ({"replicate": 3}, 6, (3, 2, 1)),
        ({"shard": False}, 3, (3, 1, 1)),
        ({"tensor": 2, "plan": PLAN}, 2, (1, 1, 2)),
        ({"tensor": 2, "plan": PLAN}, 8, (1, 4, 2)),
        ({"tensor": 2, "plan": PLAN, "shard": False}, 8, (4, 1, 2)),
        ({"tensor": 2, "plan": PLAN, "replicate": 2}, 8, (2, 2, 2)),
    ],
)
def test_ranks_are_divided(options: Any, ranks: int, sizes: tuple[int, ...]) -> None:
    parallelism = pickle.loads(pickle.dumps(Parallelism(**options)))
    assert parallelism == Parallelism(**options)
    assert parallelism.sizes(ranks) == sizes
    assert (parallelism.copies(ranks), parallelism.copies(1)) == (sizes[2], 1)


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        (
            {"replicate": 3},
            4,
            "replicate=3, shard=True, tensor=1: their product must be the number of ranks, 4",
        ),
        ({"tensor": 3, "plan": PLAN}, 4, "tensor=3: must divide the number of ranks, 4"),
        ({"shard": False, "replicate": 1}, 4, "replicate=1, shard=False"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(options: Any, ranks: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Parallelism(**options).sizes(ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": 2}, "shard=2: use True or False"),
        ({"replicate": 1.5}, "replicate=1.5"),
        ({"tensor": True}, "tensor=True"),
        ({"plan": PLAN}, "plan has no effect with tensor=1: use tensor=2 or more"),
        ({"tensor": 2}, r"tensor=2, plan=None: name the layers to split: \{\"up\": \"colwise\"\}"),
        ({"tensor": 2, "plan": {}}, r"tensor=2, plan=\{\}: name the layers"),
        ({"tensor": 2, "plan": ["up"]}, r"plan=\['up'\]: must be a dict"),
        ({"tensor": 2, "plan": {"up": "columns"}}, r"plan\['up'\]='columns': must be one of 'colwise'"),
        ({"tensor": 2, "plan": {"up": 3}}, r"plan\['up'\]=3: must be one of colwise.* or a ParallelStyle"),
        ({"units": nn.Linear}, "units=<class .*Linear.*>: must be a list of classes or names"),
        ({"units": [3]}, "units: 3 is neither a module class nor a name"),
        ({"reshard_after_forward": 0}, "reshard_after_forward=0: use True or False"),
        ({"cpu_offload": True, "shard": False}, "cpu_offload=True, shard=False"),
    ],
)
def test_arguments_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Parallelism(**options)


# ------------------------------------------------------------------ modules
def test_a_plan_names_modules_part_by_part() -> None:
    style = ColwiseParallel()
    planned = Parallelism(tensor=2, plan={"layers.*.up": "colwise", "stem": style}).planned(model())
    assert planned == {"layers.0.up": "colwise", "layers.2.up": "colwise", "stem": style}
    with pytest.raises(
        ArgumentError, match=r"plan\['\*\.up'\]: the ModuleDict has no such module: it has stem, layers"
    ):
        Parallelism(tensor=2, plan={"*.up": "colwise"}).planned(model())


def test_units_are_found_innermost_first() -> None:
    whole = model()
    assert list(Parallelism().units_of(whole)) == ["layers.0", "layers.2"]  # no ReLU, and no list within a list
    whole._no_split_modules = ["Linear"]
    assert set(Parallelism().units_of(whole)) > {"stem", "layers.0.experts.0"}
    assert list(Parallelism(units=[Layer, "layers.*.up"]).units_of(whole)) == [
        *("layers.0.up", "layers.2.up", "layers.0", "layers.2")
    ]
    assert Parallelism(units=[]).units_of(whole) == {}
    with pytest.raises(ArgumentError, match="units: the ModuleDict has no 'stern': it has stem"):
        Parallelism(units=["stern"]).units_of(whole)


# ------------------------------------------------------------------ ranks that read the same
def test_copies_refuse_a_sampler_of_single_ranks(standing: Standing) -> None:
    standing.at(3, 4)
    own: Any = DistributedSampler(range(8), num_replicas=4, rank=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"DistributedSampler has num_replicas=4, rank=3.*num_replicas=2, rank=1"):
        shard(DataLoader(range(8), sampler=own), copies=2)  # type: ignore[arg-type]
    fitting: Any = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    loader: Any = shard(DataLoader(range(8), sampler=fitting), copies=2)  # type: ignore[arg-type]
    assert torch.cat(list(loader)).tolist() == [1, 3, 5, 7]
    with pytest.raises(ArgumentError, match="copies=0"):
        shard(DataLoader(range(8)), copies=0)  # type: ignore[arg-type]
