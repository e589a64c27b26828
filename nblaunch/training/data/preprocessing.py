"""Results of a function over a dataset, made once by several processes, and then read as often as one likes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nblaunch import pickling
from nblaunch.errors import ArgumentError, text_of
from nblaunch.ranks.report import progress
from nblaunch.training import checkpoint
from nblaunch.training.data.epochs import checked
from nblaunch.training.nests import leaves, map_nest
from nblaunch.training.seeding import default_seed, derived_seed, seeded

_BEGUN, _FAILED, _DONE = 1, 2, 3


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
        processes: How many. 0: this process does it all, as a debugger needs it. Default: one for each CPU core.
        path: The file to keep the results in (its folder is made); an older one is replaced, once all is done. Default:
            none, and they stay in shared memory. Either way all of them must fit there while they are made.

    Raises:
        ArgumentError: `dataset` has no length, or no item; or `processes` is no such number.
        RuntimeError: The function or the dataset raised, a result is unlike the first, or a process died; the message
            names the index, and its cause is what was raised. Nothing is left behind then, nor when it is interrupted:
            no process, and no file.
    """
    items: object = dataset
    if not isinstance(items, Sized) or len(items) == 0:
        raise ArgumentError(f"dataset={dataset!r:.80}: give a dataset with items by index, at least one")
    wanted = _cores() if processes is None else checked(processes, "processes")
    results = _made(_Make(dataset, function), len(items), wanted, is_kept=path is not None)
    if path is None:
        return Preprocessed(results)
    checkpoint.write(results, Path(path))
    return Preprocessed.open(path)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class _Make:
    """Makes one result."""

    def __init__(self, dataset: Any, function: Callable[[Any], Any]) -> None:
        self.dataset, self.function = dataset, function

    def __call__(self, index: int) -> Any:
        with torch.no_grad(), seeded(derived_seed(default_seed(), index)):
            return map_nest(lambda leaf: torch.as_tensor(leaf).detach(), self.function(self.dataset[index]))

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
    state: Tensor
    """Of each index: 0, begun, failed or done."""

    def __getitem__(self, index: int) -> None:
        self.state[index] = _BEGUN
        try:
            result = self.make(index)
            if _kind(result) != self.kind:
                raise ValueError(f"its result is {_kind(result)}, and that of index 0 {self.kind}: make them alike")
            for store, leaf in zip(self.stores, leaves(result), strict=True):
                store[index] = leaf
        except Exception:
            self.state[index] = _FAILED
            raise
        self.state[index] = _DONE


def _kind(result: Any) -> str:
    """Structure, shapes and dtypes."""
    return str(map_nest(lambda leaf: (*leaf.shape, leaf.dtype), result))


def _made(make: _Make, size: int, processes: int, *, is_kept: bool) -> Any:
    """All results, in shared memory that has no name: it goes with the last process that holds it."""
    state = torch.zeros(size, dtype=torch.uint8).share_memory_()
    state[0] = _BEGUN
    try:
        first = make(0)
        results = _room_for(first, size, is_kept=is_kept)
        state[0] = _DONE
        _run(_Work(make, _kind(first), list(leaves(results)), state), processes)
    except Exception as error:
        # They are told of in order: of several that failed, the first is the one at hand.
        at = (state == _FAILED).nonzero().flatten().tolist()[:1] or (state == _BEGUN).nonzero().flatten().tolist()
        where = f"index {' or '.join(map(str, at))}: " if at else ""
        raise RuntimeError(f"preprocess: {where}{text_of(error)}") from error
    return results


def _room_for(first: Any, size: int, *, is_kept: bool) -> Any:
    """Room for so many results; the first is there already."""
    if next(leaves(first), None) is None:
        raise ValueError(f"its result is {first!r:.40}: give at least one tensor")
    if is_kept:  # or it would be the finished file that cannot be read
        torch.save(first, file := io.BytesIO())
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    results = map_nest(lambda leaf: torch.empty((size, *leaf.shape), dtype=leaf.dtype).share_memory_(), first)
    for store, leaf in zip(leaves(results), leaves(first), strict=True):
        store[0] = leaf
    return results


def _run(work: _Work, processes: int) -> None:
    """Have every index but the first done."""
    rest = range(1, len(work.state))
    processes = min(processes, len(rest))
    with torch.no_grad(), seeded(default_seed()):  # torch draws the workers' seed: the user's generators stay
        loader: DataLoader[None] = DataLoader(
            work,
            batch_size=min(32, 1 + len(rest) // (4 * max(1, processes))),
            sampler=rest,
            num_workers=processes,
            collate_fn=len,  # nothing comes back but how many are done
            multiprocessing_context="spawn" if processes and torch.cuda.is_initialized() else None,  # CUDA cannot fork
        )
        batches = iter(loader)
    try:
        done = sum(progress(batches, total=len(loader), desc="preprocess"))
    finally:
        if processes:
            batches._shutdown_workers()  # type: ignore[attr-defined]  # now: a traceback that is kept would keep them
    if done < len(rest):
        raise RuntimeError("the function or the dataset raised StopIteration")
