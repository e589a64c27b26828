"""`RepeatingLoader`: a DataLoader divided as accelerate divides it, with its order and its repeated samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, cycle, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, RandomSampler

from nblaunch.training.accelerator.plugin_settings import LoaderSettings
from nblaunch.training.collectives import broadcast, share_generators
from nblaunch.training.data.batch_partition import Share, with_last
from nblaunch.training.data.index_source import BatchNote, IndexPass, given_generators, source_of
from nblaunch.training.data.sharded_loader import ShardedLoader
from nblaunch.training.states.checkpoint import random_states, restore_random_states
from nblaunch.training.topology import World, world

T_co = TypeVar("T_co", covariant=True)
_END: Any = object()


class RepeatingLoader(ShardedLoader[T_co]):
    """A map-style DataLoader in accelerate's order: for ``Accelerator(semantics="accelerate")``.

    The order is drawn from torch's generators as a plain DataLoader draws it; rank 0's counts. Each rank takes whole
    batches. Where the last are short and there are other ranks, the first samples come again, and `remainder` says how
    many are no repetition. Loading seeds nothing, and reads one batch ahead, as accelerate's loaders do.

    A state holds this rank's random states: a resumed pass has the same order and
    augmentation, on the same number of ranks. Without workers it loads nothing that was taken; workers load it again.

    Args:
        loader: The loader. If its sampler has no generator, it gets one, seeded from torch's global generator.
        settings: ``use_seedable_sampler``, ``data_seed`` and ``use_stateful_dataloader`` are used.
        rng_types: The generators whose states every pass takes from rank 0.
        move: As for `shard`.
    """

    def __init__(
        self, loader: DataLoader[T_co], settings: LoaderSettings, rng_types: Iterable[str], move: Any = None
    ) -> None:
        super().__init__(loader, move=move)
        self._rng_types = tuple(rng_types)
        self.is_stateful = settings.use_stateful_dataloader
        """Whether saved states restore the position; accelerate's otherwise hold nothing of loaders."""
        outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        sampler: Any = getattr(outer, "sampler", None)
        self._drawn_by: torch.Generator | None = None
        self._initial_seed: int | None = None
        self._states: dict[str, Any] = {}
        """Random states at the beginning of the latest pass, and before it loaded the next batch."""
        self._resumed: dict[str, Any] = {}
        """Those of the loaded state."""
        if settings.use_seedable_sampler and isinstance(sampler, RandomSampler):
            given = settings.data_seed
            self._initial_seed = torch.random.initial_seed() if given is None else given
            sampler.generator = sampler.generator or torch.Generator()
            self._drawn_by = sampler.generator
        elif world().is_shared and hasattr(sampler, "generator"):
            if sampler.generator is None:
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
                sampler.generator = torch.Generator().manual_seed(seed)
            self._drawn_by = sampler.generator if "generator" in self._rng_types else None

    def _iterate_indices(self, start: int) -> Iterator[tuple[Any, BatchNote]]:
        own, now = self._passes[-1], states_for(self)
        resumed = self._resumed if start else {}
        if resumed:
            restore_states(self, resumed["began"])
        own.states = resumed or {"began": now}
        share_generators(kind for kind in self._rng_types if kind != "generator")
        if self._initial_seed is None and self._drawn_by is not None:
            self._drawn_by.set_state(broadcast(self._drawn_by.get_state(), 0, torch.device("cpu")))
        loads_here, shares = self.num_workers == 0, self._shares(self.place)
        if not resumed:  # skipped when torch reads the first index: it seeds the workers before
            shares = islice(shares, start, None)
        self._indices.current = current = IndexPass(shares, count(), loads_here=loads_here, seeds_batches=False)
        batches, ahead = DataLoader.__iter__(self), []
        if resumed:
            if loads_here:
                deque(islice(shares, start), maxlen=0)
                restore_random_states(resumed["ahead"])
            else:
                for _ in islice(batches, start):
                    current.notes.popleft()
            ahead = list(islice(batches, 1))
            restore_random_states(now)
        for content, _ in with_last(chain(ahead, self._noted(batches, own))):
            yield content, current.notes.popleft()

    def _noted(self, batches: Iterator[Any], own: Any) -> Iterator[Any]:
        """Yield the batches; note the states from which each is loaded."""
        while True:
            own.states = {"began": own.states["began"], "ahead": random_states()}
            content = next(batches, _END)
            if content is _END:
                return
            yield content

    def _update_position(self, current: Any) -> None:
        super()._update_position(current)
        if self.epoch == current.epoch:
            self._states = current.states

    def _shares(self, place: World) -> Iterator[Share]:
        if self._initial_seed is not None and self._drawn_by is not None:  # once torch has drawn from the generator
            self._drawn_by.manual_seed(self._initial_seed + self.epoch)
        source = source_of(self)
        if source.is_own_part or not place.is_shared:
            yield from source.shares(place)
            return
        rounds = _repeating(source.sampler, source.batch_size * place.size, drop_last=source.drop_last)
        size = source.batch_size
        for chunk in rounds:
            part = chunk[place.rank * size :][:size]
            yield Share(part if source.yields == "samples" and source.takes_lists else part[0])

    @property
    def total_batch_size(self) -> int:
        """Samples in the batches of all ranks together, except the last ones; 0 if that is unknown."""
        size = getattr(self.batch_sampler, "batch_size", None) if self.batch_size is None else self.batch_size
        return size * self.place.size if isinstance(size, int) else 0

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.dataset)  # type: ignore[arg-type]  # it has a length

    @property
    def remainder(self) -> int:
        """Samples in the last batches of all ranks together; 0 if they are whole, -1 if that is unknown."""
        size = self.total_batch_size
        if not size or self.drop_last or not hasattr(self.dataset, "__len__"):
            return -1
        return len(self.dataset) % size

    # ------------------------------------------------------------------ the position
    def state_dict(self) -> dict[str, Any]:
        """Return the position in the pass, with this rank's random states under ``order``."""
        state: dict[str, Any] = super().state_dict()
        order = {"initial_seed": self._initial_seed, "generators": states_for(self)["generators"]}
        return {**state, "order": order | (self._states if state["batches"] else {})}

    def beginning(self) -> dict[str, Any]:
        """Return the state at which the latest pass began."""
        state, begin = self.state_dict(), self._progress.start
        order = {name: state["order"][name] for name in ("initial_seed", "generators")}
        return {**state, "batches": begin, "order": order | (self._resumed if begin else {})}

    def begin_at(self, batches: int) -> None:
        """Begin the next pass after this many batches; unless it is stateful, in a new order as in accelerate."""
        if not self.is_stateful:
            self.load_state_dict({"epoch": self.state_dict()["epoch"], "batches": 0, "seed": self.seed})
        elif batches != self._progress.start:
            self._resumed = {}
        super().begin_at(batches)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`, see `ShardedLoader`."""
        super().load_state_dict(state)
        order = state.get("order", {})
        self._resumed = self._states = {name: order[name] for name in ("began", "ahead") if name in order}
        self._initial_seed = order.get("initial_seed", self._initial_seed)
        for generator, own in zip(given_generators(self), order.get("generators", ()), strict=False):
            generator.set_state(own)


def _repeating(items: Iterable[Any], size: int, *, drop_last: bool) -> Iterator[list[Any]]:
    """Yield chunks of `size` items; the last one is filled with the first items, again and again if they are few."""
    first: list[Any] = []
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        first = first or chunk
        if len(chunk) == size:
            yield chunk
        elif not drop_last:
            yield [*chunk, *islice(cycle(first), size - len(chunk))]


def states_for(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the states of the global generators, and of those that a loader was given."""
    return {**random_states(), "generators": [generator.get_state() for generator in given_generators(loader)]}


def restore_states(loader: DataLoader[Any], states: Mapping[str, Any]) -> None:
    """Restore what `states_for` returned."""
    restore_random_states(states)
    for generator, own in zip(given_generators(loader), states["generators"], strict=False):
        generator.set_state(own)
