"""A script whose functions and classes live in ``__main__``, as those of a notebook's cells do.

``python in_main.py START_METHOD`` runs every check below on two ranks, and writes to stdout one JSON object:
the name of each check, and "ok" or what went wrong.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nblaunch import notebook_launcher

SCALE = 2.0


class Net(nn.Module):
    """A model as a cell defines it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * SCALE


@dataclass
class Config:
    """Settings as a cell defines them."""

    lr: float = 0.1


class Mode(Enum):
    """An enumeration as a cell defines it."""

    TRAIN = 1


class Squares(Dataset[int]):
    """A dataset as a cell defines it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return square(index)


class OddNumberError(Exception):
    """An exception as a cell defines it."""


def square(number: int) -> int:
    return number * number


def put_square(number: int, queue: Any) -> None:
    queue.put(square(number))


# ------------------------------------------------------------------ checks: what ranks run
def pickles_by_name() -> None:
    net = Net()
    again = pickle.loads(pickle.dumps([net, Config(0.5), Mode.TRAIN, square]))
    assert type(again[0]) is Net
    assert again[1] == Config(0.5)
    assert again[2] is Mode.TRAIN
    assert again[3] is square


def torch_saves_a_whole_model() -> None:
    file = io.BytesIO()
    net = Net()
    torch.save(net, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert type(again) is Net
    assert torch.equal(again(torch.ones(1, 2)), net(torch.ones(1, 2)))


def gathers_objects(rank: int, world_size: int) -> None:
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, Config(float(rank)))
    assert gathered == [Config(0.0), Config(1.0)]
    told = [Config(7.0) if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    assert told == [Config(7.0)]


def _pool(method: str) -> None:
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]


def pool_by_fork() -> None:
    _pool("fork")


def pool_by_spawn() -> None:
    _pool("spawn")


def _process(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=put_square, args=(3, queue))
    process.start()
    assert queue.get(timeout=60) == 9
    process.join(60)
    assert process.exitcode == 0


def process_by_fork() -> None:
    _process("fork")


def process_by_spawn() -> None:
    _process("spawn")


def _workers(method: str) -> None:
    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
    assert torch.cat(list(loader)).tolist() == [i * i for i in range(8)]


def loader_workers_by_fork() -> None:
    _workers("fork")


def loader_workers_by_spawn() -> None:
    _workers("spawn")


def main_has_the_names_it_was_sent() -> None:
    import __main__

    assert __main__.square is square
    assert __main__.Config is Config
    assert __main__.SCALE == SCALE
    assert not hasattr(__main__, "no_such_name")


def globals_are_one_and_the_same() -> None:
    global SCALE
    SCALE = 3.0
    x = torch.ones(1, 2)
    net = Net()
    assert torch.equal(net(x), net.layer(x) * 3.0)


CHECKS: tuple[Callable[..., None], ...] = (
    pickles_by_name,
    torch_saves_a_whole_model,
    gathers_objects,
    pool_by_fork,
    pool_by_spawn,
    process_by_fork,
    process_by_spawn,
    loader_workers_by_fork,
    loader_workers_by_spawn,
    main_has_the_names_it_was_sent,
    globals_are_one_and_the_same,
)


# ------------------------------------------------------------------ checks: what comes back to this process
def raise_own() -> None:
    raise OddNumberError("odd")


def make_objects() -> tuple[Net, Config, Mode]:
    return Net(), Config(0.3), Mode.TRAIN


def objects_come_back_as_this_processs_own(**options: Any) -> None:
    net, config, mode = notebook_launcher(make_objects, **options)[0]  # type: ignore[index]
    assert type(net) is Net
    assert config == Config(0.3)
    assert mode is Mode.TRAIN


def its_own_exception_can_be_caught(**options: Any) -> None:
    caught: BaseException | None = None
    try:
        notebook_launcher(raise_own, **options)
    except OddNumberError as error:
        caught = error
    assert str(caught) == "odd"
    assert caught is not None
    assert 'raise OddNumberError("odd")' in str(caught.__cause__)


AT_HOME: tuple[Callable[..., None], ...] = (objects_come_back_as_this_processs_own, its_own_exception_can_be_caught)


def main(start_method: str) -> None:
    options: dict[str, Any] = {"num_processes": 2, "start_method": start_method, "view": "none"}
    outcomes = {check.__name__: _outcome(notebook_launcher, check, **options) for check in CHECKS}
    outcomes |= {check.__name__: _outcome(check, **options) for check in AT_HOME}
    sys.stdout.write(json.dumps(outcomes))


def _outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception:
        return traceback.format_exc()
    return "ok"


if __name__ == "__main__":
    main(sys.argv[1])
