"""`shard`: one call that gives every rank its part of a DataLoader's batches; its `ShardedLoader`; `Prefetcher`."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from nblaunch.errors import ArgumentError
from nblaunch.machine.arguments import whole_number
from nblaunch.training.collectives import exchange
from nblaunch.training.partition import (
    Division,
    Share,
    StreamReader,
    collated,
    partition_batches,
    partition_samples,
    round_count,
    with_last,
)
from nblaunch.training.pytree import tensors_in, to_device
from nblaunch.training.samplers import EpochProgress
from nblaunch.training.seeding import (
    Seeded,
    checked_seed,
    default_seed,
    derived_generator,
    derived_seed,
    order_seed,
    seeded,
)
from nblaunch.training.topology import World, data_world, world


@dataclass(frozen=True, slots=True)
class IndexSource:
    sampler: Any
    yields: Literal["samples", "batches", "own part"]
    """``"own part"``: the sampler shards, and yields this rank's indices or batches."""
    batch_size: int = 1
    drop_last: bool = False
    takes_lists: bool = True
    """Whether the loader asks its dataset for lists of indices; without automatic batching it asks for one."""

    @property
    def is_sized(self) -> bool:
        return length_of(self.sampler) is not None  # one without a length may be infinite

    def shares(self, place: World, begin: int = 0) -> Iterator[Share]:
        """Yield this rank's batches of indices, lazily; `begin` as for `partition_samples`."""
        if self.yields == "own part":
            return (Share(part) for part in self.sampler)
        if self.yields == "batches":
            rounds = partition_batches(self.sampler, place.size, drop_last=self.drop_last, begin=begin)
            return (shares[place.rank] for shares in rounds)
        rounds = partition_samples(self.sampler, self.batch_size, place.size, drop_last=self.drop_last, begin=begin)
        own = (shares[place.rank] for shares in rounds)
        return own if self.takes_lists else (share._replace(items=share.items[0], own=0, of_all=0) for share in own)

    def planned(self, place: World, seed: int, epoch: int, begin: int = 0) -> list[Share]:
        """Return all of this rank's batches of one epoch, a function of the seed and not of any generator's state."""
        with seeded(derived_seed(seed, epoch), *generators_of(self.sampler, _inner(self.sampler))):
            return list(self.shares(place, begin))

    def rounds(self, ranks: int) -> int:
        if self.yields == "own part":
            return len(self.sampler)
        return round_count(len(self.sampler), self.batch_size, ranks, drop_last=self.drop_last)

    def total(self, ranks: int) -> int | None:
        """Return how many samples all ranks get together, each counted once; None if unknown."""
        if self.yields == "own part":
            return None if self.drop_last else _total_of(self.sampler)
        if self.yields == "batches" or not self.is_sized:
            return None  # known only batch by batch
        size = len(self.sampler)
        return size - size % (self.batch_size * ranks) if self.drop_last else size


def source_of(loader: DataLoader[Any]) -> IndexSource:
    outer: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    takes_lists = loader.batch_sampler is not None or isinstance(outer, BatchSampler)
    if any(shards(sampler) for sampler in samplers_of(loader)):
        drops = isinstance(outer, BatchSampler) and outer.drop_last  # unknown how many each rank drops
        return IndexSource(outer, "own part", drop_last=drops, takes_lists=takes_lists)
    if type(outer) is BatchSampler:  # a subclass may build its batches in any way
        return IndexSource(outer.sampler, "samples", outer.batch_size, outer.drop_last)
    if takes_lists:
        return IndexSource(outer, "batches", drop_last=bool(getattr(outer, "drop_last", False)))
    return IndexSource(outer, "samples", takes_lists=False)


# ------------------------------------------------------------------ samplers
def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    outer: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return [sampler for sampler in (outer, _inner(outer)) if sampler is not None]


def shards(sampler: Any) -> bool:
    """Return True if a sampler yields one rank's part, as torch's DistributedSampler and ours do."""
    replicas = getattr(sampler, "num_replicas", None)
    return isinstance(replicas, int) and replicas > 1 and hasattr(sampler, "rank")


