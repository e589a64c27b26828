"""Warnings that save days: data that every rank goes through whole, an order that repeats, a hang that is coming.

In the ranks of a launch with more than one, `install` puts a look before ``DataLoader.__iter__`` and around the
indices of ``DistributedSampler.__iter__``. Both call torch's own function and give back what it gives: they look, and
change nothing. Trouble of their own goes to ``logging``, never to the user's loop.

Only training passes count: those that begin with gradients enabled. Ranks tell each other of a pass in the store of
the default group, under a key that holds where in the user's program it began (the lines of the call stack): the last
of them compares. Nobody waits: there is no collective, and what a rank reads is there already.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nblaunch.errors import warn
from nblaunch.ranks import callers
from nblaunch.ranks.outline import outline

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

_MOST_PASSES = 100
"""Of each place in the program: one that makes an iterator for every step must not fill the store."""
_MOST_FRAMES = 8
_MOST_SCANS = 10
"""Searches of the process for a DistributedDataParallel: each takes about a tenth of a second."""
_SHARES_OUT = ("accelerate", "lightning", "pytorch_lightning")
"""Packages that iterate a whole loader and then give each rank its part."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Who goes through a sampler: a loader, or any that is made at the same place."""

    loader: weakref.ref[Any]
    place: str

    def is_again(self, other: _Reader) -> bool:
        """Whether it is the one that read before; a second loader's pass over the same epoch is meant."""
        return self.loader == other.loader or self.place == other.place


