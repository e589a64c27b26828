"""`preprocess`: the results of a function over a dataset, computed once by several processes."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nblaunch.errors import ArgumentError, text_of
from nblaunch.machine.argument_checks import whole_number
from nblaunch.machine.limits import usable_cpus
from nblaunch.ranks.report import progress
from nblaunch.training.pytree import tree_leaves, tree_map
from nblaunch.training.seeding import default_seed, derived_seed, seeded
from nblaunch.training.states import checkpoint
from nblaunch.transfer import pickling


class Preprocessed(Dataset[Any]):
    """The dataset that `preprocess` returns: item ``i`` is the function's result for item ``i``.

    Numbers become tensors without dimensions, as in a DataLoader's batches. Items are views: an in-place change is
    seen by all that share the memory, but never written to a file. A dataset with a file pickles as the file's path;
    processes that open it share its pages.

    Attributes:
        results: The results, stacked along dimension 0: a pytree of tensors (N, ...).
        path: The file, if there is one.
    """

    def __init__(self, results: Any, path: Path | None = None) -> None:
        self.results, self.path = results, path

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Preprocessed:
        """Open a file that `preprocess` wrote. Loading it executes no code.

        Raises:
            FileNotFoundError: There is no such file.
        """
        absolute = Path(path).absolute()
        return cls(torch.load(absolute, mmap=True, weights_only=True), absolute)

    def __len__(self) -> int:
        return len(next(tree_leaves(self.results)))

    def __getitem__(self, index: int) -> Any:
        return tree_map(lambda stacked: stacked[index], self.results)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Preprocessed, (self.results,)) if self.path is None else (Preprocessed.open, (self.path,))


def preprocess(
    dataset: Dataset[Any],
    function: Callable[[Any], Any],
    *,
    processes: int | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Preprocessed:
    """Compute ``function(dataset[i])`` for every ``i`` once, with several processes; return a dataset of the results.

    Call it in the notebook before ranks are launched, or in one rank. Random numbers in the function depend only on
    the seed (that of `seed_everything`, else 0) and the index, not on the number of processes. The processes are
    DataLoader workers: they compute with one thread each and end with this process. They are forked where torch forks
    its workers; once CUDA is in use they are spawned, and receive what cells define by value.

    Args:
        dataset: An object with a length and items by index, such as a list of files.
        function: Returns a tensor, array or number, or a pytree (tuples, lists, dicts) of them, with the same
            structure, shapes and dtypes for every item. This process computes index 0 to learn them.
        processes: Number of processes. 0: this process computes everything, as a debugger needs it. Default: one per
            usable CPU.
        path: File for the results; its folder is made, and an existing file is replaced at the end. Default: none, the
            results stay in shared memory. Either way all of them must fit in shared memory while they are computed.

    Raises:
        ArgumentError: `dataset` has no length or no item, or another argument is wrong.
        RuntimeError: The function or the dataset raised, or a result differs in kind from the first: the message names
            the index. Or a process died. Then, and after an interrupt, no process and no file is left.
    """
    items: object = dataset
    if not isinstance(items, Sized) or len(items) == 0:
        raise ArgumentError(f"dataset={dataset!r:.80}: give a dataset with items by index, at least one")
    if not callable(function):
        raise ArgumentError(f"function={function!r:.80}: give a function of one item")
    if path is not None and Path(path).is_dir():
        raise ArgumentError(f"path={str(path)!r} is a folder: give the path of a file")
    wanted = usable_cpus() if processes is None else whole_number("processes", processes, least=0)
    compute = _ItemFunction(dataset, function)
    first = compute(0)
    results = _allocate(first, len(items), is_kept=path is not None)
    _run(_ResultWriter(compute, _kind(first), list(tree_leaves(results))), range(1, len(items)), wanted)
    if path is None:
        return Preprocessed(results)
    checkpoint.write(results, Path(path))
    return Preprocessed.open(path)


class _ItemFunction:
    """Computes the result of one index."""

    def __init__(self, dataset: Any, function: Callable[[Any], Any]) -> None:
        self.dataset, self.function = dataset, function

    def __call__(self, index: int) -> Any:
        try:
            with torch.no_grad(), seeded(derived_seed(default_seed(), index)):
                return tree_map(lambda leaf: torch.as_tensor(leaf).detach(), self.function(self.dataset[index]))
        except Exception as error:
            raise RuntimeError(f"preprocess: index {index}: {text_of(error)}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what a notebook's cell defines by value, for spawned processes."""
        return _load_item_function, (pickling.dump(lambda found: (self.dataset, self.function)),)


def _load_item_function(data: bytes) -> _ItemFunction:
    return _ItemFunction(*pickling.loads(data))


@dataclass
class _ResultWriter(Dataset[None]):
    """Item ``i`` computes result ``i`` and writes it to shared memory."""

    compute: _ItemFunction
    kind: str
    """The required structure, shapes and dtypes."""
    stores: list[Tensor]
    """A tensor (N, ...) for each leaf of a result."""

    def __getitem__(self, index: int) -> None:
        result = self.compute(index)
        if (kind := _kind(result)) != self.kind:
            raise RuntimeError(
                f"preprocess: index {index}: its result is {kind}, and that of index 0 {self.kind}: "
                "return the same structure, shapes and dtypes for every item"
            )
        for store, leaf in zip(self.stores, tree_leaves(result), strict=True):
            store[index] = leaf


def _kind(result: Any) -> str:
    """Describe structure, shapes and dtypes."""
    return str(tree_map(lambda leaf: (*leaf.shape, leaf.dtype), result))


def _allocate(first: Any, size: int, *, is_kept: bool) -> Any:
    """Allocate `size` results in anonymous shared memory, and store the first."""
    if next(tree_leaves(first), None) is None:
        raise RuntimeError(f"preprocess: index 0: its result is {first!r:.40}: give at least one tensor")
    if is_kept:  # detect now what weights_only refuses to load
        torch.save(first, file := io.BytesIO())
        try:
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except Exception as error:
            raise RuntimeError(f"preprocess: index 0: no file can hold its result: {error}") from error
    results = tree_map(lambda leaf: torch.empty((size, *leaf.shape), dtype=leaf.dtype).share_memory_(), first)
    for store, leaf in zip(tree_leaves(results), tree_leaves(first), strict=True):
        store[0] = leaf
    return results


def _run(work: _ResultWriter, indices: range, processes: int) -> None:
    """Compute every index."""
    processes = min(processes, len(indices))
    loader: DataLoader[None] = DataLoader(
        work,
        batch_size=min(32, 1 + len(indices) // (4 * max(1, processes))),
        sampler=indices,
        num_workers=processes,
        collate_fn=len,  # workers return only the number of results
        multiprocessing_context="spawn" if processes and torch.cuda.is_initialized() else None,  # CUDA cannot fork
    )
    before = torch.multiprocessing.active_children()
    batches: Any = None
    try:
        with torch.no_grad(), seeded(default_seed()):  # torch draws the workers' seed from it, not from the user's
            batches = iter(loader)
        for _ in progress(batches, total=len(loader), desc="preprocess"):
            pass
    finally:
        if batches is None:
            for child in torch.multiprocessing.active_children():  # start was interrupted: no iterator owns them
                if child not in before and child.daemon:
                    child.terminate()
                    child.join()
        elif processes:
            batches._shutdown_workers()  # now: a stored traceback would keep them alive