def share_parts(loader: DataLoader[Any], copies: int) -> None:
    """Let a loader's samplers give `copies` consecutive ranks the same part."""
    for sampler in samplers_of(loader):
        if hasattr(sampler, "copies"):
            sampler.copies = copies
        place = data_world(copies)
        if copies > 1 and shards(sampler) and (sampler.num_replicas, sampler.rank) != (place.size, place.rank):
            raise ArgumentError(
                f"loader: its {type(sampler).__name__} has num_replicas={sampler.num_replicas}, rank={sampler.rank}, "
                f"but each tensor-parallel group of {copies} ranks needs the same samples: remove it, or use "
                f"num_replicas={place.size}, rank={place.rank}"
            )


def generators_of(*things: Any) -> list[torch.Generator]:
    given = (getattr(thing, "generator", None) for thing in things)
    return [generator for generator in given if isinstance(generator, torch.Generator)]


def _total_of(sampler: Any) -> int | None:
    """Return how many samples a sharding sampler gives all ranks, each counted once: torch's may repeat some."""
    for each in (sampler, _inner(sampler)):
        if type(each) is DistributedSampler:
            return min(each.total_size, len(each.dataset))  # type: ignore[arg-type]  # it calls len itself
        with contextlib.suppress(TypeError):  # a sampler without a length
            if isinstance(total := getattr(each, "total", None), int):
                return total
    return None


def _inner(sampler: Any) -> Any:
    return getattr(sampler, "sampler", None)


def length_of(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):  # samplers of unknown length raise the latter
        return None


# ------------------------------------------------------------------ one pass
@dataclass(slots=True, eq=False)
class IndexPass:
    """The indices of one pass, as torch's loader reads them, each batch with a seed of its own."""

    shares: Iterable[Share]
    seeds: Iterator[int]
    loads_here: bool
    notes: deque[Share] = field(default_factory=deque)
    """Of the batches that were requested and not yielded, in order."""
    loading: ExitStack = field(default_factory=ExitStack)
    """Entered while this process loads a batch: the seeded random state."""

    def __iter__(self) -> Iterator[Any]:
        for (share, is_last), seed in zip(with_last(self.shares), self.seeds, strict=False):
            self.notes.append(share._replace(items=[], is_last=is_last))
            if self.loads_here:
                self.loading.enter_context(seeded(seed))
            yield share.items if self.loads_here else Seeded(seed, share.items)


class IndexFeed:
    """Stands in for the user's sampler: torch's loader iterates the pass that is current when it starts."""

    def __init__(self) -> None:
        self.current = IndexPass((), iter(()), loads_here=True)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.current)  # bound now: another pass may begin before this one is read


T_co = TypeVar("T_co", covariant=True)
_END: Any = object()


@dataclass(slots=True, eq=False)
class _Pass:
    epoch: int
    done: int
    """Batches up to the latest one, including those before a resume."""
    size: int | None
    taken: int = 0
    note: Share = field(default_factory=lambda: Share([]))


