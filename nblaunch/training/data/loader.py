"""`ShardedLoader`: a DataLoader of which each rank gets its part."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, NamedTuple, Protocol, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from nblaunch.errors import ArgumentError, warn
from nblaunch.training.data.batches import Share, rounds, with_last
from nblaunch.training.data.epochs import Progress
from nblaunch.training.data.orders import Source, epochs_of, length_of, samplers_of, source_of, with_epoch
from nblaunch.training.data.streams import Reader, collated
from nblaunch.training.seeding import Seeded, checked_seed, default_seed, derived_generator, derived_seed, seeded
from nblaunch.training.world import World, world

T_co = TypeVar("T_co", covariant=True)


class _Note(NamedTuple):
    """What there is to know of a batch beside its content."""

    is_padding: bool
    is_last: bool
    end: int
    """As in `Share`."""


_END: Any = object()
_NONE_YET = _Note(is_padding=False, is_last=False, end=0)


@dataclass(slots=True, eq=False)
class _Reading:
    """What torch's loader is to read in one pass, and what it was asked for, in order."""

    shares: Iterable[Share]
    seeds: Iterator[int]
    """One for each of them."""
    loads_here: bool
    """Whether this process loads, not workers."""
    notes: deque[_Note] = field(default_factory=deque)
    while_loading: ExitStack = field(default_factory=ExitStack)
    """Is closed once the batch that was asked for last is there; only where `loads_here`."""

    def __iter__(self) -> Iterator[Any]:
        for (share, is_last), seed in zip(with_last(self.shares), self.seeds, strict=False):
            self.notes.append(_Note(share.is_padding, is_last, share.end))
            if self.loads_here:
                self.while_loading.enter_context(seeded(seed))
            yield share.items if self.loads_here else Seeded(seed, share.items)


class _Indices:
    """What torch's loader reads in place of the user's sampler."""

    def __init__(self) -> None:
        self.reading = _Reading((), iter(()), loads_here=True)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.reading)  # bound now: another pass may begin before this one is read


@dataclass(slots=True, eq=False)
class _Pass:
    """A pass under way."""

    epoch: int
    done: int
    """Batches up to the one given out last, those before a resumption too."""
    size: int | None
    taken: int = 0
    note: _Note = _NONE_YET

    def take(self, note: _Note) -> None:
        self.done, self.taken, self.note = self.done + 1, self.taken + 1, note


class Follower(Protocol):
    """Who wants to know where the passes over a loader are."""

    def given(self, loader: Any) -> None:
        """It is about to give out a batch."""

    def ended(self, loader: Any) -> None:
        """A pass was taken to its end or broken off."""


class _Plan(NamedTuple):
    """One epoch of one rank, kept so that a peek and the pass after it run the user's sampler once."""

    key: tuple[World, int, int, int]
    shares: list[Share]


class _Dealing(NamedTuple):
    """What a count of taken samples holds for; its names are those of the state."""

    world_size: int
    batch_size: int
    """That of the loader or of its own batch sampler; 0 for none."""
    num_workers: int
    """Those that read a stream; 0 for a map-style dataset, whose order is the same with any number."""

    def __str__(self) -> str:
        workers = f", num_workers={self.num_workers}" if self.num_workers else ""
        return f"world_size={self.world_size}, batch_size={self.batch_size or None}{workers}"