@dataclass(slots=True)
class _Seen:
    """What this process has seen."""

    pid: int
    """Whose it is: DataLoader workers that are forked from it have a copy, and look at nothing."""
    passes: Counter[str] = field(default_factory=Counter)
    """By place."""
    scans: int = 0
    expected: weakref.WeakKeyDictionary[Any, _Reader] = field(default_factory=weakref.WeakKeyDictionary)
    """Samplers whose next pass is a training loader's."""
    finished: weakref.WeakKeyDictionary[Any, tuple[int, list[_Reader]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """The epoch of each sampler's last whole pass, and who went through all of it."""
    told_of_order: bool = False


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one rank publishes of a pass that it begins."""

    batches: int
    whole: int = 0
    """Samples, where the sampler leaves none of the dataset out; else 0."""
    outline: int = 0
    """Of the dataset, where it is iterated whole."""


_seen: _Seen | None = None


def install() -> None:
    """Begin to look. Called in a rank of a launch with several, once torch is imported."""
    global _seen
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    _seen = _Seen(os.getpid())
    if not hasattr(DataLoader.__iter__, "__nblaunch__"):
        DataLoader.__iter__ = _looking(DataLoader.__iter__)  # type: ignore[method-assign]
        DistributedSampler.__iter__ = _counting(DistributedSampler.__iter__)  # type: ignore[method-assign, assignment]


def _looking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def looked_at(self: DataLoader[Any]) -> Any:
        message = _quietly(_at_pass, self)
        if message is not None:
            warn(message, beyond=callers.LIBRARIES)
        return original(self)

    looked_at.__nblaunch__ = True  # type: ignore[attr-defined]  # the mark that install looks for
    return looked_at


def _counting(original: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
    @functools.wraps(original)
    def counted(self: DistributedSampler[Any]) -> Iterator[int]:
        indices = original(self)
        reader = _quietly(_take_expected, self)
        return indices if reader is None else _counted(self, indices, reader)

    return counted


def _quietly(look: Callable[[Any], Any], subject: Any) -> Any:
    """What a look finds; None where it fails, as a warning is a courtesy, and the run is not its price."""
    try:
        return look(subject) if _seen is not None and _seen.pid == os.getpid() else None
    except Exception:  # noqa: BLE001  # a user's dataset, sampler or store
        _log.info("%s is not watched", type(subject).__name__, exc_info=True)
        return None


# ------------------------------------------------------------------ a pass begins
def _at_pass(loader: DataLoader[Any]) -> str | None:
    """Note that a pass begins; what there is to warn of."""
    import torch
    from torch.utils.data import IterableDataset

    assert _seen is not None
    if not torch.is_grad_enabled() or isinstance(loader.dataset, IterableDataset) or _is_peek():
        return None
    sampler = _sampler_of(loader)
    place = _place(loader)
    if _is_shuffled_shard(sampler) and len(loader) > 2 * (_read_ahead(loader) + 1):
        _seen.expected[sampler] = _Reader(weakref.ref(loader), place)
    number = _seen.passes[place]
    _seen.passes[place] += 1
    if number >= _MOST_PASSES:
        return None
    own = _Pass(len(loader), *(_whole(loader, sampler) if number == 0 else ()))
    return _compare(f"nblaunch/watch/{place}/{number}", own)


def _is_peek() -> bool:
    """Whether the user's line takes one batch: that is no pass, though it begins like one."""
    return "next(iter(" in callers.users_text()


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _read_ahead(loader: DataLoader[Any]) -> int:
    """Batches that workers may have taken from the sampler and the loop has not."""
    return loader.num_workers * (loader.prefetch_factor or 2)


def _whole(loader: DataLoader[Any], sampler: Any) -> tuple[int, int]:
    """(samples, outline of the dataset) of a loader that leaves nothing to other ranks; else (0, 0)."""
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    if type(sampler) not in (RandomSampler, SequentialSampler) or type(loader.batch_sampler) not in (
        BatchSampler,
        type(None),
    ):
        return 0, 0
    samples = len(sampler)
    if samples < 2 or samples != len(loader.dataset) or _is_shared_out(loader):  # type: ignore[arg-type]  # a Sized
        return 0, 0
    return samples, outline(loader.dataset)


def _is_shared_out(loader: DataLoader[Any]) -> bool:
    """Whether what iterates the loader gives each rank its part afterwards."""
    from torch.utils.data import DataLoader

    if type(loader).__iter__ is not DataLoader.__iter__:
        return True
    return callers.package_outside(__name__) in _SHARES_OUT


def _place(loader: DataLoader[Any]) -> str:
    """Where in the user's program a pass begins, and of what kind of loader: the same on ranks that do the same."""
    kinds = [type(part).__name__ for part in (loader, loader.dataset, loader.batch_sampler, loader.sampler)]
    return hashlib.blake2b(
        repr((callers.users_lines(_MOST_FRAMES), kinds, loader.batch_size)).encode(), digest_size=8
    ).hexdigest()


# ------------------------------------------------------------------ comparing with the other ranks
def _compare(key: str, own: _Pass) -> str | None:
    """Publish a pass; the last rank to do so gets what there is to warn of."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    ranks = dist.get_world_size()
    store.set(f"{key}/{dist.get_rank()}", json.dumps((own.batches, own.whole, own.outline)))
    if store.add(f"{key}/begun", 1) != ranks:  # each sets before it adds: so for the last, all is there
        return None
    passes = [_Pass(*json.loads(value)) for value in store.multi_get([f"{key}/{rank}" for rank in range(ranks)])]
    if own.whole and all(each == own for each in passes):
        return _of_whole(own.whole, ranks) if _is_first(store, "whole") else None
    counts = [each.batches for each in passes]
    if len(set(counts)) > 1 and _will_hang(ranks) and _is_first(store, "unequal"):
        return _of_unequal(counts)
    return None


def _is_first(store: Any, kind: str) -> bool:
    """Whether no rank has given this warning yet."""
    return bool(store.add(f"nblaunch/watch/{kind}", 1) == 1)


def _will_hang(ranks: int) -> bool:
    """Whether a DistributedDataParallel over all ranks is alive here, and not within ``Join``, which allows it."""
    import gc

    from torch.nn.parallel import DistributedDataParallel

    assert _seen is not None
    _seen.scans += 1
    if _seen.scans > _MOST_SCANS:
        return False
    # by its type: isinstance asks objects for their __class__, which may import, warn or raise
    found: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return any(each.process_group.size() == ranks and not each._join_config.enable for each in found)


def _of_whole(samples: int, ranks: int) -> str:
    return (
        f"each of the {ranks} ranks goes through all {samples:,} samples of this DataLoader: with "
        "nblaunch.training.data.shard(loader), or sampler=DistributedSampler(dataset), each takes its part"
    )


def _of_unequal(counts: list[int]) -> str:
    most, fewest = counts.index(max(counts)), counts.index(min(counts))
    return (
        f"rank {most} has {counts[most]:,} batches of this DataLoader, rank {fewest} has {counts[fewest]:,}: ranks "
        "that train with DistributedDataParallel wait for each other in every batch, so after batch "
        f"{counts[fewest]:,} they hang. Give each as many, by nblaunch.training.data.shard(loader) or "
        "sampler=DistributedSampler(dataset), or train within torch.distributed.algorithms.join.Join([model])"
    )


# ------------------------------------------------------------------ an order that repeats
def _is_shuffled_shard(sampler: Any) -> bool:
    """Whether it is torch's DistributedSampler in a new order each epoch; what overrides its order is left alone."""
    from torch.utils.data.distributed import DistributedSampler

    return isinstance(sampler, DistributedSampler) and (
        sampler.shuffle and type(sampler).__iter__ is DistributedSampler.__iter__
    )


def _take_expected(sampler: DistributedSampler[Any]) -> _Reader | None:
    """Who reads the pass that begins, if it counts."""
    assert _seen is not None
    return _seen.expected.pop(sampler, None)


def _counted(sampler: DistributedSampler[Any], indices: Iterator[int], reader: _Reader) -> Iterator[int]:
    """The indices; a pass that repeats the one before is told at its half, as a mere peek goes less far."""
    epoch = sampler.epoch
    yield from itertools.islice(indices, sampler.num_samples // 2)
    if _repeats(sampler, epoch, reader):
        warn(
            f"this DistributedSampler goes through epoch {epoch} again, so in the order of the epoch before: call "
            "sampler.set_epoch(epoch) at the start of each epoch, or use nblaunch.training.data.shard(loader), "
            "which does it",
            beyond=callers.LIBRARIES,
        )
    yield from indices
    if _seen is not None:
        before = [each for each in _readers_of(sampler, epoch) if not reader.is_again(each)]
        _seen.finished[sampler] = epoch, [*before, reader]


def _repeats(sampler: DistributedSampler[Any], epoch: int, reader: _Reader) -> bool:
    """Whether this is the first pass of this process to repeat its order; rank 0 speaks for all."""
    assert _seen is not None
    if _seen.told_of_order or sampler.rank != 0 or not any(map(reader.is_again, _readers_of(sampler, epoch))):
        return False
    _seen.told_of_order = True
    return True


def _readers_of(sampler: DistributedSampler[Any], epoch: int) -> list[_Reader]:
    """Who went through all of this epoch, if it was the sampler's last one."""
    assert _seen is not None
    finished, readers = _seen.finished.get(sampler, (epoch, []))
    return readers if finished == epoch else []