class ShardedLoader(DataLoader[T_co]):
    """A DataLoader that yields this rank's part; created by `shard`. In a single process it yields everything.

    **Map-style datasets.** Every rank runs the loader's own sampler with one seed, derived from (seed, epoch), so all
    ranks agree on one order. Its random state is restored afterwards. (A ``generator`` of the loader is seeded too: use
    `seed` for another order. `Accelerator.prepare` takes `seed` from that generator.) The order is cut into chunks of
    ``batch_size`` × world size. Rank r takes the r-th part of each chunk, so a batch gathered by rank is in order.
    The last chunk is divided evenly; if it has fewer samples than ranks, the previous chunk gives it some. So each
    sample comes exactly once *and* all ranks have the same number of batches. Where that is impossible (batches of one
    sample, or fewer samples than ranks), a rank repeats one sample, and `is_padding` is True. With ``drop_last`` only
    whole chunks are yielded. A custom batch sampler's batches are distributed whole, see `partition_batches`. A
    sampler that already shards, such as torch's ``DistributedSampler``, keeps its parts; only its epochs are set.

    **Iterable datasets.** The same, except that rank 0 reads and sends, or each rank reads everything: see
    ``dispatch`` in `shard`. While rank 0 sends, iterating is a collective. Every rank must take the same number of
    batches from the same number of passes, peeks included; otherwise a RuntimeError is raised. Do not shard a dataset
    that already selects its rank's part.

    **Epochs.** A complete pass advances `epoch`, so each pass has its own order. A peek by ``next(iter(loader))`` does
    not advance it, nor does a pass that ends early. A loop that stops at the last of several batches
    (``zip(range(n), loader)``, ``break``) has completed the pass, which counts when the next one begins. Your own
    `set_epoch`, here or on your sampler, wins.

    **Random augmentation.** Each batch of a map-style dataset is loaded with the Python, NumPy and torch (CPU)
    generators seeded from (seed, epoch, rank, batch). So ranks draw different numbers, a run is reproducible with any
    number of workers, and a resumed pass loads the same batches. Without workers, this process's random states are
    restored afterwards. The dataset's own generators are not seeded. For a stream each batch is seeded as rank 0's, and
    workers are seeded once per pass. Two loaders with one seed draw the same numbers for their n-th batches: use
    different seeds for loaders that are iterated side by side.

    Rank and world size are looked up on iteration, so a loader created in the notebook also works in the ranks.

    Attributes:
        is_padding: Whether the latest batch repeats another rank's sample.
        is_last: Whether the latest batch is the last of its pass.
        remaining: Batches left in the pass, including the latest one; None if the loader has no length.
        own_samples: Samples in the latest batch that no other rank has; 0 if `all_samples` is 0.
        all_samples: Samples in the latest batches of all ranks, each counted once; 0 if unknown.
        observer: Notified about passes.
        copies: Number of consecutive ranks that get the same part.
    """

    is_padding: bool = False
    is_last: bool = False
    remaining: int | None = None
    own_samples: int = 0
    all_samples: int = 0
    observer: Any = None

    def __init__(self, loader: DataLoader[T_co]) -> None:
        # Not DataLoader.__init__, which refuses a batch_size beside a batch sampler: every argument is kept, including
        # those of later torch versions, and `_index_sampler` alone determines what is read.
        vars(self).update(vars(loader))
        self._iterator = None
        self._seed: int | None = None
        self._dispatch: bool | None = None
        self._move: Callable[[Any], Any] | None = None
        self._progress = EpochProgress()
        self._passes: list[_Pass] = []
        self._planned_for: tuple[World, int, int, int] | None = None
        self._plan: list[Share] = []  # cached: a peek and the pass after it run the user's sampler once
        self._reader: StreamReader | None = None
        self._indices = IndexFeed()
        self._loaded: Division | None = None  # of the latest loaded state
        self._sampler_epoch: int | None = None  # last set on the samplers; any other value there is the user's
        self.in_order = True  # a position is a number of batches, so workers must not overtake each other
        self.copies = 1

    def adjust(
        self, seed: int | None, dispatch: bool | None, move: Callable[[Any], Any] | None, copies: int | None
    ) -> None:
        """Set those of `shard`'s arguments that are not None."""
        self._seed = self._seed if checked_seed(seed) is None else seed
        if dispatch is not None and dispatch != self._dispatch:
            self._dispatch, self._reader = dispatch, None
        self._move = move or self._move
        if copies is not None:
            self.copies, self._reader = whole_number("copies", copies, least=1), None
            share_parts(self, self.copies)

    @property
    def place(self) -> World:
        """This process's position among those that get different samples."""
        return data_world(self.copies)

    @property
    def sample_weight(self) -> float:
        """Weight of the latest batch's mean loss, so that every sample counts the same across ranks.

        DistributedDataParallel averages the ranks' gradients regardless of batch sizes. The weight is 1 if the sizes
        are equal, or if the other ranks' sizes are unknown.
        """
        return self.own_samples * self.place.size / self.all_samples if self.all_samples else 1.0

    # ------------------------------------------------------------------ iterating
    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]  # torch's annotation names a class of its own
        return self.read()

    def read(self, ahead: Callable[[Iterator[Any]], Iterator[Any]] = iter) -> Iterator[T_co]:
        """Iterate; what `ahead` reads before a batch is yielded is not in the position."""
        self._follow_samplers()
        start = self._progress.begin()
        self._check_resumable(start)
        self._set_sampler_epochs()
        current = _Pass(self.epoch, start, self._size_from(start))
        self._passes.append(current)
        try:
            for content, note in ahead(
                self._iterate_stream(start) if self._is_stream else self._iterate_indices(start)
            ):
                current.done, current.taken, current.note = current.done + 1, current.taken + 1, note
                self._update_position(current)
                yield self._move(content) if self._move else content
            self._progress.complete(current.epoch)
        finally:
            self._leave(current)

    def _update_position(self, current: _Pass) -> None:
        note = current.note
        self.is_padding, self.is_last = note.is_padding, note.is_last
        self.own_samples, self.all_samples = note.own, note.of_all
        self.remaining = None if current.size is None else current.size - current.done + 1
        if self.epoch == current.epoch:
            self._progress.done, self._progress.samples = current.done, note.end
            self._progress.ended = note.is_last and current.taken > 1  # a single batch may be a peek
        if self.observer is not None:
            self.observer.begin_batch(self)

    def _leave(self, current: _Pass) -> None:
        self._passes.remove(current)
        if current.taken <= 1 and self._passes:  # a peek within another pass
            self._update_position(self._passes[-1])
        elif self.observer is not None:
            self.observer.end_pass(self)

    def _iterate_indices(self, start: int) -> Iterator[tuple[Any, Share]]:
        begin = self._progress.start_samples
        shares = self._planned() if source_of(self).is_sized else source_of(self).shares(self.place, begin)
        own, epoch, rank = self.seed, self.epoch, self.place.rank
        seeds = (derived_seed(own, epoch, rank, number) for number in count(start))
        current = IndexPass(islice(shares, 0 if begin else start, None), seeds, loads_here=self.num_workers == 0)
        self._indices.current = current
        given, self.generator = self.generator, derived_generator(own, epoch, rank)  # workers are seeded from it
        try:
            batches: Iterator[Any] = super().__iter__()
        finally:
            self.generator = given
        while True:
            with current.loading:
                content = next(batches, _END)
            if content is _END:
                return
            yield content, current.notes.popleft()

    def _iterate_stream(self, start: int) -> Iterator[tuple[Any, Share]]:
        """Iterate an iterable dataset; what was taken before a resume is read again."""
        place, dispatch, begin = self.place, self._dispatch is not False, self._progress.start_samples
        as_samples = world().is_shared or begin % (self.batch_size or 1) != 0
        if self._reader is None or (self._reader.place, self._reader.as_samples) != (place, as_samples):
            self._reader = StreamReader(self, place, self.copies, dispatch=dispatch, as_samples=as_samples)
        generator = derived_generator(self.seed, self.epoch, 0)  # the same on all ranks, which may all read everything
        for share in self._reader.shares(start, begin, generator):
            yield collated(self, share.items) if as_samples else share.items[0], share._replace(items=[])

    @property
    def _index_sampler(self) -> IndexFeed:
        """What torch reads; `sampler` and `batch_sampler` stay the user's."""
        return self._indices

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    def _planned(self) -> list[Share]:
        key = (self.place, self.seed, self.epoch, self._progress.start_samples)
        if self._planned_for != key:
            self._planned_for, self._plan = key, source_of(self).planned(*key)
            self._set_sampler_epochs()  # our samplers have completed a pass
        return self._plan

    def own_sampler_size(self) -> int | None:
        """Return how many samples a sampler that shards gives this rank in the next pass, including repeated ones.

        None if `shard` divides the data itself, or the sampler has no length.
        """
        if self._is_stream or source_of(self).yields != "own part" or not source_of(self).is_sized:
            return None
        self._follow_samplers()
        self._set_sampler_epochs()
        return sum(len(share.items) if source_of(self).takes_lists else 1 for share in self._planned())

    # ------------------------------------------------------------------ sizes
    def __len__(self) -> int:
        """Return the number of this rank's batches in a pass."""
        ranks = self.place.size
        if self._is_stream:
            size = len(self.dataset)  # type: ignore[arg-type]  # a stream may have a length
            return round_count(size, self.batch_size or 1, ranks, drop_last=self.drop_last)
        return source_of(self).rounds(ranks)

    def _size_from(self, start: int) -> int | None:
        """Return how many batches this rank gets in a pass that resumes after `start` of them; None if unknown."""
        begin = self._progress.start_samples
        if not begin:
            return length_of(self)
        if not self._is_stream:
            return start + len(self._planned()) if source_of(self).is_sized else None
        size = length_of(self.dataset)
        if size is None:
            return None
        return start + round_count(size - begin, self.batch_size or 1, self.place.size, drop_last=self.drop_last)

    @property
    def total(self) -> int | None:
        """Number of samples of all ranks in a pass, each counted once; None if unknown."""
        if not self._is_stream:
            return source_of(self).total(self.place.size)
        if self.batch_size is None or not hasattr(self.dataset, "__len__"):
            return None
        whole = self.batch_size * self.place.size
        return len(self.dataset) - (len(self.dataset) % whole if self.drop_last else 0)

    # ------------------------------------------------------------------ epochs
    @property
    def seed(self) -> int:
        """Seed of the sample order: the loader's own, else that of `seed_everything`, else 0."""
        return default_seed() if self._seed is None else self._seed

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or of the next one."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch. Setting the current epoch changes nothing.

        Raises:
            ArgumentError: `epoch` is not an integer of at least 0.
        """
        self._progress.move_to(epoch)
        self._set_sampler_epochs()

    def state_dict(self) -> dict[str, int]:
        """Return the position in the pass; the same on all ranks.

        Returns:
            A dict with ``epoch``; ``batches`` taken by this rank; ``samples`` taken by all ranks (batches for a custom
            batch sampler, 0 for a sampler that already shards); ``seed``; ``world_size``; ``batch_size``; and
            ``num_workers`` (0 for a map-style dataset).
        """
        self._follow_samplers()
        now, ended = self._progress, self._progress.ended
        has_moved = self._loaded is None or now.done != now.start
        division = self._division if has_moved or self._loaded is None else self._loaded
        return {
            "epoch": self.epoch + ended,
            "batches": 0 if ended else now.done,
            "samples": 0 if ended else now.samples,
            "seed": self.seed,
            **division._asdict(),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from a `state_dict`: passes of its epoch begin at its position.

        With another number of ranks or another batch size the remaining samples are divided again; none is lost or
        repeated. This is impossible for a sampler that already shards, a stream read by workers, or a custom batch
        sampler with another batch size: the next pass raises an ArgumentError. A state without ``world_size`` is not
        checked.

        Skipped batches of a map-style dataset are not loaded. A stream is read again up to the position.
        """
        self._seed = checked_seed(state["seed"])
        self._progress.resume(state["epoch"], state["batches"], state.get("samples", 0))
        self._loaded = Division(*(state[name] for name in Division._fields)) if "world_size" in state else None
        self._set_sampler_epochs()

    def beginning(self) -> dict[str, Any]:
        """Return the state at which the latest pass began: the beginning of its epoch, or a loaded position."""
        return {**self.state_dict(), "batches": self._progress.start, "samples": self._progress.start_samples}

    def begin_at(self, batches: int) -> None:
        """Begin the next pass after this many batches of this rank; later passes are complete.

        A loaded position is kept if it is the same, or if another number of ranks took its batches.
        """
        self._follow_samplers()
        now, before = self._progress, self._loaded
        has_others = before is not None and before.world_size != self.place.size and now.start > 0
        if not now.ended and (now.start == batches or has_others):
            return
        self._loaded = None
        now.resume(self.epoch + now.ended, 0)
        now.once = batches
        self._set_sampler_epochs()

    @property
    def _division(self) -> Division:
        size = getattr(samplers_of(self)[0], "batch_size", None)
        workers = self.num_workers if self._is_stream else 0
        return Division(self.place.size, size if isinstance(size, int) else 0, workers)

    def _check_resumable(self, start: int) -> None:
        before, now = self._loaded, self._division
        if not start or before is None or before == now:
            return
        reason, yields = "", None if self._is_stream else source_of(self).yields
        if before.num_workers or now.num_workers:
            reason = "workers read this stream"
        elif yields == "own part" or (yields and not self._progress.start_samples):  # counted in all other cases
            reason = "its sampler shards the data itself"
        elif yields == "batches" and before.batch_size != now.batch_size:
            reason = "its batch sampler makes the batches itself"
        if reason:
            raise ArgumentError(
                f"the loader's state was saved with {before}, but it now has {now}, and {reason}: samples would be "
                f"lost or repeated. Resume with the same values, or begin the next epoch: set_epoch({self.epoch + 1})"
            )

    def _set_sampler_epochs(self) -> None:
        for thing in (*samplers_of(self), self.dataset):
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(self.epoch)
        self._sampler_epoch = self.epoch

    def _follow_samplers(self) -> None:
        for sampler in samplers_of(self):
            epoch = getattr(sampler, "epoch", None) if hasattr(sampler, "set_epoch") else None
            if isinstance(epoch, int) and epoch != self._sampler_epoch:
                self._progress.move_to(epoch)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_iterator": None, "_reader": None, "_planned_for": None, "_indices": IndexFeed(), "observer": None}
        return {**vars(self), **own, "_plan": [], "_passes": [], "_progress": copy.copy(self._progress)}