class ShardedLoader(DataLoader[T_co]):
    """A DataLoader of which each rank gets its part; `shard` makes it. Without other ranks it gives the whole.

    **Map-style datasets.** The loader's own sampler runs on every rank under one seed, drawn from (seed, epoch), so
    that all ranks know one order, whatever the state of their random generators, which are left as they were. (So a
    ``generator`` that the loader was given is lent that seed too: choose another order by `seed`.) The order is cut
    into chunks of ``batch_size`` × world size; rank r takes the r-th part of each, so that a batch gathered by rank is
    in order. The last chunk is divided evenly; if it holds fewer samples than there are ranks, the one before gives it
    some. Hence each sample comes exactly once *and* every rank has as many batches. Where that cannot be (batches of
    one sample, or fewer samples than ranks) a rank repeats one sample, and `is_padding` says so. With ``drop_last``
    only whole chunks come. The batches of a user's own batch sampler are dealt out whole, see `deal_batches`. A loader
    whose sampler shards already (such as torch's ``DistributedSampler``) keeps its parts; only its epochs are set.

    **Iterable datasets.** The same, but that rank 0 reads and sends, or each rank reads everything: see ``dispatch``
    in `shard`. While rank 0 sends, iterating is a collective: every rank takes as many batches of as many passes, a
    look at the first one included; a rank that is out of step raises a RuntimeError. A dataset that picks its own
    rank's part must not be sharded again.

    **Epochs.** A pass that was taken to its end advances `epoch`, so each has an order of its own; a look by
    ``next(iter(loader))``, within another pass too, or a pass that is broken off does not, and begins anew. Who stops
    at the last of several batches without asking for another (``zip(range(n), loader)``, ``break``) has taken the pass
    too, which counts when the next one begins. Your own `set_epoch`, here or on your sampler, wins.

    **Random augmentation.** Of a map-style dataset each batch is loaded with Python's, NumPy's and torch's (the CPU's)
    random generators seeded from (seed, epoch, rank, batch). So no two ranks draw the same, a run repeats with any
    number of workers, and a resumed pass loads the very same batches. Without workers this process's generators are
    afterwards as they were: loading draws nothing from them. What a dataset draws from generators of its own is its
    own affair. A stream's workers are seeded once a pass, from (seed, epoch, rank of the reader). Two loaders of one
    seed draw the same in their batches of one number: give loaders that are iterated side by side different seeds.

    Rank and world size are read when it is iterated, so one made in a notebook is right in the ranks it is sent to.

    Attributes:
        is_padding: Whether the batch given out last repeats a sample that another rank has.
        is_last: Whether it is the last of its pass.
        remaining: How many batches the pass had when it was given out, with it; None where the loader has no length.
        follower: Who is told of its passes.
    """

    is_padding: bool = False
    is_last: bool = False
    remaining: int | None = None
    follower: Follower | None = None
    is_sharded = True

    def __init__(
        self,
        loader: DataLoader[T_co],
        *,
        seed: int | None = None,
        dispatch: bool | None = None,
        move: Callable[[Any], Any] | None = None,
    ) -> None:
        # Not DataLoader.__init__, which takes no batch_size beside a sampler of batches: so every argument is kept,
        # those of later versions too, and `_index_sampler` alone says what is read.
        vars(self).update(vars(loader))
        self._iterator = None
        if type(loader).__iter__ is not DataLoader.__iter__:
            warn(f"{type(loader).__name__} iterates in its own way, which a sharded loader does not use")
        self._seed: int | None = None
        self._dispatch: bool | None = None
        self._move: Callable[[Any], Any] | None = None
        self._progress = Progress()
        self._passes: list[_Pass] = []
        self._plan: _Plan | None = None
        self._reader: Reader | None = None
        self._indices = _Indices()
        self._loaded: _Dealing | None = None  # that of the state that was loaded last
        self._told: int | None = None  # the epoch that the samplers were last told; another there is the user's
        self._in_order = getattr(loader, "in_order", True)
        self.adjust(seed=seed, dispatch=dispatch, move=move)

    def adjust(
        self, *, seed: int | None = None, dispatch: bool | None = None, move: Callable[[Any], Any] | None = None
    ) -> None:
        """Set what is not None of `shard`'s arguments."""
        self._seed = self._seed if checked_seed(seed) is None else seed
        if dispatch is not None and dispatch != self._dispatch:
            self._dispatch, self._reader = dispatch, None
        self._move = move or self._move

    # ------------------------------------------------------------------ iterating
    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]  # torch's annotation names a class of its own
        self._heed_samplers()
        start = self._progress.begin()
        self._check_resumable(start)
        self._tell_samplers()
        one = _Pass(self.epoch, start, self._size_from(start))
        self._passes.append(one)
        try:
            for content, note in self._streamed(start) if self._is_stream else self._indexed(start):
                one.take(note)
                self._tell_of(one)
                yield self._move(content) if self._move else content
            self._progress.complete(one.epoch)
        finally:
            self._leave(one)

    def _tell_of(self, one: _Pass) -> None:
        """A batch of this pass was given out last."""
        self.is_padding, self.is_last, _ = one.note
        self.remaining = None if one.size is None else one.size - one.done + 1
        if self.epoch == one.epoch:
            self._progress.done, self._progress.samples = one.done, one.note.end
            self._progress.ended = one.note.is_last and one.taken > 1  # the only batch of a pass may be but looked at
        if self.follower is not None:
            self.follower.given(self)

    def _leave(self, one: _Pass) -> None:
        self._passes.remove(one)
        if one.taken <= 1 and self._passes:  # a look, within a pass that goes on
            self._tell_of(self._passes[-1])
        elif self.follower is not None:
            self.follower.ended(self)

    def _indexed(self, start: int) -> Iterator[tuple[Any, _Note]]:
        """A pass over a map-style dataset."""
        begin = self._progress.start_samples
        shares = self._planned() if self._source.is_sized else self._source.shares(world(), begin)
        # Where workers may overtake each other nobody could tell which batch is the padding.
        self.in_order = self._in_order or (isinstance(shares, list) and any(share.is_padding for share in shares[-1:]))
        own, epoch, rank = self.seed, self.epoch, world().rank
        seeds = (derived_seed(own, epoch, rank, number) for number in count(start))
        reading = _Reading(islice(shares, 0 if begin else start, None), seeds, loads_here=self.num_workers == 0)
        self._indices.reading = reading
        batches = self._torchs_own()
        while True:
            with reading.while_loading:
                content = next(batches, _END)
            if content is _END:
                return
            yield content, reading.notes.popleft()

    def _torchs_own(self) -> Iterator[Any]:
        """What torch iterates by; workers are seeded from (seed, epoch, rank), and the user's generator stays alone."""
        given, self.generator = self.generator, derived_generator(self.seed, self.epoch, world().rank)
        try:
            return super().__iter__()
        finally:
            self.generator = given

    def _streamed(self, start: int) -> Iterator[tuple[Any, _Note]]:
        """A pass over an iterable dataset; what was taken before a resumption is read again."""
        place, dispatch, begin = world(), self._dispatch is not False, self._progress.start_samples
        as_samples = place.is_shared or begin % (self.batch_size or 1) != 0
        if self._reader is None or (self._reader.place, self._reader.as_samples) != (place, as_samples):
            self._reader = Reader(self, place, dispatch=dispatch, as_samples=as_samples)
        generator = derived_generator(self.seed, self.epoch, 0)  # alike on all ranks, where each reads everything
        for share, is_last in self._reader.notes(start, begin, generator):
            content = collated(self, share.items) if as_samples else share.items[0]
            yield content, _Note(share.is_padding, is_last, share.end)

    @property
    def _index_sampler(self) -> _Indices:
        """What torch reads; `sampler` and `batch_sampler` stay the user's."""
        return self._indices

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def _source(self) -> Source:
        return source_of(self)

    def _planned(self) -> list[Share]:
        key = (world(), self.seed, self.epoch, self._progress.start_samples)
        if self._plan is None or self._plan.key != key:
            self._plan = _Plan(key, self._source.planned(*key))
            self._tell_samplers()  # ours have completed a pass
        return self._plan.shares

    def given_out(self) -> int | None:
        """How many samples a sampler that shards already gives this rank in the next pass, those it repeats too.

        None where `shard` divides the data itself, and where the sampler has no length.
        """
        if self._is_stream or not (self._source.is_own_part and self._source.is_sized):
            return None
        self._heed_samplers()
        self._tell_samplers()
        return sum(len(share.items) if self._source.takes_lists else 1 for share in self._planned())

    # ------------------------------------------------------------------ sizes
    def __len__(self) -> int:
        """How many batches this rank gets in a pass.

        Raises:
            TypeError: The dataset or sampler has no length.
        """
        ranks = world().size
        if self._is_stream:
            size: int = len(self.dataset)  # type: ignore[arg-type]  # a stream may have one
            return rounds(size, self.batch_size or 1, ranks, drop_last=self.drop_last)
        return self._source.rounds(ranks)

    def _size_from(self, start: int) -> int | None:
        """How many batches this rank gets in a pass that begins after `start` of them; None where that is not known."""
        begin = self._progress.start_samples
        if not begin:
            return length_of(self)
        if not self._is_stream:
            return start + len(self._planned()) if self._source.is_sized else None
        size = length_of(self.dataset)
        left = (
            None if size is None else rounds(size - begin, self.batch_size or 1, world().size, drop_last=self.drop_last)
        )
        return None if left is None else start + left

    @property
    def total(self) -> int | None:
        """How many samples all ranks together get in a pass, each counted once; None where that is not known."""
        if not self._is_stream:
            return self._source.total(world().size)
        if self.batch_size is None or not hasattr(self.dataset, "__len__"):
            return None
        whole = self.batch_size * world().size
        return len(self.dataset) - (len(self.dataset) % whole if self.drop_last else 0)

    # ------------------------------------------------------------------ epochs
    @property
    def seed(self) -> int:
        """What the orders are drawn from: its own, else that of `seed_everything`, else 0."""
        return default_seed() if self._seed is None else self._seed

    @property
    def epoch(self) -> int:
        """The epoch that the next pass is, or that the present one is of."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Be at the beginning of an epoch; wins over counting. To be told of the present epoch changes nothing.

        Raises:
            ArgumentError: `epoch` is no whole number of at least 0.
        """
        self._progress.move_to(epoch)
        self._tell_samplers()

    def state_dict(self) -> dict[str, int]:
        """Where the pass stands; the same on all ranks.

        Returns:
            ``epoch``; ``batches`` that this rank has taken; ``samples`` that all ranks have taken (batches of the
            user's own batch sampler, 0 with a sampler that shards already); ``seed``; ``world_size``; ``batch_size``;
            ``num_workers`` that read a stream (0 for a map-style dataset).
        """
        self._heed_samplers()
        now, ended = self._progress, self._progress.ended
        has_moved = self._loaded is None or now.done != now.start
        dealing = self._dealing if has_moved or self._loaded is None else self._loaded
        return {
            "epoch": self.epoch + ended,
            "batches": 0 if ended else now.done,
            "samples": 0 if ended else now.samples,
            "seed": self.seed,
            **dealing._asdict(),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken: passes of its epoch begin there.

        With another number of ranks or another batch size the rest of the samples is divided anew: none is lost, none
        comes again. Where the order is not the same for all of them (a sampler that shards already, a stream that
        workers read, another batch size of the user's own batch sampler) the next pass raises an ArgumentError; so does
        another number of workers of a stream. What a state of an earlier version does not say is taken to be the same.

        Of a map-style dataset nothing is loaded again; a stream is read again up to there.
        """
        self._seed = checked_seed(state["seed"])
        self._progress.resume(state["epoch"], state["batches"], state.get("samples", 0))
        given = {name: state[name] for name in _Dealing._fields if name in state}
        self._loaded = self._dealing._replace(**given) if "world_size" in given else None
        self._tell_samplers()

    @property
    def _dealing(self) -> _Dealing:
        """How the next pass is divided."""
        size = getattr(samplers_of(self)[0], "batch_size", None)
        workers = self.num_workers if self._is_stream else 0
        return _Dealing(world().size, size if isinstance(size, int) else 0, workers)

    def _check_resumable(self, start: int) -> None:
        """Refuse to begin where nobody knows which samples were taken.

        Raises:
            ArgumentError: As said.
        """
        before, now = self._loaded, self._dealing
        if not start or before is None or before == now:
            return
        if self._is_stream:
            reason = "workers read this stream" if before.num_workers or now.num_workers else ""
        elif self._source.is_own_part or not self._progress.start_samples:  # not counted: it did so then
            reason = "its sampler divides the data among the ranks itself"
        elif self._source.yields == "batches" and before.batch_size != now.batch_size:
            reason = "its batch sampler makes the batches itself"
        else:
            reason = ""
        if reason:
            raise ArgumentError(
                f"the loader's state was taken with {before}, and this is {now}: as {reason}, "
                "their orders differ, and samples would be lost or repeated. Go on with the same, or begin the next "
                f"epoch: set_epoch({self.epoch + 1})"
            )

    def break_off(self) -> None:
        """Somebody who read ahead to the pass's last batch has not given it out: the pass does not count as taken."""
        self._progress.ended = False

    def _tell_samplers(self) -> None:
        for set_epoch in with_epoch(self):
            set_epoch(self.epoch)
        self._told = self.epoch

    def _heed_samplers(self) -> None:
        """Follow a sampler whose epoch the user has set since."""
        for epoch in epochs_of(self):
            if epoch != self._told:
                self._progress.move_to(epoch)

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this process."""
        own = {"_iterator": None, "_reader": None, "_plan": None, "_indices": _Indices(), "follower": None}
        return {**vars(self), **own, "_passes": [], "_progress": copy.copy(self._progress)}
