"""A script whose functions and classes live in ``__main__``, as those of a notebook's cells do.

``python in_main.py`` runs the checks of `CHECKS` with two ranks, and writes to stdout one JSON object: for each start
method, the name of each check, and "ok" or what went wrong. A spawned rank imports torch: there is one.
"""

from __future__ import annotations

import abc
import functools
import inspect
import io
import json
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as of_torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nblaunch import Launch, notebook_launcher
from nblaunch.training import Accelerator
from tests.conftest import LONG

SCALE = 2.0
FACTOR = 2
Item = TypeVar("Item")


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


class Box:
    """A class whose methods use a global, and which counts its objects."""

    made = 0

    class Lid:
        """A class in a class."""

    def __init__(self, value: int) -> None:
        Box.made += 1
        self.value = value

    def scaled(self) -> int:
        return self.value * FACTOR


class Registered:
    """A class that keeps a list of its subclasses."""

    known: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        Registered.known.append(cls)


class Plugin(Registered):
    """Such a subclass."""


class Shape(abc.ABC):
    """An abstract class."""

    @abc.abstractmethod
    def area(self) -> int: ...


class Tile(Shape):
    """A class that is no longer abstract."""

    def area(self) -> int:
        return FACTOR


class Meta(type):
    """A metaclass."""


class OfMeta(metaclass=Meta):
    """Its class."""


class Stack(Generic[Item]):
    """A generic class."""


class Point(NamedTuple):
    """A tuple with names."""

    x: int


@dataclass(slots=True)
class Slim:
    size: int = 3


KINDS: tuple[Any, ...] = (
    *(Net, Config, Mode, OddNumberError, Box, Box.Lid, Registered, Plugin),
    *(Shape, Tile, Meta, OfMeta, Stack, Point, Slim),
)


def square(number: int) -> int:
    return number * number


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
    received = [Config(7.0) if rank == 0 else None]
    dist.broadcast_object_list(received, src=0)
    assert received == [Config(7.0)]


def pool_by_fork() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]


@functools.cache
def cached_square(number: int) -> int:
    return square(number)


class CachedSquares(Squares):
    def __getitem__(self, index: int) -> int:
        return cached_square(index)