# ------------------------------------------------------------------ shard
def shard(
    loader: DataLoader[T_co],
    *,
    seed: int | None = None,
    dispatch: bool | None = None,
    move: Callable[[Any], Any] | None = None,
    copies: int | None = None,
) -> ShardedLoader[T_co]:
    """Shard a DataLoader: every sample comes once, and all ranks get the same number of batches.

    So DDP cannot hang, and counts over the ranks are exact. See `ShardedLoader` for how the data is divided.

    Args:
        loader: Any ``torch.utils.data.DataLoader``; all its arguments are kept. A `ShardedLoader` is returned itself,
            with the other arguments set.
        seed: Seed of the sample order, 0 to 2**32 - 1. Default: that of `seed_everything`, else 0.
        dispatch: For iterable datasets. True or None: rank 0 reads and sends each rank its part. False: every rank
            reads the whole stream and keeps its part, for streams that are cheap to read and the same on every rank.
        move: Function applied to each batch before it is yielded. Default: none.
        copies: Number of consecutive ranks that get the same part, such as a tensor-parallel group. Default 1.

    Raises:
        ArgumentError: `loader` is not a DataLoader, `seed` or `copies` is out of range, or a sampler gives each of
            the `copies` ranks another part.
    """
    given: object = loader
    if not isinstance(given, DataLoader):
        kind = type(given).__name__
        raise ArgumentError(f"loader={loader!r:.80}: must be a torch.utils.data.DataLoader, not a {kind}")
    if not issubclass(type(given), DataLoader):  # isinstance believes __class__, which accelerate overrides
        raise ArgumentError(
            f"loader is a {type(given).__name__} prepared by accelerate, which already shards it and may repeat "
            "samples: pass the original DataLoader"
        )
    sharded = loader if isinstance(loader, ShardedLoader) else ShardedLoader(loader)
    sharded.adjust(seed, dispatch, move, copies)
    return sharded


