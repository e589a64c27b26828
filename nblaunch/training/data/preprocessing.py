"""Results of a function over a dataset, made once by several processes, and then read as often as one likes."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nblaunch.errors import ArgumentError, text_of
from nblaunch.machine.limits import usable_cpus
from nblaunch.ranks.report import progress
from nblaunch.training import checkpoint
from nblaunch.training.data.epochs import checked
from nblaunch.training.nests import leaves, map_nest
from nblaunch.training.seeding import default_seed, derived_seed, seeded
from nblaunch.transfer import pickling


class Preprocessed(Dataset[Any]):
    """What `preprocess` made: item ``i`` is the function's result for item ``i``.

    Numbers come as tensors without dimensions, which is what a DataLoader makes of them in any case. Items are views:
    who changes one in place changes it for all that share the memory, though never a file. Other processes, such as
    ranks, are sent a file by its name alone, and hold what they read of it in memory together.

    Attributes:
        results: The results, stacked along dimension 0: a nest of tensors (N, ...).
        path: The file, if there is one.
    """

    def __init__(self, results: Any, path: Path | None = None) -> None:
        self.results, self.path = results, path

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Preprocessed:
        """What `preprocess` wrote to a file, in any process, at any time. Nothing in the file is executed.

        Raises:
            FileNotFoundError: There is no such file.
        """
        absolute = Path(path).absolute()
        return cls(torch.load(absolute, mmap=True, weights_only=True), absolute)

    def __len__(self) -> int:
        return len(next(leaves(self.results)))

    def __getitem__(self, index: int) -> Any:
        return map_nest(lambda stacked: stacked[index], self.results)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Preprocessed, (self.results,)) if self.path is None else (Preprocessed.open, (self.path,))


def preprocess(
    dataset: Dataset[Any],
    function: Callable[[Any], Any],
    *,
    processes: int | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Preprocessed:
    """``function(dataset[i])`` of every ``i``, made once, by processes of ``torch.multiprocessing``; in order.

    Call it in the notebook, before ranks are launched, or in one rank. What the function draws at random depends on the
    seed (that of `seed_everything`, else 0) and the index alone, not on the number of processes. The processes are
    DataLoader workers: they compute with one thread each, and end with this process. They are forked where torch forks
    its workers; once CUDA is in use they start afresh, and get what cells define by value.

    Args:
        dataset: With a length, and items by index; any sequence too, such as a list of files.
        function: Gives a tensor, array or number, or a nest (tuples, lists, dicts) of them; for every item of the same
            structure, shapes and dtypes. Index 0 is done by this process, to see what they are.
        processes: How many. 0: this process does it all, as a debugger needs it. Default: one for each CPU that it may
            use.
        path: The file to keep the results in (its folder is made); an older one is replaced, once all is done. Default:
            none, and they stay in shared memory. Either way all of them must fit there while they are made.

    Raises:
        ArgumentError: `dataset` has no length, or no item; or another argument is not as above.
        RuntimeError: The function or the dataset raised, or a result is unlike the first: the message names the index.
            Or a process died. Nothing is left behind then, nor when it is interrupted: no process, and no file.
    """
    items: object = dataset
    if not isinstance(items, Sized) or len(items) == 0:
        raise ArgumentError(f"dataset={dataset!r:.80}: give a dataset with items by index, at least one")
    if not callable(function):
        raise ArgumentError(f"function={function!r:.80}: give a function of one item")
    if path is not None and Path(path).is_dir():
        raise ArgumentError(f"path={str(path)!r} is a folder: give the path of a file")
    wanted = usable_cpus() if processes is None else checked(processes, "processes")
    results = _made(_Make(dataset, function), len(items), wanted, is_kept=path is not None)
    if path is None:
        return Preprocessed(results)
    checkpoint.write(results, Path(path))
    return Preprocessed.open(path)


class _Make:
    """Makes one result."""

    def __init__(self, dataset: Any, function: Callable[[Any], Any]) -> None:
        self.dataset, self.function = dataset, function

    def __call__(self, index: int) -> Any:
        try:
            with torch.no_grad(), seeded(derived_seed(default_seed(), index)):
                return map_nest(lambda leaf: torch.as_tensor(leaf).detach(), self.function(self.dataset[index]))
        except Exception as error:
            raise RuntimeError(f"preprocess: index {index}: {text_of(error)}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        """To a process that starts afresh, what a notebook's cell defines goes by value."""
        return _make_from, (pickling.dump(lambda found: (self.dataset, self.function)),)


def _make_from(data: bytes) -> _Make:
    return _Make(*pickling.loads(data))


@dataclass
class _Work(Dataset[None]):
    """The work of the processes: asked for an item, it makes that result, right into shared memory."""

    make: _Make
    kind: str
    """What the results must be like."""
    stores: list[Tensor]
    """A tensor (N, ...) for each leaf of a result."""

    def __getitem__(self, index: int) -> None:
        result = self.make(index)
        if (kind := _kind(result)) != self.kind:
            raise RuntimeError(
                f"preprocess: index {index}: its result is {kind}, and that of index 0 {self.kind}: make them alike"
            )
        for store, leaf in zip(self.stores, leaves(result), strict=True):
            store[index] = leaf


def _kind(result: Any) -> str:
    """Structure, shapes and dtypes."""
    return str(map_nest(lambda leaf: (*leaf.shape, leaf.dtype), result))


def _made(make: _Make, size: int, processes: int, *, is_kept: bool) -> Any:
    """All results, in shared memory that has no name: it goes with the last process that holds it."""
    first = make(0)
    results = _room_for(first, size, is_kept=is_kept)
    _run(_Work(make, _kind(first), list(leaves(results))), range(1, size), processes)
    return results


def _room_for(first: Any, size: int, *, is_kept: bool) -> Any:
    """Room for so many results; the first is there already."""
    if next(leaves(first), None) is None:
        raise RuntimeError(f"preprocess: index 0: its result is {first!r:.40}: give at least one tensor")
    if is_kept:  # or it would be the finished file that cannot be read
        torch.save(first, file := io.BytesIO())
        try:
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except Exception as error:
            raise RuntimeError(f"preprocess: index 0: no file can hold its result: {error}") from error
    results = map_nest(lambda leaf: torch.empty((size, *leaf.shape), dtype=leaf.dtype).share_memory_(), first)
    for store, leaf in zip(leaves(results), leaves(first), strict=True):
        store[0] = leaf
    return results


def _run(work: _Work, indices: range, processes: int) -> None:
    """Have every index done."""
    processes = min(processes, len(indices))
    loader: DataLoader[None] = DataLoader(
        work,
        batch_size=min(32, 1 + len(indices) // (4 * max(1, processes))),
        sampler=indices,
        num_workers=processes,
        collate_fn=len,  # nothing comes back but how many are done
        multiprocessing_context="spawn" if processes and torch.cuda.is_initialized() else None,  # CUDA cannot fork
    )
    before = torch.multiprocessing.active_children()
    batches: Any = None
    try:
        with torch.no_grad(), seeded(default_seed()):  # torch draws the workers' seed: the user's generators stay
            batches = iter(loader)
        for _ in progress(batches, total=len(loader), desc="preprocess"):
            pass
    finally:
        if batches is None:
            _end_all_but(before)
        elif processes:
            batches._shutdown_workers()  # now: a traceback that is kept would keep them


def _end_all_but(children: Collection[Any]) -> None:
    """End the workers whose starting was interrupted: no iterator knows them yet."""
    for child in torch.multiprocessing.active_children():
        if child not in children and child.daemon:
            child.terminate()
            child.join()
