"""`find_executable_batch_size`: tries smaller batches until one fits into memory."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nblaunch.machine import timeouts
from nblaunch.machine.argument_checks import whole_number
from nblaunch.training.topology import ensure_group, world

_TEXTS = (
    " out of memory.",  # CUDA, ROCm, XPU
    "MPS backend out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN
    "DefaultCPUAllocator: can't allocate memory",
)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate ``function(batch_size, ...)``: it is called again with a smaller batch size while memory runs out.

    The ranks agree: if memory ran out on any of them, all try the next size together, so every rank must call the
    result. They agree over the group's store: a collective could be mistaken for one of the training. If memory runs
    out on one rank while the others wait for it in a collective, it raises, because they cannot leave that.

    Args:
        function: Makes everything that depends on the batch size, and trains. It takes the batch size first.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Returns the next size. Default: 0.9 of the last one, rounded down.

    Returns:
        The decorated function, called without the batch size; without `function` the decorator. The size that fitted is
        the first one that the next call tries.

    Raises:
        ArgumentError: `starting_batch_size` is not a whole number of at least 1.
        RuntimeError: From the decorated function: no size fits, or memory ran out on this rank alone. Its other
            exceptions are raised as they are.
        TypeError: From the decorated function: it got too many arguments, such as a batch size.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = whole_number("starting_batch_size", starting_batch_size, least=1)
    own = function

    @functools.wraps(own)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _check_arguments(own, args)
        while size > 0:
            result, failed = None, False  # if only another rank has failed, this one's result takes no more memory
            release_memory()
            try:
                result = own(size, *args, **kwargs)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failed = True
            if not _any_failed(failed):
                return result
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError("no batch size fits into memory, not even 1")

    return search


def release_memory() -> None:
    """Free what no variable refers to, on the GPU too."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for torch's errors that memory ran out, on a GPU or the CPU."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def _any_failed(failed: bool) -> bool:
    """Return True if memory ran out in this try on any rank. Every rank must call it."""
    place = world()
    if not place.is_shared:
        return failed
    ensure_group()
    store = dist.PrefixStore("nblaunch/batch_size", dist.distributed_c10d._get_default_store())
    number = store.add(f"tries of {place.rank}", 1)  # in the store: a session's new group begins with none
    store = dist.PrefixStore(str(number), store)
    store.set(str(place.rank), str(int(failed)))
    # A rank that has succeeded may wait for the others' whole training. One that failed keeps the others waiting.
    limit = timeouts.BATCH_SIZE_PEERS_S if failed else timeouts.BATCH_SIZE_TRAINING_S
    ranks = [str(rank) for rank in range(place.size)]
    try:
        store.wait(ranks, timedelta(seconds=limit))
    except RuntimeError as error:
        if not failed:
            raise
        raise RuntimeError(
            f"memory ran out on rank {place.rank} and not on every other one within {limit:.0f} s, which wait for it "
            "in a collective: begin with a smaller starting_batch_size"
        ) from error
    return any(store.get(rank) == b"1" for rank in ranks)


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse a batch size among the arguments."""
    try:
        inspect.signature(function).bind_partial(None, *args)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise TypeError(f"{name} gets the batch size as its first argument: call it without one") from error