def agreed_seed(loader: DataLoader[Any]) -> int | None:
    """Return rank 0's seed of a loader's order: of the loader's generator if it has one, else of torch's global one.

    None for a `ShardedLoader` with a seed of its own, which it keeps. A collective.
    """
    is_settled = isinstance(loader, ShardedLoader) and loader._seed is not None
    seed: int | None = exchange(None if is_settled else order_seed(generators_of(*samplers_of(loader), loader)))[0]
    return seed


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Skip the first `num_batches` batches of the next pass over a loader. Later passes are complete.

    The number counts from the beginning of the pass. `Accelerator.load_state` already resumes prepared loaders at their
    batch, and skipping these batches again has no effect. The epoch remains that of the loaded state or of
    ``set_epoch``. Prepared loaders do not load the skipped batches of a map-style dataset.

    Args:
        dataloader: A prepared loader, a `ShardedLoader`, a `Prefetcher` of one, or any other DataLoader.
        num_batches: Number of batches of each rank.

    Returns:
        The same loader, or an iterator over the remaining batches if the loader is not sharded.

    Raises:
        ArgumentError: `num_batches` is not an integer of at least 0.
    """
    skipped = whole_number("num_batches", num_batches, least=0)
    if not hasattr(dataloader, "begin_at"):
        return islice(dataloader, skipped, None)
    dataloader.begin_at(skipped)
    return dataloader


# ------------------------------------------------------------------ copied ahead
class Prefetcher:
    """Copies a loader's batches to a device ahead of time.

    On CUDA batches are copied on a separate stream, `depth` batches ahead. The compute stream waits for each copy, and
    ``record_stream`` keeps the allocator from reusing the memory too early. Copies overlap with computation only from
    pinned memory: set ``pin_memory=True`` on the loader. On other devices batches are moved on demand.

    Use it in place of its loader: it has the loader's attributes. For a ``ShardedLoader``, `is_padding`, `is_last`,
    `epoch` and `state_dict` describe the yielded batch, not those read ahead. With an Accelerator, prepare the loader
    first, then wrap it.

    Args:
        loader: Yields batches, any pytrees of tensors: a ``ShardedLoader``, a DataLoader, any iterable.
        device: The target device.
        depth: Number of batches to copy ahead, at least 1; each uses device memory.

    Raises:
        ArgumentError: `depth` is not an integer of at least 1.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str, depth: int = 1) -> None:
        self.loader: Any = loader
        self.device = torch.device(device)
        self.depth = whole_number("depth", depth, least=1)

    def __len__(self) -> int:
        """Return the number of the loader's batches."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.device.type != "cuda":
            return (to_device(batch, self.device) for batch in self.loader)
        ahead = partial(copied_ahead, device=self.device, depth=self.depth)
        return self.loader.read(ahead) if isinstance(self.loader, ShardedLoader) else ahead(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)


def copied_ahead(batches: Iterable[Any], device: torch.device, depth: int, cuda: Any = torch.cuda) -> Iterator[Any]:
    """Yield pytrees on the device; `depth` later ones are on their way there, on a stream of their own."""
    stream, iterator, is_over = cuda.Stream(device), iter(batches), False
    waiting: deque[tuple[Any, Any]] = deque()
    while True:
        while len(waiting) <= depth and not is_over:
            stream.wait_stream(cuda.current_stream(device))  # may still write the loader's input
            with cuda.stream(stream):  # the loader too: its dataset may copy
                batch = next(iterator, _END)
                is_over = batch is _END
                if not is_over:
                    waiting.append((to_device(batch, device, non_blocking=True), stream.record_event()))
        if not waiting:
            return
        batch, copied = waiting.popleft()
        current = cuda.current_stream(device)
        current.wait_event(copied)
        for tensor in tensors_in(batch):  # allocated on the copy stream, which would reuse it too early
            tensor.record_stream(current)
        yield batch
