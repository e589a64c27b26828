"""`CountedLoader`: a DataLoader in a single process, iterated as torch does, with a position to resume from."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from nblaunch.machine.argument_checks import whole_number
from nblaunch.training.data.epoch_progress import PassObserver
from nblaunch.training.data.index_source import generators_of, length_of, samplers_of, set_epoch_methods
from nblaunch.training.data.loader_names import LoaderNames
from nblaunch.training.data.sharded_loader import ShardedLoader
from nblaunch.training.states.checkpoint import random_states, restore_random_states

T_co = TypeVar("T_co", covariant=True)
_END: Any = object()


@dataclass(slots=True, eq=False)
class _Pass:
    """A pass over the loader, and the random states that its order comes from."""

    at_iter: dict[str, Any]
    """When the loop asked for the iterator: workers are seeded from them."""
    at_first: dict[str, Any]
    """Before the first batch: without workers torch's sampler draws the order then."""
    has_workers: bool
    """Whether persistent workers were there already: starting them draws a number."""
    done: int = 0


class CountedLoader(LoaderNames, DataLoader[T_co]):
    """A DataLoader that counts its batches; the Accelerator makes it in a single process on the CPU.

    It yields the same batches as the DataLoader that it was made of, and draws the same random numbers: a cell computes
    the same with and without `prepare`. That is why it is no `ShardedLoader`: there neither ``torch.manual_seed`` nor
    the loader's own generator chooses the order and the augmentation, and seeding each batch takes some 0.15 ms.

    The order of a shuffled pass comes from the global random state at its beginning, so its state holds that one.

    A resumed pass asks the sampler for the indices that were taken and loads nothing. Workers, and streams, load those
    batches once more: their augmentation continues from a state that only loading can reach. What persistent workers
    drew in earlier passes cannot be repeated: resumed in a later pass, they draw other augmentation.
    """

    is_padding: bool = False
    is_last: bool = False
    remaining: int | None = None
    observer: PassObserver | None = None

    def __init__(self, loader: DataLoader[T_co]) -> None:
        vars(self).update(vars(loader))
        self._iterator = None
        self._given = loader
        self._latest: _Pass | None = None
        self._active: list[_Pass] = []
        self._resumed: _Pass | None = None
        """Where passes begin until one is completed, after `load_state_dict`."""
        self._had_workers = False
        """Whether persistent workers were there when the loaded state was taken."""
        self._offset: int | None = None
        """Where the next pass alone begins."""
        self._epoch = 0
        self.sharded: ShardedLoader[T_co] | None = None
        """Iterated instead, after a state that several ranks have written."""

    def plain(self) -> DataLoader[T_co]:
        """Return the loader as it was given."""
        return self._given

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]  # torch's annotation names a class of its own
        if self.sharded is not None:
            self.sharded.observer = self.observer
            return iter(self.sharded)
        before, now = self._resumed, states_for(self)
        offset, self._offset = self._offset, None
        if self._had_workers and self._iterator is None:
            super().__iter__()
            restore_states(self, now)
        has_workers = self._iterator is not None
        if before is None:
            batches = super().__iter__()
            current = _Pass(now, states_for(self) if offset else now, has_workers, offset or 0)
            self._skip(batches, current.done)
            return self._counted(batches, current)
        if has_workers and not before.has_workers:  # of an attempt to continue the pass that started them
            self._iterator = None
        if offset is not None:
            before = replace(before, done=offset)
        restore_states(self, before.at_iter)
        batches = super().__iter__()
        restore_states(self, before.at_first)
        self._skip(batches, before.done)
        restore_states(self, now)
        return self._counted(batches, replace(before))

    def _counted(self, batches: Iterator[Any], current: _Pass) -> Iterator[T_co]:
        if current.done == 0:
            current.at_first = states_for(self)
        self._active.append(current)
        taken, size = 0, length_of(self)
        try:
            for batch in batches:
                current.done, taken = current.done + 1, taken + 1
                self._latest = current
                self.remaining = None if size is None else size - current.done + 1
                self.is_last = self.remaining == 1
                if self.observer is not None:
                    self.observer.begin_batch(self)
                yield batch
            self._latest = self._resumed = None
            self._epoch += 1
        finally:
            self._active.remove(current)
            if taken <= 1 and self._active:  # a peek within another pass
                self._latest = self._active[-1]
            elif self.observer is not None:
                self.observer.end_pass(self)

    def _skip(self, batches: Any, count: int) -> None:
        if batches._num_workers == 0 and not isinstance(self.dataset, IterableDataset):
            batches = iter(batches._next_index, _END)  # torch's own: the sampler's next batch, without loading it
        for _ in range(count):
            if next(batches, _END) is _END:
                return

    # ------------------------------------------------------------------ the position
    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or of the next one."""
        return self._epoch if self.sharded is None else self.sharded.epoch

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch, and set it on a sampler or dataset that has epochs.

        Setting the current epoch keeps a position that was loaded.

        Raises:
            ArgumentError: `epoch` is not a whole number of at least 0.
        """
        if self.sharded is not None:
            self.sharded.set_epoch(epoch)
            return
        if whole_number("epoch", epoch, least=0) != self._epoch:
            self._epoch, self._latest, self._resumed = epoch, None, None
        for set_epoch in set_epoch_methods(self):
            set_epoch(epoch)

    def begin_at(self, batches: int) -> None:
        """Begin the next pass after this many batches, wherever the loader stands."""
        if self.sharded is not None:
            self.sharded.begin_at(batches)
        else:
            self._offset = batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the pass, with the random states that its order comes from.

        Returns:
            ``epoch``, the complete passes; ``batches`` taken, 0 after the last; and the states.
        """
        if self.sharded is not None:
            return self.sharded.state_dict()
        return self._state_of(self._latest or self._resumed)

    def beginning(self) -> dict[str, Any]:
        """Return the state at which the latest pass began."""
        return self._state_of(self._resumed)

    def _state_of(self, latest: _Pass | None) -> dict[str, Any]:
        size = length_of(self)
        ended = latest is not None and size is not None and latest.done >= size
        state: dict[str, Any] = {"epoch": self._epoch + ended, "generators": states_for(self)["generators"]}
        if latest is not None and (not ended or given_generators(self)):
            state |= {"at_iter": latest.at_iter, "at_first": latest.at_first}
        if latest is None or ended:
            state |= {"batches": 0, "has_workers": self._had_workers or self._iterator is not None}
        else:
            state |= {"batches": latest.done, "has_workers": latest.has_workers}
        return state | {"batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`: the next pass begins there. One of a `ShardedLoader` keeps that one's order."""
        self._offset = None
        self._latest = self._resumed = self.sharded = None
        if "seed" in state:
            self.sharded = ShardedLoader(self.plain())
            self.sharded.load_state_dict(dict(state))
            return
        self._epoch = whole_number("epoch", state["epoch"], least=0)
        self._iterator, self._had_workers = None, state["has_workers"]
        for generator, own in zip(given_generators(self), state["generators"], strict=False):
            generator.set_state(own)
        if state["batches"]:
            self._resumed = _Pass(state["at_iter"], state["at_first"], state["has_workers"], state["batches"])
        elif "at_iter" in state and not isinstance(self.dataset, IterableDataset):
            self._finish(state)

    def _finish(self, state: Mapping[str, Any]) -> None:
        """Have samplers draw what they draw after the last batch of a pass, from generators of their own."""
        now = random_states()
        indices: Any = copy.copy(self._given)
        vars(indices).update(num_workers=0, _iterator=None)
        restore_states(self, state["at_iter"])
        batches = iter(indices)
        if self.num_workers == 0:  # workers have the indices drawn before the first batch
            restore_states(self, state["at_first"])
        self._skip(batches, sys.maxsize)
        restore_random_states(now)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything except what belongs to this process."""
        return {**vars(self), "_iterator": None, "observer": None, "_active": []}


# ------------------------------------------------------------------ random states
def given_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers were given, each once."""
    given = [generator for sampler in samplers_of(loader)[:1] for generator in generators_of(sampler)]
    given += [loader.generator] if isinstance(loader.generator, torch.Generator) else []
    return list({id(generator): generator for generator in given}.values())


def states_for(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the states of the global generators, and of those that a loader was given."""
    return {**random_states(), "generators": [generator.get_state() for generator in given_generators(loader)]}


def restore_states(loader: DataLoader[Any], states: Mapping[str, Any]) -> None:
    """Restore what `states_for` returned."""
    restore_random_states(states)
    for generator, own in zip(given_generators(loader), states["generators"], strict=False):
        generator.set_state(own)