def loader_workers_by_fork() -> None:
    loader = DataLoader(CachedSquares(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert torch.cat(list(loader)).tolist() == [i * i for i in range(8)]


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


def what_other_ranks_and_pickle_bring_leaves_classes_as_they_are(rank: int) -> None:
    Box.made = 10 * rank
    before = dict(vars(Box))
    box = Accelerator().broadcast([Box, square])
    assert box == [Box, square]
    assert dict(vars(Box)) == before
    assert Box.scaled.__globals__ is globals()


ON_ONE_RANK: tuple[Callable[..., None], ...] = (
    pickles_by_name,
    main_has_the_names_it_was_sent,
    globals_are_one_and_the_same,
    pool_by_fork,
)
ON_RANKS: tuple[Callable[..., None], ...] = (
    what_other_ranks_and_pickle_bring_leaves_classes_as_they_are,
    torch_saves_a_whole_model,
    gathers_objects,
    loader_workers_by_fork,
    *ON_ONE_RANK,
)


def all_in_one_launch(names: tuple[str, ...], rank: int, world_size: int) -> dict[str, str]:
    """What came of these checks on this rank."""
    given = {"rank": rank, "world_size": world_size}
    checks = {check.__name__: check for check in ON_RANKS}
    return {
        name: _outcome(check, **{each: given[each] for each in inspect.signature(check).parameters})
        for name, check in checks.items()
        if name in names
    }


# ------------------------------------------------------------------ checks: what comes back to this process
def state_of(kinds: tuple[Any, ...] = KINDS) -> list[Any]:
    return [*(dict(vars(kind)) for kind in kinds), list(Registered.known), Registered.__subclasses__()]


def make_one_of_each(rank: int) -> list[Any]:
    Box.made = rank + 100
    Registered.known.append(Box)
    Config.lr = rank
    plain = (Net, Config, Box.Lid, Registered, Plugin, Tile, OfMeta, Stack, Slim)
    return [*(kind() for kind in plain), Box(rank), Point(1), Mode.TRAIN, OddNumberError("odd"), *KINDS]


def results_leave_classes_as_they_are(**options: Any) -> None:
    before = state_of()
    results: Any = notebook_launcher(make_one_of_each, **options)
    assert state_of() == before
    here = make_one_of_each(0)
    Box.made, Registered.known[:], Config.lr = 0, [Plugin], 0.1
    for result in results:
        assert [type(each) for each in result] == [type(each) for each in here]
        assert result[-len(KINDS) :] == list(KINDS)


def methods_of_results_use_this_processs_globals(**options: Any) -> None:
    global FACTOR
    make: Callable[..., Any] = lambda rank: Box(rank)  # noqa: E731  # as users write it
    boxes: Any = notebook_launcher(make, **options)
    FACTOR = 5
    try:
        assert [box.scaled() for box in boxes] == [0, 5]
        scaled: Any = notebook_launcher(lambda rank: Box(rank).scaled(), **options)
        assert list(scaled) == [0, 5]
    finally:
        FACTOR = 2


def raise_own_after_a_change() -> None:
    OddNumberError.limit = 3  # type: ignore[attr-defined]
    raise OddNumberError("odd")


def an_exception_leaves_its_class_as_it_is(**options: Any) -> None:
    before = dict(vars(OddNumberError))
    caught: BaseException | None = None
    try:
        notebook_launcher(raise_own_after_a_change, **options)
    except OddNumberError as error:
        caught = error
    assert type(caught) is OddNumberError
    assert str(caught) == "odd"
    assert 'raise OddNumberError("odd")' in str(caught.__cause__)
    assert dict(vars(OddNumberError)) == before


def return_functions(rank: int) -> tuple[Any, ...]:
    global FACTOR
    FACTOR = 7
    return square, Box(1).scaled, lambda: FACTOR * rank


def functions_that_come_back_are_this_processs_own(**options: Any) -> None:
    own, method, made_there = notebook_launcher(return_functions, **options)[1]  # type: ignore[index]
    assert own is square
    assert method.__func__ is Box.scaled
    assert made_there() == 7
    assert FACTOR == 2


def make_on_request(folder: Path) -> Any:
    (folder / f"began{dist.get_rank()}").touch()
    wait_for(folder / "go")
    return Box(4)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + LONG
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def a_class_that_was_redefined_meanwhile_is_the_one_that_results_have(**options: Any) -> None:
    before = Box
    with tempfile.TemporaryDirectory() as name:
        launched = notebook_launcher(make_on_request, (Path(name),), block=False, **options)
        assert isinstance(launched, Launch)
        for rank in range(2):
            wait_for(Path(name, f"began{rank}"))
        redefined = type("Box", (), {"__module__": "__main__", "scaled": lambda self: -self.value})
        globals()["Box"] = redefined
        try:
            Path(name, "go").touch()
            boxes = list(launched.result())
        finally:
            globals()["Box"] = before
    assert [type(box) for box in boxes] == [redefined] * 2
    assert boxes[0].scaled() == -4


def make_classes() -> tuple[Any, Any]:
    class Local:
        made_in = "a rank"

    globals()["Config"] = type("Config", (), {"__module__": "__main__", "lr": "a rank's"})
    return Local(), Config()


def classes_that_ranks_make_are_new_here(**options: Any) -> None:
    before = dict(vars(Config))
    local, config = notebook_launcher(make_classes, **options)[0]  # type: ignore[index]
    assert local.made_in == "a rank"
    assert config.lr == "a rank's"
    assert type(config) is not Config
    assert dict(vars(Config)) == before


def a_local_class_comes_back_as_itself(**options: Any) -> None:
    class Local:
        changed = False

    def change_and_make() -> Local:
        Local.changed = True
        return Local()

    back = notebook_launcher(change_and_make, **options)[0]  # type: ignore[index]
    assert type(back) is Local
    assert not Local.changed


def what_multiprocessing_shares_is_shared(**options: Any) -> None:
    context: Any = of_torch.get_context("spawn")
    ranks = options["num_processes"]
    queue, simple, joinable = context.Queue(), context.SimpleQueue(), context.JoinableQueue()
    here, there = context.Pipe()
    count, array = context.Value("i", 0), context.Array("d", 2)
    lock, nested, gate = context.Lock(), context.RLock(), context.BoundedSemaphore(1)
    barrier, event, condition = context.Barrier(ranks), context.Event(), context.Condition()

    def use(rank: int) -> Any:
        barrier.wait(LONG)
        for _ in range(100):
            with lock:
                array[0] += 1
        with nested, nested, gate, condition, count.get_lock():
            count.value += 1
            array[1] = 5
        queue.put((rank, "from a rank"))
        simple.put(rank)
        joinable.put(rank)
        if rank == 0:
            there.send("hello")
            event.set()
        return event.wait(LONG)

    for launches in (1, 2):  # the second shares the same
        assert all(notebook_launcher(use, **options))  # type: ignore[arg-type]
        assert {queue.get(timeout=LONG) for _ in range(ranks)} == {(rank, "from a rank") for rank in range(ranks)}
        assert {simple.get() for _ in range(ranks)} == set(range(ranks))
        assert {joinable.get(timeout=LONG) for _ in range(ranks)} == set(range(ranks))
        assert here.recv() == "hello"
        assert (count.value, array[:]) == (ranks * launches, [100.0 * ranks * launches, 5.0])


def a_manager_and_what_it_holds_are_shared(**options: Any) -> None:
    with multiprocessing.Manager() as manager:
        shared: Any = manager.dict(total=0)
        queue, lock = manager.Queue(), manager.Lock()
        shared["inner"] = manager.list()

        def use(rank: int) -> None:
            with lock:
                shared["total"] += 1
            shared["inner"].append(rank)
            queue.put(rank)

        notebook_launcher(use, **options)
        ranks = options["num_processes"]
        assert shared["total"] == ranks
        assert sorted(shared["inner"]) == sorted(queue.get(timeout=LONG) for _ in range(ranks)) == list(range(ranks))


EVERYWHERE: tuple[Callable[..., None], ...] = (
    results_leave_classes_as_they_are,
    methods_of_results_use_this_processs_globals,
    an_exception_leaves_its_class_as_it_is,
    functions_that_come_back_are_this_processs_own,
    a_class_that_was_redefined_meanwhile_is_the_one_that_results_have,
    classes_that_ranks_make_are_new_here,
)
AT_HOME: tuple[Callable[..., None], ...] = (
    a_local_class_comes_back_as_itself,
    what_multiprocessing_shares_is_shared,
    a_manager_and_what_it_holds_are_shared,
    *EVERYWHERE,
)
CHECKS: dict[str, tuple[Callable[..., None], ...]] = {
    "forkserver": (*ON_RANKS, *AT_HOME),
    "spawn": ON_ONE_RANK,
    "fork": EVERYWHERE,
}


def outcomes(start_method: str) -> dict[str, str]:
    ranks = 1 if start_method == "spawn" else 2
    options: dict[str, Any] = {"num_processes": ranks, "start_method": start_method, "view": "none"}
    checks = CHECKS[start_method]
    came = {check.__name__: _outcome(check, **options) for check in checks if check not in ON_RANKS}
    names = tuple(check.__name__ for check in checks if check in ON_RANKS)
    if names:
        for of_rank in notebook_launcher(all_in_one_launch, (names,), **options):  # type: ignore[union-attr]
            came |= {name: outcome for name, outcome in of_rank.items() if came.get(name, "ok") == "ok"}
    return came


def _outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception:
        return traceback.format_exc()
    return "ok"


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "start_method='fork'")  # of a process with threads
    sys.stdout.write(json.dumps({start_method: outcomes(start_method) for start_method in CHECKS}))
