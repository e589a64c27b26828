"""Positions of loaders: in a saved state, and `skip_first_batches`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from nblaunch.errors import warn
from nblaunch.machine.argument_checks import whole_number
from nblaunch.training.data.counted_loader import CountedLoader
from nblaunch.training.data.index_source import length_of
from nblaunch.training.data.prefetch import Prefetcher, reader_of
from nblaunch.training.data.repeating_loader import RepeatingLoader
from nblaunch.training.data.sharded_loader import ShardedLoader
from nblaunch.training.topology import world


def position_of(loader: Any, continues: bool) -> dict[str, Any]:
    """Return a loader's position for a saved state; unless its latest pass `continues`, one that begins it again."""
    reader = reader_of(loader) or loader
    state = reader.state_dict() if hasattr(reader, "state_dict") else None
    if state is not None and not continues and state.get("batches"):
        state = _beginning_of(loader, state)
    return {"samples": length_of(getattr(loader, "dataset", None)), "state": state}


def _beginning_of(loader: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state at which the latest pass began: the beginning of its epoch, or a loaded position."""
    if isinstance(loader, CountedLoader) and "seed" not in state:
        return loader.beginning()
    if isinstance(loader, RepeatingLoader):
        return loader.beginning()
    progress = getattr(loader, "sharded", loader)._progress
    return {**state, "batches": progress.start, "samples": progress.start_samples}


def restore_position(loader: Any, number: int, position: dict[str, Any]) -> None:
    """Continue at the position that `position_of` returned, or warn why its next pass begins at its beginning."""
    state, samples = position["state"], length_of(getattr(loader, "dataset", None))
    if state is None or not hasattr(loader, "load_state_dict"):
        return
    if isinstance(loader, RepeatingLoader) and not loader.is_stateful:
        return  # accelerate saves nothing of it
    reason = ""
    if samples != position["samples"]:
        reason = f"its dataset had {position['samples']} samples, and has {samples}"
    elif "seed" in state:
        pass  # a sharded loader counts samples
    elif isinstance(loader, CountedLoader):
        if state["batches"] and state["batch_size"] != loader.batch_size:
            reason = f"its batch_size was {state['batch_size']}, and is {loader.batch_size}"
    elif isinstance(loader, ShardedLoader):
        if state["batches"]:
            reason = (
                "a single process wrote it, with an order from the random state instead of a seed. "
                "Accelerator(seed=...) gives an order that other numbers of ranks can continue"
            )
        else:
            loader.set_epoch(state["epoch"])
            return
    if reason and world().rank == 0:
        warn(f"load_state: the position of prepared loader {number} is not restored: {reason}")
    if not reason:
        loader.load_state_dict(state)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader whose pass begins at batch `num_batches`; later passes over `dataloader` itself are whole.

    The number counts from the beginning of the pass, also after `Accelerator.load_state`, which moves prepared loaders
    to where they were: a script that loads the state *and* skips the batches that its step count names skips them
    once, and a script that only loads the state continues at the same batch. The epoch is the one where the loader
    stands: that of the loaded state, or of ``set_epoch``. (Setting the epoch of the loaded state changes nothing.)

    Prepared loaders of map-style datasets load nothing of what is skipped, unless workers of a single process do.

    Args:
        dataloader: A prepared loader, a `ShardedLoader`, a `Prefetcher` of one, or any other DataLoader.
        num_batches: Batches of each rank.

    Raises:
        ArgumentError: `num_batches` is not a whole number of at least 0.
    """
    return SkippedLoader(dataloader, whole_number("num_batches", num_batches, least=0))


class SkippedLoader:
    """A loader without the first batches of each of its passes; every other attribute is the loader's."""

    def __init__(self, loader: Any, skipped: int) -> None:
        vars(self).update(loader=loader, skipped=skipped)

    def __len__(self) -> int:
        left: int = len(self.loader) - self.skipped
        return max(0, left)

    def __iter__(self) -> Iterator[Any]:
        inner = self.loader.loader if isinstance(self.loader, Prefetcher) else self.loader
        if not isinstance(inner, (CountedLoader, ShardedLoader)):
            yield from islice(iter(self.loader), self.skipped, None)
            return
        inner.begin_at(self.skipped)
        yield from self.loader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.loader, name, value)
