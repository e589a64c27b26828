"""`shard`: one call that gives every rank its part of a DataLoader's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from nblaunch.errors import ArgumentError
from nblaunch.training.data.counted_loader import CountedLoader, given_generators
from nblaunch.training.data.sharded_loader import ShardedLoader
from nblaunch.training.exchange import exchange
from nblaunch.training.seeding import order_seed

T = TypeVar("T")


def shard(
    loader: DataLoader[T],
    *,
    seed: int | None = None,
    dispatch: bool | None = None,
    move: Callable[[Any], Any] | None = None,
    copies: int | None = None,
) -> ShardedLoader[T]:
    """Give each rank its part of a DataLoader: every sample once, equally many batches on every rank.

    So DDP cannot hang, and counts over the ranks are exact. `ShardedLoader` describes how the data is divided.

    Args:
        loader: Any ``torch.utils.data.DataLoader``; all its arguments are kept. A `ShardedLoader` comes back itself,
            with the other arguments set.
        seed: Seed of the order, 0 to 2**32 - 1. Default: that of `seed_everything`, else 0.
        dispatch: For iterable datasets. True or None: rank 0 reads, and sends each rank its part. False: every rank
            reads everything, which must be the same on each, and keeps its part: for streams that are cheap to read.
        move: Called on each batch before it is yielded. Default: batches stay where they are.
        copies: Consecutive ranks that get the same part, as ranks that divide layers need. Default 1.

    Raises:
        ArgumentError: `loader` is not a DataLoader, `seed` or `copies` is out of range, or with `copies` a sampler
            gives each rank a part of its own.
    """
    if isinstance(loader, ShardedLoader):
        loader.adjust(seed=seed, dispatch=dispatch, move=move, copies=copies)
        return loader
    if isinstance(loader, CountedLoader):
        loader = loader.plain()
    given: object = loader
    if not isinstance(given, DataLoader):
        kind = type(given).__name__
        raise ArgumentError(f"loader={loader!r:.80}: must be a torch.utils.data.DataLoader, and is a {kind}")
    if not issubclass(type(given), DataLoader):  # isinstance believes __class__, which accelerate overrides
        raise ArgumentError(
            f"loader is a {type(given).__name__}, already divided by accelerate, which repeats samples so that every "
            "rank has equally many: give the DataLoader from before prepare"
        )
    return ShardedLoader(loader, seed=seed, dispatch=dispatch, move=move, copies=copies)


def agreed_seed(loader: DataLoader[Any]) -> int | None:
    """Return rank 0's seed of a loader's order: of the loader's generator if it has one, else of torch's global one.

    None for a `ShardedLoader` with a seed of its own, which it keeps. A collective.
    """
    is_settled = isinstance(loader, ShardedLoader) and loader.has_own_seed
    seed: int | None = exchange(None if is_settled else order_seed(given_generators(loader)))[0]
    return seed


def divide_batches(loader: DataLoader[T], ranks: int) -> DataLoader[T]:
    """Return a copy of the loader whose batches are smaller, so that all ranks together take one of the original's.

    Raises:
        ArgumentError: The batch size is unknown, or no multiple of the number of ranks.
    """
    inner: Any = loader.batch_sampler
    size: Any = getattr(inner, "batch_size", None) if loader.batch_size is None else loader.batch_size
    if not isinstance(size, int) or size % ranks:
        raise ArgumentError(f"split_batches=True: the batch size, {size}, must be a multiple of the {ranks} ranks")
    copy: DataLoader[T] = DataLoader.__new__(DataLoader)  # the constructor's arguments vary between torch versions
    vars(copy).update(vars(loader), _iterator=None)
    if loader.batch_size is not None:
        vars(copy)["batch_size"] = size // ranks
    if type(inner) is BatchSampler and not isinstance(loader.dataset, IterableDataset):
        vars(copy)["batch_sampler"] = BatchSampler(inner.sampler, size // ranks, inner.drop_last)
    elif loader.batch_size is None:
        vars(copy)["batch_sampler"] = _DividedBatchSampler(inner, size, ranks)
    return copy


class _DividedBatchSampler:
    """Yields each batch of a batch sampler in as many parts as there are ranks."""

    def __init__(self, inner: Any, size: int, ranks: int) -> None:
        self.inner, self.ranks = inner, ranks
        self.batch_size, self.drop_last = size // ranks, bool(getattr(inner, "drop_last", False))

    @property
    def sampler(self) -> Any:
        return getattr(self.inner, "sampler", None)

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self.inner:
            items = list(batch)
            bounds = [len(items) * part // self.ranks for part in range(self.ranks + 1)]
            yield from (items[begin:end] for begin, end in pairwise(bounds) if begin < end)

    def __len__(self) -> int:
        return len(self.inner) * self.ranks
