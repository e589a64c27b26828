"""`shard`: one call that gives every rank its part of a DataLoader's batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from nblaunch.errors import ArgumentError
from nblaunch.training.data.counted_loader import CountedLoader
from nblaunch.training.data.sharded_loader import ShardedLoader

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
